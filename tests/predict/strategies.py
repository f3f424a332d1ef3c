"""Random profiles for the properties of predictions."""

from __future__ import annotations

from hypothesis import strategies as st

from zerotune.config.knobs import Knobs
from zerotune.predict import replay
from zerotune.records import Link, PassProfile, Profile
from zerotune.schedule import Layout, ParamSize, Schedule, Trace, UnitSize, compile_schedule, resolve_knobs

SECONDS = st.floats(0, 10, allow_nan=False)
COSTS = st.floats(0, 1e-2, allow_nan=False)


@st.composite
def links(draw: st.DrawFn) -> Link:
    """Links of any kind, slow ones among them."""
    return Link(
        latency_s=draw(COSTS),
        seconds_per_byte=draw(COSTS),
        handled_s_per_byte=draw(COSTS),
        stolen_s_per_byte=draw(COSTS),
    )


def profile_of(link: Link, overlaps: bool = True) -> Profile:
    """A profile without passes, for a replay alone."""
    return Profile(step_s=0.0, link=link, passes=(), overlaps=overlaps)


def blocks(numels: list[int], ranks: int = 2) -> Layout:
    """Blocks of one parameter each."""
    return Layout(
        tuple(UnitSize(f"b{i}", (ParamSize(f"b{i}.w", n),), is_block=True) for i, n in enumerate(numels)),
        ranks,
    )


def measured(
    trace: Trace,
    layout: Layout,
    compute_s: list[float],
    others: list[int],
    link: Link,
    count: int = 1,
    **knobs: object,
) -> tuple[Schedule, Profile, Knobs]:
    """What a step that releases after each use would show: these seconds, and so many bytes beside full parameters."""
    block = layout.largest_block
    settled = resolve_knobs(
        Knobs(param_persistence_threshold=0, **{"prefetch_distance": block} | knobs),  # type: ignore[arg-type]
        block,
    )
    schedule = compile_schedule(trace, settled, layout)
    rows = layout.ranks - 1  # a rank sends itself nothing
    followed = replay(
        schedule, layout, compute_s, profile_of(link).model_copy(update={"gathered_rows": rows})
    )
    loads = followed.loads[:-1]
    one = PassProfile(
        order=trace.digest,
        count=count,
        compute_s=tuple(compute_s),
        acting_bytes=tuple(b + load.acting_held * 4 for b, load in zip(others, loads, strict=True)),
        computing_bytes=tuple(b + load.held * 4 for b, load in zip(others, loads, strict=True)),
    )
    step_s = followed.seconds * count + 1.0
    return schedule, Profile(step_s=step_s, link=link, passes=(one,), gathered_rows=rows), settled
