"""Paired statistics of two models that answered the same items. Standard library only.

A model that differs a little from another changes few of its answers, in both directions. What
tells whether it got worse are these *discordant* items alone: those it lost and those it won.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()
_STEPS = 60
"""Halvings of [-1, 1]: beyond what a float holds."""
_MANY = 1e6
"""Times as many items: more than anybody has."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A difference, candidate minus baseline, and its confidence limits, as shares of 1."""

    estimate: float
    low: float
    high: float


def mcnemar(lost: int, won: int) -> float:
    """Exact one-sided p-value: how likely at least `lost` of the discordant items are lost when
    each is lost or won with equal chance (McNemar 1947). 1 when there are none."""
    count = lost + won
    ways = tail = math.comb(count, lost)
    for k in range(lost, count):
        ways = ways * (count - k) // (k + 1)
        tail += ways
    return tail / (1 << count)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for testing all of them (Holm 1979): one below alpha stays significant at
    level alpha of any false one among all."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def score_interval(lost: float, won: float, count: float, confidence: float) -> Interval:
    """Two-sided score interval of a paired difference of shares (Tango 1998, Statistics in Medicine
    17:891), of `count` items that are right or wrong. It holds its level with few discordant items,
    where the usual one does not."""
    if not 0 <= lost + won <= count or min(lost, won) < 0 or not count:
        raise ValueError(f"{lost} lost and {won} won of {count} items")
    z = _quantile(confidence)
    estimate = (won - lost) / count

    def limit(outer: float, sign: int) -> float:
        """Where the score statistic is `z`, between the estimate and the end."""
        inner = estimate
        for _ in range(_STEPS):
            middle = (inner + outer) / 2
            if sign * _score(lost, won, count, middle) > z:
                outer = middle
            else:
                inner = middle
        return outer

    return Interval(estimate, limit(-1.0, 1), limit(1.0, -1))


def _score(lost: float, won: float, count: float, difference: float) -> float:
    """How many standard errors `won - lost` is above what `difference` lets expect, these being
    those of the most likely shares with that difference."""
    a = 2 * count
    b = -won - lost + (2 * count - won + lost) * difference
    c = -lost * difference * (1 - difference)
    share = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)  # of items lost
    variance = count * (2 * share + difference * (1 - difference))
    above = won - lost - count * difference
    if variance <= 0:
        return math.copysign(math.inf, above) if above else 0.0
    return above / math.sqrt(variance)


def mean_interval(differences: Sequence[float], confidence: float) -> Interval:
    """Two-sided interval of the mean of paired differences of any values, by the central limit
    theorem (Miller, arXiv 2411.00640)."""
    count = len(differences)
    if not count:
        raise ValueError("no items")
    mean = math.fsum(differences) / count
    squares = math.fsum((value - mean) ** 2 for value in differences)
    error = math.sqrt(squares / max(1, count - 1) / count)
    half = _quantile(confidence) * error
    return Interval(mean, mean - half, mean + half)


def one_sided(interval: Interval, confidence: float) -> float:
    """P-value of a drop as large as the estimate when nothing changed, from a symmetric interval
    of this confidence."""
    error = (interval.high - interval.low) / 2 / _quantile(confidence)
    if not error:
        return 0.0 if interval.estimate < 0 else 1.0
    return _NORMAL.cdf(interval.estimate / error)


def macro_interval(intervals: Sequence[Interval]) -> Interval:
    """Interval of the mean of independent differences, from the interval of each: the distances of
    their limits are combined as standard errors are, each side by itself (Zou and Donner 2008,
    Statistics in Medicine 27:1693), which keeps what is not symmetric in them."""
    count = len(intervals)
    if not count:
        raise ValueError("no intervals")
    estimate = math.fsum(i.estimate for i in intervals) / count
    below = math.hypot(*(i.estimate - i.low for i in intervals)) / count
    above = math.hypot(*(i.high - i.estimate for i in intervals)) / count
    return Interval(estimate, estimate - below, estimate + above)


def times_needed(interval: Callable[[float], Interval], limit: float) -> float:
    """Times as many items, answered alike, that put the lower limit of a difference above `limit`;
    `interval` gives it for so many times. Infinity when no number of them would."""
    few, many = 1.0, _MANY
    if interval(many).low <= limit:
        return math.inf
    for _ in range(_STEPS):
        middle = math.sqrt(few * many)
        few, many = (few, middle) if interval(middle).low > limit else (middle, many)
    return many


def narrowed(interval: Interval, confidence: float, other: float, times: float) -> Interval:
    """A symmetric interval of this confidence as one of another, of so many times as many items."""
    half = interval.estimate - interval.low
    half *= _quantile(other) / _quantile(confidence) / math.sqrt(times)
    return Interval(interval.estimate, interval.estimate - half, interval.estimate + half)


def with_power(confidence: float, power: float) -> float:
    """The confidence of the interval that must exclude a limit for one of `confidence` to do so
    with probability `power` when the same is measured again."""
    return 2 * _NORMAL.cdf(_quantile(confidence) + _NORMAL.inv_cdf(power)) - 1


def _quantile(confidence: float) -> float:
    """Standard errors that a two-sided interval of this confidence extends either way."""
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence of {confidence}")
    return _NORMAL.inv_cdf((1 + confidence) / 2)
