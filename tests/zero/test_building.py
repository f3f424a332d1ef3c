"""Models larger than a rank: built without memory, on the meta device, or from files, straight into shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.ranks import run_on_ranks
from tests.zero.building import (
    deferred_and_ordinary,
    from_files,
    loaded_later,
    loading_error,
    meta_without_values,
    own_optimizer,
    peak_of_build,
)
from tests.zero.jobs import make_model

State = dict[str, torch.Tensor]


def assert_equal(state: State, expected: State) -> None:
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.fixture(scope="module")
def weights() -> State:
    torch.manual_seed(11)
    return {name: value.clone() for name, value in make_model("tied_gpt").state_dict().items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_deferred_build_trains_the_same_model(stage: int, precision: str) -> None:
    for built, ordinary in run_on_ranks(2, deferred_and_ordinary, "tied_gpt", stage, precision):
        assert_equal(built, ordinary)


def test_an_optimizer_may_be_built_on_deferred_parameters() -> None:
    alone, together = run_on_ranks(1, own_optimizer), run_on_ranks(2, own_optimizer)
    assert_equal(together[0], together[1])
    assert list(alone[0]) == list(together[0])


@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize("stage, precision", [(3, "fp32"), (3, "bf16"), (2, "fp32"), (0, "bf16")])
def test_weights_from_files(
    tmp_path: Path, weights: State, stage: int, precision: str, on_meta: bool
) -> None:
    names = list(weights)
    half = len(names) // 2
    save_file({name: weights[name] for name in names[:half]}, tmp_path / "a.safetensors")
    # The tied name is left out, as the libraries that write such files do.
    save_file({n: weights[n] for n in names[half:] if n != "head.weight"}, tmp_path / "b.safetensors")
    for state in run_on_ranks(3, from_files, str(tmp_path), stage, precision, on_meta):
        assert_equal(state, weights)


def test_an_index_says_which_files_count(tmp_path: Path, weights: State) -> None:
    weights = {name: value for name, value in weights.items() if name != "head.weight"}
    save_file(weights, tmp_path / "good.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "other.safetensors")
    assert "is in two files" in run_on_ranks(2, loading_error, str(tmp_path))[0]
    index = {"weight_map": dict.fromkeys(weights, "good.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    state = run_on_ranks(2, loaded_later, str(tmp_path), 3, True)[0]
    assert_equal({name: state[name] for name in weights}, weights)


def test_strict_names_what_is_missing_and_unknown(tmp_path: Path, weights: State) -> None:
    changed = {name: value for name, value in weights.items() if name not in ("head.weight", "norm.bias")}
    changed["extra.weight"] = torch.zeros(3)
    file = tmp_path / "w.safetensors"
    save_file(changed, file)
    for error in run_on_ranks(2, loading_error, str(file)):
        assert error == (
            f"{file} does not fit the model: it lacks norm.bias; the model has no extra.weight "
            "(load it with strict=False to leave these alone)"
        )
    state = run_on_ranks(2, loaded_later, str(file), 3, False)[0]
    changed.pop("extra.weight")
    assert_equal({name: state[name] for name in changed}, changed)
    assert not torch.equal(state["norm.bias"], weights["norm.bias"])  # trained, and left alone


def test_files_that_do_not_fit(tmp_path: Path, weights: State) -> None:
    weights = {name: value for name, value in weights.items() if name != "head.weight"}
    file = tmp_path / "w.safetensors"
    save_file(weights | {"norm.weight": torch.zeros(5)}, file)
    assert "norm.weight has shape (5,) in" in run_on_ranks(2, loading_error, str(file))[0]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is no safetensors file in" in run_on_ranks(2, loading_error, str(empty))[0]
    file.write_bytes(b"no safetensors")
    assert "cannot be read as safetensors" in run_on_ranks(2, loading_error, str(file))[0]


def test_a_file_that_one_rank_lacks_ends_all(tmp_path: Path, weights: State) -> None:
    file = tmp_path / "w.safetensors"
    save_file({name: value for name, value in weights.items() if name != "head.weight"}, file)
    errors = run_on_ranks(2, loading_error, str(file), str(tmp_path / "absent"))
    assert all("there are no weights at" in error for error in errors)


def test_a_meta_model_without_weights_is_refused_by_name() -> None:
    for error in run_on_ranks(2, meta_without_values):
        assert "tok_emb.weight was built on the meta device: it has no values" in error


def test_peak_while_building_is_shards_and_the_largest_unit() -> None:
    """40 M parameters on 4 ranks."""
    for peak in run_on_ranks(4, peak_of_build, limit=170):
        assert 39e6 < peak.parameters < 42e6
        assert peak.shards < peak.peak < (peak.shards + peak.largest_unit) * 1.05
