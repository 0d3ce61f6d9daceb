"""The HTML report of one run or of two runs side by side.

The page is one file without scripts and external resources. It has a light and a dark style.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from loadtest.report.charts import Axis, Mark, Series, chart
from loadtest.report.comparison import Comparison, ComparisonRow
from loadtest.report.figures import CURVE, PERCENTILES, warnings

Document = Mapping[str, Any]

LATENCIES = {
    "ttft": "time to first token",
    "ttft_intended": "… from the intended time",
    "itl": "between tokens",
    "tpot": "per output token",
    "e2e": "whole answer",
    "e2e_intended": "… from the intended time",
    "lag": "sent late by",
}
OBJECTIVES = {
    "ttft": "first token within",
    "itl": "mean between tokens",
    "gap": "longest pause",
    "e2e": "whole answer within",
}
ABSENT = "–"
STYLE = """
:root{color-scheme:light dark;--back:#fcfcfb;--card:#fff;--ink:#1c1d1f;--soft:#5d6166;--line:#e3e4e6;--mark:#8a6d1c;
--c1:#2563c9;--c2:#c2540a;--c3:#9b1c31;--bad:#9b1c31;--good:#17693a}
@media (prefers-color-scheme:dark){:root{--back:#141517;--card:#1c1e21;--ink:#e9eaec;--soft:#a2a7ae;--line:#34373c;
--mark:#d9b44a;--c1:#7aa9f7;--c2:#f09a57;--c3:#f2798c;--bad:#f2798c;--good:#6fcf97}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:28px 20px 60px;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:22px;margin:0 0 2px}h2{font-size:16px;margin:34px 0 10px}
.sub{color:var(--soft);margin:0 0 18px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px}
.tile,figure,.warn{background:var(--card);border:1px solid var(--line);border-radius:8px}
.tile{padding:12px 14px}.tile b{display:block;font-size:19px;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.warn{padding:10px 14px 10px 32px;border-color:var(--mark);margin:16px 0}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px}
figure{margin:0;padding:12px 14px}figcaption{font-weight:600;margin-bottom:4px}
svg{width:100%;height:auto;display:block}
svg text{font-size:11px;fill:var(--soft);font-variant-numeric:tabular-nums}svg .name{font-size:12px}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.mark{stroke:var(--mark);stroke-width:1.2;stroke-dasharray:5 4}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.dots{fill:none;stroke-width:4;stroke-linecap:round;opacity:.55}
.c1{stroke:var(--c1);background:var(--c1)}.c2{stroke:var(--c2);background:var(--c2)}
.c3{stroke:var(--c3);background:var(--c3)}
.line.dash{stroke-dasharray:6 4}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;color:var(--soft)}
.key{display:inline-block;width:16px;height:3px;vertical-align:middle;margin-right:6px}
.key.dash{width:6px;box-shadow:10px 0 0 var(--c2);margin-right:16px}
.scroll{overflow-x:auto;margin-bottom:18px}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:500}th:first-child,td:first-child{text-align:left}
td.text{text-align:left;white-space:normal}.bad{color:var(--bad)}.good{color:var(--good)}.empty{color:var(--soft)}
code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace}
"""


def page(runs: Sequence[Document], names: Sequence[str], comparison: Comparison | None = None) -> str:
    """Returns the page for one or two runs (figures.build_document). `names` are their labels."""
    several = len(runs) > 1
    labelled = list(zip(runs, names if several else [""], strict=True))
    title = f"Load tests: {names[0]} and {names[1]}" if several else "Load test"
    sections = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p class=sub>{escape(_headline(document, name))}</p>" for document, name in labelled),
        *(_warnings(document, name) for document, name in labelled),
        "" if several else _tiles(runs[0]),
        "" if comparison is None else _compared(comparison, names),
        "<h2>Latencies</h2>",
        *(_latencies(document, name) for document, name in labelled),
        f"<div class=charts>{''.join(_charts(runs, names))}</div>",
        *(_objectives(document, name) + _errors(document, name) for document, name in labelled),
        _settings(labelled),
    ]
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8>"
        f'<meta name=viewport content="width=device-width,initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _headline(document: Document, name: str) -> str:
    config, began = document["config"], datetime.fromtimestamp(document["began_at"], UTC)
    what = f"{describe_load(config)}, {config['protocol']} {config['endpoint']}, {document['model']} at {config['url']}"
    return f"{name and f'{name}: '}{what}; {document['seconds']:.1f} s from {began:%Y-%m-%d %H:%M:%S} UTC"


def describe_load(config: Mapping[str, Any]) -> str:
    """Returns the load in words: users, rate or trace."""
    if config["users"] is not None:
        return f"{config['users']} users" + (f", {config['think_s']:g} s think time" if config["think_s"] else "")
    if config["rate"] is not None:
        shape = {"gamma": f" (gamma, {config['burstiness']:g})", "onoff": " (on and off)", "constant": " (even)"}
        return f"{config['rate']:g} requests/s{shape.get(config['arrivals'], ' (Poisson)')}"
    return f"{config['trace']} as recorded" + (f", {config['speed']:g} times as fast" if config["speed"] != 1 else "")


def _warnings(document: Document, name: str) -> str:
    items = "".join(f"<li>{escape(name and f'{name}: ')}{escape(text)}</li>" for text in warnings(document))
    return items and f"<ul class=warn>{items}</ul>"


def _tiles(document: Document) -> str:
    rates, requests, latencies = document["rates"], document["requests"], document["latencies_ms"]
    goodput, cached = document["goodput"], document["tokens"]["cached_share"]
    tiles = {
        "requests answered": f"{requests['answered']} of {requests['sent']}",
        "requests/s answered": f"{rates['answered_per_s']:.2f}",
        "output tokens/s": f"{rates['output_tokens_per_s']:.1f}",
        "in flight, mean": f"{rates['mean_running']:.1f}",
        "TTFT p50 / p99": f"{ms(latencies['ttft']['p50'])} / {ms(latencies['ttft']['p99'])}",
        "ITL p50 / p99": f"{ms(latencies['itl']['p50'])} / {ms(latencies['itl']['p99'])}",
    }
    if goodput is not None:
        tiles["goodput"] = f"{goodput['per_s']:.2f}/s, {goodput['share']:.1%}"
    if cached is not None:
        tiles["prompt tokens from a cache"] = f"{cached:.1%}"
    tiles["failed"] = str(requests["failed"])
    cells = "".join(f"<div class=tile><b>{value}</b><span>{label}</span></div>" for label, value in tiles.items())
    return f"<div class=tiles>{cells}</div>"


def ms(value: float | None) -> str:
    """Formats milliseconds."""
    if value is None:
        return ABSENT
    if value >= 10_000:
        return f"{value / 1e3:.1f} s"
    return f"{value:.{0 if value >= 100 else 1 if value >= 1 else 2}f} ms"


def _latencies(document: Document, name: str) -> str:
    rows = []
    for key, label in LATENCIES.items():
        figures = document["latencies_ms"][key]
        cells = [str(figures["count"]), *(ms(figures[column]) for column in ("mean", *PERCENTILES, "max"))]
        rows.append((label if "…" in label else f"{key}: {label}", *cells))
    return _table([name or "milliseconds", "values", "mean", *PERCENTILES, "max"], rows)


def _compared(comparison: Comparison, names: Sequence[str]) -> str:
    rows = [
        [escape(row.name), _value(row.a, row), _value(row.b, row), _change(row), row.verdict or ABSENT]
        for row in comparison.rows
    ]
    note = "significant: the 95% confidence intervals of the percentiles do not overlap. Others may be chance."
    table = _table(["", *map(escape, names), "change", "significant"], rows, raw=True)
    return f"<h2>Compared</h2><p class=sub>{note}</p>{table}"


def _value(value: float | None, row: ComparisonRow) -> str:
    if value is None:
        return ABSENT
    return ms(value) if row.unit == "ms" else f"{value:.1%}" if "share" in row.name else f"{value:.2f}{row.unit}"


def _change(row: ComparisonRow) -> str:
    tone = "" if row.negligible else "bad" if row.worse_by else "good"
    return ABSENT if row.change is None else f'<span class="{tone}">{row.change:+.1%}</span>'


def _charts(runs: Sequence[Document], names: Sequence[str]) -> Iterable[str]:
    """Yields the charts. Each run has its own colour; the lines of a single run have one colour each."""
    several, numbered = len(runs) > 1, list(zip(runs, names, (1, 2), strict=False))
    slo: Mapping[str, float] = runs[0]["config"]["slo"]
    for key, label in (("ttft", "Time to first token"), ("itl", "Time between tokens"), ("e2e", "Whole answer")):
        series = []
        for document, name, colour in numbered:
            series.append(Series(name if several else "from sending", _curve(document, key), colour))
            if not several and key != "itl":
                series.append(Series("from the intended time", _curve(document, f"{key}_intended"), 2, dashed=True))
        marks = [Mark(f"objective {ms(1e3 * slo[key])}", 1e3 * slo[key])] if key in slo else []
        share = Axis("share of all", low=0.0, high=1.0)
        yield chart(f"{label}: cumulative share", series, Axis("ms", log=True), share, marks)

    def over_time(title: str, series: Sequence[Series], unit: str) -> str:
        return chart(title, series, Axis("seconds of the run", low=0.0), Axis(unit, low=0.0))

    def rates(key: str) -> list[Series]:
        return [Series(name, _binned(document, key), colour) for document, name, colour in numbered]

    yield over_time("Output tokens per second", rates("tokens"), "tokens/s")
    in_flight = [Series(n, _binned(document, "running", per_s=False), colour) for document, n, colour in numbered]
    yield over_time("Requests in flight", in_flight, "requests")
    if several:
        yield over_time("Requests answered per second", rates("ended"), "requests/s")
    else:
        shown = ["sent", "ended", "failed"] if any(runs[0]["series"]["failed"]) else ["sent", "ended"]
        flow = [Series(key, _binned(runs[0], key), colour) for colour, key in enumerate(shown, 1)]
        yield over_time("Requests per second", flow, "requests/s")
    for title, column in (("Time to first token over the run", "ttft_ms"), ("How late requests were sent", "lag_ms")):
        dots = [Series(name, _dots(document, column), colour, dots=True) for document, name, colour in numbered]
        yield over_time(title, dots, "ms")


def _curve(document: Document, key: str) -> list[tuple[float, float]]:
    return list(zip(document["curves_ms"][key], CURVE, strict=False))


def _binned(document: Document, key: str, *, per_s: bool = True) -> list[tuple[float, float]]:
    """Returns (middle of the bin, rate or plain value). Omits the incomplete last bin."""
    bin_s, values = document["series"]["bin_s"], document["series"][key]
    shown = values[:-1] if len(values) > 1 else values
    return [((n + 0.5) * bin_s, value / bin_s if per_s else value) for n, value in enumerate(shown)]


def _dots(document: Document, column: str) -> list[tuple[float, float]]:
    records = document["records"]
    return [(t, v) for t, v in zip(records["intended_s"], records[column], strict=True) if v is not None]


def _objectives(document: Document, name: str) -> str:
    goodput = document["goodput"]
    if goodput is None:
        return ""
    slo = document["config"]["slo"]
    rows = [(OBJECTIVES[key], ms(1e3 * most), f"{goodput['kept'][key]:.2%}") for key, most in slo.items()]
    rows.append(("all of them, of all requests", "", f"{goodput['share']:.2%}"))
    return f"<h2>Objectives{escape(name and f' of {name}')}</h2>" + _table(["", "", "kept"], rows)


def _errors(document: Document, name: str) -> str:
    if not document["errors"]:
        return ""
    rows = [[escape(e["kind"]), str(e["count"]), escape(" · ".join(e["messages"]))] for e in document["errors"]]
    body = "".join(f"<tr><td>{a}</td><td>{b}</td><td class=text>{c}</td></tr>" for a, b, c in rows)
    head = "<tr><th scope=col>kind<th scope=col>requests<th scope=col style=text-align:left>for example</tr>"
    title = f"<h2>Errors{escape(name and f' of {name}')}</h2>"
    return f"{title}<div class=scroll><table><thead>{head}</thead><tbody>{body}</tbody></table></div>"


def _settings(labelled: Sequence[tuple[Document, str]]) -> str:
    configs = [document["config"] for document, _ in labelled]
    rows = [
        (key.replace("_", " "), *(str(config.get(key, ABSENT)) for config in configs))
        for key in sorted({key for config in configs for key in config})
        if any(config.get(key) not in (None, {}, ()) for config in configs)
    ]
    rows.append(("version of Baton's load test", *(document["version"] for document, _ in labelled)))
    return "<h2>Settings</h2>" + _table(["", *(name or "value" for _, name in labelled)], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, raw: bool = False) -> str:
    text = str if raw else escape
    top = "".join(f"<th scope=col>{text(h)}</th>" for h in head)
    body = "".join(f"<tr>{''.join(f'<td>{text(c)}</td>' for c in row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
