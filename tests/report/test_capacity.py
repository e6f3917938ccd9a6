"""The picture of tokens: bars as long as their numbers, words that stay words, room for labels."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from halfbyte.kvcache.layout import Kv, Part
from halfbyte.kvcache.planner import Capacity
from halfbyte.report.capacity import LEFT, WIDTH, capacity_picture

NAMESPACE = "{http://www.w3.org/2000/svg}"


def capacity(weights: str, kv: Kv, tokens: int) -> Capacity:
    return Capacity(weights, kv, 1, (Part("rows", 1, 1),), tokens, tokens, tokens)


def picture(*capacities: Capacity, title: str = "Tokens") -> ElementTree.Element:
    return ElementTree.fromstring(capacity_picture(title, "note", capacities))


def bars(root: ElementTree.Element, style: str) -> list[float]:
    rects = root.iter(f"{NAMESPACE}rect")
    lengths = [r for r in rects if r.get("class") == style and r.get("height") == "18"]
    return [float(rect.get("width", "nan")) for rect in lengths]


def texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{NAMESPACE}text")]


def test_bars_are_as_long_as_their_numbers() -> None:
    root = picture(
        capacity("int4", "bf16", 690_816),
        capacity("int4", "fp8", 1_185_472),
        capacity("fp8", "bf16", 299_008),
        capacity("fp8", "fp8", 0),
    )
    soft, main = bars(root, "soft"), bars(root, "main")
    assert soft[0] / main[0] == pytest.approx(690_816 / 1_185_472, abs=0.002)
    assert soft[1] / main[0] == pytest.approx(299_008 / 1_185_472, abs=0.002)
    assert main[1] == 0
    assert texts(root).count("does not fit") == 1
    assert {"691k", "1.19M", "299k", "INT4 weights", "FP8 weights"} <= set(texts(root))
    # The longest bar leaves its label room: seven characters of 13 pixels at most.
    assert LEFT + max(main) + 6 + 7 * 8 < WIDTH
    assert "INT4 weights, FP8 cache 1,185,472 tokens" in (root[0].text or "")


def test_nothing_and_next_to_nothing_can_be_drawn() -> None:
    assert texts(picture(capacity("bf16", "fp8", 0))).count("does not fit") == 1
    assert bars(picture(capacity("bf16", "fp8", 1)), "main")[0] > 0
    assert "1e+04M" not in texts(picture(capacity("int4", "fp8", 10**12)))


def test_a_title_stays_text_and_in_its_line() -> None:
    root = picture(capacity("int4", "fp8", 1), title="<script>&" + "x" * 500)
    assert not list(root.iter(f"{NAMESPACE}script"))
    title = texts(root)[0]
    assert title.startswith("<script>&x")
    assert len(title) <= 88
