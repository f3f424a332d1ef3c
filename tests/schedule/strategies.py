"""Random models, traces and knobs for the scheduler's properties."""

from __future__ import annotations

from hypothesis import strategies as st

from zerotune.config.knobs import Knobs
from zerotune.schedule import (
    Event,
    EventKind,
    Layout,
    ParamSize,
    Phase,
    ReleasePlan,
    Trace,
    UnitSize,
    resolve_knobs,
)


@st.composite
def layouts(draw: st.DrawFn, max_units: int = 7) -> Layout:
    """Units of odd sizes, some frozen, some persistent, some whose backward needs no weights."""
    units = []
    for index in range(draw(st.integers(1, max_units))):
        params = tuple(
            ParamSize(
                f"u{index}.p{i}", draw(st.integers(1, 400)), draw(st.booleans()), draw(st.integers(0, 4)) == 0
            )
            for i in range(draw(st.integers(1, 3)))
        )
        units.append(
            UnitSize(f"u{index}", params, backward_needs_weights=draw(st.integers(0, 5)) > 0, is_block=True)
        )
    return Layout(tuple(units), draw(st.integers(1, 5)))


@st.composite
def plain_layouts(draw: st.DrawFn) -> Layout:
    """Every parameter trainable, none persistent."""
    count = draw(st.integers(1, 8))
    units = []
    for index in range(count):
        sizes = draw(st.lists(st.integers(1, 500), min_size=1, max_size=4))
        params = tuple(ParamSize(f"u{index}.p{i}", size) for i, size in enumerate(sizes))
        units.append(UnitSize(f"u{index}", params, backward_needs_weights=index > 0 or draw(st.booleans())))
    return Layout(tuple(units), draw(st.integers(1, 5)))


@st.composite
def nested_traces(draw: st.DrawFn, units: int) -> Trace:
    """A forward pass over a random call tree, in which units recur at several places, then its backward.

    Backward exits may come late, as those of uses whose inputs need no gradient do.
    """

    def calls(depth: int) -> list[tuple[tuple[int, ...], list]]:
        if depth == 0:
            return []
        nodes = []
        for _ in range(draw(st.integers(0, 3 if depth > 1 else 2))):
            used = draw(st.lists(st.integers(0, units - 1), min_size=0, max_size=2, unique=True))
            nodes.append((tuple(used), calls(depth - 1)))
        return nodes

    tree = calls(3)
    events: list[Event] = []
    late: list[Event] = []

    def forward(nodes: list, path: str) -> None:
        for number, (used, children) in enumerate(nodes):
            scope = f"{path}.{number}"
            events.append(Event(EventKind.ENTER, Phase.FORWARD, scope, used))
            forward(children, scope)
            events.append(Event(EventKind.EXIT, Phase.FORWARD, scope, used))

    def backward(nodes: list, path: str) -> None:
        for number, (used, children) in reversed(list(enumerate(nodes))):
            scope = f"{path}.{number}"
            events.append(Event(EventKind.ENTER, Phase.BACKWARD, scope, used))
            backward(children, scope)
            leave = Event(EventKind.EXIT, Phase.BACKWARD, scope, used)
            if draw(st.integers(0, 4)) == 0:
                late.append(leave)
            else:
                events.append(leave)

    forward(tree, "m")
    if draw(st.booleans()):
        backward(tree, "m")
        events.extend(reversed(late))
    return Trace.of(events)


def plain_trace(units: int) -> Trace:
    """Every unit used once in forward and once in backward, one after the other."""
    events = []
    for phase, order in ((Phase.FORWARD, range(units)), (Phase.BACKWARD, reversed(range(units)))):
        for unit in order:
            events += [Event(kind, phase, f"u{unit}", (unit,)) for kind in (EventKind.ENTER, EventKind.EXIT)]
    return Trace.of(events)


@st.composite
def resolved_knobs(draw: st.DrawFn, block: int = 400) -> Knobs:
    size = st.integers(0, 2500)
    release = draw(st.sampled_from(["after_use", "reuse", "keep"]))
    knobs = Knobs(
        allgather_bucket_size=draw(size),
        prefetch_distance=draw(st.one_of(st.just(0), size)),
        backward_prefetch_distance=draw(st.one_of(st.just(0), st.just("auto"), size)),
        param_persistence_threshold=0,
        release=release,
        max_reuse_distance=draw(size) if release == "reuse" else None,
        max_live_parameters=draw(st.one_of(st.none(), st.integers(0, 6000))),
        reduce_bucket_size=draw(size),
    )
    return resolve_knobs(knobs, block)


@st.composite
def plans(draw: st.DrawFn, units: int) -> ReleasePlan:
    """Any choice for every unit."""
    choices = draw(st.lists(st.integers(0, 2), min_size=units, max_size=units))
    return ReleasePlan(
        kept=frozenset(unit for unit, choice in enumerate(choices) if choice == 1),
        persistent=frozenset(unit for unit, choice in enumerate(choices) if choice == 2),
        reuse_distance=draw(st.none() | st.integers(0, 2500)),
    )
