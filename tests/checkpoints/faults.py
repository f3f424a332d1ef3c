"""Ranks that are killed while they save, and what a resume finds afterwards.

Each program is a few processes of its own, forked from one that has torch loaded. Saving is made slow here, by
patching what it calls, so that a moment chosen at random falls anywhere in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import forkserver

STEPS = 5
SIZE = 2
LONGEST_SAVE_S = 0.5


@dataclass(frozen=True)
class Moment:
    """When to kill.

    Attributes:
        save: In which save, counted from 1.
        delay: Seconds after it began.
        rank: Which rank; ``None`` for all of them.
        background: Whether saves are made in the background.
    """

    save: int
    delay: float
    rank: int | None
    background: bool


def random_moments(seed: int, count: int) -> list[Moment]:
    """Moments in saves of either kind, on one rank or on all."""
    chosen = random.Random(seed)
    return [
        Moment(
            save=chosen.randint(1, STEPS - 1),
            delay=chosen.random() * LONGEST_SAVE_S,
            rank=chosen.choice([0, 1, None]),
            background=bool(number % 2),
        )
        for number in range(count)
    ]


def check_moments(root: Path, moments: list[Moment]) -> None:
    """Kill at every moment, resume, and compare with the run that nobody killed.

    Raises:
        AssertionError: A rank hangs, nothing complete is found although something was published, or the resumed run is
            another one.
    """
    reference = run_program(root / "reference", None, resume=False)
    assert reference is not None and len(reference["losses"]) == STEPS
    for number, moment in enumerate(moments):
        folder = root / f"moment-{number}"
        killed = run_program(folder, moment, resume=False)
        assert killed is None, f"{moment}: nobody was killed"
        resumed = run_program(folder, None, resume=True)
        assert resumed is not None, f"{moment}: the resumed run did not end"
        first = resumed["first_step"]
        # One save at most is under way, and a save in the background begins by waiting for the one before.
        published = moment.save - (2 if moment.background else 1)
        assert first >= published, f"{moment}: resumed from step {first}"
        assert resumed["losses"] == reference["losses"][first:], f"{moment}: another run"
        assert resumed["state"] == reference["state"], f"{moment}: other weights"
        left = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
        assert not left, f"{moment}: {left} left"


def run_program(
    folder: Path, moment: Moment | None, resume: bool, limit: float = 60.0
) -> dict[str, Any] | None:
    """Run all ranks to their end; returns what rank 0 wrote, or ``None`` if the program did not come to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("answer.json", "store"):
        (folder / name).unlink(missing_ok=True)
    context = forkserver()
    ranks = [context.Process(target=_rank, args=(rank, str(folder), moment, resume)) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + limit
    for process in ranks:
        process.join(max(0.1, deadline - time.monotonic()))
    hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
        process.join()
    assert not hanging, f"{moment}: ranks {hanging} hang; see {folder}"
    answer = folder / "answer.json"
    if any(process.exitcode for process in ranks):
        if moment is None:
            raise AssertionError("\n".join((folder / f"rank{r}.log").read_text() for r in range(SIZE)))
        return None
    return json.loads(answer.read_text())


def _rank(rank: int, folder: str, moment: Moment | None, resume: bool) -> None:
    log = open(f"{folder}/rank{rank}.log", "w")  # noqa: SIM115 - until the process ends
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from tests.checkpoints.jobs import Setting, Trainer
    from zerotune.checkpoints import complete_checkpoints
    from zerotune.engine import meeting

    torch.set_num_threads(1)
    meeting.PATIENCE_S = 5.0
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", SIZE), rank=rank, world_size=SIZE)
    trainer = Trainer(rank, SIZE, Setting({"stage": 3}, dropout=0.3))
    saves = f"{folder}/checkpoints"
    if resume and complete_checkpoints(Path(saves)):
        trainer.load(saves)
    first = trainer.engine.steps
    if moment is not None:
        _make_saving_slow()
    for number in range(first + 1, STEPS + 1):
        trainer.train(1)
        if moment is not None and number == moment.save and moment.rank in (None, rank):
            killer = threading.Timer(moment.delay, os.kill, (os.getpid(), signal.SIGKILL))
            killer.daemon = True
            # All ranks but for the one whose save is slow begin it together.
            killer.start()
        is_background = moment is not None and moment.background
        trainer.save(saves, wait=not is_background)
        if is_background and moment is not None and number == moment.save:
            time.sleep(LONGEST_SAVE_S + 0.1)  # the moment falls into this save
    trainer.engine.finish_save()
    if rank == 0:
        state = hashlib.sha256()
        for name, value in sorted(trainer.state().items()):
            state.update(name.encode() + value.numpy().tobytes())
        losses = [entry[0] for entry in trainer.trace]
        answer = {"first_step": first, "losses": losses, "state": state.hexdigest()}
        Path(f"{folder}/answer.json").write_text(json.dumps(answer))
    else:
        trainer.state()
    dist.destroy_process_group()


def _make_saving_slow() -> None:
    """Every durable act of a save takes a while."""
    from zerotune.checkpoints import writing

    sync, rename, write = os.fsync, Path.rename, writing.FileSystemWriter.write_data

    def slow_sync(descriptor: int) -> None:
        time.sleep(0.03)
        sync(descriptor)

    def slow_rename(self: Path, target: Any) -> Path:
        time.sleep(0.03)
        renamed = rename(self, target)
        time.sleep(0.03)
        return renamed

    def slow_write(self: Any, plan: Any, planner: Any) -> Any:
        time.sleep(0.05)
        return write(self, plan, planner)

    os.fsync = slow_sync
    Path.rename = slow_rename
    writing.FileSystemWriter.write_data = slow_write
