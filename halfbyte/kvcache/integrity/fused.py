"""The tracker's work in Triton, one launch for each function; equal to `reference`.

Launches and shapes follow from the arguments' shapes alone, so all of it can be captured in graphs.
What is compiled does not depend on how many pages, rows or tokens there are.
Pages change hands by compare-and-swap: of two lanes that want the same page one gets it, and the
other one sees that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.kvcache.integrity import state
from halfbyte.kvcache.integrity.launch import Launcher
from halfbyte.kvcache.integrity.state import Counter, Kind, State

ENTRIES = 1024
"""Of an expectation that a program compares at a time."""
PROGRAMS = 2048
"""So many keep a GPU busy; more than one of them share a row if there are fewer rows."""
LANES = 128
"""Pages or tokens of a program where each is looked at by itself."""

_CLEAN, _STEP = tl.constexpr(state.CLEAN), tl.constexpr(state.VERDICT_STEP)
_QUARANTINED = tl.constexpr(state.QUARANTINED)
_FREE, _FRESH = tl.constexpr(state.FREE), tl.constexpr(state.FRESH)
_SHARED, _RESERVED = tl.constexpr(state.SHARED), tl.constexpr(state.RESERVED)
_NOBODY = tl.constexpr(state.NOBODY)
_TABLE, _TAG, _LENGTH = (tl.constexpr(int(k)) for k in (Kind.TABLE, Kind.TAG, Kind.LENGTH))
_ROW, _WRITE, _CLAIM = (tl.constexpr(int(k)) for k in (Kind.ROW, Kind.WRITE, Kind.CLAIM))
_CHECKS, _ROWS = tl.constexpr(int(Counter.CHECKS)), tl.constexpr(int(Counter.ROWS))
_HELD_BACK = tl.constexpr(int(Counter.QUARANTINED))
_CLAIMS, _STRAYS = tl.constexpr(int(Counter.CLAIM)), tl.constexpr(int(Counter.PADDING))
_ACQUIRES, _RELEASES = tl.constexpr(int(Counter.ACQUIRE)), tl.constexpr(int(Counter.RELEASE))
_COUNTERS = tl.constexpr(len(Counter))


def acquire(state: State, pages: torch.Tensor, *, enforce: bool) -> None:
    """See `reference.acquire`."""
    _change(state, pages, None, acquire=True, enforce=enforce)


def release(state: State, pages: torch.Tensor, tags: torch.Tensor | None, *, enforce: bool) -> None:
    """See `reference.release`."""
    _change(state, pages, tags, acquire=False, enforce=enforce)


def _change(
    state: State, pages: torch.Tensor, tags: torch.Tensor | None, *, acquire: bool, enforce: bool
) -> None:
    count = pages.numel()
    if count:
        _bump(
            (triton.cdiv(count, LANES), 1, 1), state.tags, state.owner, state.counters,
            pages.contiguous(), pages if tags is None else tags.contiguous(), count,
            state.layout.pages, ACQUIRE=acquire, GIVEN=tags is not None, ENFORCE=enforce,
            LANES=LANES,
        )  # fmt: skip


@Launcher
@triton.jit(do_not_specialize=["count", "most"])
def _bump(  # type: ignore[no-untyped-def]
    tags, owner, counters, pages, given, count, most,
    ACQUIRE: tl.constexpr, GIVEN: tl.constexpr, ENFORCE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    page = tl.load(pages + lane, mask=lane < count, other=0)
    real = page != 0
    page = tl.where((page > 0) & (page < most), page, 0)
    tag = tl.load(tags + page)
    fits = (page != 0) & ((tag & 1) == (0 if ACQUIRE else 1)) & (tag != _QUARANTINED)
    if GIVEN:
        fits &= tag == tl.load(given + lane, mask=lane < count, other=0)
    # Lanes without work compare page 0's tag with one that it never has.
    before = tl.where(fits, tag, 0)
    good = fits & (tl.atomic_cas(tags + tl.where(fits, page, 0), before, before + 1) == before)
    tl.store(owner + page, tl.full((LANES,), _FRESH if ACQUIRE else _FREE, tl.int32), mask=good)
    wrong = real & ~good
    failed = tl.sum(wrong.to(tl.int32))
    if failed > 0:
        tl.atomic_add(counters + (_ACQUIRES if ACQUIRE else _RELEASES), failed)
        if ENFORCE:
            _poison(tags, owner, counters, page, wrong, LANES)
        elif ACQUIRE:
            tl.atomic_add(tags + page, 2, mask=wrong & (page != 0) & (tag != _QUARANTINED))


@triton.jit
def _poison(tags, owner, counters, page, chosen, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    chosen = chosen & (page != 0)
    seen = tl.atomic_xchg(tags + page, tl.full((LANES,), _QUARANTINED, tl.int32), mask=chosen)
    tl.store(owner + page, tl.full((LANES,), _FREE, tl.int32), mask=chosen)
    tl.atomic_add(counters + _HELD_BACK, tl.sum((chosen & (seen != _QUARANTINED)).to(tl.int32)))


def bind(state: State, rows: torch.Tensor) -> None:
    """See `reference.bind`."""
    _give(state, rows, bind=True)


def unbind(state: State, rows: torch.Tensor) -> None:
    """See `reference.unbind`."""
    _give(state, rows, bind=False)


def _give(state: State, rows: torch.Tensor, *, bind: bool) -> None:
    if count := rows.numel():
        _rows(
            (triton.cdiv(count, LANES), 1, 1), state.held, state.generation, state.verdict,
            rows.contiguous(), count, BIND=bind, LANES=LANES,
        )  # fmt: skip


@Launcher
@triton.jit(do_not_specialize=["count"])
def _rows(  # type: ignore[no-untyped-def]
    held, generation, verdict, rows, count, BIND: tl.constexpr, LANES: tl.constexpr
):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < count
    row = tl.load(rows + lane, mask=inside, other=0)
    number = tl.load(generation + row, mask=inside, other=0)
    number += number & 1
    if BIND:
        number += 1
        tl.store(verdict + row, tl.full((LANES,), _CLEAN, tl.int32), mask=inside)
    tl.store(generation + row, number, mask=inside)
    tl.store(held + row, tl.zeros((LANES,), tl.int32), mask=inside)


def generations(state: State, rows: torch.Tensor) -> torch.Tensor:
    """See `reference.generations`."""
    count = rows.numel()
    out = torch.empty(count, dtype=torch.int32, device=rows.device)
    if count:
        _generations(
            (triton.cdiv(count, LANES), 1, 1), state.generation, rows.contiguous(), out, count,
            LANES=LANES,
        )  # fmt: skip
    return out


@Launcher
@triton.jit(do_not_specialize=["count"])
def _generations(generation, rows, out, count, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    row = tl.maximum(tl.load(rows + lane, mask=lane < count, other=0), 0)
    tl.store(out + lane, tl.load(generation + row), mask=lane < count)


def extend(
    state: State,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor | None,
    generations: torch.Tensor | None,
    *,
    enforce: bool,
) -> None:
    """See `reference.extend`."""
    layout, total, batch = state.layout, slots.numel(), rows.numel()
    if not total:
        return
    each = total if counts is not None else total // batch
    _extend(
        (batch, triton.cdiv(each, LANES), 1), state.tags, state.owner, state.counters,
        state.expected_pages, state.expected_tags, state.held, state.generation, state.verdict,
        rows.contiguous(), lengths.contiguous(), slots.contiguous(),
        rows if counts is None else counts.contiguous(),
        rows if generations is None else generations.contiguous(), each, layout.pages,
        layout.pages_per_row, PITCH=state.expected_pages.stride(0), SIZE=layout.page_size,
        RAGGED=counts is not None, GENERATIONS=generations is not None, ENFORCE=enforce,
        LANES=min(LANES, triton.next_power_of_2(each)),
    )  # fmt: skip


@Launcher
@triton.jit(do_not_specialize=["each", "pages", "most"])
def _extend(  # type: ignore[no-untyped-def]
    tags, owner, counters, expected_pages, expected_tags, held, generation, verdict, rows, lengths,
    slots, counts, generations, each, pages, most, PITCH: tl.constexpr, SIZE: tl.constexpr,
    RAGGED: tl.constexpr, GENERATIONS: tl.constexpr, ENFORCE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    start, count = _span(counts, item, each, RAGGED, LANES)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < count
    row, length = tl.load(rows + item).to(tl.int64), tl.load(lengths + item).to(tl.int32)
    mine = row >= 0
    if GENERATIONS:
        mine = tl.load(generation + row) == tl.load(generations + item)
    slot = tl.load(slots + start + lane, mask=inside, other=0).to(tl.int32)
    position = length - count + lane
    entry = position // SIZE
    begins = inside & (position >= 0) & (position % SIZE == 0) & (entry < most)
    # The first page is padding's, so a slot that is less is not among those of any other.
    known = begins & (slot >= SIZE) & (slot // SIZE < pages)
    page = tl.where(known, slot // SIZE, 0)
    good = known
    if tl.sum(known.to(tl.int32)) > 0:
        # Lanes without a page compare with what no owner is, each in a place of its own, since
        # those that meet in one wait for each other.
        free = tl.where(known, _FRESH, _NOBODY)
        own = tl.zeros((LANES,), tl.int32) + tl.where(mine, row, _RESERVED).to(tl.int32)
        good &= tl.atomic_cas(owner + tl.where(known, page, lane % pages), free, own) == free
    place = row * PITCH + entry
    tl.store(expected_pages + place, page, mask=begins & mine)
    tl.store(expected_tags + place, tl.load(tags + page), mask=begins & mine)
    if mine & (tl.program_id(1) == 0) & (count > 0):
        tl.store(held + row, tl.minimum((length + SIZE - 1) // SIZE, most))
    wrong = begins & ~good
    failed = tl.sum(wrong.to(tl.int32))
    if failed > 0:
        tl.atomic_add(counters + _CLAIMS, failed)
        if mine:
            first = tl.min(tl.where(wrong, entry * _STEP + _CLAIM, _CLEAN), 0)
            tl.atomic_min(verdict + row, first)
        if ENFORCE:
            _poison(tags, owner, counters, page, wrong, LANES)


@triton.jit
def _span(counts, item, each, RAGGED: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the elements of an item of the batch begin, and how many there are."""
    start, count = item * each, each
    if RAGGED:
        start, count = item * 0, tl.load(counts + item).to(tl.int32)
        for first in range(0, item, LANES):
            before = first + tl.arange(0, LANES)
            start += tl.sum(tl.load(counts + before, mask=before < item, other=0).to(tl.int32))
    return start, count


def expect_prefix(
    state: State,
    rows: torch.Tensor,
    pages: torch.Tensor,
    tags: torch.Tensor,
    counts: torch.Tensor | None,
) -> None:
    """See `reference.expect_prefix`."""
    layout, total, batch = state.layout, pages.numel(), rows.numel()
    if not total:
        return
    each = total if counts is not None else total // batch
    _prefix(
        (batch, triton.cdiv(each, LANES), 1), state.expected_pages, state.expected_tags, state.held,
        rows.contiguous(), pages.contiguous(), tags.contiguous(),
        rows if counts is None else counts.contiguous(), each, layout.pages, layout.pages_per_row,
        PITCH=state.expected_pages.stride(0), RAGGED=counts is not None, LANES=LANES,
    )  # fmt: skip


@Launcher
@triton.jit(do_not_specialize=["each", "most_pages", "most"])
def _prefix(  # type: ignore[no-untyped-def]
    expected_pages, expected_tags, held, rows, pages, given, counts, each, most_pages, most,
    PITCH: tl.constexpr, RAGGED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    start, count = _span(counts, item, each, RAGGED, LANES)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = (lane < count) & (lane < most)
    row = tl.load(rows + item).to(tl.int64)
    page = tl.load(pages + start + lane, mask=inside, other=0).to(tl.int32)
    tag = tl.load(given + start + lane, mask=inside, other=0)
    known = (page >= 0) & (page < most_pages)
    place = row * PITCH + lane
    tl.store(expected_pages + place, tl.where(known, page, 0), mask=inside)
    tl.store(expected_tags + place, tl.where(known, tag, _QUARANTINED), mask=inside)
    if tl.program_id(1) == 0:
        has = tl.load(held + row)
        tl.store(held + row, tl.maximum(has, tl.minimum(count, most)))


def share(state: State, row: int, start: int, stop: int) -> torch.Tensor:
    """See `reference.share`."""
    tags = torch.empty(max(stop - start, 0), dtype=torch.int32, device=state.tags.device)
    if count := tags.numel():
        _share(
            (triton.cdiv(count, LANES), 1, 1), state.tags, state.owner, state.expected_pages,
            state.expected_tags, tags, row, start, count, PITCH=state.expected_pages.stride(0),
            LANES=LANES,
        )  # fmt: skip
    return tags


@Launcher
@triton.jit(do_not_specialize=["row", "start", "count"])
def _share(  # type: ignore[no-untyped-def]
    tags, owner, expected_pages, expected_tags, out, row, start, count,
    PITCH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = lane < count
    place = tl.cast(row, tl.int64) * PITCH + start + lane
    page = tl.load(expected_pages + place, mask=inside, other=0)
    tag = tl.load(expected_tags + place, mask=inside, other=0)
    ours = inside & (tl.load(owner + page) == row) & (tl.load(tags + page) == tag)
    tl.store(owner + page, tl.full((LANES,), _SHARED, tl.int32), mask=ours)
    tl.store(out + lane, tag, mask=inside)


def check(
    state: State,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor | None,
    generations: torch.Tensor | None,
    *,
    enforce: bool,
) -> None:
    """See `reference.check`. Raises ValueError for slots or a table that are not contiguous in
    their last dimension, since they are worked on in place."""
    layout, batch = state.layout, rows.numel()
    if not batch:
        return
    if table.stride(1) != 1 or (slots is not None and not slots.is_contiguous()):
        raise ValueError("the page table and the slots must be contiguous")
    writes = 0 if slots is None else slots.numel() // batch
    blocks = triton.cdiv(layout.pages_per_row, ENTRIES)
    parts = triton.next_power_of_2(max(1, min(blocks, triton.cdiv(PROGRAMS, batch))))
    _check(
        (batch, parts + 1, 1), state.tags, state.owner, state.counters, state.expected_pages,
        state.expected_tags, state.held, state.generation, state.verdict, rows.contiguous(),
        lengths.contiguous(), table, rows if slots is None else slots,
        rows if generations is None else generations.contiguous(),
        COLUMNS=min(layout.pages_per_row, triton.cdiv(table.shape[1], layout.table_stride)),
        MOST=layout.pages_per_row, PARTS=parts, PITCH=state.expected_pages.stride(0),
        TABLE_PITCH=table.stride(0), PADDING=layout.padding_row, SIZE=layout.page_size,
        SLOTS=layout.table_holds_slots, WRITES=writes, LANES=triton.next_power_of_2(max(writes, 1)),
        GENERATIONS=generations is not None, ENFORCE=enforce,
        ENTRIES=min(ENTRIES, max(128, triton.next_power_of_2(layout.pages_per_row))),
    )  # fmt: skip


@Launcher
@triton.jit
def _check(  # type: ignore[no-untyped-def]
    tags, owner, counters, expected_pages, expected_tags, held, generation, verdict, rows, lengths,
    table, slots, generations, COLUMNS: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr,
    PITCH: tl.constexpr, TABLE_PITCH: tl.constexpr, PADDING: tl.constexpr, SIZE: tl.constexpr,
    SLOTS: tl.constexpr, WRITES: tl.constexpr, LANES: tl.constexpr, GENERATIONS: tl.constexpr,
    ENFORCE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """`PARTS` programs to a row read; one more looks at what is written, and counts."""
    item, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + item).to(tl.int64)
    length = tl.load(lengths + item).to(tl.int32)
    live = row != PADDING
    row = tl.where(live, row, 0)
    bound = tl.load(generation + row)
    current = live & ((bound & 1) == 1)
    if GENERATIONS:
        current &= bound == tl.load(generations + item)
    has = tl.load(held + row)
    needed = (length + SIZE - 1) // SIZE
    found = _CLEAN
    if part < PARTS:
        if live:
            found = _read(
                tags, expected_pages + row * PITCH, expected_tags + row * PITCH,
                table + row * TABLE_PITCH, part * ENTRIES, PARTS * ENTRIES,
                tl.minimum(tl.minimum(needed, has), COLUMNS), SIZE, SLOTS, ENTRIES,
            )  # fmt: skip
    else:
        if needed > has:
            found = has * _STEP + _LENGTH
        if WRITES > 0:
            found = tl.minimum(
                found,
                _write(
                    tags, owner, counters, expected_pages + row * PITCH,
                    expected_tags + row * PITCH, slots + item * WRITES, row, length, has, MOST,
                    live, current, SIZE, WRITES, LANES, ENFORCE,
                ),
            )  # fmt: skip
        if live:
            tl.atomic_add(counters + _ROWS, 1)
        if item == 0:
            tl.atomic_add(counters + _CHECKS, 1)
    # A row that another request has by now is not to blame: the report tells of it by itself.
    if current & (found != _CLEAN):
        tl.atomic_min(verdict + row, found)


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    tags, expected_pages, expected_tags, table, start, step, stop,
    SIZE: tl.constexpr, SLOTS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The least verdict of the entries from `start` on, every `step` of them."""
    found = tl.full((ENTRIES,), _CLEAN, tl.int32)
    for first in range(start, stop, step):
        entry = first + tl.arange(0, ENTRIES)
        inside = entry < stop
        # A row of expectations goes on to the next 16, so whole words of four are loaded.
        whole = entry < (stop + 15) // 16 * 16
        used = tl.load(table + entry * (SIZE if SLOTS else 1), mask=inside, other=0).to(tl.int32)
        if SLOTS:
            used = tl.where(used < 0, -1, used // SIZE)
        expected = tl.load(expected_pages + entry, mask=whole, other=0)
        expected_tag = tl.load(expected_tags + entry, mask=whole, other=1)
        stale = (tl.load(tags + expected) != expected_tag) | ((expected_tag & 1) == 0)
        kind = tl.where(used != expected, _TABLE, tl.where(stale, _TAG, 0))
        found = tl.minimum(found, tl.where(inside & (kind != 0), entry * _STEP + kind, _CLEAN))
    return tl.min(found, 0)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    tags, owner, counters, expected_pages, expected_tags, slots, row, length, has, most, live,
    current, SIZE: tl.constexpr, WRITES: tl.constexpr, LANES: tl.constexpr,
    ENFORCE: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, LANES)
    inside = lane < WRITES
    slot = tl.load(slots + lane, mask=inside, other=0).to(tl.int32)
    position = length - WRITES + lane
    entry = position // SIZE
    within = inside & (position >= 0) & (entry < has)
    page = tl.load(expected_pages + entry, mask=within, other=0)
    expected_tag = tl.load(expected_tags + entry, mask=within, other=0)
    good = within & (slot == page * SIZE + position % SIZE) & ((expected_tag & 1) == 1)
    good &= tl.load(tags + page) == expected_tag
    good &= tl.load(owner + page).to(tl.int64) == row
    bad = inside & live & ~good
    stray = inside & ~live & ((slot < 0) | (slot >= SIZE))
    strays = tl.sum(stray.to(tl.int32))
    if strays > 0:
        tl.atomic_add(counters + _STRAYS, strays)
    if ENFORCE:
        blocked = bad | stray | (inside & live & ~current)
        zero = tl.zeros((LANES,), tl.int32).to(slots.dtype.element_ty)
        tl.store(slots + lane, zero, mask=blocked)
    entry = tl.minimum(tl.maximum(entry, 0), most)
    return tl.min(tl.where(bad, entry * _STEP + _WRITE, _CLEAN), 0)


def report(state: State, rows: torch.Tensor, generations: torch.Tensor | None) -> torch.Tensor:
    """See `reference.report`."""
    batch = rows.numel()
    out = torch.empty(len(Counter) + batch, dtype=torch.int32, device=rows.device)
    size = max(16, triton.next_power_of_2(batch))
    _report(
        (1, 1, 1), state.counters, state.generation, state.verdict, rows.contiguous(),
        rows if generations is None else generations.contiguous(), out, batch,
        PADDING=state.layout.padding_row, GENERATIONS=generations is not None, SIZE=size,
    )  # fmt: skip
    return out


@Launcher
@triton.jit(do_not_specialize=["batch"])
def _report(  # type: ignore[no-untyped-def]
    counters, generation, verdict, rows, generations, out, batch,
    PADDING: tl.constexpr, GENERATIONS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, SIZE)
    inside = lane < batch
    row = tl.load(rows + lane, mask=inside, other=PADDING).to(tl.int64)
    live = row != PADDING
    row = tl.where(live, row, 0)
    bound = tl.load(generation + row)
    current = (bound & 1) == 1
    if GENERATIONS:
        current &= bound == tl.load(generations + lane, mask=inside, other=0)
    found = tl.where(current, tl.load(verdict + row), _ROW)
    tl.store(out + _COUNTERS + lane, tl.where(live, found, _CLEAN), mask=inside)
    counted = lane < _COUNTERS
    tl.store(out + lane, tl.load(counters + lane, mask=counted, other=0), mask=counted)
