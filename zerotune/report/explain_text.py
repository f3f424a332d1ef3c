"""An explanation as lines and tables for the terminal."""

from __future__ import annotations

from rich.table import Column, Table
from rich.text import Text

from zerotune.records import ByteClass
from zerotune.records.flow import Flow
from zerotune.report.explain import Explanation, Held
from zerotune.report.format import memory, milliseconds
from zerotune.report.printing import Sheet

_SHOWN = 8


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
    step = f"a step of {milliseconds(explanation.step_s)} ms on {explanation.ranks} ranks"
    if not explanation.findings:
        return [Text(f"{step}: nothing stands out", style="bold")]
    lines = [Text(step, style="bold")]
    for number, finding in enumerate(explanation.findings, 1):
        lines += [Text(f"{number}. {finding.text}"), Text(f"   {finding.remedy}", style="dim")]
    return lines


def _question(text: str, knob: str) -> list[Text]:
    return [Text(text, style="bold") + Text(f"   ({knob})", style="dim")]


def _classes(amounts: dict[ByteClass, int]) -> str:
    return ", ".join(f"{name.value} {memory(amount)}" for name, amount in amounts.items() if amount)


def _resident(explanation: Explanation) -> list[Table | Text | None]:
    totals = [sum(each.values()) for each in explanation.at_rest]
    equal = (
        "the ranks hold equally much"
        if len(set(totals)) == 1
        else f"ranks hold {memory(min(totals))} to {memory(max(totals))}"
    )
    return [
        *_question("Which shards are resident at rest?", "stage"),
        Text(f"  {memory(max(totals))} on a rank: {_classes(explanation.at_rest[0])}; {equal}"),
        Text(""),
    ]


def _gathered(explanation: Explanation) -> list[Table | Text | None]:
    units = explanation.live_at_peak
    names = ", ".join(units[:_SHOWN]) + (f" and {len(units) - _SHOWN} more" if len(units) > _SHOWN else "")
    return [
        *_question(
            "Which full parameters are gathered at the peak?",
            "prefetch_distance, max_live_parameters, release",
        ),
        Text(f"  {memory(explanation.peak_bytes)} without activations: {_classes(explanation.at_peak)}"),
        Text(f"  full or in flight then: {names or 'none'}"),
        Text(""),
    ]


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
    for flow in explanation.flows:
        table.add_row(
            flow.title,
            f"{flow.count}",
            memory(flow.sent_bytes),
            milliseconds(flow.hidden_s),
            milliseconds(flow.exposed_s),
            _longest(flow),
        )
    return [
        *_question(
            "Is communication hidden behind compute?", "prefetch_distance, reduce_bucket_size, overlap_comm"
        ),
        table,
        Text(""),
    ]


def _longest(flow: Flow) -> str:
    return ", ".join(f"{units} {milliseconds(seconds)}" for units, seconds in flow.longest if seconds > 1e-4)


def _released(explanation: Explanation) -> list[Table | Text | None]:
    idle = [each for each in explanation.held if each.idle_byte_s > 0][:_SHOWN]
    lines: list[Table | Text | None] = [
        *_question("Are full parameters released soon after their last use?", "release, max_reuse_distance"),
    ]
    total = sum(each.idle_byte_s for each in explanation.held)
    lines.append(Text(f"  {total / 2**20:.2f} MiB s idle in the step" + (": " if idle else "")))
    lines += [Text(f"    {_idle(each)}") for each in idle[:3]]
    return [*lines, Text("")]


def _idle(each: Held) -> str:
    return f"{each.unit}: full for {milliseconds(each.live_s)} ms, idle for {milliseconds(each.idle_s)} ms"


def _reduced(explanation: Explanation) -> list[Table | Text | None]:
    rest = max(each.get(ByteClass.GRADIENT, 0) for each in explanation.at_rest)
    return [
        *_question("Are gradients reduced to shards as they come?", "reduce_bucket_size, accumulate"),
        Text(
            f"  gradients and their buffers take {memory(explanation.gradient_peak)} at most, {memory(rest)} at rest"
        ),
    ]
