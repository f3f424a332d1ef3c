import hashlib
import pickle

import pytest
import torch
from torch import nn

from zerotune.config.errors import RunFailed, UsageError
from zerotune.config.schema import FactoryConfig, ModelConfig
from zerotune.models.build import build_model
from zerotune.models.factory import load_function, source_hash, users_forward

SOURCE = """\
import torch

def build(width=3):
    return torch.nn.Linear(width, 1)

def wrong():
    return 5

def raises():
    x = {}
    return x["key"]

not_callable = 7
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model(factory: str, **args) -> nn.Module:
    return build_model(ModelConfig(factory=FactoryConfig(factory=factory, args=args)), seed=0)


@pytest.mark.parametrize("place", ["my_model.py", "./my_model.py", "my_model"])
def test_file_and_module(folder, place, monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "my_model", raising=False)
    assert model(f"{place}:build", width=5).in_features == 5
    assert torch.equal(model(f"{place}:build").weight, model(f"{place}:build").weight)
    assert source_hash(f"{place}:build") == hashlib.sha256(SOURCE.encode()).hexdigest()


def test_an_edit_takes_effect_at_once(folder):
    first = load_function("my_model.py:build")()
    before = source_hash("my_model.py:build")
    (folder / "my_model.py").write_text(SOURCE.replace("width, 1", "width, 2"))
    assert (first.out_features, load_function("my_model.py:build")().out_features) == (1, 2)
    assert source_hash("my_model.py:build") != before


@pytest.mark.parametrize(
    ("factory", "args", "says"),
    [
        ("my_model.py:raises", {}, r"raised KeyError: 'key' \(my_model.py:11\)"),
        ("my_model.py:wrong", {}, "returned int, not a torch.nn.Module"),
        ("my_model.py:absent", {}, "has no function absent"),
        ("my_model.py:not_callable", {}, "not_callable is int"),
        ("absent.py:build", {}, "absent.py does not exist"),
        ("absent_module:build", {}, "absent_module cannot be found"),
        ("my_model.py:build", {"depth": 2}, "unexpected keyword argument 'depth'"),
        ("broken.py:build", {}, r"SyntaxError: .* \(broken.py:1\)"),
        ("needs.py:build", {}, r"ModuleNotFoundError: .*absent_library.*\(needs.py:2\)"),
    ],
)
def test_mistakes_are_one_line(folder, factory, args, says):
    (folder / "broken.py").write_text("def build(:\n")
    (folder / "needs.py").write_text("\nimport absent_library\n")
    with pytest.raises(UsageError, match=says) as caught:
        model(factory, **args)
    assert "\n" not in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_the_whole_traceback_is_logged(folder, caplog):
    with caplog.at_level("INFO"), pytest.raises(UsageError) as caught:
        model("my_model.py:raises")
    assert "Traceback" in caplog.text and 'return x["key"]' in caplog.text
    assert isinstance(caught.value.__cause__, KeyError)


def test_out_of_memory_is_not_the_users_mistake(folder):
    (folder / "big.py").write_text("import torch\ndef build():\n    return torch.empty(10**15)\n")
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        model("big.py:build")


def test_forward_pass_of_the_user():
    class Raises(nn.Module):
        def forward(self, x):
            return x.reshape(7)

    with (
        pytest.raises(RunFailed, match=r"my model raised RuntimeError: .*test_factory.py:\d+"),
        users_forward("my model"),
    ):
        Raises()(torch.zeros(3))
