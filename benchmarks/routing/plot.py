"""Draws time to first token by policy for growing numbers of pods, as SVG without a library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

PANEL_W, PANEL_H = 400, 300
LEFT, TOP, GAP, BOTTOM, RIGHT = 70, 92, 90, 66, 150
COLOURS = {"round_robin": "#c2410c", "least_loaded": "#7c6f9f", "cost": "#0f766e"}
NAMES = {"round_robin": "round robin", "least_loaded": "least loaded", "cost": "cost (default)"}
SUBTITLE = "simulated pods of 8,000 tokens/s and 4,000 cached blocks of 512 tokens; the same load on each pod"

Row = Mapping[str, object]


def write(path: Path, rows: Sequence[Row]) -> None:
    """Writes one panel per trace, with p50 as a solid line and p99 as a dashed line."""
    traces = [name for name in dict.fromkeys(str(r["trace"]) for r in rows) if "," not in name and ":" not in name]
    panels = []
    for i, trace in enumerate(traces):
        shown = [r for r in rows if r["trace"] == trace and r["kind"] == "fifo" and r["policy"] in COLOURS]
        panels.append(_panel(LEFT + i * (PANEL_W + GAP), trace, shown))
    width = LEFT + len(traces) * PANEL_W + (len(traces) - 1) * GAP + RIGHT
    height = TOP + PANEL_H + BOTTOM
    legend_x = width - RIGHT + 18
    legend = [
        f'<g><line x1="{legend_x}" x2="{legend_x + 24}" y1="{TOP + 14 + 26 * i}" y2="{TOP + 14 + 26 * i}" '
        f'stroke="{COLOURS[p]}" stroke-width="2.5"/>{_text(legend_x + 32, TOP + 18 + 26 * i, NAMES[p])}</g>'
        for i, p in enumerate(COLOURS)
    ]
    below = TOP + 26 * len(COLOURS) + 24
    for i, (name, dash) in enumerate((("median", ""), ("99th percentile", ' stroke-dasharray="5 4"'))):
        y = below + 26 * i
        legend.append(
            f'<line x1="{legend_x}" x2="{legend_x + 24}" y1="{y}" y2="{y}" stroke="#57534e" stroke-width="2"{dash}/>'
            + _text(legend_x + 32, y + 4, name)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#292524">'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        + _text(LEFT - 44, 30, "Time to first token by routing policy, as pods grow", size=18, weight="600")
        + _text(LEFT - 44, 52, SUBTITLE, colour="#57534e")
        + "".join(panels)
        + "".join(legend)
        + "</svg>\n"
    )


def _panel(x: int, trace: str, rows: Sequence[Row]) -> str:
    pods = sorted({int(str(r["pods"])) for r in rows})
    values = [float(str(r[key])) for r in rows for key in ("ttft_p50_s", "ttft_p99_s")]
    low, high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))

    def px(count: int) -> float:
        first, last = math.log2(pods[0]), math.log2(pods[-1])
        return x + PANEL_W * (math.log2(count) - first) / max(1e-9, last - first)

    def py(seconds: float) -> float:
        return TOP + PANEL_H * (1 - (math.log10(seconds) - math.log10(low)) / (math.log10(high) - math.log10(low)))

    parts = [_text(x, TOP - 14, f"{trace} trace", weight="600")]
    for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
        y = py(10.0**power)
        parts.append(f'<line x1="{x}" x2="{x + PANEL_W}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d6d3d1"/>')
        parts.append(_text(x - 8, y + 4, f"{10.0**power:g} s", anchor="end", colour="#57534e"))
        for step in range(2, 10):
            if 10.0**power * step < high:
                y = py(10.0**power * step)
                parts.append(f'<line x1="{x}" x2="{x + PANEL_W}" y1="{y:.1f}" y2="{y:.1f}" stroke="#f0eeec"/>')
    for count in pods:
        parts.append(_text(px(count), TOP + PANEL_H + 20, str(count), anchor="middle", colour="#57534e"))
    parts.append(_text(x + PANEL_W / 2, TOP + PANEL_H + 44, "prefill pods", anchor="middle"))
    for policy, colour in COLOURS.items():
        for key, dash in (("ttft_p99_s", ' stroke-dasharray="5 4"'), ("ttft_p50_s", "")):
            points = sorted((int(str(r["pods"])), float(str(r[key]))) for r in rows if r["policy"] == policy)
            line = " ".join(f"{px(count):.1f},{py(seconds):.1f}" for count, seconds in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.2"{dash}/>')
            parts += [
                f'<circle cx="{px(count):.1f}" cy="{py(seconds):.1f}" r="3.4" fill="{"#ffffff" if dash else colour}" '
                f'stroke="{colour}" stroke-width="1.8"/>'
                for count, seconds in points
            ]
    return "".join(parts)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 13,
    weight: str = "400",
    anchor: str = "start",
    colour: str = "#292524",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(text)}</text>'
    )
