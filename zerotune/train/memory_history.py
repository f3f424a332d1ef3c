"""The allocator's history of one step, every byte of it explained.

torch's profiler with memory on sees every allocation and free with its address, and what ran around it. Marks in the
same profile say the rest, in the exact order of things: what the ledger counts, what autograd saves for backward (a hook
on saved tensors), and full gradients that nobody has collected yet (a hook on parameters). So each allocation has one
class for as long as it lives:

- made by the model's operations and saved for backward: an activation;
- made by them and become a parameter's gradient: a gradient, which from the moment that the engine takes it is the ledger's;
- made by them and neither: temporary. In backward these are gradients on their way, and what is recomputed;
- anything else is the engine's or the optimizer's, and its ledger accounts for it, but for what an operation needs only
  while it runs: that is temporary, too.

A buffer that the engine has done with may be held for a while by the thread that communicates. Where the profiler sees
that thread free it, it counts as pooled until then; where it sees no free, it is gone when the ledger says so.

What no account explains is ``other``.

A storage that is saved is an activation until it is freed, whoever holds it last. It sees the CPU's allocations or the
device's, not both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from zerotune.engine.allocations import walk
from zerotune.engine.ledger import BEGIN_MARK, BYTES_MARK, TAKEN_MARK
from zerotune.engine.protocol import Engine
from zerotune.models.access import is_wrapper, not_reading
from zerotune.models.marks import ENGINE, FORWARD, mark
from zerotune.records import (
    ByteClass,
    CollectiveEntry,
    CollectiveKind,
    Ledger,
    MemoryHistory,
    MemoryPoint,
    OperationBytes,
)

POINTS = 300
"""Stretches of time of which the curve keeps the highest moment."""

OPERATIONS = 8
"""Operations named at the peak."""

GATHERS = ("forward", "backward", "access")
"""What full parameters are gathered for, to be used and released."""

_SAVED_MARK = "zerotune::saved "
_GRADIENT_MARK = "zerotune::gradient "
_BACKWARD = "autograd::engine::evaluate_function: "


def profiled_step(engine: Engine, device: torch.device, step: Callable[[], object]) -> MemoryHistory:
    """Take one untimed step and return where its memory went.

    Args:
        engine: Between two steps, its pools empty: frees of what was allocated before are not seen.
        device: Whose allocations count.
        step: Takes one optimizer step.
    """
    at_rest = engine.at_rest()
    # The device's allocator holds more than an engine knows of: the workspaces of its libraries.
    rest = torch.cuda.memory_allocated(device) if device.type == "cuda" else sum(at_rest.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.begin_ledger()
        with _marks(engine.module) as hooks:
            try:
                step()
            except Exception as error:
                # torch.func's transforms refuse to run under such hooks, before anything has changed.
                if "saved tensor hooks" not in str(error):
                    raise
                hooks.close()
                step()
        ledger = engine.end_ledger()
    itemsize = next((param.element_size() for param in engine.module.parameters()), 4)
    return history(_events(profiler, device), rest, at_rest, ledger, itemsize)


@contextmanager
def _marks(module: nn.Module) -> Iterator[ExitStack]:
    """While it lasts, what autograd saves and gradients as they become full are marked in the profile."""
    with ExitStack() as hooks:
        # Keeping the tensor itself changes nothing about how long it lives.
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(_mark_saved, lambda tensor: tensor))
        with not_reading():
            for param in module.parameters():
                if param.requires_grad:
                    hooks.callback(param.register_post_accumulate_grad_hook(_mark_gradient).remove)
        yield hooks


def _mark_saved(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is torch.strided and not is_wrapper(type(tensor)):
        with mark(f"{_SAVED_MARK}{tensor.untyped_storage().data_ptr()}"):
            pass
    return tensor


def _mark_gradient(param: torch.Tensor) -> None:
    gradient = param.grad
    if gradient is not None and gradient.layout is torch.strided and not is_wrapper(type(gradient)):
        with mark(f"{_GRADIENT_MARK}{gradient.untyped_storage().data_ptr()}"):
            pass


# ------------------------------------------------------------------------------------------------ reading a profile


@dataclass
class Allocation:
    """A piece of memory from its allocation to its free.

    Attributes:
        bytes: Its size.
        byte_class: What it is for; ``None`` if it is not the model's, so that the ledger must account for it.
        operation: What allocated it.
        thread: Number of the thread that did.
        within: Number of the innermost operation that ran then.
        is_freed_elsewhere: Whether another thread frees it.
        is_free_unseen: Whether the profiler does not see it freed, though it may have been.
        is_taken: Whether the ledger accounts for it in the end, though it is the model's.
    """

    bytes: int
    byte_class: ByteClass | None = None
    operation: str = ""
    thread: int = 0
    within: int = -1
    is_freed_elsewhere: bool = False
    is_free_unseen: bool = False
    is_taken: bool = False


@dataclass
class Event:
    """Something in a profile; one field says what.

    Attributes:
        time_s: When.
        allocated: This was allocated.
        freed: This was freed.
        taken: The ledger accounts for this from here on.
        counted: The ledger counts so many bytes of a class from here on.
        begins_backward: A node of the graph ran.
        is_ledgers: The ledger began.
    """

    time_s: float
    allocated: Allocation | None = None
    freed: Allocation | None = None
    taken: Allocation | None = None
    counted: tuple[ByteClass, int] | None = None
    begins_backward: bool = False
    is_ledgers: bool = False

    @property
    def is_engines(self) -> bool:
        """Whether the engine was at work: it allocates, frees and counts, in this or another order."""
        touched = self.allocated or self.freed
        if touched is None:
            return self.counted is not None or self.taken is not None
        return touched.byte_class in (None, ByteClass.GRADIENT)


def _events(profiler: Any, device: torch.device) -> list[Event]:
    """What matters of a profile, in the order of time."""
    found = list(walk(profiler.profiler.kineto_results.experimental_event_tree()))
    found.sort(key=lambda each: each[0].start_time_ns)
    begun_ns = found[0][0].start_time_ns if found else 0
    alive: dict[int, Allocation] = {}
    events = []
    for event, parents in found:
        time_s = (event.start_time_ns - begun_ns) * 1e-9
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type != device.type:
                continue
            if fields.alloc_size > 0:
                gone = alive.get(fields.ptr)
                if gone is not None:
                    gone.is_free_unseen = True
                    events.append(Event(time_s, freed=gone))
                allocated = alive[fields.ptr] = _allocation(fields.alloc_size, [name for _, name in parents])
                allocated.thread = event.start_tid
                if parents and not parents[-1][1].startswith("zerotune::"):
                    allocated.within = parents[-1][0]
                events.append(Event(time_s, allocated=allocated))
            elif (freed := alive.pop(fields.ptr, None)) is not None:
                freed.is_freed_elsewhere = event.start_tid != freed.thread
                if freed.byte_class is None and freed.within in [number for number, _ in parents]:
                    freed.byte_class, freed.operation = ByteClass.TEMPORARY, parents[-1][1]
                events.append(Event(time_s, freed=freed))
            continue
        name = event.name
        if name.startswith(BYTES_MARK):
            byte_class, amount = name.removeprefix(BYTES_MARK).split()
            events.append(Event(time_s, counted=(ByteClass(byte_class), int(amount))))
        elif name.startswith(_SAVED_MARK):
            saved = alive.get(int(name.removeprefix(_SAVED_MARK)))
            if saved is not None and saved.byte_class is ByteClass.TEMPORARY:
                saved.byte_class = ByteClass.ACTIVATION
        elif name.startswith(_GRADIENT_MARK):
            gradient = alive.get(int(name.removeprefix(_GRADIENT_MARK)))
            if gradient is not None and gradient.byte_class is not None:
                gradient.byte_class = ByteClass.GRADIENT
        elif name.startswith(TAKEN_MARK):
            taken = alive.get(int(name.removeprefix(TAKEN_MARK)))
            if taken is not None and taken.byte_class is not None and not taken.is_taken:
                taken.is_taken = True
                events.append(Event(time_s, taken=taken))
        elif name.startswith(_BACKWARD):
            events.append(Event(time_s, begins_backward=True))
        elif name == BEGIN_MARK:
            events.append(Event(time_s, is_ledgers=True))
    for left in alive.values():
        left.is_free_unseen = True
    return events


def _allocation(size: int, above: list[str]) -> Allocation:
    """Whose is it? What the engine does for a use may happen inside the model's operations, not the other way round."""
    if ENGINE in above:
        return Allocation(size)
    node = next((name for name in above if name.startswith(_BACKWARD)), None)
    if node is not None:
        return Allocation(size, ByteClass.TEMPORARY, node.removeprefix(_BACKWARD))
    if FORWARD in above:
        below = above[above.index(FORWARD) + 1 :]
        return Allocation(size, ByteClass.TEMPORARY, below[0] if below else "")
    return Allocation(size)


# -------------------------------------------------------------------------------------------------- making a history


@dataclass
class _Balance:
    """What is alive, by whose account.

    Attributes:
        at_rest: Bytes before the step.
        ledger: Bytes by class as the ledger has them.
        model: Allocations of the model's operations by class.
        freed_elsewhere: The engine's that another thread will free.
        free_unseen: The engine's whose free nobody will see, once the ledger has caught up with their allocation.
        uncounted_yet: The same until then.
        total: What the allocator has handed out since.
    """

    at_rest: int
    ledger: dict[ByteClass, int]
    model: dict[ByteClass, int] = field(default_factory=lambda: defaultdict(int))
    freed_elsewhere: int = 0
    free_unseen: int = 0
    uncounted_yet: int = 0
    total: int = 0

    def apply(self, event: Event) -> None:
        if not event.is_engines:
            self.free_unseen += self.uncounted_yet
            self.uncounted_yet = 0
        if event.taken is not None:
            assert event.taken.byte_class is not None
            self.model[event.taken.byte_class] -= event.taken.bytes
        for allocation, sign in ((event.allocated, 1), (event.freed, -1)):
            if allocation is not None:
                self.total += sign * allocation.bytes
                if allocation.byte_class is not None:
                    if allocation.is_taken and sign < 0:
                        continue  # it is no longer the model's
                    self.model[allocation.byte_class] += sign * allocation.bytes
                else:
                    self.freed_elsewhere += sign * allocation.bytes * allocation.is_freed_elsewhere
                    self.uncounted_yet += sign * allocation.bytes * allocation.is_free_unseen
        if event.counted is not None:
            self.ledger[event.counted[0]] = event.counted[1]

    @property
    def bytes(self) -> int:
        """What is alive: at rest and since, without what was freed unseen."""
        uncounted = self.at_rest + self.total - sum(self.ledger.values()) - sum(self.model.values())
        return self.at_rest + self.total - min(self.free_unseen, max(0, uncounted))

    def classes(self, ledger: Mapping[ByteClass, int] | None = None) -> dict[ByteClass, int]:
        """Bytes by class; they add up to :attr:`bytes`."""
        counted = dict(self.ledger if ledger is None else ledger)
        other = self.bytes - sum(counted.values()) - sum(self.model.values())
        found = dict.fromkeys(ByteClass, 0) | counted
        for byte_class, amount in self.model.items():
            found[byte_class] += amount
        # Full gradients that wait for the end of an accumulation window are in the ledger, too.
        twice = min(self.model[ByteClass.GRADIENT], max(0, -other))
        found[ByteClass.GRADIENT] -= twice
        held = min(self.freed_elsewhere, max(0, other))
        found[ByteClass.POOLED] += held
        found[ByteClass.OTHER] = other + twice - held
        return found


def history(
    events: list[Event], rest: int, at_rest: Mapping[ByteClass, int], ledger: Ledger, itemsize: int
) -> MemoryHistory:
    """Explain the peak, and draw the curve.

    Args:
        events: In the order of time.
        rest: What was allocated before them.
        at_rest: The same by class, as far as it is known.
        ledger: Of the same step.
        itemsize: Bytes of an element of a gathered parameter.
    """
    peak = _peak(events, _Balance(rest, dict(at_rest)))
    balance = _Balance(rest, dict(at_rest))
    for event in events[: peak + 1]:
        balance.apply(event)
    at_peak = _at_peak(events, peak, balance)
    begun_s = next((event.time_s for event in events if event.is_ledgers), 0.0)
    peak_s = events[peak].time_s if peak >= 0 else 0.0
    complete, flying = _gathered(ledger, peak_s - begun_s)
    return MemoryHistory(
        peak_bytes=balance.bytes,
        peak_s=peak_s,
        at_peak={byte_class: amount for byte_class, amount in at_peak.items() if amount},
        complete=complete,
        prefetched=[unit for entry in flying for unit in entry.units],
        prefetched_bytes=sum(entry.elements for entry in flying) * itemsize,
        operations=_operations(events[: peak + 1]),
        points=_points(events, rest, at_rest),
        backward_s=next((event.time_s for event in events if event.begins_backward), None),
    )


def _peak(events: list[Event], balance: _Balance) -> int:
    """Position of the event after which most is alive; -1 if it never rises."""
    best, position = balance.at_rest, -1
    for index, event in enumerate(events):
        balance.apply(event)
        if event.allocated is not None and balance.total > best - balance.at_rest and balance.bytes > best:
            best, position = balance.bytes, index
    return position


def _at_peak(events: list[Event], peak: int, balance: _Balance) -> dict[ByteClass, int]:
    """Bytes by class at the peak. Where it is an allocation of the engine, which allocates first and counts then, the
    ledger is the one of the same stretch of work that accounts for the most."""
    best = balance.classes()
    if peak < 0 or not events[peak].is_engines:
        return best
    counted = dict(balance.ledger)
    for event in events[peak + 1 :]:
        if not event.is_engines or event.freed is not None:
            break
        if event.counted is not None:
            counted[event.counted[0]] = event.counted[1]
            later = balance.classes(counted)
            if abs(later[ByteClass.OTHER]) < abs(best[ByteClass.OTHER]):
                best = later
    return best


def _gathered(ledger: Ledger, when: float) -> tuple[list[str], list[CollectiveEntry]]:
    """Units that are complete at a moment, and the gathers that are under way."""
    complete: dict[str, bool] = {}
    flying = []
    changes: list[tuple[float, tuple[str, ...], bool]] = [
        (release.time_s, (release.unit,), False) for release in ledger.releases
    ]
    for entry in ledger.collectives:
        if entry.kind is CollectiveKind.ALL_GATHER and entry.purpose in GATHERS:
            changes.append((entry.done_s, entry.units, True))
            if entry.issued_s <= when < entry.done_s:
                flying.append(entry)
    for time_s, units, is_complete in sorted(changes):
        if time_s <= when:
            complete.update(dict.fromkeys(units, is_complete))
    return [unit for unit, is_complete in complete.items() if is_complete], flying


def _operations(events: list[Event]) -> list[OperationBytes]:
    """What the model's operations have alive after these events, the largest first."""
    alive = {id(event.allocated): event.allocated for event in events if event.allocated is not None}
    for event in events:
        alive.pop(id(event.freed), None)
    groups: dict[tuple[str, ByteClass], list[int]] = defaultdict(list)
    for each in alive.values():
        if each.byte_class is not None:
            groups[each.operation, each.byte_class].append(each.bytes)
    found = [
        OperationBytes(operation=operation, byte_class=byte_class, count=len(sizes), bytes=sum(sizes))
        for (operation, byte_class), sizes in groups.items()
    ]
    return sorted(found, key=lambda each: each.bytes, reverse=True)[:OPERATIONS]


def _points(events: list[Event], rest: int, at_rest: Mapping[ByteClass, int]) -> list[MemoryPoint]:
    """The highest moment of every stretch of time, of the moments when the ledger has caught up with the engine."""
    balance = _Balance(rest, dict(at_rest))
    length = (events[-1].time_s if events else 0.0) / POINTS or 1.0
    highest: dict[int, tuple[int, float, dict[ByteClass, int]]] = {}
    for index, event in enumerate(events):
        balance.apply(event)
        following = events[index + 1] if index + 1 < len(events) else None
        if event.is_engines and following is not None and following.is_engines:
            continue
        stretch = int(event.time_s / length)
        if stretch not in highest or balance.bytes > highest[stretch][0]:
            highest[stretch] = (balance.bytes, event.time_s, balance.classes())
    return [
        MemoryPoint(time_s=time_s, bytes={name: amount for name, amount in classes.items() if amount})
        for _, (_, time_s, classes) in sorted(highest.items())
    ]
