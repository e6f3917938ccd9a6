"""The page in a real browser: no error, no request, no overflow, and numbers of the report.

With HALFBYTE_SCREENSHOTS=FOLDER the pages are kept there as PNG files, to be looked at.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from halfbyte.core import UnitTime
from halfbyte.formats.folder import REPORT_FILE
from halfbyte.report.output import Planned, RunTimes, read_output, write_run
from halfbyte.report.page import page

from .browser import Page, browser, find_browser
from .conftest import VERDICT, report, write_output
from .test_page import EVALUATION

SECTIONS = [
    "Size", "Accuracy", "Divergence", "Error", "Coverage", "Scales and outliers", "Run",
    "Making and serving",
]  # fmt: skip


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium found; install one, or name it in HALFBYTE_BROWSER")
    with browser(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


class Shown(NamedTuple):
    """A page, and the report that it shows."""

    path: Path
    record: dict[str, Any]
    layers: int
    experts: int


@pytest.fixture(scope="module", params=[(3, 4), (76, 256)], ids=["small", "GLM-5.2"])
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A page with all sections, of a small model and of one with 19,456 experts."""
    layers, experts = request.param
    folder = tmp_path_factory.mktemp("outputs") / "GLM-5.2-INT4"
    write_output(folder, VERDICT, linears=report(layers, experts).linears)
    phases = {"solve down": 4.0, "read": 1.0}
    units = tuple(UnitTime(f"layers.{n}", 6.0, 1 << 30, 0, phases) for n in range(layers))
    write_run(folder, RunTimes(9.0, 1 << 30, Planned(1 << 30, 0, 8.0, 1), units))
    path = folder / "report.html"
    path.write_text(page(read_output(folder), EVALUATION))
    return Shown(path, json.loads((folder / REPORT_FILE).read_text()), layers, experts)


@pytest.mark.parametrize("width", [360, 1600])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_in_a_browser(tab: Page, shown: Shown, width: int, dark: bool) -> None:
    tab.events.clear()
    tab.open(shown.path, width=width, dark=dark)
    assert tab.value("[...document.querySelectorAll('h2')].map(e => e.textContent)") == SECTIONS
    record = shown.record
    assert tab.value("[...document.querySelectorAll('.figure')].map(e => e.textContent)") == [
        f"{record['bytes_in'] / 1e9:.1f}\xa0GB → {record['bytes_out'] / 1e9:.1f}\xa0GB",
        "0.00654 nats",
        "inconclusive",
        f"{len(record['linears']):,}",
    ]
    assert tab.value("document.documentElement.scrollWidth") == width
    paper = tab.value("getComputedStyle(document.body).backgroundColor")
    light = sum(int(part) for part in re.findall(r"\d+", paper)) > 3 * 128
    assert light != dark
    for layer, expert in ((0, 0), (1, 2)):
        told = _under_the_pointer(tab, shown, layer, expert)
        assert told[0] == f"layer {layer}, expert {expert}"
        numbers = dict(line.split(": ") for line in told[1:])
        for leaf in ("down_proj", "gate_proj", "up_proj"):
            name = f"model.layers.{layer}.mlp.experts.{expert}.{leaf}"
            [error] = [line["error"] for line in record["linears"] if line["name"] == name]
            assert float(numbers[f"{leaf} error"]) == pytest.approx(error, rel=0.005)
    assert tab.complaints() == []
    assert tab.requests() == [shown.path.as_uri()]
    if folder := os.environ.get("HALFBYTE_SCREENSHOTS"):
        name = f"{shown.layers}-layers-{width}-{'dark' if dark else 'light'}.png"
        tab.screenshot(Path(folder) / name)


def _under_the_pointer(tab: Page, shown: Shown, layer: int, expert: int) -> list[str]:
    """What the page says when the pointer is over a cell of the map of errors."""
    x, y, width, height = tab.value(
        "(map => { map.scrollIntoView({block: 'center'});"
        " const box = map.getBoundingClientRect();"
        " return [box.x, box.y, box.width, box.height]; })"
        "(document.querySelector('[data-map=error]'))"
    )
    x += width * (expert + 0.5) / shown.experts
    y += height * (layer + 0.5) / shown.layers
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    told: str = tab.value("document.getElementById('hint').textContent")
    return told.split("\n")
