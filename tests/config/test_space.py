"""Search spaces: what they say, and how choices become knobs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.config.errors import ConfigErrors, UsageError
from zerotune.config.knobs import Knobs, Release
from zerotune.config.schema import GptConfig, JobConfig, ModelConfig, SearchConfig
from zerotune.config.space import ModelSizes, Space, list_spaces, load_space, read_space

SIZES = ModelSizes(block=1000, model=10_000, largest_parameter=400)


def space_of(knobs: str) -> Space:
    return read_space(f"knobs:\n{knobs}", "s.yaml", "s")


def job_of(knobs: Knobs) -> JobConfig:
    return JobConfig(model=ModelConfig(gpt=GptConfig()), zero=knobs)


def choose(space: Space, data: st.DataObject) -> dict[str, Any]:
    choices: dict[str, Any] = {}
    for dimension in space:
        if dimension.is_active(choices):
            assert dimension.values is not None
            choices[dimension.name] = data.draw(st.sampled_from(dimension.values))
    return choices


def test_names() -> None:
    assert list_spaces() == ["default", "memory", "quick"]


@pytest.mark.parametrize("name", ["default", "memory", "quick"])
@given(data=st.data(), block=st.integers(1, 10**9))
@settings(max_examples=40, deadline=None)
def test_every_point_of_a_shipped_space_is_valid(name: str, data: st.DataObject, block: int) -> None:
    space = load_space(name)
    assert space.description
    choices = choose(space, data)
    sizes = ModelSizes(block=block, model=40 * block, largest_parameter=block)
    base = job_of(Knobs(release=Release.KEEP, max_live_parameters=7))
    base = base.model_copy(update={"search": SearchConfig(memory_budget=2**30)})
    job = space.apply(choices, sizes, base)
    knobs = job.zero
    assert knobs.memory_budget == (2**30 if knobs.release is Release.PLANNED else None)
    assert job.train.activation_checkpointing == choices.get("activation_checkpointing", "none")
    assert (knobs.release is Release.REUSE) == (knobs.max_reuse_distance is not None)
    for dimension in space:
        value, choice = getattr(knobs, dimension.name, None), choices.get(dimension.name)
        if (
            dimension.relative_to == "block"
            and isinstance(choice, (int, float))
            and not isinstance(choice, bool)
        ):
            assert value == max(round(choice * block), 1 if dimension.name == "unit_size" else 0)
    if "max_live_parameters" not in space:
        assert knobs.max_live_parameters == 7


def test_choices_become_absolute() -> None:
    space = space_of(
        """
  unit_size: {relative_to: block, values: [block, 0.5]}
  prefetch_distance: {relative_to: model, low: 0, high: 1}
  reduce_bucket_size: {relative_to: largest_parameter, values: [2.0]}
  allgather_bucket_size: [auto, 5k]
  max_live_parameters: {relative_to: block, values: [none, 2]}
  release: [after_use, reuse]
  max_reuse_distance: {low: 1k, high: 1M, log: true, when: {release: reuse}}
"""
    )
    assert space.dimensions[-1].name == "max_reuse_distance"
    assert (space["max_reuse_distance"].low, space["max_reuse_distance"].high) == (1000, 1_000_000)
    assert space["max_reuse_distance"].is_integer and not space["prefetch_distance"].is_integer
    assert space["max_live_parameters"].values == (None, 2)
    choices = {
        "unit_size": 0.5, "prefetch_distance": 0.25, "reduce_bucket_size": 2.0, "allgather_bucket_size": 5000,
        "max_live_parameters": 2, "release": "reuse", "max_reuse_distance": 77,
    }  # fmt: skip
    assert space.apply(choices, SIZES, job_of(Knobs())).zero == Knobs(
        unit_size=500, prefetch_distance=2500, reduce_bucket_size=800, allgather_bucket_size=5000,
        max_live_parameters=2000, release=Release.REUSE, max_reuse_distance=77,
    )  # fmt: skip
    assert space.apply({"release": "after_use"}, SIZES, job_of(Knobs())) == job_of(Knobs())


def test_a_distance_of_the_file_is_dropped_with_another_release() -> None:
    space = space_of("  release: [after_use, keep]")
    base = job_of(Knobs(release=Release.REUSE, max_reuse_distance=5))
    assert space.apply({"release": "keep"}, SIZES, base) == job_of(Knobs(release=Release.KEEP))
    assert space.apply({}, SIZES, base) == base


def test_knobs_of_the_train_section() -> None:
    space = space_of("  activation_checkpointing: [none, full, every_2]\n  accumulate: [reduce, local]")
    job = space.apply({"activation_checkpointing": "every_2", "accumulate": "local"}, SIZES, job_of(Knobs()))
    assert job.knobs["activation_checkpointing"] == job.train.activation_checkpointing == "every_2"
    assert job.knobs["accumulate"] == job.train.accumulate == "local"


def test_micro_batch() -> None:
    relative = space_of("  micro_batch_size: {relative_to: file, values: [0.25, 0.5, 1, 2]}")
    found = [relative.micro_batch_size({"micro_batch_size": m}, 4, 12) for m in (0.25, 0.5, 1, 2)]
    assert found == [1, 2, 4, 6]
    absolute = space_of("  micro_batch_size: [1, 5]")
    assert absolute.micro_batch_size({"micro_batch_size": 5}, 4, 12) == 5
    assert absolute.micro_batch_size({}, 4, 12) == 4


def test_fingerprint_is_of_the_knobs_alone() -> None:
    one = read_space("description: a\nknobs: {release: [keep, after_use]}", "a.yaml", "a")
    two = read_space("knobs:\n  release:\n    values: [keep, after_use]\n", "b.yaml", "b")
    three = read_space("knobs: {release: [after_use, keep]}", "c.yaml", "c")
    assert one.fingerprint_facts() == two.fingerprint_facts() != three.fingerprint_facts()


def test_points() -> None:
    assert load_space("quick").points() == 16
    assert space_of("  prefetch_distance: {low: 0, high: 5}").points() is None
    text = "  release: [keep, reuse, after_use]\n  max_reuse_distance: {values: [1, 2], when: {release: reuse}}\n  overlap_comm: [true, false]"
    assert space_of(text).points() == 2 * (2 + 2)
    assert load_space("default").points() == math.prod([2, 3, 5, 3, 4, 2]) * (2 + 3)


class TestErrors:
    def test_unknown_name(self) -> None:
        with pytest.raises(
            UsageError,
            match=r"no space is called 'defualt' \(did you mean default\? there are default, memory, qu",
        ):
            load_space("defualt")
        with pytest.raises(UsageError, match="no space is called ''"):
            load_space("")

    def test_unknown_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no such file; the spaces by name are default, memory or quick"):
            load_space(tmp_path / "x.yaml")

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("knobs: {overlap_comm: [true, false]}")
        assert load_space(tmp_path / "mine")["overlap_comm"].values == (True, False)

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("", "1:1: the file is empty"),
            ("knobs: {}", "1:1: knobs: has no knob in it"),
            ("knobs: {prefech_distance: [1]}", "1:9: knobs.prefech_distance: no such knob, did you mean prefetch_distance?"),
            ("baseline: {}\nknobs: {release: [keep]}", "1:1: baseline: no such key; there are description, knobs"),
            ("knobs: {release: [keep, keeep]}", "1:9: knobs.release.values.1: 'keeep' is not a value of release, which is "),
            ("knobs: {release: [keep, keep]}", "1:9: knobs.release.values: 'keep' stands there twice"),
            ("knobs: {release: [reuse]}", "1:9: knobs.release: reuse needs max_reuse_distance in the space"),
            ("knobs: {release: []}", "1:9: knobs.release.values: has the wrong length"),
            ("knobs: {release: {low: 1, high: 2}}", "1:9: knobs.release: takes values; write for example"),
            ("knobs: {prefetch_distance: [50MB]}", "1:9: knobs.prefetch_distance.values.0: '50MB' is in bytes"),
            ("knobs: {prefetch_distance: {low: 5}}", "1:9: knobs.prefetch_distance: takes values, or low and high"),
            ("knobs: {prefetch_distance: {low: 5, high: 2}}", "1:43: knobs.prefetch_distance.high: 2 is not above low 5"),
            ("knobs: {prefetch_distance: {low: 0, high: 2, log: true}}", "1:34: knobs.prefetch_distance.low: a range with log"),
            ("knobs: {prefetch_distance: {low: auto, high: 2}}", "1:9: knobs.prefetch_distance: low and high must be numbers"),
            ("knobs: {prefetch_distance: {values: [1], low: 2}}", "1:9: knobs.prefetch_distance: has both values and low"),
            ("knobs: {prefetch_distance: {values: [1], relative_to: blok}}", "1:55: knobs.prefetch_distance.relative_to: 'blok'"),
            ("knobs: {prefetch_distance: {values: [5M], relative_to: block}}", "1:38: knobs.prefetch_distance.values.0: '5M' is a s"),
            ("knobs: {prefetch_distance: {values: [-1], relative_to: block}}", "1:38: knobs.prefetch_distance.values.0: -1 is out"),
            ("knobs: {overlap_comm: {values: [true], relative_to: block}}", "1:53: knobs.overlap_comm.relative_to: block is for siz"),
            ("knobs: {unit_size: {values: [1], relative_to: file}}", "1:47: knobs.unit_size.relative_to: file is for micro_batch"),
            ("knobs: {activation_checkpointing: [some]}", "1:9: knobs.activation_checkpointing.values.0: 'some' is not a value of"),
            ("knobs: {micro_batch_size: [0]}", "1:9: knobs.micro_batch_size.values.0: 0 is not a whole number of samples"),
            ("knobs: {unit_size: {values: [1], when: {release: keep}}}", "1:50: knobs.unit_size.when.release: is not a knob of this"),
            ("knobs: {release: [keep], unit_size: {values: [1], when: {release: x}}}", "1:67: knobs.unit_size.when.release: 'x' is n"),
        ],
    )  # fmt: skip
    def test_places(self, text: str, line: str) -> None:
        with pytest.raises(ConfigErrors) as caught:
            read_space(text, "s.yaml", "s")
        assert len(caught.value.lines) == 1, caught.value.lines
        assert caught.value.lines[0].startswith(f"s.yaml:{line}"), caught.value.lines


def test_the_spaces_of_an_installed_package_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "search_spaces").mkdir()
    (tmp_path / "search_spaces" / "only.yaml").write_text("knobs: {overlap_comm: [true, false]}")
    monkeypatch.setattr("zerotune.config.space.files", lambda package: tmp_path)
    assert list_spaces() == ["only"]
    assert load_space("only").points() == 2
