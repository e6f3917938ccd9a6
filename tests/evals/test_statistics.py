"""Against scipy, against likelihoods maximised by brute force, published counts, and simulation."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.evals.statistics import (
    Interval,
    holm,
    macro_interval,
    mcnemar,
    mean_interval,
    narrowed,
    score_interval,
    times_needed,
    with_power,
)

stats = pytest.importorskip("scipy.stats")
optimize = pytest.importorskip("scipy.optimize")


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_is_the_binomial_test(lost: int, won: int) -> None:
    if lost + won == 0:
        assert mcnemar(lost, won) == 1
        return
    expected = stats.binomtest(lost, lost + won, 0.5, alternative="greater").pvalue
    assert mcnemar(lost, won) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_of_many_items_is_no_overflow() -> None:
    assert 0 < mcnemar(6000, 5800) < 0.04
    assert mcnemar(0, 5000) == 1


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_is_the_closed_test_of_bonferroni(p_values: list[float]) -> None:
    """By its definition: a hypothesis falls when every set of hypotheses with it falls, a set by
    the smallest of its p-values times its size."""
    adjusted = holm(p_values)
    for place, found in enumerate(adjusted):
        others = [p for other, p in enumerate(p_values) if other != place]
        expected = 0.0
        for size in range(len(others) + 1):
            # Of all sets of this size the hardest to reject has the largest others.
            largest = sorted(others, reverse=True)[:size]
            expected = max(expected, min(1.0, (size + 1) * min([p_values[place], *largest])))
        assert found == pytest.approx(expected)


def constrained_score(lost: float, won: float, count: float, difference: float) -> float:
    """The score statistic with shares that maximise the likelihood, found by search."""
    same = count - lost - won

    def negative(share_lost: float) -> float:
        shares = share_lost, share_lost + difference, 1 - 2 * share_lost - difference
        total = 0.0
        for number, share in zip((lost, won, same), shares, strict=True):
            if number:
                total -= number * math.log(max(share, 1e-300))
        return total

    low, high = max(0.0, -difference), (1 - difference) / 2
    found = optimize.minimize_scalar(
        negative, bounds=(low, high), method="bounded", options={"xatol": 1e-13}
    ).x
    best = min((low, high, found), key=negative)
    variance = (2 * best + difference - difference**2) / count
    return ((won - lost) / count - difference) / math.sqrt(variance)


@pytest.mark.parametrize(
    ("lost", "won", "count"),
    [
        (24, 5, 200),
        (11, 3, 1319),
        (2, 2, 50),
        (0, 4, 30),
        (7, 0, 40),
        (1, 30, 60),
        (300, 280, 12032),
    ],
)
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_score_limits_are_where_the_score_is_the_quantile(
    lost: int, won: int, count: int, confidence: float
) -> None:
    interval = score_interval(lost, won, count, confidence)
    z = stats.norm.ppf((1 + confidence) / 2)
    assert interval.estimate == (won - lost) / count
    assert interval.low < interval.estimate < interval.high
    assert constrained_score(lost, won, count, interval.low) == pytest.approx(z, rel=1e-4)
    assert constrained_score(lost, won, count, interval.high) == pytest.approx(-z, rel=1e-4)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 500))
def test_score_interval_turns_around_with_the_models(lost: int, won: int, same: int) -> None:
    count = lost + won + same
    if not count:
        return
    one, other = (score_interval(*pair, count, 0.95) for pair in ((lost, won), (won, lost)))
    assert one.low == pytest.approx(-other.high, abs=1e-9)
    assert -1 <= one.low <= one.estimate <= one.high <= 1


def test_no_discordant_item_is_not_certainty() -> None:
    """z² / (n + z²) either way, Wilson's limit for no event in n."""
    z = stats.norm.ppf(0.975)
    interval = score_interval(0, 0, 200, 0.95)
    assert interval.high == pytest.approx(z**2 / (200 + z**2), rel=1e-6)
    assert interval.low == -interval.high


@pytest.mark.parametrize("counts", [(3, 4, 6), (-1, 2, 9), (0, 0, 0)])
def test_counts_that_cannot_be_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="items"):
        score_interval(*counts, 0.95)


@pytest.mark.parametrize("share", [0.02, 0.08])
def test_score_interval_holds_its_level(share: float) -> None:
    """At the margin of 0.8 points a drop is taken for less in 5 % of 4,000 runs, or hardly more."""
    generator = random.Random(1)
    count, drop, runs = 1319, 0.008, 4000
    chances = (share + drop) / 2, (share - drop) / 2
    accepted = 0
    for _ in range(runs):
        drawn = generator.choices(("lost", "won", "same"), [*chances, 1 - share], k=count)
        interval = score_interval(drawn.count("lost"), drawn.count("won"), count, 0.9)
        accepted += interval.low > -drop
    assert 0.035 < accepted / runs < 0.06


def test_mean_interval_is_that_of_the_paired_z_test() -> None:
    generator = random.Random(2)
    values = [generator.gauss(0.02, 0.3) for _ in range(500)]
    interval = mean_interval(values, 0.95)
    low, high = stats.norm.interval(0.95, loc=interval.estimate, scale=stats.sem(values))
    assert (interval.low, interval.high) == pytest.approx((low, high), rel=1e-9)
    assert mean_interval([0.25], 0.95) == Interval(0.25, 0.25, 0.25)


def test_macro_interval_of_symmetric_ones_is_that_of_the_mean() -> None:
    errors = (0.003, 0.011, 0.004)
    parts = [Interval(0.01 * i, 0.01 * i - 2 * e, 0.01 * i + 2 * e) for i, e in enumerate(errors)]
    found = macro_interval(parts)
    error = math.sqrt(sum(e**2 for e in errors)) / 3
    assert found.estimate == pytest.approx(0.01)
    assert (found.low, found.high) == pytest.approx((0.01 - 2 * error, 0.01 + 2 * error))
    one = Interval(-0.01, -0.03, 0.0)
    assert macro_interval([one]) == one


@pytest.mark.parametrize(
    ("discordant", "margin", "published"),
    [(0.02, 0.008, 1933), (0.05, 0.008, 4831), (0.08, 0.008, 7729), (0.05, 0.01, 3092)],
)
def test_times_needed_are_near_the_published_numbers(
    discordant: float, margin: float, published: int
) -> None:
    """n = 6.18 d / margin², one-sided 95 % with a power of 80 %, for flips both ways alike: where
    they are many beside the margin. The score, by brute force, is the quantile there."""
    count = 200
    flips = discordant * count / 2
    wide = with_power(0.9, 0.8)
    times = times_needed(lambda k: score_interval(k * flips, k * flips, k * count, wide), -margin)
    many, z = times * count, stats.norm.ppf(0.95) + stats.norm.ppf(0.8)
    assert published < many < published * (1 + margin / discordant)
    flips = discordant * many / 2
    assert constrained_score(flips, flips, many, -margin) == pytest.approx(z, rel=1e-4)


def test_times_needed_where_nothing_changed() -> None:
    """Wilson's limit z² / (n + z²): it comes closer with the items, not with their root."""
    z = stats.norm.ppf(0.95) + stats.norm.ppf(0.8)
    wide = with_power(0.9, 0.8)
    assert stats.norm.ppf((1 + wide) / 2) == pytest.approx(z)
    times = times_needed(lambda k: score_interval(0, 0, 60 * k, wide), -0.008)
    assert 60 * times == pytest.approx(z**2 / 0.008 - z**2, rel=1e-6)
    assert times_needed(lambda k: score_interval(2 * k, 0, 100 * k, wide), -0.01) == math.inf


def test_narrowed_intervals_are_those_of_more_items() -> None:
    half = stats.norm.ppf(0.95) * 0.3 / math.sqrt(50)
    found = narrowed(Interval(0.1, 0.1 - half, 0.1 + half), 0.9, 0.95, 4)
    expected = stats.norm.interval(0.95, loc=0.1, scale=0.3 / math.sqrt(200))
    assert (found.low, found.high) == pytest.approx(expected)
