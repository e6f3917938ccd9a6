"""A picture of how many tokens fit, by format of weights and of the KV cache: one SVG file.

It stands by itself, in light and dark, with its numbers beside the bars.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from halfbyte.kvcache.layout import Kv
from halfbyte.kvcache.planner import Capacity
from halfbyte.report.axis import Scale, short
from halfbyte.report.html import Html, element

WIDTH, LEFT, RIGHT = 720, 120, 690
TOP, BAR, GAP = 84, 20, 22
CHARACTERS = 88
"""Of a line of text, which does not wrap."""
COLOURS: dict[Kv, str] = {"bf16": "soft", "fp8": "main", "fp8-raw": "raw"}

STYLE = Html(
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',sans-serif;"
    "font-variant-numeric:tabular-nums;fill:#1c1f23}"
    ".title{font-size:16px;font-weight:600}.quiet{fill:#59616b;font-size:12px}"
    ".paper{fill:#fcfcfa}.grid{stroke:#e2e4e7}.soft{fill:#9fc6e4}.main{fill:#1f5f9f}"
    ".raw{fill:#e69f00}"
    "@media(prefers-color-scheme:dark){text{fill:#e4e7ea}.quiet{fill:#9aa4ae}.paper{fill:#111417}"
    ".grid{stroke:#2a3037}.soft{fill:#2b4560}.main{fill:#7db8ef}.raw{fill:#e6a924}}"
)


def capacity_picture(title: str, note: str, capacities: Sequence[Capacity]) -> str:
    """Bars of tokens, those of one format of weights together, in the order given."""
    most = max((c.tokens for c in capacities), default=0)
    scale = Scale(0.0, max(1.0, 1.15 * most))
    ticks = scale.ticks()
    bars: list[Html] = []
    y = TOP
    for weights, members in groupby(capacities, key=lambda c: c.weights):
        group = list(members)
        middle = y + BAR * len(group) / 2 + 4
        bars.append(_text(f"{weights.upper()} weights", LEFT - 12, middle, text_anchor="end"))
        for capacity in group:
            bars += _bar(capacity, y, scale)
            y += BAR
        y += GAP
    bottom = y - GAP + 8
    grid = [
        element("path", d=f"M{_x(tick, scale):.1f} {TOP - 8}V{bottom}", class_="grid")
        for tick in ticks
    ]
    labels = [
        _text(short(tick), _x(tick, scale), bottom + 16, class_="quiet", text_anchor="middle")
        for tick in ticks
    ]
    height = bottom + 30
    svg = element(
        "svg",
        element("title", f"{title}: {_description(capacities)}"),
        element("style", STYLE),
        element("rect", width=WIDTH, height=height, class_="paper"),
        _text(_cut(title), 20, 28, class_="title"),
        _text(_cut(note), 20, 46, class_="quiet"),
        *_legend(capacities),
        *grid,
        *bars,
        *labels,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {height}",
        width=WIDTH,
        height=height,
        role="img",
    )
    return f"{svg}\n"


def _bar(capacity: Capacity, y: float, scale: Scale) -> list[Html]:
    end = _x(capacity.tokens, scale)
    label = f"{short(capacity.tokens)}" if capacity.fits else "does not fit"
    return [
        element("rect", x=LEFT, y=y + 1, width=f"{end - LEFT:.1f}", height=BAR - 2,
                class_=COLOURS[capacity.kv]),
        _text(label, end + 6, y + 14.5),
    ]  # fmt: skip


def _legend(capacities: Sequence[Capacity]) -> list[Html]:
    parts: list[Html] = []
    x = 20.0
    for kv in dict.fromkeys(capacity.kv for capacity in capacities):
        text = f"{kv.upper()} KV cache"
        parts.append(element("rect", x=x, y=58, width=11, height=11, class_=COLOURS[kv]))
        parts.append(_text(text, x + 16, 68, class_="quiet"))
        x += 16 + 7.5 * len(text) + 18
    return parts


def _description(capacities: Sequence[Capacity]) -> str:
    """What the bars show, in words."""
    return "; ".join(
        f"{c.weights.upper()} weights, {c.kv.upper()} cache {c.tokens:,} tokens" for c in capacities
    )


def _x(tokens: float, scale: Scale) -> float:
    return LEFT + scale.at(tokens) * (RIGHT - LEFT)


def _text(text: str, x: float, y: float, **attributes: str) -> Html:
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS else text[: CHARACTERS - 3] + "..."
