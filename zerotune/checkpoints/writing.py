"""A save under way: every rank writes its own file, rank 0 publishes when all have.

[Note: in the background]
A background thread must never take part in a collective of the group that trains: its calls would interleave with the
step's in another order on every rank. So the ranks agree on who writes what before the thread starts, and tell rank 0
that they have written by a small file each, beside their data. Rank 0's thread waits for these files, not for ranks.
"""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from zerotune.checkpoints.folders import aside_path, publish
from zerotune.checkpoints.manifest import Manifest
from zerotune.config.errors import RunFailed
from zerotune.engine import RankGroup
from zerotune.engine.meeting import meet, on_rank_zero, together

VISIBLE_S = 60.0
"""How long a file that another rank has written may take to be seen here: network file systems cache names."""

_POLL_S = 0.01


class PendingSave:
    """One rank's part of a save whose plan is agreed upon.

    Args:
        group: The ranks.
        folder: Folder of checkpoints.
        step: Optimizer steps taken.
        writer: Writes to the place aside.
        plan: What this rank writes.
        planner: Knows the tensors; they must not change until :attr:`has_written`.
        metadata: Of the whole, on rank 0.
        manifest: On rank 0.
    """

    def __init__(
        self,
        group: RankGroup,
        folder: Path,
        step: int,
        writer: FileSystemWriter,
        plan: SavePlan,
        planner: SavePlanner,
        metadata: Metadata | None,
        manifest: Manifest | None,
    ) -> None:
        self.step = step
        self._group = group
        self._folder = folder
        self._aside = aside_path(folder, step)
        self._what = f"checkpoint of step {step} in {folder}"
        self._writer: FileSystemWriter | None = writer
        self._plan: SavePlan | None = plan
        self._planner: SavePlanner | None = planner
        self._metadata = metadata
        self._manifest = manifest
        self._published: Path | None = None
        self._all_written = threading.Event()
        self._cancelled = threading.Event()
        self._write_error: BaseException | None = None
        self._publish_error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._written = threading.Event()
        self._is_over = False
        self._error: BaseException | None = None

    def start(self, in_background: bool) -> None:
        """Write, here or in a thread of its own, which also publishes."""
        if not in_background:
            self._write()
            return
        self._thread = threading.Thread(target=self._work, name=f"save-{self.step}", daemon=True)
        self._thread.start()

    @property
    def has_written(self) -> bool:
        """Whether this rank has written its part, or failed to."""
        return self._written.is_set()

    def wait(self) -> Path:
        """Wait until it is published; a collective call, and the same answer when called again.

        Returns:
            Path of the checkpoint.

        Raises:
            RunFailed: A rank could not write its part, or rank 0 could not publish; every rank raises.
        """
        if not self._is_over:
            self._is_over = True
            try:
                self._published = self._wait()
            except BaseException as error:
                self._error = error
                self.abandon(patience_s=0)
                if self._group.rank == 0:
                    shutil.rmtree(self._aside, ignore_errors=True)  # it may be what filled the disk
                raise
        if self._error is not None:
            raise self._error
        assert self._published is not None
        return self._published

    def _wait(self) -> Path:
        if self._thread is not None:
            meet(self._group, f"the end of saving step {self.step}")
        together(self._group, self._what, self._join_writing)
        self._all_written.set()
        return on_rank_zero(self._group, self._what, self._join_publishing)

    def abandon(self, patience_s: float = 10.0) -> None:
        """End without a word to other ranks, when training ends with an error. What all ranks wrote is published.

        Args:
            patience_s: How long rank 0 waits for the other ranks' parts.
        """
        self._is_over = True
        if self._thread is not None:
            self._written.wait()
            self._thread.join(patience_s)
            self._cancelled.set()
            self._thread.join()

    # ------------------------------------------------------------------------------------------------ inside

    def _work(self) -> None:
        self._write()
        if self._group.rank == 0 and self._write_error is None:
            self._publish()

    def _write(self) -> None:
        try:
            assert self._writer is not None and self._plan is not None and self._planner is not None
            results = self._writer.write_data(self._plan, self._planner).wait()
            _leave_word(self._aside, self._group.rank, results)
        except BaseException as error:
            self._write_error = error
        finally:
            self._plan = self._planner = None  # the copies of the tensors go with them
            self._written.set()

    def _publish(self) -> None:
        """Rank 0: wait for every rank's word, then make the whole visible."""
        try:
            assert self._writer is not None and self._metadata is not None and self._manifest is not None
            results = [self._word_of(rank) for rank in range(self._group.size)]
            for rank in range(self._group.size):
                _word_path(self._aside, rank).unlink()
            self._writer.finish(self._metadata, results)
            self._published = publish(self._folder, self.step, self._manifest)
        except BaseException as error:
            self._publish_error = error

    def _word_of(self, rank: int) -> Any:
        path = _word_path(self._aside, rank)
        deadline: float | None = None
        while not path.exists():
            if self._cancelled.is_set():
                raise RunFailed(f"{self._what} was given up before rank {rank} had written its part")
            if self._all_written.is_set():
                deadline = deadline or time.monotonic() + VISIBLE_S
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"{self._what}: rank {rank} has written its part, but rank 0 does not see it",
                        "save to a folder that all nodes share",
                    )
                os.listdir(self._aside)  # network file systems look again
            time.sleep(_POLL_S)
        return pickle.loads(path.read_bytes())

    def _join_writing(self) -> None:
        self._written.wait()
        if self._write_error is not None:
            raise self._write_error

    def _join_publishing(self) -> Path:
        if self._thread is not None:
            self._thread.join()
        else:
            self._publish()
        if self._publish_error is not None:
            raise self._publish_error
        assert self._published is not None
        return self._published


def _word_path(aside: Path, rank: int) -> Path:
    return aside / f"rank-{rank:05d}.written"


def _leave_word(aside: Path, rank: int, results: Any) -> None:
    path = _word_path(aside, rank)
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(results))
    part.rename(path)
