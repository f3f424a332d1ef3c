"""Pure scheduling: trace and knobs in, actions out. No torch."""

from zerotune.schedule.actions import Action, Collect, Drain, Gather, Reason, Reduce, Release, Wait
from zerotune.schedule.buckets import Bucket
from zerotune.schedule.compile import compile_schedule
from zerotune.schedule.layout import Layout, ParamRef, ParamSize, UnitSize
from zerotune.schedule.on_demand import OnDemand
from zerotune.schedule.padding import SLICE_MULTIPLE, padded_numel, slice_bounds, slice_numel
from zerotune.schedule.plan import ReleasePlan, UnitChoice
from zerotune.schedule.resolve import resolve_knobs
from zerotune.schedule.schedule import Saving, Schedule
from zerotune.schedule.trace import Event, EventKind, PassKey, Phase, Trace

__all__ = [
    "SLICE_MULTIPLE",
    "Action",
    "Bucket",
    "Collect",
    "Drain",
    "Event",
    "EventKind",
    "Gather",
    "Layout",
    "OnDemand",
    "ParamRef",
    "ParamSize",
    "PassKey",
    "Phase",
    "Reason",
    "Reduce",
    "Release",
    "ReleasePlan",
    "Saving",
    "Schedule",
    "Trace",
    "UnitChoice",
    "UnitSize",
    "Wait",
    "compile_schedule",
    "padded_numel",
    "resolve_knobs",
    "slice_bounds",
    "slice_numel",
]
