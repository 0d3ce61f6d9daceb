"""Figures of load test runs with known times, comparison of two runs, and the report."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from array import array
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from loadtest.config import LoadConfig
from loadtest.report import figures
from loadtest.report.charts import Axis, Mark, Series, chart
from loadtest.report.comparison import compare_runs, confidence_interval
from loadtest.report.figures import build_document, warnings
from loadtest.report.html import page
from loadtest.report.tables import verdict
from loadtest.run import LoadRun, RequestRecord, progress_line

BEGAN = 1000.0


def record(
    number: int, intended: float, *at: float, lag: float = 0.0, tokens: int | None = None, **more: Any
) -> RequestRecord:
    """A request with events `at` seconds after sending. It ends with the last event."""
    sent = BEGAN + intended + lag
    made = RequestRecord(f"r{number}", number, 0, 10, 3, BEGAN + intended, sent_s=sent, finish="length", **more)
    made.event_times = array("d", [sent + t for t in at])
    made.ended_s = sent + (at[-1] if at else 0.5)
    made.tokens = len(at) if tokens is None else tokens
    return made


def run_of(*records: RequestRecord, **flags: Any) -> LoadRun:
    config = LoadConfig.of({"rate": "1", **flags})
    for r in records:
        r.counted = r.intended_s - BEGAN >= config.settle_s
    ended = max((r.ended_s for r in records), default=BEGAN)
    return LoadRun(
        config, "m", began=BEGAN, began_at=1.7e9, ended=ended, cpu_s=0.1, records=list(records), sent=len(records)
    )


def failed(
    number: int, intended: float, kind: str = "http 429 rate_limit_exceeded", message: str = "busy"
) -> RequestRecord:
    made = record(number, intended)
    made.finish = ""
    made.ended_s = 0.0
    made.fail(kind, message, made.sent_s + 0.5)
    return made


def document_of(run: LoadRun) -> dict[str, Any]:
    """The document of a run after a JSON round trip."""
    found: dict[str, Any] = json.loads(figures.dumps(build_document(run, "1.0")))
    return found


def test_times_are_those_between_the_events() -> None:
    found = document_of(run_of(record(0, 0.0, 0.1, 0.2, 0.4), record(1, 1.0, 0.3, 0.35, 0.5, lag=0.2)))
    latencies = found["latencies_ms"]
    assert (latencies["ttft"]["p50"], latencies["ttft"]["max"]) == (pytest.approx(100), pytest.approx(300))
    assert latencies["ttft_intended"]["max"] == pytest.approx(500)
    assert latencies["itl"]["count"] == 4
    assert latencies["itl"]["max"] == pytest.approx(200)
    assert latencies["itl"]["mean"] == pytest.approx(125)
    assert latencies["tpot"]["mean"] == pytest.approx(125)
    assert (latencies["e2e"]["max"], latencies["e2e_intended"]["max"]) == (pytest.approx(500), pytest.approx(700))
    assert (latencies["lag"]["p50"], latencies["lag"]["max"]) == (pytest.approx(0), pytest.approx(200))
    assert found["seconds"] == pytest.approx(1.7)
    assert found["rates"]["output_tokens_per_s"] == pytest.approx(6 / 1.7)
    assert found["rates"]["answered_per_s"] == pytest.approx(2 / 1.7)
    assert (found["rates"]["intended_per_s"], found["rates"]["sent_per_s"]) == (
        pytest.approx(1.0),
        pytest.approx(1 / 1.2),
    )
    assert found["rates"]["mean_running"] == pytest.approx(0.9 / 1.7)


def test_an_event_may_hold_several_tokens() -> None:
    latencies = document_of(run_of(record(0, 0.0, 0.1, 0.3, tokens=5)))["latencies_ms"]
    assert latencies["tpot"]["p50"] == pytest.approx(50)
    assert latencies["itl"]["p50"] == pytest.approx(200)


def test_failed_and_aborted_requests_count_in_no_latency() -> None:
    left = record(2, 1.0, 9.0)
    left.aborted = True
    found = document_of(
        run_of(record(0, 0.0, 0.1), failed(1, 0.5), failed(2, 0.6, message="full"), failed(3, 0.7, "connect"), left)
    )
    assert found["latencies_ms"]["ttft"]["count"] == 1
    assert found["requests"] | {"sent": 5, "answered": 1, "failed": 3, "aborted": 1} == found["requests"]
    assert found["errors"] == [
        {"kind": "http 429 rate_limit_exceeded", "count": 2, "messages": ["busy", "full"]},
        {"kind": "connect", "count": 1, "messages": ["busy"]},
    ]


def test_goodput_counts_from_the_intended_time_and_needs_every_objective() -> None:
    slo = "ttft=500ms,itl=101ms,gap=155ms,e2e=1s"
    records = [
        record(0, 0.0, 0.4, 0.5, 0.6),
        record(1, 1.0, 0.4, 0.5, 0.6, lag=0.2),  # the first token is late relative to the intended time 1.0
        record(2, 2.0, 0.4, 0.55, 0.7),  # mean gap too long
        record(3, 3.0, 0.1, 0.2, 0.36, 0.4, 0.45),  # one gap too long
        record(4, 4.0, 0.1, 0.12, 1.3, tokens=60),
        record(5, 5.0, 0.45),  # one token: only ttft is known
        failed(6, 6.0),
    ]
    goodput = document_of(run_of(*records, slo=slo))["goodput"]
    assert goodput["share"] == pytest.approx(2 / 7)
    assert goodput["per_s"] == pytest.approx(2 / 6.5)
    assert goodput["kept"] == {k: pytest.approx(v / 6) for k, v in {"ttft": 5, "itl": 5, "gap": 4, "e2e": 5}.items()}
    assert document_of(run_of(*records))["goodput"] is None


def test_goodput_excludes_requests_that_the_client_aborted() -> None:
    left = record(1, 1.0)
    left.aborted = True
    assert document_of(run_of(record(0, 0.0, 0.1), left, slo="ttft=1s"))["goodput"]["share"] == 1.0


def test_settling_is_not_counted() -> None:
    found = document_of(run_of(record(0, 0.0, 9.0, 9.5), record(1, 5.0, 0.1, 0.3), settle_s="4"))
    assert (found["requests"]["sent"], found["requests"]["not_counted"]) == (1, 1)
    assert found["latencies_ms"]["ttft"]["max"] == pytest.approx(100)
    assert found["seconds"] == pytest.approx(1.3)


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.lists(st.floats(0.001, 3), min_size=1, max_size=9), st.booleans()),
        min_size=1,
        max_size=20,
    )
)
def test_the_series_add_up(requests: list[tuple[float, list[float], bool]]) -> None:
    records = []
    for number, (at, gaps, fails) in enumerate(requests):
        moments = [sum(gaps[: i + 1]) for i in range(len(gaps))]
        records.append(record(number, at, *moments))
        if fails:
            records[-1].ended_s = 0.0
            records[-1].fail("disconnected", "gone", records[-1].event_times[-1])
    found = document_of(run_of(*records))
    series = found["series"]
    assert sum(series["sent"]) == len(records) == sum(series["ended"]) + sum(series["failed"])
    assert sum(series["failed"]) == found["requests"]["failed"]
    assert sum(series["tokens"]) == pytest.approx(sum(r.tokens for r in records))
    assert sum(series["running"]) * series["bin_s"] == pytest.approx(sum(r.e2e_s for r in records), abs=1e-6)
    assert len(series["sent"]) <= 241


def test_an_empty_run_has_figures_too() -> None:
    found = document_of(run_of(slo="ttft=1s"))
    assert found["latencies_ms"]["ttft"]["p99"] is None
    assert found["goodput"]["share"] == 0.0
    assert "nothing to show" in page([found], ["run"])


def test_warnings() -> None:
    assert warnings(document_of(run_of(record(0, 0.0, 0.1, 0.2, 0.3)))) == []
    run = run_of(record(0, 0.0, 0.1, lag=0.3), max_concurrency="1")
    run.stopped, run.unfinished, run.skipped, run.skipped_too_long, run.cpu_s = True, 4, 3, 2, 99.0
    text = " ".join(warnings(document_of(run)))
    for part in ("4 requests were in flight", "2 requests of the trace", "3 later turns", "used 247", "300 ms late"):
        assert part in text
    assert "--max-concurrency" in text
    assert "1 answers have fewer tokens" in text


def test_the_verdict_is_one_sentence_about_load_and_objectives() -> None:
    steady = [record(i, i, 0.1, 0.2) for i in range(30)]
    assert verdict(document_of(run_of(*steady))) == (
        "the server keeps up with 1 requests/s (Poisson): first token after 100 ms in the median and 100 ms at p99."
    )
    growing = [record(i, i, 0.1 + 0.2 * i, 8.0) for i in range(30)]
    assert verdict(document_of(run_of(*growing))) == (
        "the server does not keep up with 1 requests/s (Poisson): the median first token comes after 1000 ms at the "
        "start of the run and after 5000 ms at its end."
    )
    said = verdict(document_of(run_of(*steady, failed(30, 30.0), slo="ttft=50ms")))
    assert said == (
        "the server misses the objectives with 1 requests/s (Poisson): 0.0% of requests are good, aim 90%; "
        "1 of 31 requests failed."
    )
    assert "keeps the objectives" in verdict(document_of(run_of(*steady, slo="ttft=150ms", attainment="0.99")))
    users = verdict(document_of(run_of(*steady, rate=None, users="3")))
    assert users.startswith("3 users get ")
    assert verdict(document_of(run_of(failed(0, 0.0)))) == "no request was answered."


def test_progress_line_has_share_and_counts() -> None:
    run = run_of(duration_s="20")
    run.sent, run.running, run.done, run.failed = 9, 4, 5, 1
    assert progress_line(run, BEGAN + 5.0).endswith("25%  5 s  9 sent  4 running  5 done  1 failed")
    assert "100%  30 s (ending)" in progress_line(run, BEGAN + 30.0)
    counted = run_of(requests="10")
    counted.planned, counted.done = 10, 5
    assert " 50% " in progress_line(counted, BEGAN + 1.0)


# -- two runs


def many(ttft_s: float, count: int = 400, **flags: Any) -> dict[str, Any]:
    records = [record(i, float(i), ttft_s * (1 + i % 10 / 10), ttft_s * 2 + 0.1) for i in range(count)]
    return document_of(run_of(*records, **flags))


def test_significance_of_differences() -> None:
    comparison = compare_runs(many(0.1, slo="ttft=1s"), many(0.2, slo="ttft=1s"))
    rows = {row.name: row for row in comparison.rows}
    assert rows["ttft p50"].change == pytest.approx(1.0)
    assert rows["ttft p50"].significant is True
    assert rows["ttft p50"].worse_by == pytest.approx(1.0)
    assert rows["goodput share"].worse_by == 0
    assert "ttft p50" in [row.name for row in comparison.worse(0.5)]
    assert comparison.worse(2.0) == []
    backwards = {row.name: row for row in compare_runs(many(0.2), many(0.1)).rows}
    assert backwards["ttft p50"].worse_by == 0
    assert not compare_runs(many(0.1), many(0.1)).worse(0.0)


def test_few_requests_give_no_significance() -> None:
    comparison = compare_runs(many(0.1, count=12), many(0.2, count=12))
    rows = {row.name: row for row in comparison.rows}
    assert rows["ttft p99"].significant is False
    assert "ttft p99" not in [row.name for row in comparison.worse(0.1)]


def test_differences_of_the_settings_are_named() -> None:
    assert compare_runs(many(0.1), many(0.1, seed="5")).differences == (("seed", 0, 5),)


@pytest.mark.parametrize(("n", "share", "bounds"), [(100, 0.5, (39, 59)), (1000, 0.9, (880, 918))])
def test_intervals_are_order_statistics(n: int, share: float, bounds: tuple[int, int]) -> None:
    assert confidence_interval([float(i) for i in range(n)], share) == bounds
    assert confidence_interval([1.0, 2.0], 0.99) is None


# -- files


def test_results_read_back_and_others_are_refused(tmp_path: Path) -> None:
    found = many(0.1, count=3)
    path = tmp_path / "new" / "a.json"
    figures.write(path, found)
    assert figures.read(path) == found
    (tmp_path / "x.json").write_text("[")
    (tmp_path / "y.json").write_text('{"kind": "baton loadtest", "format": 99}')
    (tmp_path / "z.json").write_text('{"kind": "else"}')
    for name, says in {"x": "not JSON", "y": "format 99", "z": "not the result", "none": "cannot be read"}.items():
        with pytest.raises(ConfigError, match=says):
            figures.read(tmp_path / f"{name}.json")


# -- the report

VOID = {"meta", "br"}
MAY_STAY_OPEN = {"th"}


class Checker(HTMLParser):
    """Checks that elements are closed in order and that the page loads no external resource."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.text: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        assert tag not in {"script", "link", "img", "iframe", "object", "use", "image"}
        assert not {name for name, _ in attrs} & {"src", "href", "xlink:href", "onload", "onclick"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] != tag and self.open[-1] in MAY_STAY_OPEN:
            self.open.pop()
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert "url(" not in html
    assert "@import" not in html
    assert html.startswith("<!doctype html>")
    for svg in re.findall(r"<svg.*?</svg>", html):
        svg = re.sub(r"(\s[a-z]+)=([a-z0-9-]+)(?=[\s/>])", r'\1="\2"', svg)  # HTML needs no quotes, XML does
        for element in ET.fromstring(svg).iter():
            assert "nan" not in " ".join(element.attrib.values()).lower()
    return checker


def test_the_report_is_well_formed_and_self_contained() -> None:
    run = run_of(
        *(record(i, float(i), 0.1 + i / 100, 0.3 + i / 100, 0.4 + i / 100) for i in range(50)),
        failed(99, 50.0, "http 500", "<script>alert(1)</script>"),
        slo="ttft=200ms,itl=1s",
    )
    html = page([document_of(run)], ["run"])
    checker = checked(html)
    text = " ".join(checker.text)
    assert "<script>alert(1)</script>" in text  # as text
    assert {"svg", "figure", "figcaption", "table", "h1", "h2"} <= checker.seen
    assert html.count("<svg") == 8
    for part in ("Time to first token", "Objectives", "http 500", "arrivals", "50 of 51", "objective 200 ms"):
        assert part in text
    assert "prefers-color-scheme:dark" in html


def test_the_report_of_two_runs_shows_both() -> None:
    a, b = many(0.1), many(0.2)
    checker = checked(page([a, b], ["before", "a<b"], compare_runs(a, b)))
    text = " ".join(checker.text)
    for part in ("before", "a<b", "Compared", "+100.0%", "significant"):
        assert part in text


# -- charts

finite = st.floats(-1e7, 1e7, allow_nan=False)


@given(
    points=st.lists(st.tuples(finite, finite), max_size=40),
    log=st.booleans(),
    dots=st.booleans(),
    mark=st.none() | finite,
)
def test_a_chart_stays_within_its_frame(
    points: list[tuple[float, float]], log: bool, dots: bool, mark: float | None
) -> None:
    marks = [] if mark is None else [Mark("here", mark)]
    drawn = chart("t", [Series("a", points, dots=dots)], Axis("x", log=log), Axis("y"), marks)
    if not points:
        assert "nothing to show" in drawn
        return
    path = re.findall(r'<path class="(?:line|dots) c1" d="([^"]*)"', drawn)
    assert len(path) == 1
    numbers = [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path[0])]
    assert len(numbers) == len(points)
    assert all(-0.1 <= x <= 560.1 and -0.1 <= y <= 280.1 for x, y in numbers)
    ticks = re.findall(r'text-anchor="middle">([^<]*)<', drawn)
    assert 1 <= len(ticks) <= 20
