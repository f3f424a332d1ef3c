"""The cross-entropy that keeps nothing but the logits: torch's values, and what it takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from zerotune.models.loss import cross_entropy_sum
from zerotune.train.memory import allocation_peak

IGNORED = -100


def both(
    logits: torch.Tensor, targets: torch.Tensor, scale: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Loss and gradient: ours, and torch's in float64."""
    found = []
    for values, loss in (
        (logits.clone(), lambda x: cross_entropy_sum(x, targets, IGNORED)),
        (logits.double(), lambda x: F.cross_entropy(x, targets, ignore_index=IGNORED, reduction="sum")),
    ):
        values.requires_grad_()
        result = loss(values)
        (result * scale).backward()
        assert values.grad is not None
        found.append((result.detach(), values.grad))
    return found


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 70),
    words=st.sampled_from([1, 2, 17, 1000, 30_000]),
    size=st.sampled_from([0.0, 1.0, 40.0]),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_values_are_those_of_torch(
    rows: int, words: int, size: float, ignored: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, words, generator=generator) * size).to(dtype)
    targets = torch.randint(words, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = IGNORED
    (ours, our_grad), (theirs, their_grad) = both(logits, targets, scale=0.25)
    double = dtype is torch.float64
    assert ours.dtype is (torch.float64 if double else torch.float32) and our_grad.dtype is dtype
    rtol, atol = (1e-12, 1e-12) if double else (2e-6, 1e-4)
    torch.testing.assert_close(ours.double(), theirs, rtol=rtol, atol=atol)
    rtol, atol = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-6, 1e-6)}.get(dtype, (5e-3, 1e-6))
    torch.testing.assert_close(our_grad.double(), their_grad, rtol=rtol, atol=atol)
    assert not our_grad[targets == IGNORED].any()


def test_backward_takes_the_gradient_and_a_few_rows() -> None:
    rows, words = 512, 8192
    logits = torch.randn(rows, words, requires_grad=True)
    targets = torch.randint(words, (rows,))
    one = logits.nbytes

    def step() -> None:
        cross_entropy_sum(logits, targets, IGNORED).backward()

    assert one <= allocation_peak(step) <= 1.1 * one


def test_low_precision_logits_get_no_wide_copy() -> None:
    logits = torch.randn(512, 8192).bfloat16().requires_grad_()
    targets = torch.randint(8192, (512,))
    peak = allocation_peak(lambda: cross_entropy_sum(logits, targets, IGNORED).backward())
    assert peak <= 1.3 * logits.nbytes


def test_the_graph_may_be_used_twice() -> None:
    logits = torch.randn(4, 9, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.tensor([1, 2, 3, IGNORED]), IGNORED)
    loss.backward(retain_graph=True)
    once = logits.grad.clone()
    loss.backward()
    assert torch.equal(logits.grad, 2 * once)
