"""Axes: where values lie, which round numbers to write on them, and how."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """Where a value lies between the ends of an axis, linear or logarithmic."""

    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """From 0 to 1; what lies outside lies on the end."""
        low, high, value = (self._on_axis(number) for number in (self.low, self.high, value))
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def value(self, at: float) -> float:
        """The inverse of `at`."""
        low, high = self._on_axis(self.low), self._on_axis(self.high)
        number = low + at * (high - low)
        return 10**number if self.logarithmic else number

    def _on_axis(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.logarithmic else value

    def ticks(self) -> list[float]:
        """Round numbers on the axis, a handful."""
        if self.logarithmic:
            return _decades(self.low, self.high)
        step = round_step(self.high - self.low)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]


def logarithmic(values: Sequence[float]) -> Scale:
    """An axis for values that are positive; others lie on its lower end."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    # At least half a decade, or noise would look like a difference.
    spread = max(0.0, 0.5 - math.log10(high / low)) / 2
    return Scale(low / 10**spread, high * 10**spread, logarithmic=True)


def is_decade(value: float) -> bool:
    """Whether a number is a power of ten."""
    power = math.log10(value)
    return abs(power - round(power)) < 1e-9


def _decades(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        every = max(1, (last - first) // 5) if steps == (1,) else 1
        found = [m * 10.0**power for power in range(first, last + 1, every) for m in steps]
        shown = [float(f"{v:.6g}") for v in found if low * 0.999 <= v <= high * 1.001]
        if len(shown) >= 3:
            break
    return shown


def round_step(extent: float, most: int = 5) -> float:
    """The least of 1, 2, 5, 10, ... of some power that cuts an extent into few pieces."""
    rough = max(extent, 1e-12) / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)


def short(value: float) -> str:
    """A number of about three digits: "0.0042", "1.2e-06", "7,390", "310k"."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 1e2:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-4 else f"{value:.2g}"
