"""Each method of the tracker, on pages and rows small enough to follow by hand.

All tests run with both forms of the work: plain torch, and Triton, which is interpreted on a CPU.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from halfbyte.errors import IntegrityError
from halfbyte.kvcache.integrity.page_tags import PageTagTracker
from halfbyte.kvcache.integrity.state import CLEAN, QUARANTINED, Counter, Kind, Layout
from halfbyte.kvcache.integrity.tracker import Mode, NoopTracker, Violation, open_tracker

LAYOUT = Layout(pages=32, page_size=4, rows=8, pages_per_row=6)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Work:
    """The functions that all trackers of a test work with."""

    form: ModuleType


@pytest.fixture(autouse=True, params=["reference", "fused"])
def work(request: pytest.FixtureRequest) -> None:
    if request.param == "fused":
        pytest.importorskip("triton", reason="Triton is not installed; it comes with torch")
    Work.form = importlib.import_module(f"halfbyte.kvcache.integrity.{request.param}")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_tracker(
    mode: Mode = "abort", layout: Layout = LAYOUT, seed: int | None = 1
) -> PageTagTracker:
    return PageTagTracker(mode, layout, DEVICE, seed=seed, operations=Work.form)


class Engine:
    """The least that an engine does: a page table, and places of tokens in it."""

    def __init__(self, mode: Mode = "abort", layout: Layout = LAYOUT) -> None:
        self.tracker = make_tracker(mode, layout)
        self.table = torch.zeros(layout.rows, 24, dtype=torch.int32, device=DEVICE)

    def start(self, row: int, *pages: int, length: int) -> None:
        """A request of `length` tokens on pages of its own."""
        self.tracker.acquire(ints(*pages))
        self.tracker.bind(ints(row))
        slots = torch.tensor([p * 4 + i for p in pages for i in range(4)][:length], device=DEVICE)
        self.table[row, :length] = slots
        self.tracker.extend(ints(row), ints(length), slots)

    def decode(self, row: int, length: int, slot: int) -> list[Violation]:
        """One more token at `slot`, the last of `length`."""
        self.table[row, length - 1] = slot
        slots = ints(slot)
        self.tracker.extend(ints(row), ints(length), slots)
        return self.step(row, length=length, slots=slots)

    def step(self, *rows: int, length: int, slots: torch.Tensor | None = None) -> list[Violation]:
        lengths = torch.full((len(rows),), length, device=DEVICE)
        self.tracker.check(ints(*rows), lengths, self.table, slots)
        return list(self.tracker.settle(self.tracker.report(ints(*rows)), rows))


def kinds(violations: list[Violation]) -> list[tuple[int, str, int]]:
    return [(v.row, v.kind.name, v.index) for v in violations]


def test_a_request_that_grows_is_clean() -> None:
    engine = Engine()
    engine.start(1, 5, 6, length=7)
    assert engine.step(1, length=7) == []
    assert engine.decode(1, 8, 6 * 4 + 3) == []
    engine.tracker.acquire(ints(9))
    assert engine.decode(1, 9, 9 * 4) == []
    assert engine.decode(1, 10, 9 * 4 + 1) == []
    metrics = engine.tracker.metrics()
    assert (metrics["checks"], metrics["rows_checked"], metrics["steps"]) == (4, 4, 4)
    assert sum(count for name, count in metrics.items() if name.startswith("viol")) == 0


def test_tags_are_odd_in_use_even_when_free_and_start_at_random() -> None:
    tracker = make_tracker()
    start = tracker.state.tags.clone()
    assert (start[1:] % 2 == 0).all()
    assert len(set(start.tolist())) == LAYOUT.pages
    tracker.acquire(ints(3, 0, 4))
    assert (tracker.state.tags - start)[[3, 4, 5, 0]].tolist() == [1, 1, 0, 0]
    tracker.release(ints(4, 0))
    assert (tracker.state.tags - start)[[3, 4, 5, 0]].tolist() == [1, 2, 0, 0]
    again = make_tracker(seed=None).state.tags
    assert not torch.equal(again, make_tracker(seed=None).state.tags)


def test_a_page_freed_under_a_request_is_found_before_and_after_it_has_a_new_owner() -> None:
    engine = Engine()
    engine.start(1, 5, 6, length=8)
    engine.start(2, 7, length=4)
    engine.tracker.release(ints(6))
    assert kinds(engine.step(1, 2, length=4)) == []  # these four tokens are on other pages
    assert kinds(engine.step(1, length=8)) == [(1, "TAG", 1)]
    engine.start(3, 6, length=4)
    assert kinds(engine.step(1, length=8)) == [(1, "TAG", 1)]
    assert kinds(engine.step(3, length=4)) == []
    found = engine.tracker.abort(Violation(0, 1, Kind.TAG, 1))
    assert (found.page, found.found_tag - found.expected_tag) == (6, 2)
    assert found.own_pages.tolist() == [5]


def test_a_table_that_names_another_page_is_found_at_the_first_of_them() -> None:
    engine = Engine()
    engine.start(1, 5, 6, 7, length=12)
    engine.table[1, 4:12] = engine.table[1, 0:8].clone()
    assert kinds(engine.step(1, length=12)) == [(1, "TABLE", 1)]
    assert kinds(engine.step(1, length=4)) == [(1, "TABLE", 1)]  # a verdict stays
    engine.tracker.unbind(ints(1))
    assert kinds(engine.step(1, length=4)) == [(1, "ROW", 0)]
    assert engine.tracker.metrics()["violations_table"] == 1


def test_more_tokens_than_pages_are_found() -> None:
    engine = Engine()
    engine.start(1, 5, length=3)
    assert kinds(engine.step(1, length=4)) == []
    assert kinds(engine.step(1, length=5)) == [(1, "LENGTH", 1)]


def test_a_row_with_another_request_blames_the_old_one_only() -> None:
    engine = Engine()
    engine.start(1, 5, length=3)
    old = engine.tracker.generations(ints(1))
    engine.tracker.unbind(ints(1))
    engine.start(1, 6, length=3)
    engine.tracker.check(ints(1), ints(3), engine.table, None, old)
    violations = engine.tracker.settle(engine.tracker.report(ints(1), old), [1])
    assert kinds(list(violations)) == [(1, "ROW", 0)]
    assert kinds(engine.step(1, length=3)) == []


@pytest.mark.parametrize("mode", ["abort", "log"])
@pytest.mark.parametrize(
    ("slot", "where"),
    [
        (5 * 4 + 3, "another of its pages"),
        (6 * 4 + 2, "another place of the page"),
        (7 * 4 + 3, "another's page"),
        (0, "padding"),
        (-1, "before the pool"),
    ],
)
def test_a_write_elsewhere_is_found_and_turned_to_page_0(mode: Mode, slot: int, where: str) -> None:
    engine = Engine(mode)
    engine.start(1, 5, 6, length=7)
    engine.start(2, 7, length=3)
    engine.table[1, 7], engine.table[2, 3] = 6 * 4 + 3, 7 * 4 + 3
    slots = ints(slot, 7 * 4 + 3)
    engine.tracker.extend(ints(1, 2), ints(8, 4), slots)
    engine.tracker.check(ints(1, 2), ints(8, 4), engine.table, slots)
    violations = engine.tracker.settle(engine.tracker.report(ints(1, 2)), [1, 2])
    assert kinds(list(violations)) == [(1, "WRITE", 1)], where
    assert slots.tolist() == [0 if mode == "abort" else slot, 7 * 4 + 3]


def test_drafts_write_several_places_of_which_each_is_checked() -> None:
    engine = Engine()
    engine.start(1, 5, 6, length=6)
    slots = ints(6 * 4 + 2, 6 * 4 + 3).view(1, 2)
    engine.table[1, 6:8] = slots
    assert engine.step(1, length=8, slots=slots) == []
    assert kinds(engine.step(1, length=8, slots=slots.flip(1).contiguous())) == [(1, "WRITE", 1)]


def test_padding_rows_write_to_page_0_only() -> None:
    engine = Engine()
    engine.start(1, 5, length=3)
    for stray in (3, 0, 6 * 4, -1):
        slots = ints(5 * 4 + 2, stray)
        engine.tracker.check(ints(1, 0), ints(3, 1), engine.table, slots)
        engine.tracker.settle(engine.tracker.report(ints(1, 0)), [1, None])
        assert slots.tolist() == [5 * 4 + 2, 0 if stray < 0 or stray > 3 else stray]
    assert engine.tracker.metrics()["violations_padding"] == 2


def test_a_shared_page_is_nobodys_to_write_and_a_hit_takes_the_tags_of_its_node() -> None:
    engine = Engine()
    engine.start(1, 5, 6, length=7)
    node = engine.tracker.share(1, 0, 1)
    engine.tracker.bind(ints(2, 3))
    engine.tracker.expect_prefix(ints(2, 3), ints(5, 5), torch.cat([node, node]))
    engine.table[2:4, :4] = engine.table[1, :4]
    assert engine.step(1, 2, 3, length=4) == []
    assert kinds(engine.step(2, length=4, slots=ints(5 * 4 + 3))) == [(2, "WRITE", 0)]
    # The tree's page goes to somebody else: whoever hits the node later is stopped.
    engine.tracker.release(ints(5))
    engine.start(4, 5, length=4)
    engine.tracker.bind(ints(5))
    engine.tracker.expect_prefix(ints(5), ints(5), node)
    engine.table[5, :4] = engine.table[4, :4]
    assert kinds(engine.step(4, 5, 3, length=4)) == [(5, "TAG", 0), (3, "TAG", 0)]


def test_a_node_made_of_a_stale_page_stays_stale() -> None:
    """A table's pages as they are when they go into the cache would make the fault seem right."""
    engine = Engine()
    engine.start(1, 5, length=4)
    engine.tracker.release(ints(5))
    engine.start(2, 5, length=4)
    node = engine.tracker.share(1, 0, 1)
    engine.tracker.bind(ints(3))
    engine.tracker.expect_prefix(ints(3), ints(5), node)
    engine.table[3, :4] = engine.table[1, :4]
    assert kinds(engine.step(2, 3, length=4)) == [(3, "TAG", 0)]


def test_ragged_rows_extend_and_hit_each_by_their_own_count() -> None:
    engine = Engine()
    engine.tracker.acquire(ints(5, 6, 7, 8))
    node = engine.tracker.preload(ints(5, 6))
    engine.tracker.bind(ints(1, 2))
    engine.tracker.expect_prefix(ints(2, 1), ints(5, 6, 5), node[[0, 1, 0]], ints(2, 1))
    slots = ints(28, 29, 30, 32)
    engine.tracker.extend(ints(1, 2), ints(7, 9), slots, ints(3, 1))
    state = engine.tracker.state
    assert state.expected_pages[1, :3].tolist() == [5, 7, 0]
    assert state.expected_pages[2, :3].tolist() == [5, 6, 8]
    assert state.held[[1, 2]].tolist() == [2, 3]
    engine.table[1, [0, 4]], engine.table[2, [0, 4, 8]] = ints(20, 28), ints(20, 24, 32)
    assert engine.step(1, 2, length=7) == []


def test_a_page_handed_out_twice_stops_both_owners_and_is_quarantined() -> None:
    engine = Engine()
    engine.start(1, 5, length=4)
    engine.start(2, 5, length=4)
    assert kinds(engine.step(1, 2, length=4)) == [(1, "TAG", 0), (2, "TAG", 0)]
    assert engine.tracker.metrics()["violations_acquire"] == 1
    assert engine.tracker.metrics()["quarantined_pages"] == 1
    free = ints(4, 5, 6)
    assert engine.tracker.usable(free).tolist() == [4, 6]
    engine.tracker.release(ints(5))
    assert int(engine.tracker.state.tags[5]) == QUARANTINED
    engine.tracker.readmit(ints(5, 6))
    engine.tracker.unbind(ints(1, 2))
    engine.start(3, 5, length=4)
    assert engine.step(3, length=4) == []
    assert engine.tracker.usable(free) is free


def test_all_who_share_a_page_in_quarantine_are_stopped_and_nobody_else() -> None:
    engine = Engine()
    engine.start(1, 5, 6, length=8)
    engine.start(2, 7, length=4)
    node = engine.tracker.share(1, 0, 1)
    engine.tracker.bind(ints(3))
    engine.tracker.expect_prefix(ints(3), ints(5), node)
    engine.table[3, :4] = engine.table[1, :4]
    assert engine.step(1, 2, 3, length=4) == []
    engine.tracker.quarantine(ints(5))
    violations = engine.step(1, 2, 3, length=4)
    assert kinds(violations) == [(1, "TAG", 0), (3, "TAG", 0)]
    own = [engine.tracker.abort(violation).own_pages.tolist() for violation in violations]
    assert own == [[6], []]
    assert engine.tracker.usable(ints(5, 8)).tolist() == [8]


def test_frees_of_what_is_free_or_anothers_are_found() -> None:
    engine = Engine()
    engine.start(1, 5, 6, length=8)
    node = engine.tracker.share(1, 0, 2)
    engine.tracker.release(ints(5, 6), node)
    engine.tracker.release(ints(5))  # free already
    engine.start(2, 6, length=4)
    engine.tracker.release(ints(6), node[1:])  # another's by now
    engine.tracker.release(ints(9, 9))  # twice at once, and never handed out
    assert engine.tracker.state.counters[Counter.RELEASE] == 4
    assert (engine.tracker.state.tags == QUARANTINED).nonzero().flatten().tolist() == [5, 6, 9]
    assert kinds(engine.step(2, length=4)) == [(2, "TAG", 0)]


def test_numbers_that_are_no_page_are_faults_and_reach_no_memory() -> None:
    engine = Engine()
    before = engine.tracker.state.tags.clone()
    for number in (-1, 32, 2**31 - 1):
        engine.tracker.acquire(ints(number))
        engine.tracker.release(ints(number))
        engine.tracker.quarantine(ints(number))
    assert torch.equal(engine.tracker.state.tags, before)
    counters = engine.tracker.state.counters
    assert counters[[Counter.ACQUIRE, Counter.RELEASE, Counter.QUARANTINED]].tolist() == [3, 3, 0]
    engine.tracker.bind(ints(1, 2))
    engine.tracker.extend(ints(1), ints(1), ints(32 * 4))
    engine.tracker.expect_prefix(ints(2), ints(-1), ints(1))
    assert [kind for _, kind, _ in kinds(engine.step(1, 2, length=1))] == ["CLAIM", "TAG"]


def test_one_page_for_two_requests_of_a_batch_stops_both() -> None:
    engine = Engine()
    engine.tracker.acquire(ints(5))
    engine.tracker.bind(ints(1, 2))
    engine.tracker.extend(ints(1, 2), ints(1, 1), ints(20, 20))
    engine.table[1:3, 0] = 20
    assert {row for row, _, _ in kinds(engine.step(1, 2, length=1))} == {1, 2}


def test_mode_log_changes_nothing_and_sees_the_same() -> None:
    engine = Engine("log")
    engine.start(1, 5, length=4)
    engine.start(2, 5, length=4)
    assert kinds(engine.step(1, 2, length=4)) == [(1, "TAG", 0), (2, "CLAIM", 0)]
    free = ints(5)
    assert engine.tracker.usable(free) is free
    assert engine.tracker.metrics()["violations_acquire"] == 1


def test_a_step_without_a_check_is_an_error() -> None:
    engine = Engine()
    engine.start(1, 5, length=4)
    assert engine.step(1, length=4) == []
    with pytest.raises(IntegrityError, match=r"step 2 .* no check ran"):
        engine.tracker.settle(engine.tracker.report(ints(1)), [1])
    assert not engine.tracker.healthy
    logs = Engine("log").tracker
    logs.settle(logs.report(ints(1)), [None])
    assert not logs.healthy


def test_mode_raise_raises_for_requests_and_for_the_allocator() -> None:
    engine = Engine("raise")
    engine.start(1, 5, 6, length=8)
    engine.tracker.release(ints(6))
    with pytest.raises(IntegrityError, match="row 1, page 1 of the request: tag"):
        engine.step(1, length=8)
    engine = Engine("raise")
    engine.start(1, 5, length=4)
    engine.tracker.release(ints(6))
    with pytest.raises(IntegrityError, match="release fault; 0 requests"):
        engine.step(1, length=4)


def test_a_row_that_ended_meanwhile_is_not_told_of() -> None:
    engine = Engine("raise")
    engine.start(1, 5, length=4)
    engine.tracker.release(ints(5))
    engine.tracker.check(ints(1), ints(4), engine.table)
    assert engine.tracker.settle(engine.tracker.report(ints(1)), [None]) == []


def test_a_block_table_and_padding_outside_the_table() -> None:
    """vLLM's form: an entry to a page, and no row that stands for padding."""
    layout = Layout(32, 4, 8, 6, table_holds_slots=False, padding_row=-1)
    tracker = make_tracker(layout=layout)
    table = torch.zeros(8, 6, dtype=torch.int32, device=DEVICE)
    tracker.acquire(ints(5, 6))
    tracker.bind(ints(0))
    tracker.extend(ints(0), ints(5), ints(20, 21, 22, 23, 24))
    table[0, :2] = ints(5, 6)
    tracker.check(ints(0, -1), ints(5, 1), table, ints(24, 0))
    assert tracker.report(ints(0, -1))[len(Counter) :].tolist() == [CLEAN, CLEAN]
    table[0, 1] = 5
    tracker.check(ints(0, -1), ints(5, 1), table)
    assert kinds(list(tracker.settle(tracker.report(ints(0, -1)), [0, None]))) == [(0, "TABLE", 1)]


def test_the_default_does_nothing_and_layouts_are_checked() -> None:
    tracker = open_tracker("off", LAYOUT, "cpu")
    assert isinstance(tracker, NoopTracker)
    assert tracker.settle(tracker.report(ints(1)), [1]) == ()
    with pytest.raises(IntegrityError, match="page_size 0; at least 1"):
        Layout(4, 0, 1, 1)
    with pytest.raises(IntegrityError, match="int32"):
        Layout(2**26, 64, 1, 1)


def test_engine_that_starts_anew() -> None:
    engine = Engine()
    engine.start(1, 5, 6, length=7)
    engine.start(2, 7, length=3)
    engine.tracker.quarantine(ints(7, 9))
    before = engine.tracker.state.tags.clone()
    engine.tracker.clear()
    state = engine.tracker.state
    assert (state.tags[1:] % 2 == 0).all()
    assert state.tags[[5, 6]].tolist() == [int(before[5]) + 1, int(before[6]) + 1]
    assert state.tags[[7, 9]].tolist() == [QUARANTINED] * 2
    assert (state.generation % 2 == 0).all()
    assert (state.verdict == CLEAN).all()
    engine.start(1, 5, 6, length=7)
    engine.tracker.check(ints(1), ints(7), engine.table)
    report = engine.tracker.report(ints(1)).cpu()
    assert engine.tracker.settle(report, [1]) == []
