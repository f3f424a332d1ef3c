from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest

from tests.builders import make_cluster, make_workload
from tests.search.fakes import FakeWorkers, Surface
from zerotune.config.schema import JobConfig
from zerotune.config.space import ModelSizes, Space, read_space
from zerotune.records.events import Event, SearchResult
from zerotune.runs.execute import Executor
from zerotune.search.plan import SearchPlan, make_plan
from zerotune.search.study import Search
from zerotune.store.location import file_url
from zerotune.store.store import Store

SIZES = ModelSizes(block=1_000_000, model=4_200_000, largest_parameter=262_144)

QUICK = """
knobs:
  prefetch_distance: {relative_to: block, values: [0, 1, 2, 4]}
  release: [after_use, keep]
  reduce_bucket_size: {relative_to: block, values: [1, 4]}
"""

# Eight points, the defaults among them.
SMALL = QUICK.replace("[0, 1, 2, 4]", "[0, 4]")


def make_job(
    global_batch: int = 8, micro: int | None = None, zero: dict | None = None, **search: object
) -> JobConfig:
    defaults = {"trials": 8, "confirm_rounds": 2}
    return JobConfig.model_validate(
        {
            "model": {"gpt": {"layers": 4}},
            "train": {"global_batch_size": global_batch, "micro_batch_size": micro},
            "zero": zero or {},
            "search": defaults | search,
        }
    )


def plan_of(
    job: JobConfig, space: str | Space = QUICK, name: str | None = None, ranks: int = 2
) -> SearchPlan:
    read = space if isinstance(space, Space) else read_space(space, "space.yaml", "test")
    return make_plan(job, read, SIZES, ranks, make_workload(), make_cluster(), name)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(file_url(tmp_path / "store" / "zerotune.db")) as store:
        yield store


class Bench:
    """Searches in one store."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.events: list[Event] = []

    def search(self, plan: SearchPlan, workers: FakeWorkers) -> SearchResult:
        executor = Executor(self.store, workers, plan.cluster, self.folder / "runs")
        return Search(plan, self.store, executor, self.events.append).run()

    def __call__(
        self, plan: SearchPlan, surface: Surface, noise: float = 0.0
    ) -> tuple[SearchResult, FakeWorkers]:
        workers = FakeWorkers(surface, noise)
        return self.search(plan, workers), workers


@pytest.fixture
def real_bench(store: Store, tmp_path: Path) -> Bench:
    """Everything in the database, as it is for users."""
    return Bench(store, tmp_path)


@pytest.fixture
def bench(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The sampler's trials in memory, which is most of what a search over a fake surface costs; rows in the store."""
    trials = optuna.storages.InMemoryStorage()
    monkeypatch.setattr(store, "open_optuna_storage", lambda: trials)
    return Bench(store, tmp_path)


Make = Callable[..., SearchPlan]
