"""The tracker's work in plain torch: what `fused` is compared with, and what runs on a CPU.

No function waits for the device: shapes follow from those of the arguments, and lanes without work
write what is there already, or to a place that nobody reads.
"""

from __future__ import annotations

import torch

from halfbyte.kvcache.integrity.state import (
    CLEAN,
    FREE,
    FRESH,
    QUARANTINED,
    RESERVED,
    SHARED,
    VERDICT_STEP,
    Counter,
    Kind,
    State,
)


def acquire(state: State, pages: torch.Tensor, *, enforce: bool) -> None:
    """See `Tracker.acquire`. Without `enforce` a page in use gets a new tag instead of the
    quarantine's, which its owner's checks then find."""
    pages, _, repeated = _sorted(pages)
    page = _known(state, pages)
    tag = state.tags[page]
    good = (page != 0) & ~repeated & (tag & 1 == 0) & (tag != QUARANTINED)
    _step(state, page, good, FRESH)
    wrong = (pages != 0) & ~good
    if enforce:
        _poison(state, page, wrong)
    else:
        state.tags.index_add_(0, page, (wrong & (page != 0) & (tag != QUARANTINED)).int() * 2)
    _count(state, Counter.ACQUIRE, wrong)


def release(state: State, pages: torch.Tensor, tags: torch.Tensor | None, *, enforce: bool) -> None:
    """See `Tracker.release`. Without `enforce` a page that is not the caller's stays as it is."""
    pages, order, repeated = _sorted(pages)
    page = _known(state, pages)
    tag = state.tags[page]
    good = (page != 0) & ~repeated & (tag & 1 == 1)
    if tags is not None:
        good = good & (tag == tags[order])
    _step(state, page, good, FREE)
    wrong = (pages != 0) & ~good
    if enforce:
        _poison(state, page, wrong)
    _count(state, Counter.RELEASE, wrong)


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
    """See `Tracker.extend`."""
    layout, slots = state.layout, slots.flatten()
    item, left = _ragged(slots.numel(), rows.numel(), counts, slots.device)
    rows = rows.long()
    mine = torch.ones_like(rows, dtype=torch.bool)
    if generations is not None:
        mine = state.generation[rows] == generations
    row, own = rows[item], mine[item]
    position = lengths.long()[item] - left
    entry = position // layout.page_size
    begins = (position % layout.page_size == 0) & (entry >= 0) & (entry < layout.pages_per_row)
    page = _known(state, torch.where(begins, _page_of(state, slots.long()), 0))
    _, order, repeated = _sorted(page)
    again = torch.empty_like(repeated)
    again[order] = repeated
    good = begins & ~again & (state.owner[page] == FRESH)
    wrong = begins & ~good
    column = torch.where(begins & own, entry, layout.pages_per_row)
    state.expected_pages[row, column] = page.int()
    state.expected_tags[row, column] = state.tags[page]
    _assign(state.owner, page, good, torch.where(own, row, RESERVED).int())
    held = _pages_of(state, lengths).clamp(max=layout.pages_per_row)
    state.held[rows] = torch.where(mine, held, state.held[rows])
    found = torch.where(wrong & own, entry * VERDICT_STEP + Kind.CLAIM, CLEAN).int()
    state.verdict.scatter_reduce_(0, row, found, "amin")
    if enforce:
        _poison(state, page, wrong)
    _count(state, Counter.CLAIM, wrong)


def bind(state: State, rows: torch.Tensor) -> None:
    """See `Tracker.bind`."""
    rows = rows.long()
    state.generation[rows] += 1 + (state.generation[rows] & 1)
    state.held.index_fill_(0, rows, 0)
    state.verdict.index_fill_(0, rows, CLEAN)


def unbind(state: State, rows: torch.Tensor) -> None:
    """See `Tracker.unbind`."""
    rows = rows.long()
    state.generation[rows] += state.generation[rows] & 1
    state.held.index_fill_(0, rows, 0)


def generations(state: State, rows: torch.Tensor) -> torch.Tensor:
    """See `Tracker.generations`; for padding anything."""
    return state.generation[rows.long().clamp(min=0)]


def expect_prefix(
    state: State,
    rows: torch.Tensor,
    pages: torch.Tensor,
    tags: torch.Tensor,
    counts: torch.Tensor | None,
) -> None:
    """See `Tracker.expect_prefix`."""
    most, each = state.layout.pages_per_row, pages.numel() // max(rows.numel(), 1)
    item, left = _ragged(pages.numel(), rows.numel(), counts, pages.device)
    lengths = torch.full_like(rows, each) if counts is None else counts
    row, column = rows.long()[item], (lengths.long()[item] - left).clamp(max=most)
    known = (pages >= 0) & (pages < state.layout.pages)
    state.expected_pages[row, column] = torch.where(known, pages, 0).int()
    state.expected_tags[row, column] = torch.where(known, tags, QUARANTINED).int()
    rows = rows.long()
    state.held[rows] = torch.maximum(state.held[rows], lengths.int().clamp(max=most))


def share(state: State, row: int, start: int, stop: int) -> torch.Tensor:
    """See `Tracker.share`."""
    pages = state.expected_pages[row, start:stop].long()
    tags = state.expected_tags[row, start:stop].clone()
    ours = (state.owner[pages] == row) & (state.tags[pages] == tags)
    state.owner[pages] = torch.where(ours, SHARED, state.owner[pages])
    return tags


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
    """See `Tracker.check`. With `enforce` it turns writes to page 0."""
    layout = state.layout
    live, row = _live(state, rows)
    current = live & _current(state, row, generations)
    held, needed = state.held[row], _pages_of(state, lengths)
    columns = table[:, :: layout.table_stride][:, : layout.pages_per_row]
    # index_select, since reading by a list of places takes four times as long on a CPU.
    entry = torch.arange(columns.shape[1], device=table.device, dtype=torch.int32)
    expected = state.expected_pages[:, : columns.shape[1]].index_select(0, row)
    expected_tags = state.expected_tags[:, : columns.shape[1]].index_select(0, row)
    used = columns.index_select(0, row)
    if layout.table_holds_slots:
        used = torch.div(used, layout.page_size, rounding_mode="floor")
    read = entry < torch.minimum(needed, held)[:, None]
    tags = state.tags.index_select(0, expected.flatten()).view_as(expected)
    stale = (tags != expected_tags) | (expected_tags & 1 == 0)
    moved = used != expected
    kind = (stale.int() * int(Kind.TAG)).masked_fill_(moved, int(Kind.TABLE))
    kind.add_(entry * VERDICT_STEP).masked_fill_(~(read & (stale | moved)), CLEAN)
    found = kind.amin(1)
    found = torch.minimum(
        found, torch.where(needed > held, held.long() * VERDICT_STEP + Kind.LENGTH, CLEAN)
    )
    if slots is not None:
        bad = _check_writes(state, row, lengths, slots.view(rows.numel(), -1), live)
        found = torch.minimum(found, bad.amin(1))
        stray = ~live[:, None] & (_page_of(state, slots.view(rows.numel(), -1)) != 0)
        _count(state, Counter.PADDING, stray)
        if enforce:
            blocked = (bad != CLEAN) | stray | (live & ~current)[:, None]
            slots.masked_fill_(blocked.view_as(slots), 0)
    # A row that another request has by now is not to blame: `report` tells of it by itself.
    state.verdict.scatter_reduce_(0, row, torch.where(current, found, CLEAN).int(), "amin")
    state.counters[Counter.CHECKS] += 1
    _count(state, Counter.ROWS, live)


def _check_writes(
    state: State, row: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor, live: torch.Tensor
) -> torch.Tensor:
    """Verdicts [b, k] of each write alone."""
    layout, count = state.layout, slots.shape[1]
    position = lengths.long()[:, None] - count + torch.arange(count, device=slots.device)
    entry = torch.div(position, layout.page_size, rounding_mode="floor")
    within = (entry >= 0) & (entry < state.held[row][:, None])
    entry = entry.clamp(0, layout.pages_per_row)
    expected = state.expected_pages[row[:, None], entry]
    tags = state.expected_tags[row[:, None], entry]
    good = (
        within
        & (slots == expected * layout.page_size + position % layout.page_size)
        & (state.tags[expected] == tags)
        & (tags & 1 == 1)
        & (state.owner[expected] == row[:, None])
    )
    return torch.where(live[:, None] & ~good, entry * VERDICT_STEP + Kind.WRITE, CLEAN)


def report(state: State, rows: torch.Tensor, generations: torch.Tensor | None) -> torch.Tensor:
    """See `Tracker.report`: the counters, then the verdict of each place in the batch."""
    live, row = _live(state, rows)
    verdict = torch.where(_current(state, row, generations), state.verdict[row], int(Kind.ROW))
    return torch.cat([state.counters, torch.where(live, verdict, CLEAN)]).int()


def quarantine(state: State, pages: torch.Tensor) -> None:
    """See `Tracker.quarantine`."""
    page = _known(state, pages.long())
    _poison(state, page, page != 0)


def _ragged(
    total: int, rows: int, counts: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each element of a ragged argument, the batch's item that it belongs to, and how many of
    that item's are left, itself included: int64 [total] both."""
    element = torch.arange(total, device=device)
    if counts is None:
        each = total // max(rows, 1)
        return element // max(each, 1), each - element % max(each, 1)
    ends = counts.long().cumsum(0)
    item = torch.searchsorted(ends, element, right=True).clamp(max=rows - 1)
    return item, ends[item] - element


def _live(state: State, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which are no padding, and the rows with 0 in place of those that are no row."""
    live = rows != state.layout.padding_row
    return live, torch.where(live, rows, 0).long()


def _current(state: State, row: torch.Tensor, generations: torch.Tensor | None) -> torch.Tensor:
    generation = state.generation[row]
    bound = generation & 1 == 1
    return bound if generations is None else bound & (generation == generations)


def _pages_of(state: State, lengths: torch.Tensor) -> torch.Tensor:
    size = state.layout.page_size
    return ((lengths + size - 1) // size).int()


def _page_of(state: State, slots: torch.Tensor) -> torch.Tensor:
    return torch.div(slots, state.layout.page_size, rounding_mode="floor")


def _known(state: State, page: torch.Tensor) -> torch.Tensor:
    """0 in place of those that the pool does not have."""
    return torch.where((page > 0) & (page < state.layout.pages), page, 0)


def _sorted(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pages in ascending order, where each was, and whether it stands there a second time."""
    if pages.numel() < 2:
        return pages.long(), torch.zeros_like(pages).long(), torch.zeros_like(pages).bool()
    page, order = pages.long().sort(stable=True)
    repeated = torch.zeros_like(page, dtype=torch.bool)
    repeated[1:] = page[1:] == page[:-1]
    return page, order, repeated


def _step(state: State, page: torch.Tensor, chosen: torch.Tensor, owner: int) -> None:
    state.tags.index_add_(0, page, chosen.int())
    _assign(state.owner, page, chosen, torch.full_like(page, owner).int())


def _poison(state: State, page: torch.Tensor, chosen: torch.Tensor) -> None:
    """Quarantines, but page 0 never."""
    if chosen.device.type == "cpu" and not chosen.any():
        return  # a look at the result would wait for a GPU, but costs a CPU nothing
    place, _, repeated = _sorted(torch.where(chosen, page, 0))
    fresh = (place != 0) & ~repeated & (state.tags[place] != QUARANTINED)
    _assign(state.tags, page, chosen, torch.full_like(page, QUARANTINED).int())
    _assign(state.owner, page, chosen, torch.full_like(page, FREE).int())
    _count(state, Counter.QUARANTINED, fresh)


def _assign(
    target: torch.Tensor, page: torch.Tensor, chosen: torch.Tensor, value: torch.Tensor
) -> None:
    """target[page] = value where `chosen`. Others write to page 0 what it has."""
    place = torch.where(chosen, page, 0)
    target[place] = torch.where(place != 0, value, target[0])


def _count(state: State, counter: Counter, which: torch.Tensor) -> None:
    state.counters[counter] += which.sum()
