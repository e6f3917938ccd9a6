"""The Triton functions do to a state what those in plain torch do, over random histories.

Without a GPU they are interpreted on CPU tensors: that checks what they mean, not how they compile.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch

from halfbyte.kvcache.integrity import reference
from halfbyte.kvcache.integrity.page_tags import PageTagTracker
from halfbyte.kvcache.integrity.state import (
    CLEAN,
    FREE,
    QUARANTINED,
    RESERVED,
    SHARED,
    Counter,
    Kind,
    Layout,
    State,
)
from halfbyte.testing.numeric import first_difference

pytest.importorskip("triton", reason="Triton is not installed; it comes with torch on Linux")
from halfbyte.kvcache.integrity import fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = (
    Layout(pages=97, page_size=4, rows=9, pages_per_row=7),
    Layout(pages=3000, page_size=1, rows=6, pages_per_row=1300),
    Layout(
        pages=40, page_size=16, rows=5, pages_per_row=4, table_holds_slots=False, padding_row=-1
    ),
)


class Pair:
    """Both forms on the same calls; after each of them their states are equal."""

    def __init__(self, layout: Layout, mode: str, seed: int) -> None:
        self.both = [
            PageTagTracker(mode, layout, DEVICE, seed=seed, operations=operations)  # type: ignore[arg-type]
            for operations in (reference, fused)
        ]

    def __call__(self, method: str, *arguments: torch.Tensor | int | None) -> torch.Tensor | None:
        results, used = [], []
        for tracker in self.both:
            copies = [a.clone().to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arguments]
            torch.manual_seed(0)  # chooses the tags of pages that are readmitted
            results.append(getattr(tracker, method)(*copies))
            used.append(copies)
        for one, other in zip(*used, strict=True):
            same = first_difference(one, other) is None if isinstance(one, torch.Tensor) else True
            assert same, f"{method}'s arguments"
        one, other = (tracker.state for tracker in self.both)
        for name in [f.name for f in fields(State)][1:]:
            tensors = getattr(one, name), getattr(other, name)
            if name.startswith("expected"):
                tensors = tuple(t[:, : one.layout.pages_per_row] for t in tensors)
            assert first_difference(*tensors) is None, f"{method}: {name}"
        if results[0] is not None:
            assert first_difference(*results) is None, method
        result: torch.Tensor | None = results[0]
        return result


class History:
    """Calls at random, most of them right: requests that come, grow, and go."""

    def __init__(self, layout: Layout, mode: str) -> None:
        self.layout, self.chance = layout, random.Random(layout.pages)
        self.pair = Pair(layout, mode, seed=7)
        self.rows = [row for row in range(layout.rows) if row != layout.padding_row]
        self.pages: dict[int, list[int]] = {}
        self.table = torch.zeros(
            layout.rows, layout.pages_per_row * layout.table_stride, dtype=torch.int32
        )
        self.seen: set[Kind] = set()

    def odds(self, one_in: int) -> bool:
        return self.chance.randrange(one_in) == 0

    def any_pages(self) -> torch.Tensor:
        return torch.tensor([self.chance.randrange(self.layout.pages) for _ in range(3)])

    def replace(self, row: int) -> None:
        """The row's request goes, and another one comes."""
        layout, pair = self.layout, self.pair
        one = torch.tensor([row]).int()
        pair("release", torch.tensor(self.pages.pop(row, [])).int())
        if self.odds(2):
            pair("unbind", one)
        pair("bind", one)
        state = pair.both[0].state
        free = ((state.tags % 2 == 0).nonzero().flatten()).tolist()
        most = min(layout.pages_per_row, len(free))
        count = self.chance.randrange(most * 3 // 4, most + 1)
        pages = self.chance.sample(free, count)
        if not pages:
            return
        pair("acquire", torch.tensor(pages))
        if self.odds(6):
            pair(self.chance.choice(["acquire", "release"]), self.any_pages())
        length = count * layout.page_size - self.chance.randrange(layout.page_size)
        slots = torch.tensor(
            [p * layout.page_size + i for p in pages for i in range(layout.page_size)]
        )
        slots = slots[:length]
        if self.odds(6):
            at = self.chance.randrange(count) * layout.page_size
            slots[at] = self.chance.randrange(-3, (layout.pages + 1) * layout.page_size)
        pair("extend", one, torch.tensor([length]), slots)
        stride = 1 if layout.table_holds_slots else layout.page_size
        entries = slots[::stride] // stride
        self.table[row, : len(entries)] = entries.int()
        if self.odds(3):
            self.table[row, self.chance.randrange(len(entries)) // stride * stride] -= 5
        self.pages[row] = pages

    def step(self) -> None:
        """Some rows, with padding, read what they have and write behind it."""
        layout, pair = self.layout, self.pair
        chosen = self.chance.sample(self.rows, 3)
        batch = torch.tensor([layout.padding_row, *chosen, layout.padding_row])
        state, row = pair.both[0].state, batch.clamp(min=0)
        held, expected = state.held.cpu()[row], state.expected_pages.cpu()[row]
        lengths = (held * layout.page_size - self.chance.randrange(3)).clamp(min=1)
        lengths[1] += self.odds(3) * layout.page_size
        writes = self.chance.choice([1, 3])
        position = (lengths[:, None] - writes + torch.arange(writes)).clamp(min=0)
        entry = (position // layout.page_size).clamp(max=layout.pages_per_row - 1)
        slots = expected.gather(1, entry) * layout.page_size + position % layout.page_size
        slots[2] += self.odds(6)
        slots[batch == layout.padding_row] = self.chance.choice([0, 0, layout.page_size, -1])
        generations = pair("generations", batch)
        assert generations is not None
        generations[3] -= 2 * self.odds(6)
        pair("check", batch, lengths, self.table, slots, generations if self.odds(2) else None)
        pair("check", batch, lengths, self.table, None, None)
        report = pair("report", batch, generations)
        assert report is not None
        self.seen |= {Kind(int(v) % 16) for v in report[len(Counter) :] if v != CLEAN}


@pytest.mark.parametrize("mode", ["abort", "log"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"page {layout.page_size}")
def test_random_histories_end_alike(
    layout: Layout, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "log":
        monkeypatch.setattr(fused, "PROGRAMS", 1)  # one to a row, which loops over its pages
    history = History(layout, mode)
    for number in range(20):
        history.replace(history.chance.choice(history.rows))
        history.step()
        if number % 10 == 9:
            history.pair("readmit", torch.arange(1, layout.pages))
            history.pair("quarantine", history.any_pages())
    counters = history.pair.both[0].state.counters
    assert history.seen >= {Kind.TAG, Kind.ROW}
    assert all(int(counters[each]) > 0 for each in Counter)


def test_ragged_batches_extend_alike() -> None:
    layout = LAYOUTS[0]
    pair = Pair(layout, "abort", seed=3)
    pair("acquire", torch.arange(1, 40))
    pair("bind", torch.tensor([1, 2, 3]))
    counts = torch.tensor([3, 28, 1])
    slots = torch.cat([torch.arange(4, 7), torch.arange(8, 36), torch.tensor([36])])
    pair("extend", torch.tensor([3, 1, 2]), counts, slots, counts)
    assert pair.both[1].state.held.tolist() == [0, 7, 1, 1] + [0] * 5
    assert pair.both[1].state.expected_pages[1, :7].tolist() == list(range(2, 9))


def test_a_row_of_another_request_by_now_gets_nothing() -> None:
    pair = Pair(LAYOUTS[0], "abort", seed=3)
    pair("acquire", torch.arange(1, 10))
    rows = torch.tensor([1, 2])
    pair("bind", rows)
    generations = pair("generations", rows)
    assert generations is not None
    pair("unbind", rows[1:])
    pair("bind", rows[1:])  # the row's next request
    slots = torch.tensor([*range(4, 12), *range(12, 20)])
    pair("extend", rows, torch.tensor([8, 8]), slots, None, generations)
    state = pair.both[1].state
    assert state.held[1:3].tolist() == [2, 0]
    assert state.expected_pages[1:3, :2].tolist() == [[1, 2], [0, 0]]
    assert state.owner[1:5].tolist() == [1, 1, RESERVED, RESERVED]
    assert int(state.verdict[2]) == CLEAN
    # A page that is not to be had is counted and kept from everybody, but nobody is to blame.
    pair("extend", rows[1:], torch.tensor([4]), slots[8:12], None, generations[1:])
    assert state.counters[Counter.CLAIM] == 1
    assert int(state.verdict[2]) == CLEAN
    assert int(state.tags[3]) == QUARANTINED


def test_prefixes_are_shared_and_expected_alike() -> None:
    layout = LAYOUTS[0]
    pair = Pair(layout, "abort", seed=3)
    pair("acquire", torch.arange(1, 40))
    pair("bind", torch.tensor([1, 2, 3]))
    pair("extend", torch.tensor([1]), torch.tensor([28]), torch.arange(8, 36))
    pair("release", torch.tensor([4]))
    tags = pair("share", 1, 1, 6)
    owner = pair.both[1].state.owner
    assert tags is not None
    # Page 4 is somebody else's by now, and stays so; the first and the last one remain the row's.
    assert owner[2:9].tolist() == [1, SHARED, FREE, SHARED, SHARED, SHARED, 1]
    pages = torch.tensor([3, 4, 5, 200, 3, -1])
    given = torch.cat([tags[:3], tags[:3]])
    pair("expect_prefix", torch.tensor([2, 3]), pages, given)
    counts = torch.tensor([0, 9])  # more than a row has
    pair("expect_prefix", torch.tensor([2, 3]), torch.arange(3, 12), tags[:1].repeat(9), counts)
    state = pair.both[1].state
    assert state.expected_pages[2, :3].tolist() == [3, 4, 5]
    assert state.held[1:4].tolist() == [7, 3, 7]
    assert state.expected_pages[3, :7].tolist() == list(range(3, 10))
    pair("expect_prefix", torch.tensor([3]), pages[3:], given[3:])
    assert state.expected_pages[3, :3].tolist() == [0, 3, 0]
    assert state.expected_tags[3, :3].tolist() == [QUARANTINED, int(tags[1]), QUARANTINED]


def test_kernels_compile_for_a_gpu() -> None:
    """What the interpreter allows, as a variable that changes its type, a compiler may refuse."""
    program = Path(__file__).with_name("compile_fused.py")
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    sizes = [int(line) for line in result.stdout.split()]
    assert len(sizes) == 22
    assert min(sizes) > 0


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_a_check_in_a_graph_sees_what_changed_since_it_was_captured() -> None:
    layout = LAYOUTS[0]
    tracker = PageTagTracker("abort", layout, DEVICE, seed=1)
    rows, lengths = (torch.tensor(each, device=DEVICE) for each in ([1, 2, 0], [4, 4, 1]))
    tracker.acquire(torch.tensor([5, 6], device=DEVICE))
    tracker.bind(rows[:2])
    slots = torch.arange(20, 28, device=DEVICE)
    tracker.extend(rows[:2], lengths[:2], slots)
    table = torch.zeros(layout.rows, 28, dtype=torch.int32, device=DEVICE)
    table[1, :4], table[2, :4] = slots[:4], slots[4:]
    writes = torch.tensor([23, 27, 0], device=DEVICE)
    tracker.check(rows, lengths, table, writes)
    tracker.report(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tracker.check(rows, lengths, table, writes)
        report = tracker.report(rows)
    graph.replay()
    assert tracker.settle(report.cpu(), [1, 2, None]) == []
    tracker.release(torch.tensor([6], device=DEVICE))
    writes[2] = 8
    graph.replay()
    found = tracker.settle(report.cpu(), [1, 2, None])
    assert [(v.row, v.kind) for v in found] == [(2, Kind.TAG)]
    assert writes.tolist() == [23, 0, 0]
    assert tracker.metrics()["violations_padding"] == 1


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("operations", [reference, fused], ids=["reference", "fused"])
def test_nothing_before_settle_waits_for_the_gpu(operations: ModuleType) -> None:
    tracker = PageTagTracker("abort", LAYOUTS[0], DEVICE, seed=1, operations=operations)
    one, pages = torch.tensor([1], device=DEVICE), torch.tensor([5, 6, 7], device=DEVICE)
    table = torch.zeros(LAYOUTS[0].rows, 28, dtype=torch.int32, device=DEVICE)
    length, slots = 4 * one, torch.arange(24, 28, device=DEVICE)
    for _ in range(2):  # the first time compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            tracker.acquire(pages)
            tracker.bind(one)
            tags = tracker.preload(pages[:1])
            tracker.expect_prefix(one, pages[:1], tags)
            tracker.extend(one, 2 * length, slots)
            tracker.extend(one, 2 * length, slots, length)
            generations = tracker.generations(one)
            tracker.check(one, length, table, slots[:1].clone(), generations)
            tracker.report(one, generations)
            tracker.share(1, 0, 1)
            tracker.release(pages[:1], tags)
            tracker.quarantine(pages[2:])
            tracker.release(pages)
            tracker.unbind(one)
            assert tracker.usable(pages) is pages
        finally:
            torch.cuda.set_sync_debug_mode("default")
