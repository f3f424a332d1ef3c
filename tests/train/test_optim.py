import pytest
import torch
from torch import nn

from zerotune.config.schema import OptimizerConfig
from zerotune.train.optim import can_fuse, optimizer_factory

REFERENCES = {
    "adamw": (
        {"name": "adamw", "lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3},
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, foreach=False),
    ),
    "sgd": (
        {"name": "sgd", "lr": 0.1, "momentum": 0.7, "nesterov": True, "weight_decay": 0.3},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.7, nesterov=True, weight_decay=0.3, foreach=False),
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_same_as_torch(name):
    fields, reference = REFERENCES[name]
    mine, theirs = (nn.Parameter(torch.linspace(-1, 1, 33)) for _ in range(2))
    optimizers = optimizer_factory(OptimizerConfig(**fields))([{"params": [mine]}]), reference([theirs])
    assert optimizers[0].defaults["fused"] is True
    for step in range(3):
        for parameter, optimizer in zip((mine, theirs), optimizers, strict=True):
            parameter.grad = torch.linspace(step, 1, 33)
            optimizer.step()
    torch.testing.assert_close(mine, theirs)


def test_groups_keep_their_own_settings():
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": 0.5}, {"params": [nn.Parameter(torch.ones(1))]}]
    optimizer = optimizer_factory(OptimizerConfig(lr=0.1))(groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]


def test_fused_only_where_torch_has_it():
    assert can_fuse([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)])
    assert not can_fuse([])
    assert not can_fuse([torch.ones(1), torch.ones(1, device="meta")])
