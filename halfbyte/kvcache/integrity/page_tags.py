"""The tracker by page tags: the host's side, thin around the functions that change `State`."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch

from halfbyte.kvcache.integrity import reference
from halfbyte.kvcache.integrity.findings import Findings
from halfbyte.kvcache.integrity.state import (
    CLEAN,
    FREE,
    FRESH,
    QUARANTINED,
    SHARED,
    Counter,
    Kind,
    Layout,
    State,
)
from halfbyte.kvcache.integrity.tracker import Abort, Mode, Violation

logger = logging.getLogger(__name__)


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
        self._findings = Findings(mode)

    def acquire(self, pages: torch.Tensor) -> None:
        self._work.acquire(self.state, pages, enforce=self._enforce)

    def release(self, pages: torch.Tensor, tags: torch.Tensor | None = None) -> None:
        self._work.release(self.state, pages, tags, enforce=self._enforce)

    def bind(self, rows: torch.Tensor) -> None:
        self._work.bind(self.state, rows)

    def unbind(self, rows: torch.Tensor) -> None:
        self._work.unbind(self.state, rows)

    def generations(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._work.generations(self.state, rows)
        return found

    def extend(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor | None = None,
        generations: torch.Tensor | None = None,
    ) -> None:
        self._work.extend(
            self.state, rows, lengths, slots, counts, generations, enforce=self._enforce
        )

    def expect_prefix(
        self,
        rows: torch.Tensor,
        pages: torch.Tensor,
        tags: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> None:
        self._work.expect_prefix(self.state, rows, pages, tags, counts)

    def share(self, row: int, start: int, stop: int) -> torch.Tensor:
        tags: torch.Tensor = self._work.share(self.state, row, start, stop)
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
        return self._findings.settle(report.tolist(), rows)

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
        if not self._enforce or not self._findings.quarantined:
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
        return self._findings.metrics()

    @property
    def healthy(self) -> bool:
        return self._findings.healthy


def _operations(device: torch.device) -> ModuleType:
    if device.type != "cuda":
        return reference
    from halfbyte.kvcache.integrity import fused

    return fused
