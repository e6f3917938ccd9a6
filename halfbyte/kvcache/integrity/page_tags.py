"""The tracker by page tags: the host's side, thin around the functions that change `State`."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch

from halfbyte.errors import IntegrityError
from halfbyte.kvcache.integrity import reference
from halfbyte.kvcache.integrity.state import (
    CLEAN,
    FREE,
    FRESH,
    QUARANTINED,
    SHARED,
    VERDICT_STEP,
    Counter,
    Kind,
    Layout,
    State,
)
from halfbyte.kvcache.integrity.tracker import Abort, Mode, Violation

logger = logging.getLogger(__name__)

COUNTERS = len(Counter)
"""Of a report, before the verdicts."""
ALLOCATOR = {
    Counter.CLAIM: Kind.CLAIM,
    Counter.ACQUIRE: Kind.ACQUIRE,
    Counter.RELEASE: Kind.RELEASE,
    Counter.PADDING: Kind.PADDING,
}
"""Faults that are counted on the device, since a request's verdict may hide them or none has it."""


class PageTagTracker:
    """See `Tracker`. A tag for each page, odd while it is in use, changes at each acquire and
    release; each request's row holds which pages and tags it was given, and who may write to a
    page is one row at most.

    `operations` are the functions on `State`, those of `reference` or `fused`; None chooses by the
    device. `seed` chooses where tags start; None for any.
    """

    def __init__(
        self,
        mode: Mode,
        layout: Layout,
        device: torch.device | str,
        *,
        seed: int | None = None,
        operations: ModuleType | None = None,
    ) -> None:
        self.mode: Mode = mode
        self.state = State.empty(layout, device, secrets.randbits(62) if seed is None else seed)
        self._work = operations or _operations(torch.device(device))
        self._enforce = mode != "log"
        self._seen = [0] * COUNTERS
        self._counts = [0] * COUNTERS
        self._found = dict.fromkeys(Kind, 0)
        self._told: dict[int, int] = {}
        self._steps = self._unchecked = 0

    def acquire(self, pages: torch.Tensor) -> None:
        self._work.acquire(self.state, pages, enforce=self._enforce)

    def release(self, pages: torch.Tensor, tags: torch.Tensor | None = None) -> None:
        self._work.release(self.state, pages, tags, enforce=self._enforce)

    def bind(self, rows: torch.Tensor) -> None:
        rows = rows.long()
        self.state.generation[rows] += 1 + (self.state.generation[rows] & 1)
        self.state.held.index_fill_(0, rows, 0)
        self.state.verdict.index_fill_(0, rows, CLEAN)

    def unbind(self, rows: torch.Tensor) -> None:
        rows = rows.long()
        self.state.generation[rows] += self.state.generation[rows] & 1
        self.state.held.index_fill_(0, rows, 0)

    def generations(self, rows: torch.Tensor) -> torch.Tensor:
        return self.state.generation[rows.long().clamp(min=0)]

    def extend(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> None:
        self._work.extend(self.state, rows, lengths, slots, counts, enforce=self._enforce)

    def expect_prefix(
        self,
        rows: torch.Tensor,
        pages: torch.Tensor,
        tags: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> None:
        state, each = self.state, pages.numel() // max(rows.numel(), 1)
        item, left = reference.ragged(pages.numel(), rows.numel(), counts, pages.device)
        lengths = torch.full_like(rows, each) if counts is None else counts
        entry = lengths.long()[item] - left
        row = rows.long()[item]
        column = entry.clamp(max=state.layout.pages_per_row)
        known = (pages >= 0) & (pages < state.layout.pages)
        state.expected_pages[row, column] = torch.where(known, pages, 0).int()
        state.expected_tags[row, column] = torch.where(known, tags, QUARANTINED).int()
        rows = rows.long()
        state.held[rows] = torch.maximum(state.held[rows], lengths.int())

    def share(self, row: int, start: int, stop: int) -> torch.Tensor:
        state = self.state
        pages = state.expected_pages[row, start:stop].long()
        tags = state.expected_tags[row, start:stop].clone()
        ours = (state.owner[pages] == row) & (state.tags[pages] == tags)
        state.owner[pages] = torch.where(ours, SHARED, state.owner[pages])
        return tags

    def preload(self, pages: torch.Tensor) -> torch.Tensor:
        state, pages = self.state, pages.long()
        owner = state.owner[pages]
        state.owner[pages] = torch.where(owner == FRESH, SHARED, owner)
        # A page that was not acquired for this must not look right to whoever reads it.
        return torch.where(owner == FRESH, state.tags[pages], QUARANTINED)

    def check(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor | None = None,
        generations: torch.Tensor | None = None,
    ) -> None:
        self._work.check(
            self.state, rows, lengths, table, slots, generations, enforce=self._enforce
        )

    def report(self, rows: torch.Tensor, generations: torch.Tensor | None = None) -> torch.Tensor:
        report: torch.Tensor = self._work.report(self.state, rows, generations)
        return report

    def settle(self, report: torch.Tensor, rows: Sequence[int | None]) -> Sequence[Violation]:
        values = report.tolist()
        self._steps += 1
        news = self._advance(values[:COUNTERS])
        if not news[Counter.CHECKS]:
            self._unchecked += 1
            text = f"step {self._steps} read the KV cache, and no check ran before it"
            if self._enforce:
                raise IntegrityError(
                    text, hint="call check on the stream of the model, before it, at every step"
                )
            logger.error("kv-integrity unchecked step=%d", self._steps)
        violations = self._violations(values[COUNTERS:], rows)
        faults = self._faults(news) if any(news[Counter.CLAIM :]) else {}
        for kind, count in faults.items():
            self._found[kind] += count
            logger.error("kv-integrity kind=%s count=%d", kind.name.lower(), count)
        if self.mode == "raise" and (violations or faults):
            first = str(violations[0]) if violations else f"{next(iter(faults)).name.lower()} fault"
            raise IntegrityError(
                f"step {self._steps}: {first}; {len(violations)} requests are affected",
                hint="abort only these requests: mode abort",
            )
        return violations

    def _advance(self, counters: Sequence[int]) -> Sequence[int]:
        """By how much each counter grew since the last report; they wrap as int32 does."""
        grown = [
            (now - before + 2**31) % 2**32 - 2**31
            for now, before in zip(counters, self._seen, strict=True)
        ]
        self._counts = [count + change for count, change in zip(self._counts, grown, strict=True)]
        self._seen = list(counters)
        return grown

    def _faults(self, news: Sequence[int]) -> Mapping[Kind, int]:
        return {kind: news[counter] for counter, kind in ALLOCATOR.items() if news[counter]}

    def _violations(self, verdicts: Sequence[int], rows: Sequence[int | None]) -> list[Violation]:
        """Those of requests that still run. Each is logged and counted once, though a verdict
        stays until its row is bound anew."""
        if len(verdicts) != len(rows):
            raise IntegrityError(f"{len(rows)} rows for a report of {len(verdicts)}")
        if not self._told and verdicts.count(CLEAN) == len(verdicts):
            return []  # nearly always, and faster than a look at each
        found = []
        for position, (row, verdict) in enumerate(zip(rows, verdicts, strict=True)):
            if row is None:
                continue
            if verdict == CLEAN:
                self._told.pop(row, None)
                continue
            kind = Kind(verdict % VERDICT_STEP)
            violation = Violation(position, row, kind, verdict // VERDICT_STEP)
            found.append(violation)
            if self._told.get(row) != verdict:
                self._told[row] = verdict
                self._found[kind] += kind not in ALLOCATOR.values()
                logger.error(
                    "kv-integrity step=%d row=%d kind=%s index=%d",
                    self._steps, row, kind.name.lower(), violation.index,
                )  # fmt: skip
        return found

    def abort(self, violation: Violation) -> Abort:
        state, row = self.state, violation.row
        own_row = violation.kind != Kind.ROW
        held = int(state.held[row]) if own_row else 0
        pages = state.expected_pages[row, :held].long()
        tags = state.expected_tags[row, :held]
        sound = (state.tags[pages] == tags) & (tags & 1 == 1)
        own = sound & (state.owner[pages] == row)
        index = violation.index
        page, expected = (int(pages[index]), int(tags[index])) if index < held else (0, 0)
        found = int(state.tags[page]) if page else 0
        logger.error(
            "kv-integrity abort row=%d page=%d expected_tag=%d found_tag=%d owner=%d own_pages=%d",
            row, page, expected, found, int(state.owner[page]), int(own.sum()),
        )  # fmt: skip
        return Abort(page, expected, found, pages[sound].int(), pages[own].int(), own_row)

    def quarantine(self, pages: torch.Tensor) -> None:
        reference.quarantine(self.state, pages)

    def readmit(self, pages: torch.Tensor) -> None:
        page = pages.long().unique()
        page = page[self.state.tags[page] == QUARANTINED]
        # Their earlier tags are lost; random ones are hardly what an old expectation holds.
        tags = torch.randint(0, 2**29, page.shape, device=page.device, dtype=torch.int32) * 2
        self.state.tags[page] = tags
        self.state.counters[Counter.QUARANTINED] -= page.numel()

    def usable(self, pages: torch.Tensor) -> torch.Tensor:
        if not self._enforce or not self._counts[Counter.QUARANTINED]:
            return pages
        return pages[self.state.tags[pages.long()] != QUARANTINED]

    def clear(self) -> None:
        state = self.state
        # Page 0 is odd and stays so.
        state.tags[1:].add_(state.tags[1:] & 1)
        state.owner[1:] = FREE
        state.held.zero_()
        state.generation.add_(state.generation & 1)
        state.verdict.fill_(CLEAN)

    def metrics(self) -> Mapping[str, int]:
        return {
            "steps": self._steps,
            "unchecked_steps": self._unchecked,
            "checks": self._counts[Counter.CHECKS],
            "rows_checked": self._counts[Counter.ROWS],
            "quarantined_pages": self._counts[Counter.QUARANTINED],
            **{f"violations_{kind.name.lower()}": count for kind, count in self._found.items()},
        }

    @property
    def healthy(self) -> bool:
        return not self._unchecked


def _operations(device: torch.device) -> ModuleType:
    if device.type != "cuda":
        return reference
    from halfbyte.kvcache.integrity import fused

    return fused
