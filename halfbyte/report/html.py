"""HTML from Python: elements whose text is escaped unless it is HTML already."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

ROWS_SHOWN = 500
"""Rows of a table at most."""


class Html(str):
    """Text that is HTML; any other string is escaped where it becomes part of an element."""

    __slots__ = ()


def escaped(text: str) -> Html:
    """Text as HTML; what cannot be printed, or turns the direction of text, becomes a space."""
    if isinstance(text, Html):
        return text
    return Html(html.escape("".join(c if c.isprintable() or c in "\n\xa0" else " " for c in text)))


def element(name: str, *children: str, **attributes: str | float | None) -> Html:
    """`element("td", "5 < 6", class_="n")` is `<td class="n">5 &lt; 6</td>`.

    Underscores of attribute names become hyphens; an attribute of None is left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{joined(children)}</{name}>")


def joined(parts: Iterable[str], between: str = "") -> Html:
    """Parts one after the other."""
    return Html(between.join(escaped(part) for part in parts))


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    spare: Iterable[int] = (),
) -> Html:
    """A table; columns of `numbers` are set to the right, `spare` ones give way on small screens.
    The first cell of a row is its heading."""
    right, extra = set(numbers), set(spare)

    def kind(column: int) -> str | None:
        names = [n for n, where in (("number", right), ("spare", extra)) if column in where]
        return " ".join(names) or None

    top = [element("th", cell, scope="col", class_=kind(i)) for i, cell in enumerate(head)]
    lines = [
        element(
            "tr",
            element("th", row[0], scope="row", class_=kind(0)),
            *(element("td", cell, class_=kind(i)) for i, cell in enumerate(row[1:], 1)),
        )
        for row in rows
    ]
    made = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *top)),
        element("tbody", *lines),
    )
    return element("div", made, class_="table")


def details(summary: str, *children: str) -> Html:
    """What is shown on request."""
    return element("details", element("summary", summary), *children)


def data(record: Any, name: str) -> Html:
    """A record for the page's script, which can end neither its element nor be run."""
    text = json.dumps(record, separators=(",", ":"), allow_nan=False)
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Html(f'<script type="application/json" data-of="{escaped(name)}">{safe}</script>')


def section(title: str, lead: str | None, *children: str) -> Html:
    """A part of the page with a heading and a sentence or two on what it shows."""
    start = [element("h2", title)]
    if lead is not None:
        start.append(element("p", lead, class_="lead"))
    return element("section", *start, *children, id=title.lower().replace(" ", "-"))


def missing(title: str, what: str, *lines: str) -> Html:
    """A section without data: one line, and the commands that give it."""
    return section(title, what, element("pre", element("code", "\n".join(lines))))


def percent(part: float, whole: float) -> str:
    """A share: "12.5 %"; a dash where there is nothing to share."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
