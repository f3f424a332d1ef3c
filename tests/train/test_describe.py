import pytest
import torch

from tests.train.contexts import TINY_GPT, make_job
from zerotune.config.errors import UsageError
from zerotune.train import describe as module
from zerotune.train.describe import describe

USERS = """\
import torch

def frozen():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model[0].requires_grad_(False)
    return model

def computes():
    model = torch.nn.Linear(4, 3)
    assert model.weight.abs().max().item() < 1
    return model

def raises():
    raise ValueError("no model today")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)


def test_takes_no_memory():
    facts = describe(make_job({"gpt": {"layers": 2, "d_model": 8192, "heads": 8, "tie_embeddings": True}}))
    assert {p.device.type for p in facts.module.parameters()} == {"meta"}
    assert facts.parameters == facts.trainable_parameters == sum(p.numel() for p in facts.module.parameters())
    assert facts.parameters > 1.6e9


def test_frozen_parameters_are_told_apart():
    facts = describe(make_job({"factory": "mine.py:frozen"}))
    assert (facts.parameters, facts.trainable_parameters) == (4 * 3 + 3 + 3 * 2 + 2, 3 * 2 + 2)


def test_falls_back_to_the_cpu():
    facts = describe(make_job({"factory": "mine.py:computes"}))
    assert (facts.parameters, next(facts.module.parameters()).device.type) == (15, "cpu")


def test_falls_back_only_up_to_a_size(monkeypatch):
    monkeypatch.setattr(module, "CPU_LIMIT", 14)
    with pytest.raises(UsageError, match="cannot be built on the meta device"):
        describe(make_job({"factory": "mine.py:computes"}))
    torch.nn.Linear(100, 100)  # the limit is lifted again


def test_the_users_mistake_is_one_line():
    with pytest.raises(UsageError, match=r"raised ValueError: no model today \(mine.py:14\)"):
        describe(make_job({"factory": "mine.py:raises"}))


def test_small_models():
    assert describe(make_job(TINY_GPT)).parameters > 0
