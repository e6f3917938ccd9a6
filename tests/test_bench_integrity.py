"""The integrity benchmark's batches are what they claim, and its proof before timing can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import engine_hooks
from benchmarks.bench_integrity import Case, host_line, make_batch, prove
from halfbyte.errors import HalfbyteError

CASES = (Case(8, 300, 64, 4_000), Case(64, 640, 16, 10_000), Case(16, 1_000, 1, 10_000))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"page {case.page_size}")
def test_batches_are_clean_and_share_as_much_as_the_pool_asks(case: Case) -> None:
    batch = make_batch(case)
    prove(case, batch)
    expected = batch.tracker.state.expected_pages[1:, : case.pages]
    assert len(expected.unique()) <= case.pool_tokens // case.page_size
    assert (len(expected.unique()) < case.entries) == (case.entries * case.page_size > 10_000)


def test_a_check_that_sees_nothing_is_not_timed() -> None:
    batch = make_batch(CASES[0])
    batch.tracker.check = lambda *arguments: None  # type: ignore[method-assign]
    with pytest.raises(HalfbyteError, match="a stale page was not found"):
        prove(CASES[0], batch)


def test_the_host_is_timed_with_and_without_a_graph() -> None:
    line = host_line(3, 4, steps=12)
    assert {"us_off", "us_abort", "us_off_in_graph", "us_abort_in_graph", "share_of_step"} < set(
        line
    )


def test_the_clock_counts_hooks_and_not_what_they_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(engine_hooks.time, "perf_counter", lambda: now)
    clock = engine_hooks.Clock()
    clock.seconds = 0.0
    tracker = clock.inside(lambda: spend(8))
    inner = clock.around(lambda original: (spend(16), original()))

    def hook(original: Callable[[int], int], number: int) -> int:
        spend(1)
        tracker()
        result = original(number)
        spend(2)
        return result

    def engine(number: int) -> int:
        spend(100)
        inner(lambda: spend(200))
        return number + 1

    assert clock.around(hook)(engine, 3) == 4
    assert clock.seconds == 1 + 2 + 8 + 16, "a hook within the engine's function counts, too"
    assert clock.tracker == 8
