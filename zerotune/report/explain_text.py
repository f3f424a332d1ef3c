"""An explanation as lines and tables for the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Column, Table
from rich.text import Text

from zerotune.records import ByteClass
from zerotune.records.flow import Flow
from zerotune.report.explain import Explanation, Held, Peak
from zerotune.report.format import count, memory, milliseconds, sent
from zerotune.report.printing import Sheet

_SHOWN = 8


@dataclass(frozen=True)
class Question:
    """What an explanation answers, and the knobs that would change the answer."""

    text: str
    knobs: tuple[str, ...]


QUESTIONS = {
    "resident": Question("Which shards are resident at rest?", ("stage", "param_persistence_threshold")),
    "gathered": Question(
        "Which full parameters are gathered, and what else is there at the peak?",
        (
            "prefetch_distance",
            "max_live_parameters",
            "release",
            "activation_checkpointing",
            "micro_batch_size",
        ),
    ),
    "hidden": Question(
        "Is communication hidden behind compute?",
        ("prefetch_distance", "reduce_bucket_size", "overlap_comm"),
    ),
    "released": Question(
        "Are full parameters released soon after their last use?", ("release", "max_reuse_distance")
    ),
    "reduced": Question(
        "Are gradients reduced to shards as they come?", ("reduce_bucket_size", "accumulate")
    ),
}


def explanation_parts(explanation: Explanation) -> list[Table | Text | None]:
    """Findings first, then one question after the other, each with the knob that would change its answer."""
    parts: list[Table | Text | None] = [*_findings(explanation), Text("")]
    parts += _resident(explanation)
    parts += _gathered(explanation)
    parts += _hidden(explanation)
    parts += _released(explanation)
    parts += _reduced(explanation)
    return parts


def _findings(explanation: Explanation) -> list[Text]:
    step = f"a step of {milliseconds(explanation.step_s)} ms on {count(explanation.ranks, 'rank')}"
    if not explanation.findings:
        return [Text(f"{step}: nothing stands out", style="bold")]
    lines = [Text(step, style="bold")]
    for number, finding in enumerate(explanation.findings, 1):
        lines += [Text(f"{number}. {finding.text}"), Text(f"   {finding.remedy}", style="dim")]
    return lines


def _question(key: str) -> Text:
    question = QUESTIONS[key]
    return Text(question.text, style="bold") + Text(f"   ({', '.join(question.knobs)})", style="dim")


def classes_text(amounts: dict[ByteClass, int]) -> str:
    """Bytes by class in a line, those that there are."""
    return ", ".join(f"{name.value} {memory(amount)}" for name, amount in amounts.items() if amount)


def resident_text(explanation: Explanation) -> str:
    """What rests on a rank, and whether the ranks are equal."""
    totals = [sum(each.values()) for each in explanation.at_rest]
    equal = (
        "the ranks hold equally much"
        if len(set(totals)) == 1
        else f"ranks hold {memory(min(totals))} to {memory(max(totals))}"
    )
    return f"{memory(max(totals))} on a rank: {classes_text(explanation.at_rest[0])}; {equal}"


def _resident(explanation: Explanation) -> list[Table | Text | None]:
    return [_question("resident"), Text(f"  {resident_text(explanation)}"), Text("")]


def _gathered(explanation: Explanation) -> list[Table | Text | None]:
    peak = explanation.peak
    which = (
        "the allocator's peak"
        if peak.is_allocators
        else "at the peak of what the engine counts, without activations"
    )
    table = Sheet(
        Column("", no_wrap=True), Column("", justify="right", no_wrap=True), box=None, show_header=False
    )
    for label, amount in peak_rows(peak):
        table.add_row(f"  {label}", memory(amount))
    lines: list[Table | Text | None] = [
        _question("gathered"),
        Text(f"  {memory(peak.bytes)} on rank {peak.rank}, {which}"),
        table,
        Text(f"  complete then: {_names(peak.complete)}; being gathered: {_names(peak.prefetched)}"),
    ]
    if peak.operations:
        largest = [
            f"{memory(each.bytes)} {each.byte_class} by {each.operation}" for each in peak.operations[:4]
        ]
        lines.append(Text(f"  most by: {', '.join(largest)}"))
    return [*lines, Text("")]


def peak_rows(peak: Peak) -> list[tuple[str, int]]:
    """The parts of a peak in words; they add up to it."""
    gathered = peak.classes.get(ByteClass.FULL, 0) - peak.prefetched_bytes
    rows = [
        ("shards", peak.classes.get(ByteClass.SHARD, 0)),
        ("optimizer", peak.classes.get(ByteClass.OPTIMIZER, 0)),
        ("full parameters", gathered),
        ("prefetched", peak.prefetched_bytes),
        ("idle buffers", peak.classes.get(ByteClass.POOLED, 0)),
        ("gradients and their buckets", peak.classes.get(ByteClass.GRADIENT, 0)),
        ("activations", peak.classes.get(ByteClass.ACTIVATION, 0)),
        ("temporaries, gradients on their way", peak.classes.get(ByteClass.TEMPORARY, 0)),
        ("other", peak.classes.get(ByteClass.OTHER, 0)),
    ]
    return [(label, amount) for label, amount in rows if amount or (label == "other" and peak.is_allocators)]


def _names(units: list[str]) -> str:
    more = f" and {len(units) - _SHOWN} more" if len(units) > _SHOWN else ""
    return (", ".join(units[:_SHOWN]) + more) or "none"


def _hidden(explanation: Explanation) -> list[Table | Text | None]:
    figure = {"justify": "right", "no_wrap": True}
    table = Sheet(
        Column("collective", no_wrap=True),
        Column("count", **figure),  # type: ignore[arg-type]
        Column("sent", **figure),  # type: ignore[arg-type]
        Column("hidden ms", **figure),  # type: ignore[arg-type]
        Column("exposed ms", **figure),  # type: ignore[arg-type]
        Column("waited for longest"),
        box=None,
    )
    if not explanation.flows:
        return [_question("hidden"), Text("  nothing is sent"), Text("")]
    for flow in explanation.flows:
        table.add_row(
            flow.title,
            f"{flow.count}",
            sent(flow.sent_bytes, flow.left_out_bytes),
            milliseconds(flow.hidden_s),
            milliseconds(flow.exposed_s),
            longest_text(flow),
        )
    return [
        _question("hidden"),
        table,
        Text(""),
    ]


def longest_text(flow: Flow) -> str:
    """The collectives of a flow that were waited for longest, with milliseconds."""
    return ", ".join(f"{units} {milliseconds(seconds)}" for units, seconds in flow.longest if seconds > 1e-4)


def _released(explanation: Explanation) -> list[Table | Text | None]:
    idle = [each for each in explanation.held if each.idle_byte_s > 0][:_SHOWN]
    lines: list[Table | Text | None] = [
        _question("released"),
    ]
    lines.append(
        Text(f"  {explanation.idle_byte_s / 2**20:.2f} MiB s idle in the step" + (": " if idle else ""))
    )
    lines += [Text(f"    {_idle(each)}") for each in idle[:3]]
    return [*lines, Text("")]


def _idle(each: Held) -> str:
    return f"{each.unit}: full for {milliseconds(each.live_s)} ms, idle for {milliseconds(each.idle_s)} ms"


def gradients_text(explanation: Explanation) -> str:
    """Gradients and their buckets at most and at rest, against the largest bucket."""
    rest = max(each.get(ByteClass.GRADIENT, 0) for each in explanation.at_rest)
    bucket = (
        f"the largest bucket is {memory(explanation.bucket_bytes)}"
        if explanation.bucket_bytes
        else "no bucket"
    )
    return f"gradients and their buckets take {memory(explanation.gradient_peak)} at most, {memory(rest)} at rest; {bucket}"


def _reduced(explanation: Explanation) -> list[Table | Text | None]:
    return [_question("reduced"), Text(f"  {gradients_text(explanation)}")]
