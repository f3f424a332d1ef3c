import gc

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import run_on_ranks
from tests.train.contexts import TINY_GPT, FakeContext, make_job, make_spec
from tests.train.plain_engine import PlainEngine, make_plain_engine
from zerotune.config.check import BatchPlan
from zerotune.config.errors import RunFailed, UsageError
from zerotune.config.schema import JobConfig
from zerotune.engine.group import RankGroup
from zerotune.models.build import build_model
from zerotune.records import CollectiveEntry, CollectiveKind, Ledger
from zerotune.train import saving
from zerotune.train.data import build_data
from zerotune.train.loop import Loop, micro_batch_indices
from zerotune.train.memory import bytes_in_use
from zerotune.train.run import run
from zerotune.train.seeds import mixed, seed_step
from zerotune.train.spec import RankReport
from zerotune.train.steady import Steady, sent_elements

CPU = torch.device("cpu")


@pytest.fixture
def plain(monkeypatch):
    """Runs use a plain engine; gives those that were made."""
    made: list[PlainEngine] = []

    def make(*args):
        made.append(make_plain_engine(*args))
        return made[-1]

    monkeypatch.setattr("zerotune.train.run.make_engine", make)
    return made


def train(job: JobConfig, ctx: FakeContext | None = None, **spec) -> RankReport:
    return run(ctx or FakeContext(), make_spec(job, "train", **spec))


@pytest.fixture
def doubles(plain, monkeypatch):
    """Runs use a plain engine in double precision; gives those that were made."""

    def make(*args):
        plain.append(make_plain_engine(*args))
        plain[-1].module.double()
        return plain[-1]

    monkeypatch.setattr("zerotune.train.run.make_engine", make)
    return plain


def oracle(job: JobConfig, dtype: torch.dtype = torch.float32) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A plain loop over whole global batches, written out."""
    config = job.train
    model = build_model(job.model, config.seed).to(dtype)
    data = build_data(job.data, job.model, config.seed, config.global_batch_size)
    kind = torch.optim.AdamW if config.optimizer.name == "adamw" else torch.optim.SGD
    options = {"betas": config.optimizer.betas} if kind is torch.optim.AdamW else {}
    optimizer = kind(model.parameters(), lr=config.optimizer.lr, weight_decay=0.0, **options)
    losses = []
    for step in range(config.steps):
        batch = data.batch(step, range(config.global_batch_size))
        loss = F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        if config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("micro", [4, 2, 1])
@pytest.mark.parametrize(
    "optimizer", [{"name": "adamw", "lr": 1e-2}, {"name": "sgd", "lr": 0.5}], ids=["adamw", "sgd"]
)
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_training_is_the_plain_loop(doubles, micro, optimizer, clip_norm):
    """In doubles: Adam moves a weight whose first gradient is only rounding by a whole learning rate."""
    job = make_job(
        data={"synthetic": {"pad_fraction": 0.3}},
        steps=6, micro_batch_size=micro, optimizer=optimizer, clip_norm=clip_norm,
    )  # fmt: skip
    losses, weights = oracle(job, torch.float64)
    report = train(job)
    assert report.losses == pytest.approx(losses, abs=1e-8)
    for name, weight in doubles[0].module.state_dict().items():
        torch.testing.assert_close(weight, weights[name], atol=1e-8, rtol=0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_every_sample_once_over_ranks_and_micro_batches(ranks, micro):
    plan = BatchPlan(micro_batch_size=micro, accumulation=3)
    taken = [i for m in range(3) for r in range(ranks) for i in micro_batch_indices(plan, ranks, r, m)]
    assert sorted(taken) == list(range(3 * ranks * micro))


def test_measure(plain):
    ctx = FakeContext()
    report = run(ctx, make_spec(make_job(micro_batch_size=2), warmup_steps=2, max_steps=13))
    m = report.measurement
    assert ctx.phases == ["setup", "warmup", "measure", "profile"]
    assert 10 <= len(m.step_times_s) <= 13 and m.warmup_steps == 2
    assert len(report.losses) == 2 + len(m.step_times_s) + 2  # a step for the ledger, one for the memory
    assert m.tokens_per_step == 4 * 16
    assert m.tokens_per_second.value == pytest.approx(64 / m.step_time_s.value)
    assert m.step_time_s.low <= m.step_time_s.value <= m.step_time_s.high < 1
    assert m.memory[0].peak > m.memory[0].at_rest > 0
    assert (m.final_loss, report.first_step) == (report.losses[-1], 0)
    assert report.job.train.micro_batch_size == 2 and report.job.zero.is_resolved
    assert report.ledger is not None and not plain[0].recording and plain[0].closed
    assert RankReport.model_validate_json(report.model_dump_json()) == report


def test_exactly_the_budget_of_steps(plain):
    report = run(
        FakeContext(), make_spec(make_job(), min_steps=5, max_steps=5, half_width=0.0, profile_memory=False)
    )
    assert len(report.measurement.step_times_s) == 5
    assert report.measurement.stopped_because == "budget" and report.measurement.is_noisy


def test_a_run_that_cannot_win_gives_up(plain):
    report = run(FakeContext(), make_spec(make_job(), half_width=0.0, give_up_below=1e12))
    assert report.measurement.stopped_because == "cannot_win" and len(report.measurement.step_times_s) == 10


class Costs(PlainEngine):
    """On a clock of its own each optimizer step costs 20 ms, the first two 200 ms, and nothing else does."""

    now = 0.0
    taken = 0

    def step(self):
        self.now += 0.2 if self.taken < 2 else 0.02
        self.taken += 1
        return super().step()


@pytest.mark.parametrize("micro", [8, 2])
@pytest.mark.parametrize("steps", [5, 50])
@pytest.mark.parametrize("pad", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["measure", "train"])
def test_throughput_of_known_cost(monkeypatch, micro, steps, pad, mode):
    model = {"gpt": {"layers": 1, "d_model": 2, "heads": 1, "vocab_size": 4, "sequence_length": 4}}
    data = {"synthetic": {"pad_fraction": pad}}
    job = make_job(model, data, steps=steps + 4, global_batch_size=8, micro_batch_size=micro)
    engine = Costs(build_model(job.model, 0), lambda groups: torch.optim.SGD(groups, lr=0.0))
    monkeypatch.setattr("zerotune.train.run.make_engine", lambda *_: engine)
    monkeypatch.setattr("zerotune.train.loop.time.perf_counter", lambda: engine.now)
    spec = make_spec(
        job, mode, warmup_steps=2, min_steps=steps, max_steps=steps, profile_memory=mode == "train"
    )
    measured = run(FakeContext(), spec).measurement
    assert measured.step_times_s == pytest.approx([0.02] * steps)
    assert measured.tokens_per_step == 8 * 4 * (1 - pad)
    assert measured.tokens_per_second.value == pytest.approx(8 * 4 * (1 - pad) / 0.02)


class TwoRanks(RankGroup):
    """Two ranks, of which the other one is three times as slow."""

    def gather_numbers(self, values):
        return [values, [3 * value for value in values]]


def test_slowest_rank_decides_and_tokens_add_up():
    steady = Steady()
    steady.extend([1.0, 2.0], 10.0, TwoRanks(None, 0, 2, CPU))
    assert steady.times_s == [3.0, 6.0]
    assert steady.tokens_per_step == (10 + 30) / 2


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9])
def test_train_takes_exactly_its_steps(plain, steps):
    report = train(make_job(steps=steps), warmup_steps=2)
    assert len(report.losses) == steps
    assert (report.measurement is not None) == (
        steps > 4
    )  # two to warm up, one for the ledger, one for memory
    if report.measurement is not None:
        assert len(report.measurement.step_times_s) == steps - 4
        assert report.measurement.memory[0].peak > report.measurement.memory[0].at_rest
    assert (report.ledger is not None) == (steps > 1)


def test_ledger_and_profile_change_no_weight(plain):
    with_both = train(make_job(steps=6))
    without = train(make_job(steps=6), record_ledger=False, profile_memory=False)
    assert with_both.losses == without.losses
    assert (
        without.ledger is None
        and without.measurement.memory[0].peak == without.measurement.memory[0].resident_peak
    )


def test_loss_falls_on_text(plain):
    losses = train(make_job(data={"text": {}}, steps=40, optimizer={"name": "adamw", "lr": 1e-2})).losses
    assert sum(losses[-5:]) / 5 < losses[0] - 1


def test_learning_rate_follows_its_schedule(plain):
    train(make_job(steps=3, optimizer={"lr": 0.5}, lr_schedule={"name": "linear", "warmup_steps": 1}))
    assert plain[0].optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.5)


@pytest.mark.parametrize(("every", "at"), [(None, []), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_when_it_saves(plain, monkeypatch, every, at):
    saved = []
    monkeypatch.setattr(
        saving, "save", lambda engine, run_dir, done: saved.append(done) or f"{run_dir}/checkpoints"
    )
    report = train(make_job(steps=5, save_every=every), run_dir="there")
    assert saved == at
    assert report.checkpoint == ("there/checkpoints" if at else None)


def test_resumed_training_is_the_unbroken_one(plain, monkeypatch):
    model = {"gpt": {**TINY_GPT["gpt"], "dropout": 0.2}}
    job = make_job(model, steps=6, save_every=3, lr_schedule={"name": "cosine"}, optimizer={"lr": 1e-2})
    stored = {}

    def save(engine, run_dir, done):
        if done == 3:
            stored.update(model=engine.full_state_dict(), optimizer=engine.optimizer.state_dict())
            stored["optimizer"] = torch.utils._pytree.tree_map_only(
                torch.Tensor, torch.clone, stored["optimizer"]
            )
        return run_dir

    def resume(engine, folder, job):
        engine.module.load_state_dict(stored["model"])
        engine.optimizer.load_state_dict(stored["optimizer"])
        return 3

    monkeypatch.setattr(saving, "save", save)
    monkeypatch.setattr(saving, "resume", resume)
    whole = train(job)
    rest = train(job, resume_from="there")
    assert rest.first_step == 3 and rest.losses == whole.losses[3:]


def test_resuming_a_finished_training_is_refused(monkeypatch):
    monkeypatch.setattr("zerotune.checkpoints.load", lambda engine, folder: (5, {}), raising=False)
    with pytest.raises(UsageError, match=r"already taken 5 of train.steps 5"):
        saving.resume(None, "folder", make_job(steps=5))


def test_masks_differ_between_ranks_and_repeat_between_runs():
    def masks(rank: int, step: int) -> torch.Tensor:
        seed_step(7, rank, step)
        return torch.rand(8)

    assert torch.equal(masks(0, 1), masks(0, 1))
    assert not torch.equal(masks(0, 1), masks(1, 1)) and not torch.equal(masks(0, 1), masks(0, 2))
    assert len({mixed(s, r) for s in range(20) for r in range(20)}) == 400


def test_python_random_is_shared_by_the_ranks():
    import random

    seed_step(7, 0, 3)
    first = random.random()
    seed_step(7, 1, 3)
    assert random.random() == first


def test_a_loss_that_is_not_finite_ends_the_run(plain):
    with pytest.raises(RunFailed, match=r"the loss of step \d+ is (nan|inf)"):
        train(make_job(steps=50, optimizer={"name": "sgd", "lr": 1e12}))
    assert plain[0].closed


def test_only_padding_is_a_step_of_zero_loss(plain):
    job = make_job()
    group = RankGroup.default("cpu")
    engine = make_plain_engine(job, build_model(job.model, 0), group)
    data = build_data(job.data, job.model, 0, 4)

    class Padded:
        def batch(self, step, indices):
            batch = data.batch(step, indices)
            batch.targets_BT.fill_(-100)
            return type(batch)(batch.inputs, batch.targets_BT, batch.samples, 0)

    loop = Loop(job, engine, Padded(), group, BatchPlan(4, 1))
    loop.take_step()
    assert loop.losses == [0.0] and loop.tokens == 0


def test_reports_at_most_twice_a_second_but_always_the_last(plain):
    ctx = FakeContext()
    train(make_job(steps=50), ctx)
    steps = [report for report in ctx.reports if report.loss is not None]
    assert steps[-1].step == steps[-1].steps == 50
    assert len(steps) <= 6 and all(
        report.tokens_per_second > 0 and report.memory_bytes > 0 for report in steps
    )


def test_batch_that_does_not_divide():
    with pytest.raises(UsageError, match="does not divide"):
        run(FakeContext(), make_spec(make_job(global_batch_size=4, micro_batch_size=3)))


def test_users_model_and_data(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x, y):\n"
        "        return (super().forward(x) - y).square().mean()\n"
        "def model(): return Model(3, 1)\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 32\n"
        "    def __getitem__(self, i):\n"
        "        x = torch.tensor([i % 2, i % 3, i % 5]).float()\n"
        "        return x, x.sum(0, keepdim=True)\n"
    )
    model, data = {"factory": "mine.py:model"}, {"factory": "mine.py:Data"}
    job = make_job(model, data, steps=60, micro_batch_size=2, optimizer={"lr": 0.1})
    report = train(job)
    assert report.losses[-1] < 0.05 * report.losses[0]
    assert report.measurement.tokens_per_step == 4


def run_again_and_again(rank: int, size: int) -> tuple[list[int], list[int]]:
    # Each run holds about 40 MB of weights, gradients and optimizer state.
    model = {"gpt": {"layers": 2, "d_model": 320, "heads": 2, "vocab_size": 256, "sequence_length": 16}}
    spec = make_spec(make_job(model, {"text": {}}, global_batch_size=1), min_steps=5, max_steps=5)
    sizes, tensors = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerotune.train.run.make_engine", make_plain_engine)
        for _ in range(6):
            run(FakeContext(), spec)
            sizes.append(bytes_in_use(CPU))
            tensors.append(sum(isinstance(item, torch.Tensor) for item in gc.get_objects()))
    return sizes, tensors


def test_memory_is_flat_over_runs():
    """In a process of its own: this one's memory moves for other reasons."""
    sizes, tensors = run_on_ranks(1, run_again_and_again)[0]
    assert tensors[-1] <= tensors[1], tensors
    # What is read once moves by the profiler's buffers; what leaks stays.
    assert min(sizes[3:]) - min(sizes[1:3]) < 8 * 2**20, sizes


def test_sent_elements():
    def entry(kind: CollectiveKind, elements: int) -> CollectiveEntry:
        times = {"issued_s": 0.0, "waited_s": 0.0, "done_s": 0.0}
        return CollectiveEntry(
            sequence=0, kind=kind, purpose="", units=(), elements=elements, sent_bytes=0, **times
        )

    kinds = CollectiveKind
    entries = [entry(kinds.ALL_GATHER, 96), entry(kinds.REDUCE_SCATTER, 48), entry(kinds.ALL_REDUCE, 3)]
    ledger = Ledger(rank=0, collectives=entries, samples=[], at_rest={}, peak={}, peak_live_elements=0)
    assert sent_elements(ledger, 3) == 64 + 32 + 4
    assert sent_elements(ledger, 1) == 0
