"""Charts: what is drawn where, and in which colour."""

from __future__ import annotations

import re
from collections import Counter

from halfbyte.report.axis import Scale
from halfbyte.report.charts import Cells, heat_map, histogram, interval


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
