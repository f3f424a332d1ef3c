import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerotune.config.schema import LrScheduleConfig
from zerotune.train.lr import lr_multiplier, set_lr


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1]),
        ({"name": "linear", "decay_steps": 4}, [1, 0.75, 0.5, 0.25, 0, 0, 0]),
        ({"name": "linear"}, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0]),
        ({"name": "linear", "warmup_steps": 2, "decay_steps": 4, "min_ratio": 0.2}, [0.5, 1, 1, 0.6, 0.2, 0.2, 0.2]),
        ({"name": "cosine", "decay_steps": 4}, [1, 0.8535534, 0.5, 0.1464466, 0, 0, 0]),
        ({"name": "cosine", "warmup_steps": 4, "decay_steps": 2, "min_ratio": 0.1}, [0.25, 0.5, 0.75, 1, 0.1, 0.1, 0.1]),
    ],
)  # fmt: skip
def test_values(fields, expected):
    config = LrScheduleConfig(**fields)
    assert [lr_multiplier(config, step, 6) for step in range(7)] == pytest.approx(expected)


@given(
    st.sampled_from(["constant", "cosine", "linear"]),
    st.integers(0, 20),
    st.none() | st.integers(1, 30),
    st.floats(0, 1),
    st.integers(1, 50),
    st.integers(0, 60),
)
def test_stays_between_the_floor_and_one(name, warmup, decay, floor, steps, step):
    config = LrScheduleConfig(name=name, warmup_steps=warmup, decay_steps=decay, min_ratio=floor)
    value = lr_multiplier(config, step, steps)
    assert 0 < value <= 1 + 1e-12 if step < warmup else floor - 1e-12 <= value <= 1 + 1e-12


def test_set_lr_multiplies_the_rate_the_group_was_built_with():
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (1.0, 0.1)]
    optimizer = torch.optim.SGD(groups)
    for multiplier in (0.5, 0.25):
        set_lr(optimizer, multiplier)
        assert [group["lr"] for group in optimizer.param_groups] == [multiplier, 0.1 * multiplier]
