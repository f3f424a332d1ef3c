import torch

from zerotune.config.schema import GptConfig, ModelConfig
from zerotune.models.build import build_model
from zerotune.models.gpt import Gpt

TINY = GptConfig(layers=2, d_model=16, heads=2, vocab_size=11, sequence_length=8)


def tokens(batch: int = 3, length: int = 8) -> torch.Tensor:
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(1))


def test_logits_are_of_every_position_and_causal():
    model = build_model(ModelConfig(gpt=TINY), seed=0)
    x_BT = tokens()
    logits_BTV = model(x_BT)
    assert logits_BTV.shape == (3, 8, 11)
    changed = x_BT.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    differs_T = (model(changed) != logits_BTV).any(dim=2).any(dim=0)
    assert differs_T.tolist() == [False] * 5 + [True] * 3
    torch.testing.assert_close(model(x_BT[:, :4]), logits_BTV[:, :4])


def test_weights_follow_the_seed_and_leave_the_generator_alone():
    before = torch.get_rng_state()
    first, again, other = (build_model(ModelConfig(gpt=TINY), seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_builds_on_the_meta_device():
    with torch.device("meta"):
        model = build_model(ModelConfig(gpt=TINY), seed=0)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert model(torch.empty(2, 8, dtype=torch.long, device="meta")).shape == (2, 8, 11)


def test_number_of_parameters():
    d, v, t = 16, 11, 8
    weights = 2 * (4 * d * d + 8 * d * d) + 2 * v * d + t * d
    norms = (2 * 2 + 1) * d
    biases = norms + 2 * (2 * d + 4 * d + d)
    count = {
        bias: sum(p.numel() for p in Gpt(TINY.model_copy(update={"bias": bias})).parameters())
        for bias in (True, False)
    }
    assert count == {True: weights + norms + biases, False: weights + norms}


def test_tied_embedding_is_one_parameter():
    model = Gpt(TINY.model_copy(update={"tie_embeddings": True}))
    assert model.head.weight is model.tok_emb.weight
    assert len([p for p in model.parameters() if p.shape == (11, 16)]) == 1


def test_no_gradient_is_zero_by_mathematics():
    model = build_model(ModelConfig(gpt=TINY), seed=0).double()
    model(tokens(8)).square().sum().backward()
    smallest = {name: p.grad.abs().mean().item() for name, p in model.named_parameters()}
    assert min(smallest.values()) > 1e-7, smallest


def test_dropout_acts_in_training_only():
    model = Gpt(TINY.model_copy(update={"dropout": 0.5}))
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))
