"""Axes: where values come to lie, and how numbers are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.report.axis import Scale, logarithmic, short


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
