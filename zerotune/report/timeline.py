"""Steps over time as interactive figures: who computed, gathered, reduced and released when, and the bytes beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zerotune.records import ByteClass, CollectiveEntry, CollectiveKind, Ledger, MemoryHistory
from zerotune.report.format import memory, milliseconds, sent
from zerotune.report.pictures import timeline

if TYPE_CHECKING:
    import plotly.graph_objects as go

MIB = 2**20

_COLOURS = {
    "forward": "#7fb3d5",
    "recompute": "#c39bd3",
    "backward": "#2e75b6",
    "all_gather": "#f0a04b",
    "reduce_scatter": "#5aa469",
    "exposed": "#c0392b",
    "release": "#444444",
}
_CLASSES = {
    ByteClass.SHARD: ("shards", "#34568b"),
    ByteClass.OPTIMIZER: ("optimizer", "#7f96b8"),
    ByteClass.FULL: ("full parameters", "#f0a04b"),
    ByteClass.POOLED: ("idle buffers", "#f7d7a8"),
    ByteClass.GRADIENT: ("gradients and buckets", "#5aa469"),
    ByteClass.ACTIVATION: ("activations", "#a569bd"),
    ByteClass.TEMPORARY: ("temporaries", "#d2b4de"),
    ByteClass.OTHER: ("other", "#aaaaaa"),
}
_DASHES = ("solid", "dot", "dash", "dashdot")
_SCALES = ("compute", "AllGather", "ReduceScatter")
_LANES = {CollectiveKind.ALL_GATHER: "AllGather", CollectiveKind.REDUCE_SCATTER: "ReduceScatter"}


def timeline_figure(steps: Sequence[tuple[str, Sequence[Ledger]]]) -> go.Figure:
    """Rows per rank, and below them the bytes of full parameters, on one axis of time.

    Args:
        steps: Steps to show below one another, each with a name (empty where there is one) and its ledgers by rank.
    """
    from plotly.subplots import make_subplots

    ranks = [(f"{name} rank {ledger.rank}".strip(), ledger) for name, ledgers in steps for ledger in ledgers]
    height = 34 * len(_SCALES) * len(ranks)
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=48 / (height + 300),
        row_heights=[height / (height + 200), 200 / (height + 200)],
    )  # fmt: skip
    bars = [bar for rank, ledger in ranks for bar in _bars(rank, ledger)]
    for name, colour in _COLOURS.items():
        chosen = [bar for bar in bars if bar[0] == name]
        if name != "release" and chosen:
            figure.add_bar(
                orientation="h", name=name.replace("all_gather", "AllGather").replace("reduce_scatter", "ReduceScatter"),
                x=[(end - begin) * 1e3 for _, _, begin, end, _ in chosen], base=[begin * 1e3 for _, _, begin, _, _ in chosen],
                y=[row for _, row, _, _, _ in chosen], customdata=[text for *_, text in chosen],
                hovertemplate="%{customdata}<extra></extra>", marker={"color": colour, "line": {"width": 0.5, "color": "white"}},
                width=0.3 if name == "exposed" else 0.78, row=1, col=1,
            )  # fmt: skip
    marks = [(entry.time_s, rank, entry.unit) for rank, ledger in ranks for entry in ledger.releases]
    figure.add_scatter(
        x=[time * 1e3 for time, _, _ in marks], y=[f"{rank} AllGather" for _, rank, _ in marks],
        customdata=[f"{unit} released at {milliseconds(time)} ms" for time, _, unit in marks],
        hovertemplate="%{customdata}<extra></extra>", mode="markers", name="release",
        marker={"symbol": "line-ns", "size": 20, "line": {"width": 1.5, "color": _COLOURS["release"]}}, row=1, col=1,
    )  # fmt: skip
    for number, (rank, ledger) in enumerate(ranks):
        _add_curve(figure, ledger, ByteClass.FULL, f"full, {rank}", number, row=2, col=1)
    rows = [f"{rank} {lane}" for rank, _ in ranks for lane in _SCALES]
    figure.update_yaxes(categoryorder="array", categoryarray=rows[::-1], automargin=True, row=1, col=1)
    figure.update_yaxes(title_text="full, MiB", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title_text="ms since the step began", row=2, col=1)
    figure.update_layout(barmode="overlay")
    return _plain(figure, height + 320)


def _bars(rank: str, ledger: Ledger) -> list[tuple[str, str, float, float, str]]:
    """Kind, row, begin, end and words of everything that took time; exposed parts lie over their collectives."""
    bars = [
        (bar.detail, f"{rank} compute", bar.begin_s, bar.end_s,
         f"<b>{bar.label}</b> {bar.detail}, {milliseconds(bar.end_s - bar.begin_s)} ms")
        for bar in timeline(ledger).bars
        if bar.lane == "compute"
    ]  # fmt: skip
    for entry in ledger.collectives:
        if entry.kind in _LANES:
            row, words = f"{rank} {_LANES[entry.kind]}", collective_words(entry)
            bars.append((entry.kind.value, row, entry.issued_s, entry.done_s, words))
            if entry.done_s - entry.waited_s > 1e-4:
                bars.append(("exposed", row, entry.waited_s, entry.done_s, words))
    return bars


def collective_words(entry: CollectiveEntry) -> str:
    """A collective for a label: units, purpose, bytes, and how long it was waited for."""
    units = ", ".join(entry.units[:4]) + (f" and {len(entry.units) - 4} more" if len(entry.units) > 4 else "")
    exposed = max(0.0, entry.done_s - entry.waited_s)
    return (
        f"<b>{units}</b><br>{_LANES.get(entry.kind, entry.kind.value)}, {entry.purpose}, sent {sent(entry.sent_bytes, entry.left_out_bytes)}<br>"
        f"{milliseconds(entry.done_s - entry.issued_s)} ms, exposed {milliseconds(exposed)} ms"
    )


def memory_figure(history: MemoryHistory) -> go.Figure:
    """Bytes by class over a profiled step, one upon the other, with the peak marked."""
    import plotly.graph_objects as go

    figure = go.Figure()
    times = [point.time_s * 1e3 for point in history.points]
    for byte_class, (name, colour) in _CLASSES.items():
        amounts = [max(0, point.bytes.get(byte_class, 0)) / MIB for point in history.points]
        if any(amounts):
            figure.add_scatter(
                x=times, y=amounts, name=name, stackgroup="bytes", mode="lines",
                line={"width": 0.5, "color": colour}, fillcolor=colour,
                hovertemplate=f"{name} %{{y:.1f}} MiB<extra></extra>",
            )  # fmt: skip
    figure.add_scatter(
        x=[history.peak_s * 1e3], y=[history.peak_bytes / MIB], mode="markers+text", name="peak",
        text=[f"peak {memory(history.peak_bytes)}"], textposition="top right", showlegend=False,
        marker={"symbol": "diamond", "size": 9, "color": _COLOURS["exposed"]}, hoverinfo="skip",
    )  # fmt: skip
    if history.backward_s is not None:
        figure.add_vline(
            x=history.backward_s * 1e3, line={"dash": "dot", "color": "#555555", "width": 1},
            annotation_text="backward begins", annotation_position="bottom left", annotation_font_color="#ffffff",
        )  # fmt: skip
    figure.update_yaxes(title_text="MiB", range=[0, history.peak_bytes / MIB * 1.12])
    figure.update_xaxes(title_text="ms of a profiled step, slower than a timed one")
    figure.update_layout(hovermode="x unified")
    return _plain(figure, 440)


def gradient_figure(ledgers: Sequence[Ledger], bucket_bytes: int) -> go.Figure:
    """Bytes of gradients and their buckets over time, against the largest bucket."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for number, ledger in enumerate(ledgers):
        _add_curve(figure, ledger, ByteClass.GRADIENT, f"rank {ledger.rank}", number)
    if bucket_bytes:
        figure.add_hline(
            y=bucket_bytes / MIB, line={"dash": "dash", "color": _COLOURS["exposed"], "width": 1},
            annotation_text=f"largest bucket {memory(bucket_bytes)}", annotation_position="top left",
        )  # fmt: skip
    figure.update_yaxes(title_text="MiB", rangemode="tozero")
    figure.update_xaxes(title_text="ms since the step began")
    return _plain(figure, 300)


def _add_curve(
    figure: go.Figure, ledger: Ledger, byte_class: ByteClass, name: str, number: int, **place: Any
) -> None:
    samples = [sample for sample in ledger.samples if sample.byte_class is byte_class]
    figure.add_scatter(
        x=[0.0, *(sample.time_s * 1e3 for sample in samples)],
        y=[ledger.at_rest.get(byte_class, 0) / MIB, *(sample.bytes / MIB for sample in samples)],
        name=name, mode="lines", hovertemplate=f"{name} %{{y:.1f}} MiB at %{{x:.1f}} ms<extra></extra>",
        line={
            "shape": "hv", "width": 1.5, "color": list(_COLOURS.values())[3 + number % 2], "dash": _DASHES[number // 2 % 4]
        }, **place,
    )  # fmt: skip


def _plain(figure: go.Figure, height: int) -> go.Figure:
    figure.update_layout(
        template="plotly_white", height=height, margin={"l": 8, "r": 8, "t": 8, "b": 8},
        font={"family": "system-ui, sans-serif", "size": 12},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0, "xanchor": "left"},
    )  # fmt: skip
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure
