"""Runs with the real engine, on one rank in this process and on two in their own."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.train.contexts import FakeContext, make_job, make_spec
from tests.train.test_run import oracle
from zerotune.config.errors import RunFailed, UsageError
from zerotune.train.memory import bytes_in_use
from zerotune.train.run import run
from zerotune.train.spec import RankReport, RunSpec


def run_rank(rank: int, size: int, spec: RunSpec) -> RankReport:
    return run(FakeContext(rank=rank, world_size=size), spec)


@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_agree_and_train_the_plain_loop(stage):
    job = make_job(
        data={"synthetic": {"pad_fraction": 0.3}},
        global_batch_size=8, micro_batch_size=2, steps=12, clip_norm=0.1, optimizer={"name": "sgd", "lr": 0.5},
    )  # fmt: skip
    job = job.model_copy(update={"zero": job.zero.model_copy(update={"stage": stage})})
    losses, _ = oracle(job)
    first, second = run_on_ranks(2, run_rank, make_spec(job, "train"), limit=150)
    assert first.losses == second.losses == pytest.approx(losses, abs=1e-5)
    measured = run_on_ranks(2, run_rank, make_spec(job, max_steps=12))
    assert measured[0].measurement == measured[1].measurement
    assert measured[0].losses[:12] == first.losses
    m = measured[0].measurement
    assert (m.tokens_per_step, len(m.memory)) == (8 * 11, 2)
    assert m.sent_elements_per_step > 0 and m.collectives_per_step == len(measured[0].ledger.collectives)
    assert all(use.peak > use.at_rest > 0 and use.resident_peak > use.peak for use in m.memory)


def test_stage_3_rests_on_half_of_what_stage_0_does():
    rests = {}
    for stage in (0, 3):
        job = make_job(steps=7)
        job = job.model_copy(update={"zero": job.zero.model_copy(update={"stage": stage})})
        report = run_on_ranks(2, run_rank, make_spec(job, min_steps=5, max_steps=5))[0]
        rests[stage] = report.measurement.memory[0].at_rest
    assert 0.4 < rests[3] / rests[0] < 0.65


def test_saved_and_resumed(tmp_path):
    model = {"gpt": {"layers": 2, "d_model": 16, "heads": 2, "sequence_length": 16, "dropout": 0.2}}
    job = make_job(model, steps=6, save_every=3, optimizer={"lr": 1e-2}, lr_schedule={"name": "cosine"})
    whole = run_on_ranks(2, run_rank, make_spec(job, "train", run_dir=str(tmp_path)))[0]
    assert Path(whole.checkpoint).name == "step-00000006"
    third = str(Path(whole.checkpoint).with_name("step-00000003"))
    again = make_spec(job, "train", run_dir=str(tmp_path / "again"), resume_from=third)
    rest = run_on_ranks(2, run_rank, again)[0]
    assert rest.first_step == 3 and rest.losses == whole.losses[3:]
    with pytest.raises(UsageError, match=r"already taken 6 of train.steps 6"):
        run(FakeContext(), make_spec(job, "train", resume_from=str(tmp_path / "checkpoints")))


def run_again_and_again(rank: int, size: int) -> tuple[list[int], list[int], set[int]]:
    # Weights, gradients and optimizer state of one run are about 50 MB.
    model = {"gpt": {"layers": 2, "d_model": 384, "heads": 2, "vocab_size": 256, "sequence_length": 16}}
    spec = make_spec(make_job(model, {"text": {}}, global_batch_size=1), min_steps=5, max_steps=5)
    sizes, tensors, peaks = [], [], set()
    for _ in range(6):
        report = run(FakeContext(rank=rank, world_size=size), spec)
        peaks.add(report.measurement.memory[0].at_rest)
        sizes.append(bytes_in_use(torch.device("cpu")))
        tensors.append(sum(isinstance(item, torch.Tensor) for item in gc.get_objects()))
    return sizes, tensors, peaks


def test_memory_is_flat_over_runs():
    """In a process of its own: this one's memory moves for other reasons."""
    (sizes, tensors, peaks) = run_on_ranks(1, run_again_and_again)[0]
    assert tensors[-1] <= tensors[3], tensors  # the husks of the last few engines may wait for later runs
    # What is read once moves by the profiler's buffers; what leaks stays.
    assert min(sizes[3:]) - min(sizes[1:3]) < 8 * 2**20, sizes
    assert len(peaks) == 1


def test_a_forward_pass_that_raises_is_one_line_and_leaves_the_process_usable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, tokens):\n"
        "        return super().forward(tokens.float()).reshape(7)\n"
        "def model(): return Model(128, 1)\n"
    )
    with pytest.raises(RunFailed, match=r"raised RuntimeError: .*\(mine.py:4\)"):
        run(FakeContext(), make_spec(make_job({"factory": "mine.py:model"})))
    assert run(FakeContext(), make_spec(make_job(steps=2), "train")).losses


def test_bf16_runs():
    report = run(
        FakeContext(), make_spec(make_job(precision="bf16", steps=20, optimizer={"lr": 1e-2}), "train")
    )
    assert report.losses[-1] < report.losses[0] + 0.2
