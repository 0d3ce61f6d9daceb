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

LATENCIES = {
    "ttft": "time to first token",
    "ttft_intended": "… from the intended time",
    "itl": "between tokens",
    "tpot": "per output token",
    "e2e": "whole answer",
    "e2e_intended": "… from the intended time",
    "lag": "sent lags by",
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


def page(runs: Sequence[Mapping[str, Any]], names: Sequence[str], comparison: Comparison | None = None) -> str:
    """Returns the page for one or two runs (figures.build_document). `names` are their labels."""
    title = "Load test" if len(runs) == 1 else f"Load tests: {names[0]} and {names[1]}"
    sections = [f"<h1>{escape(title)}</h1>"]
    for document, name in zip(runs, names, strict=True):
        sections.append(f"<p class=sub>{escape(_headline(document, name if len(runs) > 1 else ''))}</p>")
    for document, name in zip(runs, names, strict=True):
        sections.append(_warnings(document, name if len(runs) > 1 else ""))
    if len(runs) == 1:
        sections.append(_tiles(runs[0]))
    if comparison is not None:
        sections.append(_compared(comparison, names))
    sections.append("<h2>Latencies</h2>")
    sections += [
        _latencies(document, name if len(runs) > 1 else "") for document, name in zip(runs, names, strict=True)
    ]
    sections.append(f"<div class=charts>{''.join(_charts(runs, names))}</div>")
    for document, name in zip(runs, names, strict=True):
        sections.append(_objectives(document, name if len(runs) > 1 else ""))
        sections.append(_errors(document, name if len(runs) > 1 else ""))
    sections.append(_settings(runs, names))
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8>"
        f'<meta name=viewport content="width=device-width,initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _headline(document: Mapping[str, Any], name: str) -> str:
    config, began = document["config"], datetime.fromtimestamp(document["began_at"], UTC)
    what = f"{describe_load(config)}, {config['protocol']} {config['endpoint']}, {document['model']} at {config['url']}"
    return f"{name + ': ' if name else ''}{what}; {document['seconds']:.1f} s from {began:%Y-%m-%d %H:%M:%S} UTC"


def describe_load(config: Mapping[str, Any]) -> str:
    """Describes the describe_load: users, rate or trace."""
    if config["users"] is not None:
        return f"{config['users']} users" + (f", {config['think_s']:g} s think time" if config["think_s"] else "")
    if config["rate"] is not None:
        shape = {"gamma": f" (gamma, {config['burstiness']:g})", "onoff": " (on and off)", "constant": " (even)"}
        return f"{config['rate']:g} requests/s{shape.get(config['arrivals'], ' (Poisson)')}"
    return f"{config['trace']} as recorded" + (f", {config['speed']:g} times as fast" if config["speed"] != 1 else "")


def _warnings(document: Mapping[str, Any], name: str) -> str:
    messages = warnings(document)
    items = "".join(f"<li>{escape(name + ': ' if name else '')}{escape(text)}</li>" for text in messages)
    return f"<ul class=warn>{items}</ul>" if messages else ""


def _tiles(document: Mapping[str, Any]) -> str:
    rates, requests, latencies, goodput = (
        document["rates"],
        document["requests"],
        document["latencies_ms"],
        document["goodput"],
    )
    tiles = [
        ("requests answered", f"{requests['answered']} of {requests['sent']}"),
        ("requests/s answered", f"{rates['answered_per_s']:.2f}"),
        ("output tokens/s", f"{rates['output_tokens_per_s']:.1f}"),
        ("in flight, mean", f"{rates['mean_running']:.1f}"),
        ("TTFT p50 / p99", f"{ms(latencies['ttft']['p50'])} / {ms(latencies['ttft']['p99'])}"),
        ("ITL p50 / p99", f"{ms(latencies['itl']['p50'])} / {ms(latencies['itl']['p99'])}"),
    ]
    if goodput is not None:
        tiles.append(("goodput", f"{goodput['per_s']:.2f}/s, {goodput['share']:.1%}"))
    cached = document["tokens"]["cached_share"]
    if cached is not None:
        tiles.append(("prompt tokens from a cache", f"{cached:.1%}"))
    tiles.append(("failed", str(requests["failed"])))
    return (
        "<div class=tiles>" + "".join(f"<div class=tile><b>{b}</b><span>{a}</span></div>" for a, b in tiles) + "</div>"
    )


def ms(value: float | None) -> str:
    """Formats milliseconds."""
    if value is None:
        return ABSENT
    if value >= 10_000:
        return f"{value / 1e3:.1f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def _latencies(document: Mapping[str, Any], name: str) -> str:
    rows = []
    for key, label in LATENCIES.items():
        figures = document["latencies_ms"][key]
        cells = [str(figures["count"]), *(ms(figures[column]) for column in ("mean", *PERCENTILES, "max"))]
        rows.append((f"{key.partition('_')[0]}: {label}" if "…" not in label else label, *cells))
    return _table([f"{name or 'milliseconds'}", "values", "mean", *PERCENTILES, "max"], rows)


def _compared(comparison: Comparison, names: Sequence[str]) -> str:
    rows = [
        [escape(row.name), *(_value(v, row) for v in (row.a, row.b)), _change(row), _verdict(row)]
        for row in comparison.rows
    ]
    note = (
        "<p class=sub>significant: the 95% confidence intervals of the percentiles do not overlap. "
        "The other differences may be chance.</p>"
    )
    return f"<h2>Compared</h2>{note}" + _table(["", *map(escape, names), "change", "significant"], rows, raw=True)


def _value(value: float | None, row: ComparisonRow) -> str:
    if value is None:
        return ABSENT
    return ms(value) if row.unit == "ms" else f"{value:.1%}" if "share" in row.name else f"{value:.2f}{row.unit}"


def _change(row: ComparisonRow) -> str:
    if row.change is None:
        return ABSENT
    tone = "" if row.significant is False or abs(row.change) < 0.005 else "bad" if row.worse_by else "good"
    return f'<span class="{tone}">{row.change:+.1%}</span>'


def _verdict(row: ComparisonRow) -> str:
    return ABSENT if row.significant is None else "yes" if row.significant else "no"


def _charts(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterable[str]:
    several = len(runs) > 1
    share = Axis("share of all", low=0.0, high=1.0)
    slo: Mapping[str, float] = runs[0]["config"]["slo"]
    for key, label in (("ttft", "Time to first token"), ("itl", "Time between tokens"), ("e2e", "Whole answer")):
        series = []
        for i, (document, name) in enumerate(zip(runs, names, strict=True)):
            series.append(Series(name if several else "from sending", _curve(document, key), i + 1))
            if not several and key != "itl":
                series.append(Series("from the intended time", _curve(document, f"{key}_intended"), 2, dashed=True))
        marks = [Mark(f"objective {ms(1e3 * slo[key])}", x=1e3 * slo[key])] if key in slo else []
        yield chart(f"{label}: cumulative share", series, Axis("ms", log=True), share, marks)
    time = Axis("seconds of the run", low=0.0)
    yield chart("Output tokens per second", _binned(runs, names, "tokens"), time, Axis("tokens/s", low=0.0))
    in_flight = _binned(runs, names, "running", each=True)
    yield chart("Requests in flight", in_flight, time, Axis("requests", low=0.0))
    if several:
        flow = _binned(runs, names, "ended")
        yield chart("Requests answered per second", flow, time, Axis("requests/s", low=0.0))
    else:
        flow = [
            *_binned(runs, ["sent"], "sent"),
            *_binned(runs, ["ended"], "ended", colour=2),
            *(_binned(runs, ["failed"], "failed", colour=3) if any(runs[0]["series"]["failed"]) else []),
        ]
        yield chart("Requests per second", flow, time, Axis("requests/s", low=0.0))
    dots = [Series(name, _dots(document, "ttft_ms"), i + 1, dots=True) for i, (document, name) in _each(runs, names)]
    yield chart("Time to first token over the run", dots, time, Axis("ms", low=0.0))
    lags = [Series(name, _dots(document, "lag_ms"), i + 1, dots=True) for i, (document, name) in _each(runs, names)]
    yield chart("How lags requests were sent", lags, time, Axis("ms", low=0.0))


def _each(
    runs: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Iterable[tuple[int, tuple[Mapping[str, Any], str]]]:
    return enumerate(zip(runs, names, strict=True))


def _curve(document: Mapping[str, Any], key: str) -> list[tuple[float, float]]:
    return list(zip(document["curves_ms"][key], CURVE, strict=False))


def _binned(
    runs: Sequence[Mapping[str, Any]], names: Sequence[str], key: str, *, each: bool = False, colour: int = 0
) -> list[Series]:
    """Returns (middle of the bin, rate) points, or the plain values if `each` is set. Omits the incomplete last bin."""
    lines = []
    for i, (document, name) in _each(runs, names):
        series = document["series"]
        bin_s, values = series["bin_s"], series[key]
        shown = values[:-1] if len(values) > 1 else values
        points = [((n + 0.5) * bin_s, value if each else value / bin_s) for n, value in enumerate(shown)]
        lines.append(Series(name, points, colour or i + 1))
    return lines


def _dots(document: Mapping[str, Any], column: str) -> list[tuple[float, float]]:
    records = document["records"]
    return [(t, v) for t, v in zip(records["intended_s"], records[column], strict=True) if v is not None]


def _objectives(document: Mapping[str, Any], name: str) -> str:
    goodput = document["goodput"]
    if goodput is None:
        return ""
    rows = [
        (OBJECTIVES[key], ms(1e3 * most), f"{goodput['kept'][key]:.2%}")
        for key, most in document["config"]["slo"].items()
    ]
    rows.append(("all of them, of all requests", "", f"{goodput['share']:.2%}"))
    return f"<h2>Objectives{escape(' of ' + name if name else '')}</h2>" + _table(["", "", "kept"], rows)


def _errors(document: Mapping[str, Any], name: str) -> str:
    if not document["errors"]:
        return ""
    rows = [[escape(e["kind"]), str(e["count"]), escape(" · ".join(e["messages"]))] for e in document["errors"]]
    body = "".join(f"<tr><td>{a}</td><td>{b}</td><td class=text>{c}</td></tr>" for a, b, c in rows)
    head = "<tr><th scope=col>kind<th scope=col>requests<th scope=col style=text-align:left>for example</tr>"
    title = f"<h2>Errors{escape(' of ' + name if name else '')}</h2>"
    return f"{title}<div class=scroll><table><thead>{head}</thead><tbody>{body}</tbody></table></div>"


def _settings(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    keys = sorted({key for document in runs for key in document["config"]})
    rows = [
        (key.replace("_", " "), *(str(document["config"].get(key, ABSENT)) for document in runs))
        for key in keys
        if any(document["config"].get(key) not in (None, {}, ()) for document in runs)
    ]
    rows.append(("version of Baton's describe_load test", *(document["version"] for document in runs)))
    return "<h2>Settings</h2>" + _table(["", *(names if len(runs) > 1 else ["value"])], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, raw: bool = False) -> str:
    def text(value: str) -> str:
        return value if raw else escape(value)

    top = "".join(f"<th scope=col>{text(h)}</th>" for h in head)
    body = "".join(f"<tr>{''.join(f'<td>{text(c)}</td>' for c in row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
