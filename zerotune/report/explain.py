"""Why a step takes the time and the memory that it does: questions and answers, from its ledgers alone.

Findings name what stands out, worst first, and the knob that would change it; a healthy
step has none.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from zerotune.records import ByteClass, CollectiveEntry, Ledger, OperationBytes
from zerotune.records.base import Record
from zerotune.records.flow import Flow, exposed_s, flows_of

EXPOSED_SHARE = 0.15
"""Share of a step that may stand still for one purpose before it is a finding."""

UNHIDDEN = 0.3
"""Hidden over exposed time below which gathers count as not hidden at all: even without prefetch some time passes
between issue and wait, while a prefetched gather is hidden for as long as a unit computes."""

UNEVEN = 0.15
"""By how much of the step a rank may be waited for before it is called slow."""

HUGE_SHARE = 0.5
"""Share of all gathered elements in one unit that makes it a finding."""

IDLE_SHARE = 0.15
"""Share of the time that units are full that may lie between last use and release: released after use it is hardly any,
released with the step's end a quarter or more."""


class Held(Record):
    """How long a unit's full parameters were there, and for how long of that nobody used them any more.

    Attributes:
        unit: Its name.
        live_s: From landing to release, over the step.
        idle_s: From last use to release.
        idle_byte_s: The same, times its bytes.
    """

    unit: str
    live_s: float
    idle_s: float
    idle_byte_s: float


class Peak(Record):
    """What memory consists of where it is most, on the rank where that is most.

    Attributes:
        rank: That rank.
        bytes: The allocator's peak of a profiled step; without one, the largest sum over the engine's own classes.
        is_allocators: Which of the two.
        classes: Bytes by class, which add up to it.
        prefetched_bytes: Of the full parameters, the buffers of gathers that were under way.
        complete: Units that were complete then.
        prefetched: Units whose gathers were under way.
        operations: What had allocated activations, gradients and temporaries, the largest first.
    """

    rank: int
    bytes: int
    is_allocators: bool
    classes: dict[ByteClass, int]
    prefetched_bytes: int
    complete: list[str]
    prefetched: list[str]
    operations: list[OperationBytes]

    @property
    def other_share(self) -> float:
        """Share of the peak that nothing accounts for."""
        return abs(self.classes.get(ByteClass.OTHER, 0)) / self.bytes if self.bytes else 0.0


class Finding(Record):
    """Something that stands out.

    Attributes:
        cost_s: Seconds of the step that it is about, to order findings by.
        text: What, with figures.
        remedy: The knob that would change it.
    """

    cost_s: float
    text: str
    remedy: str


class Explanation(Record):
    """The answers.

    Attributes:
        ranks: Number of ledgers.
        step_s: From the ledger's beginning to the last thing in it, on the slowest rank.
        at_rest: Bytes by class at rest, of every rank.
        peak: Where memory is most.
        flows: By purpose.
        held: By unit, those with most idle byte-seconds first.
        gradient_peak: Largest bytes of gradients and their buckets.
        bucket_bytes: Of the largest bucket of gradients that was reduced.
        findings: Worst first.
    """

    ranks: int
    step_s: float
    at_rest: list[dict[ByteClass, int]]
    peak: Peak
    flows: list[Flow]
    held: list[Held]
    gradient_peak: int
    bucket_bytes: int
    findings: list[Finding]

    @property
    def idle_byte_s(self) -> float:
        """Bytes of full parameters times seconds that they lay idle, between last uses and releases."""
        return sum(each.idle_byte_s for each in self.held)


def explain(ledgers: Sequence[Ledger]) -> Explanation | None:
    """Explain the step that these ledgers, one per rank, recorded; ``None`` if there are none."""
    if not ledgers:
        return None
    steps = [_end(ledger) for ledger in ledgers]
    peak = max((_peak(ledger, len(ledgers)) for ledger in ledgers), key=lambda peak: peak.bytes)
    flows = flows_of(ledgers)
    held = _held(next(ledger for ledger in ledgers if ledger.rank == peak.rank), len(ledgers))
    step_s = max(steps)
    reductions = [e for ledger in ledgers for e in ledger.collectives if e.purpose == "gradient"]
    return Explanation(
        ranks=len(ledgers),
        step_s=step_s,
        at_rest=[ledger.at_rest for ledger in ledgers],
        peak=peak,
        flows=flows,
        held=held,
        gradient_peak=max(ledger.peak.get(ByteClass.GRADIENT, 0) for ledger in ledgers),
        bucket_bytes=max((_full_bytes(e, len(ledgers)) for e in reductions), default=0),
        findings=sorted(
            _findings(ledgers, step_s, flows, held), key=lambda finding: finding.cost_s, reverse=True
        ),
    )


# ------------------------------------------------------------------------------------------------ time and memory


def _end(ledger: Ledger) -> float:
    times = [entry.done_s for entry in ledger.collectives] + [use.end_s for use in ledger.uses]
    return max([*times, *(sample.time_s for sample in ledger.samples[-1:])], default=0.0)


def _peak(ledger: Ledger, ranks: int) -> Peak:
    """The allocator's, or what the engine's own classes come to at most."""
    found = ledger.memory
    if found is not None:
        return Peak(
            rank=ledger.rank,
            bytes=found.peak_bytes,
            is_allocators=True,
            classes=found.at_peak,
            prefetched_bytes=found.prefetched_bytes,
            complete=found.complete,
            prefetched=found.prefetched,
            operations=found.operations,
        )
    now = dict(ledger.at_rest)
    best, classes, when = sum(now.values()), dict(now), 0.0
    for sample in ledger.samples:
        now[sample.byte_class] = sample.bytes
        total = sum(now.values())
        if total > best:
            best, classes, when = total, dict(now), sample.time_s
    flying = [entry for entry in _gathers(ledger) if entry.issued_s <= when < entry.done_s]
    lives = _lives(ledger).items()
    return Peak(
        rank=ledger.rank,
        bytes=best,
        is_allocators=False,
        classes=classes,
        prefetched_bytes=sum(_full_bytes(entry, ranks) for entry in flying),
        complete=[unit for unit, each in lives if any(done <= when < end for _, done, end in each)],
        prefetched=[unit for entry in flying for unit in entry.units],
        operations=[],
    )


def _full_bytes(entry: CollectiveEntry, ranks: int) -> int:
    """Bytes of the full tensor that a collective assembles or reduces."""
    return (
        (entry.sent_bytes + entry.left_out_bytes) * ranks // (ranks - 1) if ranks > 1 else 4 * entry.elements
    )


def _gathers(ledger: Ledger) -> list[CollectiveEntry]:
    return [e for e in ledger.collectives if e.purpose in ("forward", "backward", "access")]


def _lives(ledger: Ledger) -> dict[str, list[tuple[float, float, float]]]:
    """For each unit its lives: when its gather was issued, when it had landed, when it was released."""
    releases: dict[str, list[float]] = defaultdict(list)
    for release in ledger.releases:
        releases[release.unit].append(release.time_s)
    lives: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    end = _end(ledger)
    for entry in _gathers(ledger):
        for unit in entry.units:
            released = next((t for t in releases[unit] if t >= entry.done_s), end)
            lives[unit].append((entry.issued_s, entry.done_s, released))
    return lives


def _held(ledger: Ledger, ranks: int) -> list[Held]:
    """Per unit, with the uses of its own scope; a unit whose scope has none was used by another's."""
    sizes: dict[str, float] = {}
    for entry in sorted(
        _gathers(ledger), key=lambda entry: -len(entry.units)
    ):  # a gather of its own knows best
        sizes.update(dict.fromkeys(entry.units, _full_bytes(entry, ranks) / len(entry.units)))
    ends: dict[str, list[float]] = defaultdict(list)
    for use in ledger.uses:
        ends[use.scope].append(use.end_s)
    held = []
    for unit, lives in _lives(ledger).items():
        idle = 0.0
        for _, landed, released in lives:
            last = max((t for t in ends[unit] if landed <= t <= released), default=None)
            idle += 0.0 if last is None else released - last
        held.append(
            Held(
                unit=unit,
                live_s=sum(released - landed for _, landed, released in lives),
                idle_s=idle,
                idle_byte_s=idle * sizes[unit],
            )
        )
    return sorted(held, key=lambda each: each.idle_byte_s, reverse=True)


# ------------------------------------------------------------------------------------------------------- findings


def _findings(ledgers: Sequence[Ledger], step_s: float, flows: list[Flow], held: list[Held]) -> list[Finding]:
    slow, huge = _slow_rank(ledgers, step_s), _huge_unit(ledgers)
    found = [slow, huge, _kept_too_long(held)]
    if slow is None:  # otherwise what is waited for is that rank, whatever the collective
        gathers = _exposed_gathers(flows, step_s)
        if gathers is not None and (huge is None or huge.cost_s < 0.5 * gathers.cost_s):
            found.append(gathers)  # otherwise what is waited for is that unit
        found.append(_exposed_reductions(ledgers, flows, step_s))
    return [finding for finding in found if finding is not None]


def _slow_rank(ledgers: Sequence[Ledger], step_s: float) -> Finding | None:
    """Everybody waits for the slow rank, which itself hardly waits."""
    if len(ledgers) < 2:
        return None
    waits = [sum(map(exposed_s, ledger.collectives)) for ledger in ledgers]
    slow = min(range(len(ledgers)), key=waits.__getitem__)
    others = statistics.median(wait for rank, wait in enumerate(waits) if rank != slow)
    gap = others - waits[slow]
    if gap < UNEVEN * step_s or others < 2 * waits[slow]:
        return None
    return Finding(
        cost_s=gap,
        text=(
            f"rank {ledgers[slow].rank} is slow: the others wait {others * 1e3:.0f} ms a step in collectives, "
            f"it waits {waits[slow] * 1e3:.0f} ms"
        ),
        remedy="look at that rank's node: other work on it, a slower device, throttling, or more data than the others",
    )


def _exposed_gathers(flows: list[Flow], step_s: float) -> Finding | None:
    gathers = [flow for flow in flows if flow.purpose in ("forward", "backward")]
    exposed, hidden = sum(f.exposed_s for f in gathers), sum(f.hidden_s for f in gathers)
    if exposed < EXPOSED_SHARE * step_s:
        return None
    unit, seconds = max((u for f in gathers for u in f.longest), key=lambda pair: pair[1])
    if hidden < UNHIDDEN * exposed:
        return Finding(
            cost_s=exposed,
            text=f"gathers are not hidden at all: {exposed * 1e3:.0f} ms of {step_s * 1e3:.0f} ms are waited for, longest "
            f"for {unit} ({seconds * 1e3:.0f} ms)",
            remedy="raise prefetch_distance, and leave overlap_comm on",
        )
    return Finding(
        cost_s=exposed,
        text=f"gathers are exposed for {exposed * 1e3:.0f} ms of {step_s * 1e3:.0f} ms, longest for {unit} "
        f"({seconds * 1e3:.0f} ms)",
        remedy="raise prefetch_distance, or release: keep if memory allows; if the link is full, gather less",
    )


def _exposed_reductions(ledgers: Sequence[Ledger], flows: list[Flow], step_s: float) -> Finding | None:
    flow = next((flow for flow in flows if flow.purpose == "gradient"), None)
    if flow is None or flow.exposed_s < EXPOSED_SHARE * step_s:
        return None
    backward = [use for use in ledgers[0].uses if use.phase == "backward"]
    first = min((e.issued_s for e in ledgers[0].collectives if e.purpose == "gradient"), default=0.0)
    end = max((use.end_s for use in backward), default=0.0)
    begin = min((use.begin_s for use in backward), default=0.0)
    if first > begin + 0.8 * (end - begin):
        return Finding(
            cost_s=flow.exposed_s,
            text=f"gradients are reduced at the very end: the first reduction is issued {(first - begin) * 1e3:.0f} ms into "
            f"a backward of {(end - begin) * 1e3:.0f} ms, {flow.exposed_s * 1e3:.0f} ms are waited for",
            remedy="lower reduce_bucket_size, or accumulate: reduce",
        )
    return Finding(
        cost_s=flow.exposed_s,
        text=f"reductions are exposed for {flow.exposed_s * 1e3:.0f} ms of {step_s * 1e3:.0f} ms",
        remedy="lower reduce_bucket_size, and leave overlap_comm on; with accumulation, accumulate: local reduces once",
    )


def _kept_too_long(held: list[Held]) -> Finding | None:
    idle, live = sum(h.idle_s for h in held), sum(h.live_s for h in held)
    if not held or live == 0 or idle < IDLE_SHARE * live:
        return None
    worst = held[0]
    return Finding(
        cost_s=idle / len(held),
        text=f"full parameters lie idle: of the time that units are full, {idle / live:.0%} come after their last use, most "
        f"with {worst.unit} ({worst.idle_s * 1e3:.0f} ms)",
        remedy="release: after_use, or a smaller max_reuse_distance",
    )


def _huge_unit(ledgers: Sequence[Ledger]) -> Finding | None:
    sizes: dict[str, int] = {}
    for entry in _gathers(ledgers[0]):
        if len(entry.units) == 1:
            sizes[entry.units[0]] = max(sizes.get(entry.units[0], 0), entry.elements)
    total = sum(sizes.values())
    if len(sizes) < 3 or total == 0:
        return None
    unit, size = max(sizes.items(), key=lambda pair: pair[1])
    if size < HUGE_SHARE * total:
        return None
    waited = max(
        sum(exposed_s(entry) for entry in _gathers(ledger) if unit in entry.units) for ledger in ledgers
    )
    return Finding(
        cost_s=waited,
        text=f"one unit is huge: {unit} has {size:,} of {total:,} gathered elements",
        remedy="set unit_size to cut it, or split the module",
    )
