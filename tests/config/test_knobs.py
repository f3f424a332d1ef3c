"""The registry says what the schema does, and its pages are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotune.config.docs import pages, write
from zerotune.config.errors import ConfigErrors
from zerotune.config.knobs import REGISTRY, KnobInfo, Knobs, find_knob
from zerotune.config.load import read_job
from zerotune.config.schema import TrainConfig

ROOT = Path(__file__).parents[2]


def test_registry_and_schema_have_the_same_knobs_in_the_same_order() -> None:
    assert [name for name, info in REGISTRY.items() if info.section == "zero"] == list(Knobs.model_fields)
    assert all(info.section == "zero" or name in TrainConfig.model_fields for name, info in REGISTRY.items())


@pytest.mark.parametrize("info", REGISTRY.values(), ids=list(REGISTRY))
def test_what_the_registry_says_of_a_knob_holds(info: KnobInfo) -> None:
    model = "model: {gpt: {}}"
    extra = ["zero.max_reuse_distance=5"] if info.example == "reuse" else []
    read_job(model, sets=[f"{info.path}={info.example}", *extra])
    if info.name != "micro_batch_size":
        default = info.default.partition(":")[0]
        assert read_job(model, sets=[f"{info.path}={default}"]).job == read_job(model).job
    if info.unit:
        read_job(model, sets=[f"{info.path}={info.least}"])
        with pytest.raises(ConfigErrors):
            read_job(model, sets=[f"{info.path}={info.least - 1}"])


def test_find() -> None:
    assert find_knob("zero.stage") is find_knob("stage") is REGISTRY["stage"]
    assert find_knob("stage3_prefetch_bucket_size") is REGISTRY["prefetch_distance"]
    assert find_knob("nothing") is None


def test_pages_are_up_to_date() -> None:
    folder = ROOT / "docs" / "knobs"
    written = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    assert written == pages(), "run python -m zerotune.config.docs"


def test_pages_of_removed_knobs_go(tmp_path: Path) -> None:
    (tmp_path / "old_knob.md").write_text("x")
    write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(pages())
