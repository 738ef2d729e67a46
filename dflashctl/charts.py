"""Charts as inline SVG, in the standard library alone: a line of figures over steps, and bars.

Pure: numbers in, text out. Colours are variables of the page, so that one file reads well on light and on dark. Every
point and bar bears its figure as a `<title>`, which a browser shows under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 34  # room around the plot for what is written there
POINTS = 300  # most points of a line; more are averaged
COLOURS = ("var(--one)", "var(--two)")
Point = tuple[float, float]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def figure(value: float) -> str:
    """A number in few characters: `0.25`, `12.5k`, `1.2M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"


def thinned(points: Sequence[Point], most: int = POINTS) -> list[Point]:
    """At most `most` points: the means of neighbours; what is no finite number is left out."""
    found = [point for point in points if math.isfinite(point[1])]
    size = -(-len(found) // most) or 1
    groups = (found[at : at + size] for at in range(0, len(found), size))
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def lines(
    title: str,
    series: Sequence[tuple[str, Sequence[Point]]],
    across: str = "step",
    zero: bool = True,
    dots: bool = False,
) -> str:
    """A chart of up to two lines; zero: the scale begins at 0. An empty string where there is no point."""
    drawn = [(name, thinned(points)) for name, points in series]
    drawn = [(name, points) for name, points in drawn if points]
    if not drawn:
        return ""
    xs = [x for _, points in drawn for x, _ in points]
    ys = [y for _, points in drawn for _, y in points]
    x_range = (min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1)
    low, high = (min(0.0, *ys) if zero else min(ys)), max(ys)
    y_range = (low, high if high > low else low + 1)
    body = [*_grid(x_range, y_range, across)]
    for (name, points), colour in zip(drawn, COLOURS, strict=False):
        places = [(_x(x, x_range), _y(y, y_range), x, y) for x, y in points]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in places)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for px, py, x, y in places:
            seen = "1" if dots or len(places) == 1 else "0"
            body.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}" opacity="{seen}">'
                f"<title>{escape(name)} {figure(y)} at {escape(across)} {figure(x)}</title></circle>"
            )
    return _framed(title, [name for name, _ in drawn], body)


def bars(title: str, entries: Sequence[tuple[str, float]], across: str, share: bool = False) -> str:
    """A chart of bars with their labels; share: heights are shares of 1. An empty string without entries."""
    if not entries:
        return ""
    high = 1.0 if share else max(max(value for _, value in entries), 1e-9)
    body = [*_grid(None, (0.0, high), across)]
    slot = (WIDTH - LEFT - RIGHT) / len(entries)
    every = -(-len(entries) // 16)  # labels that have room
    for number, (label, value) in enumerate(entries):
        x, y = LEFT + slot * number, _y(value, (0.0, high))
        words = f"{value:.1%}" if share else figure(value)
        body.append(
            f'<rect x="{x + slot * 0.12:.1f}" y="{y:.1f}" width="{slot * 0.76:.1f}" height="{HEIGHT - BOTTOM - y:.1f}" '
            f'fill="{COLOURS[0]}"><title>{escape(label)}: {words}</title></rect>'
        )
        if number % every == 0:
            body.append(f'<text x="{x + slot / 2:.1f}" y="{HEIGHT - 20}" text-anchor="middle">{escape(label)}</text>')
    return _framed(title, [], body)


def _framed(title: str, names: Sequence[str], body: Sequence[str]) -> str:
    legend = "".join(
        f'<span style="color:{colour}">&#9632;</span> {escape(name)} '
        for name, colour in zip(names, COLOURS, strict=False)
    )
    head = f"<figcaption>{escape(title)}{' &nbsp; ' + legend if len(names) > 1 else ''}</figcaption>"
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    return f"<figure>{head}{svg}</figure>"


def _grid(x_range: Point | None, y_range: Point, across: str) -> Iterator[str]:
    for tick in ticks(*y_range):
        y = _y(tick, y_range)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="var(--grid)"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{figure(tick)}</text>'
    for tick in ticks(*x_range, 8) if x_range else ():
        yield f'<text x="{_x(tick, x_range):.1f}" y="{HEIGHT - 20}" text-anchor="middle">{figure(tick)}</text>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(across)}</text>'


def _x(value: float, scale: Point | None) -> float:
    low, high = scale or (0.0, 1.0)
    return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)


def _y(value: float, scale: Point) -> float:
    low, high = scale
    return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
