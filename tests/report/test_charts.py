"""Charts: where values come to lie, and which colour they get."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.report.charts import Cells, Scale, heat_map, histogram, interval, logarithmic, short


@given(st.floats(1e-9, 1e9), st.floats(1.01, 1e6), st.booleans(), st.floats(0, 1))
def test_a_scale_can_be_read_back(low: float, ratio: float, log: bool, at: float) -> None:
    scale = Scale(low, low * ratio, logarithmic=log)
    assert (scale.at(low), scale.at(low * ratio)) == (0, pytest.approx(1))
    assert scale.at(scale.value(at)) == pytest.approx(at, abs=1e-6)
    ticks = scale.ticks()
    assert ticks == sorted(ticks)
    assert len(ticks) <= 12
    assert all(low * 0.99 <= tick <= low * ratio * 1.01 for tick in ticks)


def test_ticks_are_round() -> None:
    assert Scale(-2.5, 2.5).ticks() == [-2, -1, 0, 1, 2]
    assert Scale(0, 760).ticks() == [0, 200, 400, 600]
    assert Scale(1e-6, 1e-3, logarithmic=True).ticks() == [1e-6, 1e-5, 1e-4, 1e-3]
    assert Scale(0.002, 0.006, logarithmic=True).ticks() == [0.002, 0.003, 0.004, 0.005]


def test_values_that_are_alike_look_alike() -> None:
    scale = logarithmic([1.0, 1.01])
    assert abs(scale.at(1.0) - scale.at(1.01)) < 0.02
    assert logarithmic([]).at(0.0) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00421, "0.00421"), (1.23e-6, "1.2e-06"), (7392, "7,392"), (44812, "44.8k"),
     (3.1e6, "3.1M"), (999.6, "1,000")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_each_cell_is_drawn_once_in_the_colour_of_its_value() -> None:
    values = [[1.0, 10.0, 100.0, None], [100.0, 100.0, 1.0, 0.0]]
    drawn = heat_map("m", Cells(["3", "4"], 4, values, {}), "unit")
    colour: dict[tuple[int, int], int] = {}
    for path, shade in re.findall(r'<path d="([^"]*)" class="s(\d)">', drawn):
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path):
            for column in range(int(x), int(x) + int(width)):
                assert colour.setdefault((int(y), column), int(shade)) == int(shade)
    assert colour == {
        (0, 0): 0, (0, 1): 4, (0, 2): 8, (1, 0): 8, (1, 1): 8, (1, 2): 0, (1, 3): 0,
    }  # fmt: skip


def test_twenty_thousand_cells_are_a_few_elements() -> None:
    values = [[float((x * y) % 97 + 1) for x in range(256)] for y in range(78)]
    drawn = heat_map("m", Cells([str(i) for i in range(78)], 256, values, {}), "unit")
    tags = Counter(re.findall(r"<(\w+)", drawn))
    assert tags["path"] == 9
    assert sum(tags.values()) < 100


def test_bars_are_as_high_as_counts() -> None:
    drawn = histogram("KL", (0.001, 0.01, 0.1, 1.0), (0, 30, 60, 15, 0), "nats")
    heights = re.findall(r'height="([\d.]+)"', drawn)
    assert [float(height) for height in heights] == [50, 100, 25]
    assert "0.001 to 0.01 nats: 30 tokens, 28.57 %" in drawn


def test_an_interval_lies_on_its_axis() -> None:
    drawn = interval(-2.0, -1.0, 1.0, Scale(-4.0, 4.0), 2.0)
    assert 'd="M50.00 0V20" class="zero"' in drawn
    assert 'd="M25.00 0V20" class="margin"' in drawn
    assert 'd="M25.00 10H62.50' in drawn
    assert 'd="M37.50 10h0"' in drawn
