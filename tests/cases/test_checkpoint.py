"""The scenarios C01 to C06: what checkpoints and export must get right."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from torch import nn

from tests.checkpoints.faults import check_moments, random_moments
from tests.checkpoints.jobs import (
    Mixed,
    Setting,
    Trainer,
    build,
    build_mixed,
    disturb,
    plain_losses,
    plain_steps,
    same,
)
from tests.ranks import end_pool, run_on_ranks
from zerotune import checkpoints
from zerotune.config.errors import RunFailed, UsageError

# ------------------------------------------------------------------------------- C01: a save that is interrupted


def test_c01_killed_at_three_random_moments(tmp_path):
    check_moments(tmp_path, random_moments(seed=int(time.time()), count=3))


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        file = path / "__0_0.distcp"
        os.truncate(file, file.stat().st_size // 2)
    elif how == "torn manifest":
        os.truncate(path / "zerotune.json", 40)
    elif how == "lost its last rename":
        path.rename(path.with_name(f".{path.name}.partial"))
    else:
        (path / how).unlink()


@pytest.mark.parametrize(
    "how",
    ["truncated", ".metadata", "__0_0.distcp", "zerotune.json", "torn manifest", "lost its last rename"],
)
def test_c01_an_incomplete_one_is_skipped_and_can_be_saved_again(tmp_path, how):
    engine = build()
    for _ in range(2):
        list(plain_steps(engine, 0, 1, 1))
        engine.save(tmp_path)
    expected = engine.full_state_dict()
    list(plain_steps(engine, 0, 1, 1))
    engine.save(tmp_path)
    damage(tmp_path / "step-00000003", how)

    other = build()
    other.load(tmp_path)
    assert other.steps == 2 and same(other.full_state_dict(), expected)
    list(plain_steps(other, 0, 1, 1))
    other.save(tmp_path)
    assert checkpoints.latest(tmp_path).name == "step-00000003"
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{n:08d}" for n in (1, 2, 3)]


def test_c01_replacing_one_never_leaves_none(tmp_path, caplog):
    engine = build()
    list(plain_steps(engine, 0, 1, 1))
    engine.save(tmp_path)
    # Interrupted between the two renames of a replacement.
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.old")
    shutil.copytree(tmp_path / ".step-00000001.old", tmp_path / ".step-00000001.partial")
    other = build()
    other.load(tmp_path)
    assert other.steps == 1
    other.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert "put back" in caplog.text and "removed, a save that was interrupted left it" in caplog.text


def test_c01_naming_an_incomplete_one_is_refused(tmp_path):
    engine = build()
    list(plain_steps(engine, 0, 1, 1))
    path = engine.save(tmp_path)
    damage(path, "truncated")
    with pytest.raises(
        UsageError, match=r"step-00000001: the checkpoint is incomplete: __0_0.distcp has \d+ of"
    ):
        build().load(path)
    with pytest.raises(UsageError, match="no complete checkpoint"):
        build().load(tmp_path)


# ------------------------------------------------------- C02: export with ties, frozen parts, buffers and padding


def export_job(rank: int, size: int, folder: str, knobs: dict) -> dict[str, torch.Tensor]:
    engine = build_mixed(knobs)
    root = Path(folder)
    engine.save(root)
    checkpoints.export_weights(engine, root / "engine.safetensors")
    return engine.full_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_c02_export_is_what_the_plain_model_would_have_saved(tmp_path, stage):
    expected = run_on_ranks(3, export_job, str(tmp_path), {"stage": stage})[0]
    checkpoints.export_weights(tmp_path, tmp_path / "folder.safetensors")
    for name in ("engine", "folder"):
        file = tmp_path / f"{name}.safetensors"
        model = Mixed()
        keys = set(model.state_dict())
        assert "shift" not in keys and "head.weight" in keys

        state = checkpoints.read_weights(file)
        assert set(state) == keys and same(state, expected)
        assert all(value.numel() for value in state.values())
        assert state["head.weight"] is state["embed.weight"]
        assert state["batch_norm.num_batches_tracked"].dtype is torch.int64
        model.load_state_dict(state, strict=True)

        model = Mixed()
        safetensors.torch.load_model(model, str(file), strict=True)
        assert same(model.state_dict(), expected)
        assert model.head.weight is model.embed.weight
        logits = model.eval()(torch.arange(11))
        assert logits.shape == (11, 11) and torch.isfinite(logits).all()
    # The file is what the library itself would write for the same model.
    safetensors.torch.save_model(model, str(tmp_path / "library.safetensors"), metadata={"format": "pt"})
    ours = safetensors.torch.load_file(tmp_path / "engine.safetensors")
    theirs = safetensors.torch.load_file(tmp_path / "library.safetensors")
    assert len(ours) == len(theirs)
    assert {k: v for k, v in ours.items() if "weight" not in k}.keys() <= theirs.keys()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", torch.float64])
def test_c02_dtype_as_asked(tmp_path, dtype):
    engine = build_mixed()
    path = checkpoints.export_weights(engine, tmp_path / "m.safetensors", dtype)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, dtype)
    full = engine.full_state_dict()
    for name, value in checkpoints.read_weights(path).items():
        expected = full[name].to(wanted) if full[name].is_floating_point() else full[name]
        assert value.dtype == expected.dtype and torch.equal(value, expected)
    with pytest.raises(UsageError, match="int7 is no dtype"):
        checkpoints.export_weights(engine, tmp_path / "m.safetensors", "int7")


# ------------------------------------------------------------------- C03: resume with another number of ranks


def save_after_three(rank: int, size: int, folder: str, knobs: dict) -> list[float]:
    engine = build(knobs)
    losses = list(plain_steps(engine, rank, size, 3))
    engine.save(folder)
    return losses


def go_on_for_three(rank: int, size: int, folder: str, knobs: dict):
    engine = build(knobs)
    engine.load(folder)
    losses = list(plain_steps(engine, rank, size, 3))
    steps = [float(state["step"]) for state in engine.optimizer.state.values()]
    # Padding is never updated, whatever was loaded.
    padding = 0.0
    for param in engine.shards.params:
        real = engine._real_part(param, param.master).local.numel()
        for value in engine.optimizer.state[param.master].values():
            if value.dim():
                padding = max(padding, float(value[real:].abs().sum()))
    return losses, engine.full_state_dict(), steps, padding


@pytest.mark.parametrize(
    ("size", "knobs"),
    [
        (3, {"stage": 3}),
        (1, {"stage": 0}),
        (4, {"stage": 3, "param_persistence_threshold": 10}),
        (4, {"stage": 2}),
        (2, {"stage": 1}),
    ],
    ids=str,
)
def test_c03_other_ranks_and_stages_go_on_as_the_oracle(tmp_path, size, knobs):
    losses, state = plain_losses(6)
    assert run_on_ranks(2, save_after_three, str(tmp_path), {"stage": 3})[0] == pytest.approx(
        losses[:3], abs=1e-5
    )
    sizes = checkpoint_sizes(tmp_path / "step-00000003")
    assert sizes == {name: [value.numel()] for name, value in state.items()}
    for found, full, steps, padding in run_on_ranks(size, go_on_for_three, str(tmp_path), knobs):
        assert found == pytest.approx(losses[3:], abs=1e-5)
        assert all(torch.allclose(full[name], state[name], atol=1e-5) for name in state)
        assert steps == [6.0] * 5
        assert padding == 0.0


def checkpoint_sizes(path: Path) -> dict[str, list[int]]:
    """Sizes of moments, which are those of the parameters."""
    import torch.distributed.checkpoint as dcp

    saved = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    moments = {k: list(v.size) for k, v in saved.items() if k.endswith(("/exp_avg", "/exp_avg_sq"))}
    names = {k.split("/")[1] for k in moments}
    assert all(moments[f"optimizer/{n}/exp_avg"] == moments[f"optimizer/{n}/exp_avg_sq"] for n in names)
    return {n: moments[f"optimizer/{n}/exp_avg"] for n in names}


def test_c03_from_plain_data_parallel_to_partitioned(tmp_path):
    losses, _ = plain_losses(6)
    run_on_ranks(4, save_after_three, str(tmp_path), {"stage": 0})
    assert run_on_ranks(3, go_on_for_three, str(tmp_path), {"stage": 3})[0][0] == pytest.approx(
        losses[3:], abs=1e-5
    )


# --------------------------------------------------------------------- C04: a resumed run is the same run


def resume_job(rank: int, size: int, folder: str, setting: Setting, at: int) -> None:
    """A is the unbroken run; B saves after ``at`` micro-batches, and another engine goes on."""
    in_all = 6 * setting.accumulation
    whole = Trainer(rank, size, setting)
    trace, state = list(whole.train(in_all)), whole.state()
    counters = whole.counters()
    whole.engine.close()

    first = Trainer(rank, size, setting)
    first.train(at)
    first.save(folder)
    taken = len(first.trace)
    kept = first.state()
    # The run that saved goes on as if it had not.
    assert first.train(in_all - at) == trace and same(first.state(), state)

    # Into the same engine, used since: everything of it is gone.
    first.load(folder)
    assert same(first.state(), kept)
    assert first.train(in_all - at) == trace[taken:] and same(first.state(), state)
    first.engine.close()

    disturb()
    second = Trainer(rank, size, setting)
    disturb()
    second.load(folder)
    # Save what was just loaded, and load that, twice.
    second.save(folder + "/again")
    disturb()
    second.load(folder + "/again")
    second.load(folder + "/again")
    assert second.engine.steps == taken and same(second.state(), kept)
    assert second.train(in_all - at) == trace[taken:]
    assert same(second.state(), state) and second.counters() == counters
    second.engine.flush()
    assert second.engine.ledger.live_elements == (whole.engine.ledger.live_elements or 0)
    second.engine.close()


@pytest.mark.parametrize(
    ("size", "setting", "at"),
    [
        (2, Setting({"stage": 3}, dropout=0.3), 3),
        (2, Setting({"stage": 3}, accumulation=2, dropout=0.3), 7),
        (3, Setting({"stage": 2}, accumulation=2), 5),
        (2, Setting({"stage": 1}, accumulation=3), 8),
        (2, Setting({"stage": 0}, accumulation=2, dropout=0.3), 7),
        (2, Setting({"stage": 3}, accumulation=3, engine={"accumulate": "local"}), 7),
        (2, Setting({"stage": 3}, accumulation=2, precision="bf16"), 7),
        (2, Setting({"stage": 3}, accumulation=2, precision="fp16"), 7),
        (2, Setting({"stage": 3, "param_persistence_threshold": 50}, accumulation=2), 5),
        (1, Setting({"stage": 3}, accumulation=2, dropout=0.3), 7),
    ],
    ids=str,
)
def test_c04_a_resumed_run_is_the_same_run(tmp_path, size, setting, at):
    run_on_ranks(size, resume_job, str(tmp_path), setting, at)


def background_job(rank: int, size: int, folder: str, setting: Setting) -> None:
    trainer = Trainer(rank, size, setting)
    trainer.train(3)
    kept = trainer.state()
    trainer.save(folder, wait=False)
    trace = list(trainer.train(3))[3:]
    path = trainer.engine.finish_save()
    assert path is not None and path.name == "step-00000003" and trainer.engine.finish_save() is None
    other = Trainer(rank, size, setting)
    other.load(folder)
    assert same(other.state(), kept)
    assert other.train(3) == trace and same(other.state(), trainer.state())


@pytest.mark.parametrize("size", [1, 2])
def test_c04_a_save_in_the_background_holds_what_was_when_it_began(tmp_path, size):
    run_on_ranks(size, background_job, str(tmp_path), Setting({"stage": 3}, dropout=0.3))


def other_ranks_window(rank: int, size: int, folder: str, setting: Setting) -> str:
    trainer = Trainer(rank, size, setting)
    try:
        trainer.load(folder)
    except UsageError as error:
        message = str(error)
    trainer.load(folder, restart_window=True)
    assert trainer.engine.steps == 2 and trainer.micro == 0
    trainer.train(2)
    assert len(trainer.trace) == 1
    return message


def save_in_window(rank: int, size: int, folder: str, setting: Setting) -> None:
    trainer = Trainer(rank, size, setting)
    trainer.train(5)
    trainer.save(folder)


def test_c04_an_open_window_on_another_number_of_ranks(tmp_path):
    setting = Setting(accumulation=2)
    run_on_ranks(2, save_in_window, str(tmp_path), setting)
    message = run_on_ranks(3, other_ranks_window, str(tmp_path), setting)[0]
    assert (
        "saved by 2 ranks inside an accumulation window, after micro-batch 1 of step 2; here are 3" in message
    )
    assert "restart_window=True" in message


# ------------------------------------------------------------------------------- C05: work done on rank 0 only


def impatient(seconds: float = 1.0) -> None:
    from zerotune.engine import meeting

    meeting.PATIENCE_S = seconds


def refused(act) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        act()
    except (RunFailed, UsageError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    raise AssertionError("it went through")


def unwritable_job(rank: int, size: int, folder: str):
    engine = build()
    list(plain_steps(engine, rank, size, 1))
    occupied = Path(folder) / "occupied"
    if rank == 0:
        occupied.write_text("a file where a folder is wanted")
    answers = [
        refused(lambda: engine.save(occupied / "checkpoints")),
        refused(lambda: checkpoints.export_weights(engine, occupied / "m.safetensors")),
        refused(lambda: engine.save(folder, extra={"not": object()})),
        refused(lambda: engine.load(Path(folder) / "none")),
    ]
    # The engine is still good.
    engine.save(folder)
    engine.load(folder)
    return answers


def test_c05_rank_zeros_error_is_everybodys(tmp_path):
    first, second = run_on_ranks(2, unwritable_job, str(tmp_path))
    assert [answer[:2] for answer in first] == [answer[:2] for answer in second]
    assert all(seconds < 10 for *_, seconds in first + second)
    save, export, extra, load = first
    assert save[0] == "RunFailed" and "Not a directory" in save[1]
    assert export[0] == "UsageError" and "m.safetensors cannot be written" in export[1]
    assert extra[0] == "UsageError" and "not JSON" in extra[1]
    assert load[0] == "UsageError" and "no complete checkpoint" in load[1]


def fill_the_disk(rank: int):
    """From here on what this rank writes of a checkpoint goes to a device that is full; returns how to undo it."""
    from zerotune.checkpoints import writing

    write = writing.FileSystemWriter.write_data

    def write_to_full(self, plan, planner):
        os.symlink("/dev/full", Path(self.path) / f"__{rank}_0.distcp")
        return write(self, plan, planner)

    writing.FileSystemWriter.write_data = write_to_full
    return lambda: setattr(writing.FileSystemWriter, "write_data", write)


def full_disk_job(rank: int, size: int, folder: str, full_rank: int, wait: bool):
    engine = build()
    list(plain_steps(engine, rank, size, 1))
    empty = fill_the_disk(rank) if rank == full_rank else lambda: None
    try:
        if wait:
            answer = refused(lambda: engine.save(folder))
        else:
            engine.save(folder, wait=False)
            list(plain_steps(engine, rank, size, 1))
            answer = refused(lambda: engine.save(folder))  # the error of the one before
    finally:
        empty()
    if rank == 0:
        (Path(folder) / ".m.partial").symlink_to("/dev/full")
    export = refused(lambda: checkpoints.export_weights(engine, Path(folder) / "m", "fp64"))
    left = sorted(p.name for p in Path(folder).iterdir())
    engine.save(folder)
    return answer, export, left


@pytest.mark.parametrize("wait", [True, False], ids=["at once", "in the background"])
@pytest.mark.parametrize("full_rank", [0, 1])
def test_c05_a_full_disk_on_any_rank(tmp_path, full_rank, wait):
    answers = run_on_ranks(2, full_disk_job, str(tmp_path), full_rank, wait)
    texts = {answer[:2] for answer, _, _ in answers}
    assert len(texts) == 1
    name, text = texts.pop()
    assert name == "RunFailed" and f"failed on rank {full_rank}" in text and "No space left on device" in text
    assert all(answer[2] < 10 for answer, _, _ in answers)
    (_, first, left), (_, second, _) = answers
    assert first[:2] == second[:2] and "No space left on device" in first[1] and left == []
    assert len(checkpoints.complete_checkpoints(tmp_path)) == 1
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def alone_job(rank: int, size: int, folder: str, api: str):
    impatient()
    engine = build()
    list(plain_steps(engine, rank, size, 1))
    calls = {
        "export": lambda: checkpoints.export_weights(engine, Path(folder) / "m.safetensors"),
        "save": lambda: engine.save(folder),
        "load": lambda: engine.load(folder),
        "state_dict": engine.full_state_dict,
    }
    if rank == 0:
        answer = refused(calls[api])
    else:
        time.sleep(1.5)
        # A rank that comes too late, or with another call, learns it at once.
        answer = refused(calls["save" if api == "export" else "export"])
    impatient(20)
    engine.save(folder)
    calls[api]()
    return answer


@pytest.mark.parametrize("api", ["export", "save", "load", "state_dict"])
def test_c05_a_collective_call_from_one_rank_is_named(tmp_path, api):
    first, second = run_on_ranks(2, alone_job, str(tmp_path), api)
    words = {
        "export": "exporting weights",
        "save": "saving step 1",
        "load": "loading",
        "state_dict": "full_state_dict",
    }
    assert first[0] == "RunFailed" and words[api] in first[1] and "rank 1" in first[1]
    assert first[2] < 5
    assert second[1] == first[1] and second[2] < 1


def other_calls_job(rank: int, size: int, folder: str):
    engine = build()
    if rank == 0:
        return refused(lambda: engine.save(folder))
    return refused(lambda: engine.load(folder))


def test_c05_two_calls_at_once_are_told_apart(tmp_path):
    first, second = run_on_ranks(2, other_calls_job, str(tmp_path))
    assert first[1] == second[1] and "rank 0 called saving step 0 while rank 1 called loading" in first[1]
    assert max(first[2], second[2]) < 5


def hook_job(rank: int, size: int, own: bool):
    """A user's hook that reads parameters on rank 0 only: those of the module that runs, or others."""
    engine = build()
    list(plain_steps(engine, rank, size, 1))
    norms: list[float] = []
    if rank == 0:
        layers = [m for m in engine.module.modules() if next(m.parameters(recurse=False), None) is not None]
        read = layers[0 if own else -1]
        layers[0].register_forward_hook(
            lambda *_: norms.append(sum(float(p.detach().norm()) for p in read.parameters(recurse=False)))
        )
    if not own:
        return refused(lambda: list(plain_steps(engine, rank, size, 2)))
    list(plain_steps(engine, rank, size, 2))
    return norms


def test_c05_a_hook_may_read_its_own_weights_on_one_rank():
    first, second = run_on_ranks(2, hook_job, True)
    assert len(first) == 2 and min(first) > 0 and second == []


def test_c05_a_hook_that_reads_others_weights_on_one_rank_is_named():
    answers = run_on_ranks(2, hook_job, False)
    end_pool(2)  # its group is of no use any more
    for kind, text, seconds in answers:
        assert kind in ("RanksDiverged", "CollectiveFailed"), text
        assert "rank 0" in text and "rank 1" in text and seconds < 10


# --------------------------------------------------------------- C06: memory after saving and after training


class Heavy(nn.Module):
    """16 parameters of 4 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def memory_job(rank: int, size: int, folder: str):
    import zerotune
    from zerotune.checkpoints.safetensors_file import SafetensorsWriter
    from zerotune.config.knobs import Knobs
    from zerotune.train.memory import release_memory

    torch.manual_seed(1)
    model = Heavy()
    engine = zerotune.ZeroEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), Knobs(stage=3))
    engine.backward(engine(torch.randn(2, 1024)).square().mean())
    engine.step()
    engine.flush()
    process = psutil.Process()

    def resident() -> int:
        release_memory()  # what the allocator only keeps in stock is no growth
        return process.memory_info().rss

    seen: list[int] = []
    write = SafetensorsWriter.write

    def noting(self, tensor):
        write(self, tensor)
        seen.append(process.memory_info().rss)

    SafetensorsWriter.write = noting
    root = Path(folder)
    rests, after = [], []
    try:
        for _ in range(20):
            checkpoints.export_weights(engine, root / "m.safetensors")
            assert engine.ledger.live_elements == 0
            after.append(process.memory_info().rss)
            rests.append(resident())
        before_folder = after[-1]
        for turn in range(4):
            engine.save(root, wait=turn % 2 == 0)
            engine.finish_save()
            assert engine.ledger.live_elements == 0
            rests.append(resident())
        engine_peak = max(seen, default=0) - after[0]
        seen.clear()
        if rank == 0:
            checkpoints.export_weights(root, root / "n.safetensors")
        folder_peak = max(seen, default=0) - before_folder

        # An exception on the way leaves nothing behind, on any rank.
        def failing(self, tensor):
            if self._next == 3:
                raise ValueError("in the middle")
            write(self, tensor)

        SafetensorsWriter.write = failing
        (root / "m.safetensors").unlink(missing_ok=True)
        failed = refused(lambda: checkpoints.export_weights(engine, root / "m.safetensors"))
        assert engine.ledger.live_elements == 0
    finally:
        SafetensorsWriter.write = write
    with torch.no_grad():
        engine.eval()(torch.randn(2, 1024))
    engine.flush()
    live = engine.ledger.live_elements
    engine.close()
    return rests, engine_peak, folder_peak, failed, live


def test_c06_memory_is_flat_and_export_streams(tmp_path):
    mb = 2**20
    answers = run_on_ranks(2, memory_job, str(tmp_path), limit=120)
    for rests, engine_peak, folder_peak, failed, live in answers:
        assert rests[19] - rests[2] < 24 * mb, [rest // mb for rest in rests]
        assert rests[-1] - rests[20] < 32 * mb, [rest // mb for rest in rests]
        # One parameter is 4 MiB, all are 64 MiB.
        assert engine_peak < 24 * mb and folder_peak < 24 * mb, (engine_peak // mb, folder_peak // mb)
        assert failed[:2] == answers[0][3][:2] and "in the middle" in failed[1]
        assert live == 0
    assert not (tmp_path / "m.safetensors").exists()
    assert (tmp_path / "n.safetensors").stat().st_size > 64 * mb
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
