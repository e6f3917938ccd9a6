"""The tracker that follows changes, held against the one that looks at every page of every step."""

from __future__ import annotations

import random
from collections import Counter as Bag
from collections.abc import Sequence

import pytest
import torch

from halfbyte.errors import IntegrityError
from halfbyte.kvcache.integrity.host import HostTracker
from halfbyte.kvcache.integrity.page_tags import PageTagTracker
from halfbyte.kvcache.integrity.state import CLEAN, Counter, Kind, Layout
from halfbyte.kvcache.integrity.tracker import Mode

PAGES, ROWS, MOST = 40, 160, 12


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


class Both:
    """Two trackers that are told the same. Calls and their order are random, most of them such as
    a sound engine makes."""

    def __init__(self, mode: Mode, seed: int) -> None:
        self.chance = random.Random(seed)
        self.host = HostTracker(mode, PAGES, seed=seed)
        layout = Layout(PAGES, 1, ROWS, MOST, table_holds_slots=False)
        self.scan = PageTagTracker(mode, layout, "cpu", seed=seed)
        self.table = torch.zeros(ROWS, MOST + 4, dtype=torch.int32)
        self.given: dict[int, list[int]] = {}
        self.told: dict[int, list[int]] = {}
        self.free = list(range(1, PAGES))
        self.nodes: list[tuple[list[int], list[int], list[int]]] = []
        self.kinds: Bag[str] = Bag()
        self.faulty = False

    def row(self) -> int:
        return self.chance.choice(list(self.given))

    def bind(self) -> None:
        row = self.host.bind()
        self.scan.bind(ints([row]))
        self.given[row], self.told[row] = [], []
        if self.nodes and self.chance.random() < 0.6:
            pages, tags, scan_tags = self.chance.choice(self.nodes)
            if self.faulty and self.chance.random() < 0.2:
                tags, scan_tags = [0] * len(pages), [0] * len(pages)
            self.host.expect_prefix(row, pages, tags)
            self.scan.expect_prefix(ints([row]), ints(pages), ints(scan_tags))
            self.given[row] += pages

    def unbind(self) -> None:
        row = self.row()
        self.host.unbind(row)
        self.scan.unbind(ints([row]))
        pages = self.given.pop(row)
        del self.told[row]
        cached = {page for node, _, _ in self.nodes for page in node}
        shared = cached.union(*self.given.values())
        self.release([page for page in pages if page not in shared])

    def release(self, pages: Sequence[int]) -> None:
        self.host.release(pages)
        self.scan.release(ints(pages))
        self.free += pages

    def grow(self) -> None:
        row, count = self.row(), self.chance.randint(1, 3)
        if len(self.given[row]) + count > MOST or len(self.free) < count:
            return
        pages = [self.free.pop(0) for _ in range(count)]
        self.host.acquire(pages)
        self.scan.acquire(ints(pages))
        self.extend(row, pages)

    def extend(self, row: int, pages: Sequence[int]) -> None:
        self.given[row] += pages
        self.host.extend(row, pages)
        self.scan.extend(ints([row]), ints([len(self.given[row])]), ints(pages))

    def share(self) -> None:
        row = self.row()
        stop = self.chance.randint(0, len(self.given[row]))
        tags = self.host.share(row, 0, stop)
        self.nodes.append(
            (self.given[row][:stop], list(tags), self.scan.share(row, 0, stop).tolist())
        )

    def evict(self) -> None:
        if self.nodes:
            pages = self.nodes.pop(self.chance.randrange(len(self.nodes)))[0]
            used = {page for given in self.given.values() for page in given}
            used |= {page for node, _, _ in self.nodes for page in node}
            self.release([page for page in pages if page not in used])

    def fault(self) -> None:
        pages = [self.chance.randint(-1, PAGES) for _ in range(self.chance.randint(1, 3))]
        what, row = (
            self.chance.choice(["acquire", "release", "give", "table", "longer"]),
            self.row(),
        )
        if what == "acquire":
            self.host.acquire(pages)
            self.scan.acquire(ints(pages))
        elif what == "release":
            self.release(pages)
        elif what == "give" and len(self.given[row]) + len(pages) <= MOST:
            self.extend(row, pages)
        elif what == "table" and self.told[row]:
            wrong = list(self.told[row])
            wrong[self.chance.randrange(len(wrong))] = self.chance.randint(0, PAGES)
            self.tell(row, wrong, anew=True)
        elif what == "longer":
            self.tell(row, [self.chance.randint(1, PAGES - 1)])

    def tell(self, row: int, pages: Sequence[int], *, anew: bool = False) -> None:
        told = list(pages) if anew else [*self.told[row], *pages]
        if len(told) <= MOST:
            self.told[row] = told
            self.host.tell(row, pages, anew=anew)
            self.table[row, : len(told)] = ints(told)

    def step(self) -> None:
        rows = self.chance.sample(list(self.given), self.chance.randint(1, len(self.given)))
        for row in rows:
            new = self.given[row][len(self.told[row]) :]
            if new or self.chance.random() < 0.05:
                anew = not self.told[row] or self.chance.random() < 0.1
                self.tell(row, self.given[row] if anew else new, anew=anew)
        lengths = ints([len(self.told[row]) for row in rows])
        self.scan.check(ints(rows), lengths, self.table)
        report, expected = self.host.check(rows), self.scan.report(ints(rows))
        assert list(report) == expected.tolist()
        violations = self.host.settle(report, rows)
        assert violations == self.scan.settle(expected, rows)
        assert self.host.metrics() == self.scan.metrics()
        for violation in violations:
            self.kinds[violation.kind.name] += 1
            ours, theirs = self.host.abort(violation), self.scan.abort(violation)
            assert ours.page == theirs.page
            assert ours.sound_pages.tolist() == theirs.sound_pages.tolist()
            assert ours.own_pages.tolist() == theirs.own_pages.tolist()


@pytest.mark.parametrize("mode", ["abort", "log"])
def test_it_finds_what_a_scan_of_everything_finds(mode: Mode) -> None:
    kinds: Bag[str] = Bag()
    for seed in range(60):
        both = Both(mode, seed)
        calls = [both.grow] * 4 + [both.step] * 4 + [both.share, both.evict, both.unbind]
        for i in range(150):
            if len(both.given) < 2 or (i % 6 == 0 and len(both.given) < 8):
                both.bind()
            both.chance.choice(calls)()
            if i == 75:
                assert not both.kinds, "the first half of each history is that of a sound engine"
                both.faulty = True
            if both.faulty and both.given and both.chance.random() < 0.1:
                both.fault()
        both.bind()
        both.step()
        kinds += both.kinds
        pages = ints(range(1, PAGES))
        usable = [page for page in range(1, PAGES) if both.host.is_usable(page)]
        assert mode == "log" or both.scan.usable(pages).tolist() == usable
    # In mode abort a page that is claimed twice goes to quarantine, and so has a wrong tag.
    expected = {"TABLE", "TAG", "LENGTH"} | ({"CLAIM"} if mode == "log" else set())
    assert {kind for kind, count in kinds.items() if count > 20} >= expected


def test_a_row_that_ended_meanwhile_and_a_step_without_a_check() -> None:
    tracker = HostTracker("raise", 8, seed=1)
    row = tracker.bind()
    tracker.acquire([3])
    tracker.extend(row, [3])
    tracker.tell(row, [3], anew=True)
    tracker.release([3])
    report = tracker.check([row])
    assert report[len(Counter) :] == [Kind.TAG]
    tracker.unbind(row)
    assert tracker.settle(report, [row]) == []
    assert tracker.bind() != row
    with pytest.raises(KeyError):
        tracker.check([row])
    with pytest.raises(IntegrityError, match="no check ran before it"):
        tracker.settle(report, [row])
    assert not tracker.healthy


def test_pages_freed_by_a_request_that_has_ended_leave_others_clean() -> None:
    tracker = HostTracker("abort", 8, seed=1)
    first, second = tracker.bind(), tracker.bind()
    tracker.acquire([3, 4, 5])
    tracker.extend(first, [3, 4])
    tags = tracker.share(first, 0, 1)
    tracker.expect_prefix(second, [3], tags)
    tracker.extend(second, [5])
    tracker.unbind(first)
    tracker.release([4])
    tracker.tell(second, [3, 5], anew=True)
    assert tracker.check([second])[len(Counter) :] == [CLEAN]
    with pytest.raises(IntegrityError, match="0 pages; at least 1"):
        HostTracker("abort", 0)
