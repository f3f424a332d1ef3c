"""Random modules and random settings of all knobs, small first, so that failures shrink to something short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.jobs import STEPS, Case
from tests.fuzz.modules import Model, Node
from zerotune.config.knobs import REGISTRY

WIDTHS = (1, 2, 3, 4, 5, 7, 8, 11, 13)
SIZES = (1, 2, 3, 5, 7, 16, 17)

LEAVES = (
    "linear", "mlp", "norm", "scale", "vector", "table", "conv", "attention", "encoder", "params", "buffers",
    "hollow", "strided", "alias", "provider", "normed", "inplace", "function", "cast", "hooked", "identity", "ref", "tied", "borrow",
)  # fmt: skip
ONE_CHILD = (
    "residual", "twice", "checkpoint", "freeze", "silent", "stop", "keyword", "delegate", "unused",
)  # fmt: skip
SOME_CHILDREN = ("sequential", "list", "dict", "branch", "fork")

rarely = st.integers(0, 3).map(lambda n: n == 3)
leaves = st.builds(Node, st.sampled_from(LEAVES), st.sampled_from(SIZES), st.booleans())


def _above(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    one = st.builds(Node, st.sampled_from(ONE_CHILD), st.just(1), st.booleans(), st.tuples(children))
    some = st.builds(
        Node,
        st.sampled_from(SOME_CHILDREN),
        st.integers(0, 3),
        st.booleans(),
        st.lists(children, min_size=1, max_size=4).map(tuple),
    )
    return st.one_of(some, one)


nodes = st.recursive(leaves, _above, max_leaves=9)

chains = st.builds(
    Node,
    st.sampled_from(("sequential", "list")),
    st.just(1),
    st.just(False),
    st.lists(
        st.builds(
            Node, st.sampled_from(("linear", "mlp", "conv", "norm")), st.sampled_from(SIZES), st.booleans()
        ),
        min_size=2,
        max_size=5,
    ).map(tuple),
)

_tied = st.builds(Node, st.sampled_from(("tied", "ref", "mlp")), st.sampled_from(SIZES), st.just(True))

shared_and_recomputed = st.builds(
    lambda first, second, others, kind, reentrant: Node(
        "checkpoint", flag=reentrant, children=(Node(kind, children=(first, second, *others)),)
    ),
    st.builds(Node, st.just("ref"), st.just(0), st.just(True)),
    st.builds(Node, st.just("tied"), st.sampled_from((0, 2)), st.just(True)),
    st.lists(_tied, max_size=2),
    st.sampled_from(("sequential", "list")),
    st.booleans(),
)
"""Layers of one weight under one checkpoint: the weight is in use around all of it, each bias only within its layer."""

bodies = st.one_of(
    nodes,
    st.builds(
        Node,
        st.sampled_from(("sequential", "list", "fork")),
        st.integers(0, 3),
        st.booleans(),
        st.lists(nodes, min_size=2, max_size=3).map(tuple),
    ),
    chains,
    shared_and_recomputed,
)

models = st.builds(
    Model,
    body=bodies,
    width=st.sampled_from(WIDTHS),
    vocabulary=st.sampled_from((2, 7, 16, 31)),
    pool=st.lists(st.booleans(), min_size=1, max_size=2).map(tuple),
    pool_at_root=st.booleans(),
    tied_head=st.booleans(),
    frozen=rarely,
    outputs=st.sampled_from(("tensor", "tuple", "dict", "nested")),
)

elements = st.one_of(st.sampled_from((0, 10**6)), st.integers(0, 800))


@st.composite
def knob_settings(draw: st.DrawFn) -> tuple[tuple[str, Any], ...]:
    """A value for every knob of the registry that stands under ``zero:``."""
    or_auto = st.one_of(st.just("auto"), elements)
    release = draw(st.sampled_from(("after_use", "reuse", "keep", "planned")))
    knobs = {
        "stage": draw(st.sampled_from((3, 3, 3, 0, 1, 2))),
        "unit_size": draw(st.one_of(st.just("block"), st.integers(1, 600))),
        "allgather_bucket_size": draw(or_auto),
        "prefetch_distance": draw(st.one_of(st.just(0), or_auto)),
        "backward_prefetch_distance": draw(st.one_of(st.just(0), or_auto)),
        "param_persistence_threshold": draw(st.one_of(st.just(0), or_auto)),
        "release": release,
        "max_reuse_distance": draw(elements) if release == "reuse" else None,
        "memory_budget": draw(st.integers(0, 2**40)) if release == "planned" else None,
        "max_live_parameters": draw(st.one_of(st.none(), elements)),
        "reduce_bucket_size": draw(or_auto),
        "overlap_comm": draw(st.booleans()),
    }
    return tuple(knobs.items())


def undrawn_knobs() -> set[str]:
    """Knobs of the engine that :func:`knob_settings` does not draw yet."""
    drawn = {
        "stage", "unit_size", "allgather_bucket_size", "prefetch_distance", "backward_prefetch_distance",
        "param_persistence_threshold", "release", "max_reuse_distance", "memory_budget", "max_live_parameters", "reduce_bucket_size", "overlap_comm",
    }  # fmt: skip
    return {name for name, info in REGISTRY.items() if info.section == "zero"} - drawn


on_demand = {
    "stage": 3,
    "unit_size": "block",
    "prefetch_distance": 0,
    "backward_prefetch_distance": 0,
    "param_persistence_threshold": 0,
    "release": "after_use",
    "max_reuse_distance": None,
}


def on_demand_cases(body: st.SearchStrategy[Node]) -> st.SearchStrategy[Case]:
    """Cases on two ranks in which everything is partitioned and dropped as soon as it may be."""
    return st.builds(
        lambda case, body: replace(
            case,
            model=replace(
                case.model, body=body, frozen=False, tied_head=False, width=max(2, case.model.width)
            ),
            ranks=2,
            two_losses=False,
            teacher=False,
            siamese=False,
            abandons=False,
            thaws=0,
            knobs=tuple((dict(case.knobs) | on_demand).items()),
        ),
        cases,
        body,
    )


cases = st.builds(
    Case,
    model=models,
    ranks=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    accumulate=st.sampled_from(("reduce", "local")),
    clip=st.sampled_from((None, 0.05, 1.0)),
    weight_decay=st.sampled_from((0.0, 0.1)),
    two_losses=st.booleans(),
    evaluate_before=st.sets(st.integers(0, STEPS - 1), max_size=2).map(lambda steps: tuple(sorted(steps))),
    teacher=rarely,
    siamese=rarely,
    abandons=rarely,
    reloads=rarely,
    groups=st.booleans(),
    thaws=st.one_of(st.just(0), st.integers(0, 3)),
    knobs=knob_settings(),
)

on_several_ranks = st.builds(lambda case, ranks: replace(case, ranks=ranks), cases, st.integers(2, 3))
