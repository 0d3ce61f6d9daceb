"""Draws line and scatter charts as inline SVG. The style sheet of the page sets colours and fonts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 280
LEFT, TOP = 58, 12
END, FLOOR = WIDTH - 14, HEIGHT - 42  # The last pixels of the plot.
MAX_POINTS = 2000


@dataclass(frozen=True, slots=True)
class Series:
    """One line or one set of dots."""

    name: str  # Legend text.
    points: Sequence[tuple[float, float]]  # (x, y), in order of x.
    colour: int = 1  # Number of the colour in the style sheet: 1, 2 or 3.
    dots: bool = False  # Draws dots instead of a line.
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    log: bool = False  # Logarithmic scale. Ignores `low` and `high`.
    low: float | None = None  # Limits; None: from the data.
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled vertical line at `x`."""

    label: str
    x: float


def chart(title: str, series: Sequence[Series], x: Axis, y: Axis, marks: Sequence[Mark] = ()) -> str:
    """Returns a <figure> with caption, legend and SVG. The aria-label describes the axes and series."""
    shown = [s for s in series if s.points]
    if not shown:
        return f"<figure><figcaption>{escape(title)}</figcaption><p class=empty>nothing to show</p></figure>"
    x_scale = _Scale.of(x, [p[0] for s in shown for p in s.points] + [m.x for m in marks], (LEFT, END))
    y_scale = _Scale.of(y, [p[1] for s in shown for p in s.points], (FLOOR, TOP))
    parts = [*_grid(x_scale, y_scale, x, y), *(_mark(mark, x_scale) for mark in marks)]
    parts += [_line_or_dots(s, x_scale, y_scale) for s in shown]
    legend = "".join(f'<span><i class="key c{s.colour}{" dash" * s.dashed}"></i>{escape(s.name)}</span>' for s in shown)
    legend = f"<div class=legend>{legend}</div>" if len(shown) > 1 else ""
    described = f"{y.label} over {x.label}: {', '.join(s.name for s in shown)}"
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{legend}"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}. {escape(described)}">'
        f"{''.join(parts)}</svg></figure>"
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to the pixels of an axis."""

    low: float
    high: float
    log: bool
    pixels: tuple[int, int]  # First and last.

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float], pixels: tuple[int, int]) -> _Scale:
        if axis.log:
            above = [v for v in values if v > 0] or [1.0]
            low, high = min(above), max(above)
            return cls(low / 1.1, max(high, low * 2) * 1.05, True, pixels)
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if high - low < 1e-9 * max(1.0, abs(low), abs(high)):
            high = low + max(1.0, abs(low))
        return cls(low, high if axis.high is not None else high + 0.04 * (high - low), False, pixels)

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log(max(v, self.low)) for v in (value, low, high))
        first, last = self.pixels
        return first + (value - low) / (high - low) * (last - first)

    def ticks(self) -> list[float]:
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) <= 4 else (1,)
            ticks = [m * 10.0**d for d in decades[:: -(-len(decades) // 10)] for m in steps]
            return [tick for tick in ticks if self.low <= tick <= self.high]
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _grid(x_scale: _Scale, y_scale: _Scale, x: Axis, y: Axis) -> list[str]:
    parts = []
    for tick in y_scale.ticks():
        at = y_scale.at(tick)
        parts.append(f'<path class=grid d="M{LEFT} {at:.1f}H{END}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick in x_scale.ticks():
        at = x_scale.at(tick)
        parts.append(f'<path class=grid d="M{at:.1f} {TOP}V{FLOOR}"/>')
        parts.append(f'<text x="{at:.1f}" y="{FLOOR + 16}" text-anchor="middle">{_number(tick)}</text>')
    middle, centre = (LEFT + END) / 2, (TOP + FLOOR) / 2
    return [
        *parts,
        f'<path class=axis d="M{LEFT} {FLOOR}H{END}"/>',
        f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle" class=name>{escape(x.label)}</text>',
        f'<text x="14" y="{centre:.0f}" text-anchor="middle" class=name transform="rotate(-90 14 {centre:.0f})">'
        f"{escape(y.label)}</text>",
    ]


def _mark(mark: Mark, x_scale: _Scale) -> str:
    at = x_scale.at(mark.x)
    anchor, side = ("end", -4) if at > (LEFT + END) / 2 else ("start", 4)
    text = f'<text x="{at + side:.1f}" y="{FLOOR - 6}" text-anchor="{anchor}">{escape(mark.label)}</text>'
    return f'<path class=mark d="M{at:.1f} {TOP}V{FLOOR}"/>{text}'


def _line_or_dots(series: Series, x_scale: _Scale, y_scale: _Scale) -> str:
    points = [f"{x_scale.at(a):.1f} {y_scale.at(b):.1f}" for a, b in series.points]
    if series.dots:
        shown = points[:: -(-len(points) // MAX_POINTS)]
        return f'<path class="dots c{series.colour}" d="{"".join(f"M{point}h0" for point in shown)}"/>'
    return f'<path class="line c{series.colour}{" dash" * series.dashed}" d="M{"L".join(points)}"/>'


def _number(value: float) -> str:
    if value and abs(value) >= 10_000:
        return f"{value / 1e3:g}k" if abs(value) < 1e6 else f"{value / 1e6:g}M"
    return f"{value:.6g}"
