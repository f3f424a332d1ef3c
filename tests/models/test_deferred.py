"""A deferred build has the values of an ordinary one, and no memory for them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from zerotune.config.errors import UsageError
from zerotune.config.schema import GptConfig, LlamaConfig
from zerotune.models.deferred import SMALL_BYTES, deferred, is_deferred, leave_meta, values_of
from zerotune.models.gpt import Gpt
from zerotune.models.llama import Llama


class Initialisers(nn.Module):
    """What constructors do to weights: the usual, and the unusual."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(100, 100) * 0.1)
        self.orthogonal = nn.Linear(200, 100)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.embedding = nn.Embedding(300, 64, padding_idx=3)
        nn.init.trunc_normal_(self.embedding.weight, std=0.02)
        self.computed = nn.Parameter(torch.empty(200, 200))
        with torch.no_grad():
            self.computed.copy_(self.orthogonal.weight.t() @ self.orthogonal.weight)
            self.computed[3:5] *= 2
            self.computed.add_(self.computed.t().clone())
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 3)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(128, 128))
        self.assigned = nn.Linear(128, 128)
        self.assigned.weight.data = self.assigned.weight.data.double().float() * 2
        self.read = nn.Linear(128, 128)
        self.sum = self.read.weight.sum().item()
        self.copied = copy.deepcopy(self.read)
        self.copied.weight.data[0, 0] = self.sum
        self.recurrent = nn.LSTM(64, 64, 2)
        self.attention = nn.MultiheadAttention(128, 4)
        nn.init.sparse_(self.attention.in_proj_weight, 0.3)
        self.tied = nn.Linear(128, 128)
        self.tied.weight = self.read.weight
        self.narrow = nn.Linear(128, 128).bfloat16()
        self.generator = nn.Linear(128, 128)
        nn.init.normal_(self.generator.weight, generator=torch.Generator().manual_seed(5))
        self.register_buffer("constants", torch.randn(100, 100))


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "initialisers": Initialisers,
    "gpt": lambda: Gpt(GptConfig(layers=2, d_model=128, vocab_size=256, tie_embeddings=True)),
    "llama": lambda: Llama(LlamaConfig(layers=2, d_model=128, vocab_size=256)),
}


def deferred_build(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    with deferred():
        return build()


@pytest.mark.parametrize("name", BUILDS)
def test_values_and_generator_are_those_of_an_ordinary_build(name: str) -> None:
    torch.manual_seed(3)
    ordinary = BUILDS[name]()
    next_number = torch.rand(1)
    module = deferred_build(BUILDS[name])
    assert torch.equal(torch.rand(1), next_number)

    large = [p for p in module.parameters() if p.numel() * p.itemsize >= SMALL_BYTES]
    assert all(is_deferred(param) for param in large)
    assert all(param.untyped_storage().nbytes() == 0 for param in large)
    for (key, expected), (own_key, param) in zip(
        ordinary.named_parameters(), module.named_parameters(), strict=True
    ):
        assert own_key == key
        for _ in range(2):  # as often as one likes
            with values_of(param) as values:
                assert torch.equal(values, expected.detach()), key
    assert all(param.untyped_storage().nbytes() == 0 for param in large)
    for (_, expected_buffer), (key, buffer) in zip(
        ordinary.named_buffers(), module.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, expected_buffer), key


class ReadsMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(128, 128)
        self.one.weight.data.numpy()[:] = 3
        self.two = nn.Linear(128, 128)
        self.first = self.two.weight.tolist()[0][0]


def test_memory_that_is_looked_at_stays() -> None:
    module = deferred_build(ReadsMemory)
    assert not is_deferred(module.one.weight)
    assert torch.equal(module.one.weight, torch.full((128, 128), 3.0))
    assert not is_deferred(module.two.weight)
    assert module.two.weight[0, 0].item() == module.first


def test_an_exception_in_the_constructor_leaves_no_mode_behind() -> None:
    with pytest.raises(ZeroDivisionError), deferred():
        nn.Linear(1, 1 // 0)
    layer = nn.Linear(128, 128)
    assert not is_deferred(layer.weight)
    assert layer.weight.untyped_storage().nbytes() == 128 * 128 * 4


def test_reading_a_deferred_parameter_is_refused() -> None:
    module = deferred_build(BUILDS["gpt"])
    with pytest.raises(UsageError, match=r"shape \(256, 128\) was built deferred"):
        module.tok_emb.weight.sum()
    with pytest.raises(UsageError, match="was built deferred"):
        module(torch.zeros(1, 4, dtype=torch.long))


def test_meta_parameters_stay_the_same_objects() -> None:
    with torch.device("meta"):
        module = nn.Linear(128, 64)
    weight = module.weight
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="weight was built on the meta device: it has no values"):
        leave_meta(module, torch.device("cpu"), {"bias"})
    leave_meta(module, torch.device("cpu"), {"weight", "bias"})
    assert module.weight is weight is optimizer.param_groups[0]["params"][0]
    assert is_deferred(weight)
    assert weight.device.type == "cpu"
    assert weight.shape == (64, 128)
    assert weight.untyped_storage().nbytes() == 0
    with pytest.raises(UsageError, match="weight was built on the meta device: it has no values yet"):
        weight.sum()
    with values_of(weight, make=False) as values:
        assert values.shape == (64, 128)
        assert values.untyped_storage().nbytes() == 64 * 128 * 4


def test_a_meta_buffer_is_refused_by_name_unless_it_is_loaded() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    weights = {name for name, _ in build().named_parameters()}
    with pytest.raises(
        UsageError, match=r"buffer 1\.running_mean was built on the meta device: it has no values"
    ):
        leave_meta(build(), torch.device("cpu"), weights)
    module = build()
    leave_meta(module, torch.device("cpu"), module.state_dict().keys())
    assert all(buffer.device.type == "cpu" for buffer in module.buffers())
