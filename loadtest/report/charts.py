"""Draws line and scatter charts as inline SVG. The style sheet of the page sets colours and fonts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 42
MAX_POINTS = 2000


@dataclass(frozen=True, slots=True)
class Series:
    """One line or one set of dots."""

    #: Legend text.
    name: str
    #: (x, y), in order of x.
    points: Sequence[tuple[float, float]]
    #: Number of the colour in the style sheet: 1, 2 or 3.
    colour: int = 1
    #: Draws dots instead of a line.
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis."""

    label: str
    #: Logarithmic scale. Ignores `low` and `high`.
    log: bool = False
    #: Limits; None: from the data.
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled vertical line at `x`, or a horizontal line at `y`."""

    label: str
    x: float | None = None
    y: float | None = None


def chart(title: str, series: Sequence[Series], x: Axis, y: Axis, marks: Sequence[Mark] = ()) -> str:
    """Returns a <figure> with caption, legend and SVG. The aria-label describes the axes and series."""
    shown = [s for s in series if s.points]
    if not shown:
        return f"<figure><figcaption>{escape(title)}</figcaption><p class=empty>nothing to show</p></figure>"
    x_scale = _Scale.of(x, [p[0] for s in shown for p in s.points] + [m.x for m in marks if m.x is not None])
    y_scale = _Scale.of(y, [p[1] for s in shown for p in s.points] + [m.y for m in marks if m.y is not None])
    parts = [*_grid(x_scale, y_scale, x, y)]
    for mark in marks:
        parts.append(_mark(mark, x_scale, y_scale))
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
    """Maps values to shares of an axis, 0 to 1."""

    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float]) -> _Scale:
        if axis.log:
            above = [v for v in values if v > 0] or [1.0]
            low, high = min(above), max(above)
            return cls(low / 1.1, max(high, low * 2) * 1.05, True)
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if high - low < 1e-9 * max(1.0, abs(low), abs(high)):
            high = low + max(1.0, abs(low))
        return cls(low, high if axis.high is not None else high + 0.04 * (high - low), False)

    def share(self, value: float) -> float:
        if self.log:
            value, low, high = (math.log(max(v, self.low)) for v in (value, self.low, self.high))
            return (value - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if len(decades) <= 4 else (1,)
            return [
                t
                for d in decades[:: -(-len(decades) // 10)]
                for m in steps
                if self.low <= (t := m * 10.0**d) <= self.high
            ]
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _x(scale: _Scale, value: float) -> float:
    return LEFT + scale.share(value) * (WIDTH - LEFT - RIGHT)


def _y(scale: _Scale, value: float) -> float:
    return HEIGHT - BOTTOM - scale.share(value) * (HEIGHT - TOP - BOTTOM)


def _grid(x_scale: _Scale, y_scale: _Scale, x: Axis, y: Axis) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in y_scale.ticks():
        at = _y(y_scale, tick)
        parts.append(f'<path class=grid d="M{LEFT} {at:.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick in x_scale.ticks():
        at = _x(x_scale, tick)
        parts.append(f'<path class=grid d="M{at:.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{_number(tick)}</text>')
    parts.append(f'<path class=axis d="M{LEFT} {bottom}H{right}"/>')
    middle = (LEFT + right) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle" class=name>{escape(x.label)}</text>')
    centre = (TOP + bottom) / 2
    parts.append(
        f'<text x="14" y="{centre:.0f}" text-anchor="middle" class=name transform="rotate(-90 14 {centre:.0f})">'
        f"{escape(y.label)}</text>"
    )
    return parts


def _mark(mark: Mark, x_scale: _Scale, y_scale: _Scale) -> str:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    if mark.x is not None:
        at = _x(x_scale, mark.x)
        anchor = "end" if at > (LEFT + right) / 2 else "start"
        side = -4 if anchor == "end" else 4
        text = f'<text x="{at + side:.1f}" y="{bottom - 6}" text-anchor="{anchor}">{escape(mark.label)}</text>'
        return f'<path class=mark d="M{at:.1f} {TOP}V{bottom}"/>{text}'
    at = _y(y_scale, mark.y or 0.0)
    text = f'<text x="{right - 4}" y="{at - 5:.1f}" text-anchor="end">{escape(mark.label)}</text>'
    return f'<path class=mark d="M{LEFT} {at:.1f}H{right}"/>{text}'


def _line_or_dots(series: Series, x_scale: _Scale, y_scale: _Scale) -> str:
    points = series.points
    if series.dots:
        every = -(-len(points) // MAX_POINTS)
        where = "".join(f"M{_x(x_scale, a):.1f} {_y(y_scale, b):.1f}h0" for a, b in points[::every])
        return f'<path class="dots c{series.colour}" d="{where}"/>'
    line = "L".join(f"{_x(x_scale, a):.1f} {_y(y_scale, b):.1f}" for a, b in points)
    return f'<path class="line c{series.colour}{" dash" * series.dashed}" d="M{line}"/>'


def _number(value: float) -> str:
    if value and abs(value) >= 10_000:
        return f"{value / 1e3:g}k" if abs(value) < 1e6 else f"{value / 1e6:g}M"
    return f"{value:.6g}"
