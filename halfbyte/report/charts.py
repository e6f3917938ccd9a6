"""Charts as SVG and HTML, sharp at every width: lines and areas are SVG that is stretched, labels
are HTML, which is not.

Colours are classes of the style sheet, so that one chart serves light and dark. What a chart shows
is in its description, and for cells of a map in the tooltip of the page's script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from halfbyte.report.axis import Scale, is_decade, logarithmic, round_step, short
from halfbyte.report.html import Html, data, element, joined
from halfbyte.report.linears import quantile

SHADES = 9
"""Classes of colour of a map, from few to many."""
CATEGORIES = 6
"""Colours of things that have no order, besides the grey of "other"."""

WIDTH = 1000
"""Units across a plot: about as many as pixels, since far from that strokes are drawn blurred."""
DOTS = 40
"""Places up to which each is drawn by itself."""

Format = Callable[[float], str]


# Maps.


@dataclass(frozen=True)
class Cells:
    """Numbers for rows and columns, some of which may be missing."""

    rows: Sequence[str]
    columns: int
    values: Sequence[Sequence[float | None]]
    """By row and column."""
    hints: Mapping[str, Sequence[Sequence[float | str | None]]]
    """What the tooltip of a cell says, by name."""


def heat_map(name: str, cells: Cells, unit: str, column: str = "expert") -> Html:
    """A map with a colour for each number, on a logarithmic scale that leaves out the extremes.

    A path for each colour, not an element for each cell: twenty thousand cells stay fast.
    """
    present = [value for row in cells.values for value in row if value is not None and value > 0]
    scale = logarithmic([quantile(present, 0.005), quantile(present, 0.995)] if present else [])
    paths = [""] * SHADES
    for y, row in enumerate(cells.values):
        x = 0
        for shade, run in groupby(row, key=lambda value: _shade(value, scale)):
            width = len(list(run))
            if shade is not None:
                paths[shade] += f"M{x} {y}h{width}v1h-{width}z"
            x += width
    drawn = [element("path", d=path, class_=f"s{i}") for i, path in enumerate(paths) if path]
    height = min(30.0, max(5.0, 480 / max(1, len(cells.rows))))
    picture = element(
        "svg",
        *drawn,
        viewBox=f"0 0 {cells.columns} {len(cells.rows)}",
        preserveAspectRatio="none",
        style=f"height:{height * len(cells.rows):.0f}px",
        aria_hidden="true",
    )
    hints = {"rows": list(cells.rows), "columns": cells.columns, "column": column}
    values = {key: [cell for row in rows for cell in row] for key, rows in cells.hints.items()}
    side = _named(cells.rows, most=int(height * len(cells.rows) / 18))
    below = _named([str(i) for i in range(cells.columns)], most=8)
    return element(
        "figure",
        element(
            "div",
            _side(side, falling=True),
            element("div", picture, class_="map", data_map=name, tabindex="0", role="img",
                    aria_label=f"{unit} by layer and {column}; the table below has it by layer"),
            _below(below),
            class_="plot",
        ),
        _shades(scale, unit),
        data({**hints, "hints": values}, name),
        class_="wide",
    )  # fmt: skip


def _shade(value: float | None, scale: Scale) -> int | None:
    return None if value is None else min(SHADES - 1, int(scale.at(value) * SHADES))


def _shades(scale: Scale, unit: str) -> Html:
    """The legend: a colour for each class, and the values where classes meet."""
    boxes = [element("span", class_=f"box s{i}") for i in range(SHADES)]
    ends = [element("span", short(scale.value(at))) for at in (0, 0.5, 1)]
    colours = element("span", *boxes, class_="boxes")
    return element(
        "figcaption",
        element("span", unit),
        element("span", colours, element("span", *ends, class_="ends"), class_="shades"),
        class_="legend",
    )  # fmt: skip


# Plots.


@dataclass(frozen=True)
class Line:
    """A number for each place on the horizontal axis; None where there is none."""

    label: str
    values: Sequence[float | None]
    style: str
    """Class of the style sheet: "main", "other", "band"."""


def line_plot(
    title: str,
    places: Sequence[str],
    lines: Sequence[Line],
    band: tuple[Sequence[float], Sequence[float]] | None = None,
    *,
    from_zero: Format | None = None,
) -> Html:
    """Lines over places, and behind them bars from a low to a high value.

    The axis is logarithmic, or with `from_zero`, which writes its numbers, linear.
    """
    shown = [v for line in lines for v in line.values if v is not None]
    if band is not None:
        shown += [v for side in band for v in side]
    scale = logarithmic(shown)
    if from_zero is not None:
        scale = Scale(0.0, 1.05 * max([*shown, 1e-12]))
    parts = []
    if band is not None:
        parts.append(_band(*band, scale))
    for line in lines:
        points = [
            f"{_middle(i, len(places)):.1f} {100 * (1 - scale.at(value)):.2f}"
            for i, value in enumerate(line.values)
            if value is not None
        ]
        if points:
            parts.append(element("path", d="M" + "L".join(points), class_=f"line {line.style}"))
            # A stroke without length and with round ends is a dot at every stretch.
            dots = "".join(f"M{point}h0" for point in points)
            if len(points) <= DOTS:
                parts.append(element("path", d=dots, class_=f"dots {line.style}"))
    written = from_zero or short
    return _framed(title, places, parts, scale, lines_label(lines, written), written)


def _band(low: Sequence[float], high: Sequence[float], scale: Scale) -> Html:
    """From low to high: a bar for each place, or an area when there are too many for that."""
    ends = [
        (_middle(i, len(low)), 100 * (1 - scale.at(a)), 100 * (1 - scale.at(b)))
        for i, (a, b) in enumerate(zip(low, high, strict=True))
    ]
    if len(ends) <= DOTS:
        bars = "".join(f"M{x:.1f} {bottom:.2f}V{top:.2f}" for x, bottom, top in ends)
        return element("path", d=bars, class_="band")
    around = [f"{x:.1f} {top:.2f}" for x, _, top in ends]
    around += [f"{x:.1f} {bottom:.2f}" for x, bottom, _ in reversed(ends)]
    return element("path", d=f"M{'L'.join(around)}z", class_="area")


def lines_label(lines: Sequence[Line], written: Format) -> str:
    """What a plot shows, in words."""
    ends = [
        f"{line.label} {written(min(known))} to {written(max(known))}"
        for line in lines
        if (known := [value for value in line.values if value is not None])
    ]
    return "; ".join(ends)


def stacked_bars(
    title: str, places: Sequence[str], series: Mapping[str, Sequence[float]], written: Format
) -> Html:
    """A bar for each place, cut into what it is the sum of."""
    sums = [sum(values) for values in zip(*series.values(), strict=True)]
    scale = Scale(0.0, max([*sums, 1e-12]))
    base = [0.0] * len(places)
    parts = []
    for number, (name, values) in enumerate(series.items()):
        bars = []
        for i, value in enumerate(values):
            if value <= 0:
                continue
            hint = f"{places[i]}: {name} {written(value)}"
            bars.append(_bar(i, len(places), base[i] / scale.high, value / scale.high, hint))
            base[i] += value
        parts.append(element("g", *bars, class_=_colour(number, name)))
    label = "; ".join(f"{name} {written(sum(values))}" for name, values in series.items())
    return joined([_framed(title, places, parts, scale, label, written), categories(list(series))])


def histogram(title: str, edges: Sequence[float], counts: Sequence[int], unit: str) -> Html:
    """Bars over bins with a logarithmic axis. Bins at the ends that hold nothing are left out."""
    filled = [i for i, count in enumerate(counts) if count] or [0]
    bins = range(min(filled), max(filled) + 1)
    top, total = max(counts[i] for i in bins) or 1, sum(counts) or 1
    bars = []
    for place, i in enumerate(bins):
        low = edges[i - 1] if i else 0.0
        high = f"{short(edges[i])}" if i < len(edges) else "more"
        hint = (
            f"{short(low)} to {high} {unit}: {counts[i]:,} tokens, {100 * counts[i] / total:.2f} %"
        )
        bars.append(_bar(place, len(bins), 0.0, counts[i] / top, hint))
    marks = [
        (short(edges[i]), (place + 1) / len(bins))
        for place, i in enumerate(bins)
        if i < len(edges) - 1 and is_decade(edges[i])
    ]
    marks = marks[:: max(1, math.ceil(len(marks) / 5))]  # what a small screen has room for
    label = f"{total:,} tokens from {short(edges[max(0, bins[0] - 1)])} {unit} on"
    return _framed(title, [""] * len(bins), [element("g", *bars, class_="c0")], Scale(0.0, top),
                   label, lambda v: f"{v:,.0f}", marks)  # fmt: skip


def interval(low: float, estimate: float, high: float, scale: Scale, margin: float) -> Html:
    """A row of a forest plot: an estimate within its limits, zero, and the margin."""

    def x(value: float) -> str:
        return f"{100 * scale.at(value):.2f}"

    return element(
        "svg",
        element("path", d=f"M{x(0)} 0V20", class_="zero"),
        element("path", d=f"M{x(-margin)} 0V20", class_="margin"),
        element("path", d=f"M{x(low)} 10H{x(high)}M{x(low)} 6V14M{x(high)} 6V14", class_="limits"),
        element("path", d=f"M{x(estimate)} 10h0", class_="dots main"),
        viewBox="0 0 100 20",
        preserveAspectRatio="none",
        class_="interval",
        role="img",
        aria_label=f"{estimate:+.2f}, {low:+.2f} to {high:+.2f}",
    )


def axis(scale: Scale) -> Html:
    """Round numbers over a column of intervals."""
    marks = [(f"{tick:+g}" if tick else "0", scale.at(tick)) for tick in scale.ticks()]
    return element("div", _below(marks), class_="axis")


def lines_key(**styles: str) -> Html:
    """The legend of line plots: a style, and what is drawn in it."""
    keys = [
        element("span", element("span", class_=f"stroke {style}"), text, class_="key")
        for style, text in styles.items()
    ]
    return element("p", *keys, class_="legend")


def share_bar(parts: Sequence[tuple[str, float, str]]) -> Html:
    """One bar of named parts: (name, share of the whole, class of its colour)."""
    pieces = [
        element("span", class_=f"part {style}", style=f"width:{100 * share:.3f}%",
                title=f"{name}: {100 * share:.1f} %")
        for name, share, style in parts
    ]  # fmt: skip
    label = ", ".join(f"{name} {100 * share:.1f} %" for name, share, _ in parts)
    return element("div", *pieces, class_="share", role="img", aria_label=label)


def categories(names: Sequence[str]) -> Html:
    """The legend of things without an order."""
    return element(
        "p",
        *(
            element("span", element("span", class_=f"box {_colour(i, name)}"), name, class_="key")
            for i, name in enumerate(names)
        ),
        class_="legend",
    )


def _colour(number: int, name: str) -> str:
    return f"c{CATEGORIES}" if name == "other" else f"c{number % CATEGORIES}"


def _framed(
    title: str,
    places: Sequence[str],
    parts: Sequence[Html],
    scale: Scale,
    label: str,
    written: Format,
    marks: Sequence[tuple[str, float]] | None = None,
) -> Html:
    """A plot with its axes; places are named sparingly."""
    ticks = [(written(tick), 1 - scale.at(tick)) for tick in scale.ticks()]
    grid = "".join(f"M0 {100 * at:.2f}H{WIDTH}" for _, at in ticks)
    picture = element(
        "svg",
        element("path", d=grid, class_="grid"),
        *parts,
        viewBox=f"0 0 {WIDTH} 100",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title}: {label}",
    )
    if marks is None:
        marks = _named(places, most=6 if len(places) > 8 else 8)
    frame = element(
        "div", _side(ticks), element("div", picture, class_="lines"), _below(marks), class_="plot"
    )
    return element("figure", element("figcaption", title), frame)


def _side(marks: Sequence[tuple[str, float]], *, falling: bool = False) -> Html:
    """Labels of the vertical axis, at shares of its height from the top."""
    widest = max((len(label) for label, _ in marks), default=1)
    labels = [element("span", text, style=f"top:{100 * at:.2f}%") for text, at in marks]
    kind = "side rows" if falling else "side"
    return element("div", *labels, class_=kind, style=f"width:{widest + 1}ch", aria_hidden="true")


def _bar(place: int, places: int, begin: float, height: float, hint: str) -> Html:
    """A bar at one of the places, from and of a share of the plot's height."""
    width = WIDTH / places
    return element(
        "rect",
        element("title", hint),
        x=f"{width * (place + 0.06):.2f}",
        y=f"{100 * (1 - begin - height):.3f}",
        width=f"{0.88 * width:.2f}",
        height=f"{100 * height:.3f}",
    )


def _middle(place: int, places: int) -> float:
    """Where a place is across a plot."""
    return WIDTH * (place + 0.5) / places


def _named(places: Sequence[str], most: int) -> list[tuple[str, float]]:
    """Some of the places, `most` or few more, and where they are; of numbers the round ones."""
    step = max(1, math.ceil(round_step(len(places), max(1, most)))) if len(places) > most else 1
    chosen = [i for i, place in enumerate(places) if place.isdecimal() and int(place) % step == 0]
    if step == 1 or not chosen:
        chosen = list(range(0, len(places), step))
    return [(places[i], (i + 0.5) / len(places)) for i in chosen]


def _below(marks: Sequence[tuple[str, float]]) -> Html:
    labels = [element("span", text, style=f"left:{100 * at:.2f}%") for text, at in marks]
    return element("div", *labels, class_="below", aria_hidden="true")
