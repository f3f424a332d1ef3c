import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zerotune.config.errors import UsageError
from zerotune.config.schema import FactoryConfig, GptConfig, HfConfig, ModelConfig
from zerotune.models.build import build_model
from zerotune.models.task import IGNORE, Batch, Task, language_batch

GPT = ModelConfig(gpt=GptConfig(layers=1, d_model=8, heads=2, vocab_size=7, sequence_length=6))
USERS = Task(ModelConfig(factory=FactoryConfig(factory="m:f")))


def batch(real: int = 12) -> Batch:
    tokens = torch.arange(12).view(2, 6) % 7
    targets = (tokens + 1) % 7
    targets.view(-1)[real:] = IGNORE
    return language_batch(tokens, targets)


@pytest.mark.parametrize("real", [12, 7, 1])
def test_language_model(real):
    model = build_model(GPT, seed=0)
    loss, weight = Task(GPT).loss(model, batch(real))
    expected = F.cross_entropy(model(batch().inputs).view(12, 7)[:real], batch().targets_BT.view(12)[:real])
    assert weight == real
    torch.testing.assert_close(loss, expected)


def test_only_padding_is_zero_and_connected():
    model = build_model(GPT, seed=0)
    loss, weight = Task(GPT).loss(model, batch(0))
    loss.backward()
    assert (loss.item(), weight) == (0.0, 0)
    assert all(not p.grad.any() for p in model.parameters())


def test_splits_add_up_to_the_mean_over_all_tokens():
    model = build_model(GPT, seed=0)
    whole, parts = (
        batch(8),
        [language_batch(batch(8).inputs[i : i + 1], batch(8).targets_BT[i : i + 1]) for i in (0, 1)],
    )
    losses = [Task(GPT).loss(model, part) for part in parts]
    assert [loss.weight for loss in losses] == [6, 2]
    mean = sum(loss * weight for loss, weight in losses) / sum(weight for _, weight in losses)
    torch.testing.assert_close(mean, Task(GPT).loss(model, whole).loss)


def test_bf16_logits_are_summed_in_fp32():
    model = build_model(GPT, seed=0).bfloat16()
    assert Task(GPT).loss(model, batch()).loss.dtype == torch.float32


def test_hf_takes_input_ids_alone():
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 7, "n_positions": 6}
    hf = ModelConfig(hf=HfConfig(config=config, sequence_length=6))
    model = build_model(hf, seed=0).eval()
    loss, weight = Task(hf).loss(model, batch(7))
    logits = model(input_ids=batch().inputs).logits
    torch.testing.assert_close(loss, F.cross_entropy(logits.view(12, 7)[:7], batch().targets_BT.view(12)[:7]))
    assert weight == 7


class Users(nn.Module):
    """A module whose forward is the given function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class TakesTargets(nn.Module):
    def forward(self, tokens, targets=None):
        assert targets is not None
        return targets.float().mean()


SCALAR = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("returned", "weight"),
    [
        (SCALAR, 3),
        (SCALAR.view(1), 3),
        ((SCALAR, 5), 5),
        ((SCALAR, torch.tensor(5)), 5),
        ({"loss": SCALAR, "logits": 1}, 3),
        (type("Output", (), {"loss": SCALAR})(), 3),
    ],
    ids=["scalar", "one element", "pair", "tensor weight", "dict", "object"],
)
def test_what_a_users_module_may_return(returned, weight):
    loss = USERS.loss(Users(lambda x: returned), Batch(torch.zeros(3, 2), None, 3, None))
    assert (loss.loss.item(), loss.weight, loss.loss.ndim) == (2.0, weight, 0)


@pytest.mark.parametrize(
    ("inputs", "function"),
    [
        ({"a": 1, "b": 2}, lambda *, a, b: torch.tensor(float(10 * a + b))),
        ((1, 2), lambda a, b: torch.tensor(float(10 * a + b))),
        ([1, 2], lambda a, b: torch.tensor(float(10 * a + b))),
        (12, lambda a: torch.tensor(float(a))),
    ],
    ids=["dict", "tuple", "list", "alone"],
)
def test_how_a_users_module_is_called(inputs, function):
    assert USERS.loss(Users(function), Batch(inputs, None, 1, None)).loss.item() == 12


def test_users_module_on_built_in_data():
    logits = torch.randn(2, 6, 7, generator=torch.Generator().manual_seed(0))
    expected = F.cross_entropy(logits.view(12, 7)[:7], batch().targets_BT.view(12)[:7])
    for returned in (logits, (logits, None)):
        loss, weight = USERS.loss(Users(lambda tokens, returned=returned: returned), batch(7))
        torch.testing.assert_close(loss, expected)
        assert weight == 7
    assert USERS.loss(TakesTargets(), batch(7)).weight == 7


@pytest.mark.parametrize("returned", [torch.zeros(3, 4), None, "loss", (1, 2), {"logits": 1}, {}])
def test_what_is_no_loss_is_refused(returned):
    with pytest.raises(UsageError, match="which is not a loss"):
        USERS.loss(Users(lambda x: returned), Batch(torch.zeros(3, 2), None, 3, None))


def test_batch_moves_whole():
    moved = Batch({"a": (torch.zeros(1), [torch.zeros(2)]), "b": 3}, None, 1, None).to(torch.device("meta"))
    assert (moved.inputs["a"][0].device.type, moved.inputs["a"][1][0].device.type, moved.inputs["b"]) == (
        "meta",
        "meta",
        3,
    )
