"""The pages open in a browser without an error, and show what they should; nothing is loaded from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.report.test_explain import Step, ledger
from zerotune.records import ByteClass, Ledger, MemoryHistory, MemoryPoint, OperationBytes
from zerotune.report.explain import explain
from zerotune.report.explain_compare import comparison_rows
from zerotune.report.page import Explained, comparison_page, explanation_page

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")
LIMIT_S = 120
MIB = 2**20


def history() -> MemoryHistory:
    at_peak = {
        ByteClass.SHARD: 20 * MIB,
        ByteClass.ACTIVATION: 60 * MIB,
        ByteClass.FULL: 9 * MIB,
        ByteClass.OTHER: MIB,
    }
    points = [
        MemoryPoint(time_s=0.001 * n, bytes=at_peak | {ByteClass.ACTIVATION: (60 - abs(n - 30)) * MIB}) for n in range(60)
    ]  # fmt: skip
    return MemoryHistory(
        peak_bytes=90 * MIB, peak_s=0.03, at_peak=at_peak, complete=["blocks.3"], prefetched=["blocks.2"],
        prefetched_bytes=3 * MIB, points=points, backward_s=0.029,
        operations=[OperationBytes(operation="aten::linear", byte_class=ByteClass.ACTIVATION, count=4, bytes=50 * MIB)],
    )  # fmt: skip


def explained(run_id: str, step: Step, memory: MemoryHistory | None) -> Explained:
    ledgers: list[Ledger] = [ledger(step, rank).model_copy(update={"memory": memory}) for rank in range(2)]
    found = explain(ledgers)
    assert found is not None
    return Explained(run_id, "gpt 4 x 256 <on> text", ledgers, found)


@dataclass
class Opened:
    """What a browser made of a page."""

    dom: str
    log: str


def open_page(html: str, folder: Path, width: int) -> Opened:
    """Render a page headless; also writes ``page.png`` beside it."""
    page = folder / "page.html"
    page.write_text(html, encoding="utf-8")
    assert BROWSER is not None
    common = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={width},2400", "--virtual-time-budget=5000",
        "--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND",
    ]  # fmt: skip
    # One run gives the document or the picture, not both.
    dom = subprocess.run(
        [*common, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    shot = [*common, f"--screenshot={folder / 'page.png'}", page.as_uri()]
    subprocess.run(shot, capture_output=True, timeout=LIMIT_S, check=True)
    return Opened(dom.stdout, dom.stderr)


@needs_browser
@pytest.mark.parametrize("width", [1280, 500])
def test_an_explanation_opens_in_a_browser(tmp_path: Path, width: int) -> None:
    opened = open_page(explanation_page(explained("t-1", Step(prefetched=False), history())), tmp_path, width)
    assert "CONSOLE" not in opened.log, opened.log
    for section in (
        "findings",
        "timeline",
        "resident",
        "gathered",
        "memory",
        "hidden",
        "released",
        "reduced",
        "gradients",
    ):
        assert f'id="{section}"' in opened.dom, section
    # Drawn by the script: three figures, with the rows of both ranks and the peak.
    assert len(re.findall(r'class="[^"]*js-plotly-plot', opened.dom)) == 3
    for words in (
        "rank 0 compute",
        "rank 1 AllGather",
        "rank 1 ReduceScatter",
        "peak 90.0 MiB",
        "backward begins",
    ):
        assert re.search(rf"<text[^>]*>{words}", opened.dom), words
    assert "gathers are not hidden at all" in opened.dom
    assert (tmp_path / "page.png").stat().st_size > 20_000


@needs_browser
def test_two_steps_stand_on_one_axis(tmp_path: Path) -> None:
    runs = [explained("t-1", Step(), None), explained("t-2", Step(prefetched=False), None)]
    rows = comparison_rows(runs[0].explanation, runs[1].explanation)
    opened = open_page(comparison_page(runs[0], runs[1], rows), tmp_path, 1280)
    assert "CONSOLE" not in opened.log, opened.log
    for words in ("t-1 rank 0 compute", "t-2 rank 1 AllGather"):
        assert re.search(rf"<text[^>]*>{words}", opened.dom), words
    assert "AllGather in forward, exposed" in opened.dom


def test_a_page_needs_nothing_else_and_escapes_what_it_is_given() -> None:
    html = explanation_page(explained("t-1", Step(), None))
    without_plotly = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!data:)', without_plotly)
    assert "Nothing stands out." in html
    assert "&lt;on&gt;" in html and 'id="memory"' not in html
