"""The tracker for an engine that keeps its books on the host, in plain Python.

It finds what `PageTagTracker` finds, by the same tags, but a step costs what changes in it and not
what its requests have. Every change of a page comes by here; so a request can be looked at when
something happens to a page that it expects, and until then it is known to be right. Of the page
table only what the engine tells anew is compared.

Its calls are those of `Tracker` for one request at a time, with numbers in place of tensors: an
engine's call is about one page or a few, and the making of a tensor takes longer than the work.
There are no graphs here that would want a report apart, so `check` returns it. A row is no place in
a table but a number that no other request gets, so none is mistaken for another's.
"""

from __future__ import annotations

import itertools
import logging
import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from halfbyte.errors import IntegrityError
from halfbyte.kvcache.integrity.findings import COUNTERS, Findings
from halfbyte.kvcache.integrity.state import (
    CLEAN,
    FREE,
    FRESH,
    QUARANTINED,
    RESERVED,
    RESERVED_TAG,
    SHARED,
    VERDICT_STEP,
    Counter,
    Kind,
)
from halfbyte.kvcache.integrity.tracker import Abort, Mode, Violation

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    pages: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    """Those that the pages had when the request got them."""
    told: list[int] = field(default_factory=list)
    """The page table, as the engine's workers have it."""
    verdict: int = CLEAN


class HostTracker:
    """See the module, and `Tracker`. `pages` are those of the pool, page 0 included; `seed` chooses
    where tags start, None for any. Raises IntegrityError for a pool without pages."""

    def __init__(self, mode: Mode, pages: int, *, seed: int | None = None) -> None:
        if pages < 1:
            raise IntegrityError(f"a KV pool with {pages} pages; at least 1")
        self.mode: Mode = mode
        self._enforce = mode != "log"
        chance = random.Random(secrets.randbits(62) if seed is None else seed)
        self._size = pages
        self._tags = [RESERVED_TAG, *(chance.randrange(0, 2**30, 2) for _ in range(1, pages))]
        self._owner = [RESERVED] + [FREE] * (pages - 1)
        self._expected = [0] * pages
        """By how many places of requests each page is expected."""
        self._rows: dict[int, _Row] = {}
        self._numbers = itertools.count(1)
        self._suspects: set[int] = set()
        """Rows that something has happened to, or was wrong from the start. All others are clean.
        A row stays here until it is unbound."""
        self._counters = [0] * COUNTERS
        self._findings = Findings(mode)

    def acquire(self, pages: Iterable[int]) -> None:
        tags, owner, size = self._tags, self._owner, self._size
        for page in pages:
            if 0 < page < size and not tags[page] & 1 and tags[page] != QUARANTINED:
                tags[page] += 1
                owner[page] = FRESH
            elif page:
                self._counters[Counter.ACQUIRE] += 1
                if self._enforce:
                    self._poison(page)
                elif 0 < page < size and tags[page] != QUARANTINED:
                    tags[page] += 2
                    self._suspect([page])

    def release(self, pages: Iterable[int]) -> None:
        tags, owner, size = self._tags, self._owner, self._size
        missed = []
        for page in pages:
            if 0 < page < size and tags[page] & 1:
                tags[page] += 1
                owner[page] = FREE
                if self._expected[page]:
                    missed.append(page)
            elif page:
                self._counters[Counter.RELEASE] += 1
                if self._enforce:
                    self._poison(page)
        if missed:
            self._suspect(missed)

    def bind(self) -> int:
        """A request that is new gets a row: this number."""
        row = next(self._numbers)
        self._rows[row] = _Row()
        return row

    def unbind(self, row: int) -> None:
        """Before the request's pages are released, or its own release makes it suspect, which is
        not wrong but slow."""
        for page in self._rows.pop(row).pages:
            self._expected[page] -= 1
        self._suspects.discard(row)

    def extend(self, row: int, pages: Iterable[int]) -> None:
        """The request gets `pages`, which must be acquired and nobody's yet, behind those that it
        has."""
        held, owner = self._rows[row], self._owner
        for page in pages:
            known = page if 0 < page < self._size else 0
            self._expect(held, known, self._tags[known])
            if owner[known] == FRESH:
                owner[known] = row
                continue
            self._suspects.add(row)
            self._counters[Counter.CLAIM] += 1
            index = len(held.pages) - 1
            held.verdict = min(held.verdict, index * VERDICT_STEP + Kind.CLAIM)
            if self._enforce:
                self._poison(known)

    def expect_prefix(self, row: int, pages: Iterable[int], tags: Iterable[int]) -> None:
        """The request begins with `pages` of a prefix cache, which was given them with `tags`."""
        held = self._rows[row]
        for page, tag in zip(pages, tags, strict=True):
            known = 0 < page < self._size
            self._expect(held, page if known else 0, tag if known else QUARANTINED)
            if not known or self._tags[page] != tag or not tag & 1:
                self._suspects.add(row)

    def _expect(self, held: _Row, page: int, tag: int) -> None:
        held.pages.append(page)
        held.tags.append(tag)
        self._expected[page] += 1

    def share(self, row: int, start: int, stop: int) -> Sequence[int]:
        held, owner = self._rows[row], self._owner
        shared = held.tags[start:stop]
        for page, tag in zip(held.pages[start:stop], shared, strict=False):
            if owner[page] == row and self._tags[page] == tag:
                owner[page] = SHARED
        return shared

    def tell(self, row: int, pages: Sequence[int], *, anew: bool = False) -> None:
        """The workers' table of the row goes on with `pages`; `anew`: it begins with them."""
        held = self._rows[row]
        if anew:
            held.told.clear()
        start = len(held.told)
        held.told += pages
        if held.pages[start : len(held.told)] != held.told[start:]:
            self._suspects.add(row)

    def check(self, rows: Sequence[int]) -> Sequence[int]:
        """The report on a step of `rows`, which reads all that the workers were told of them.
        Raises KeyError for a row that nobody has."""
        if not all(map(self._rows.__contains__, rows)):
            raise KeyError(f"of rows {rows} not all are bound")
        self._counters[Counter.CHECKS] += 1
        self._counters[Counter.ROWS] += len(rows)
        if not self._suspects or self._suspects.isdisjoint(rows):
            return self._counters + [CLEAN] * len(rows)
        held = [self._rows[row] for row in rows]
        for one in held:
            one.verdict = min(one.verdict, self._look(one))
        return self._counters + [one.verdict for one in held]

    def _look(self, row: _Row) -> int:
        places = zip(row.told, row.pages, row.tags, strict=False)
        for index, (used, page, tag) in enumerate(places):
            if used != page:
                return index * VERDICT_STEP + Kind.TABLE
            if self._tags[page] != tag or not tag & 1:
                return index * VERDICT_STEP + Kind.TAG
        held = len(row.pages)
        return held * VERDICT_STEP + Kind.LENGTH if len(row.told) > held else CLEAN

    def settle(self, report: Sequence[int], rows: Sequence[int]) -> Sequence[Violation]:
        """A verdict on a row that was unbound since the check means nothing."""
        now: Sequence[int | None] = rows
        if report.count(CLEAN) < len(rows):
            now = [row if row in self._rows else None for row in rows]
        return self._findings.settle(report, now)

    def abort(self, violation: Violation) -> Abort:
        row, index = violation.row, violation.index
        held = self._rows[row]
        sound = [
            page
            for page, tag in zip(held.pages, held.tags, strict=True)
            if self._tags[page] == tag and tag & 1
        ]
        own = [page for page in sound if self._owner[page] == row]
        page, expected = (
            (held.pages[index], held.tags[index]) if index < len(held.pages) else (0, 0)
        )
        found = self._tags[page] if page else 0
        logger.error(
            "kv-integrity abort row=%d page=%d expected_tag=%d found_tag=%d owner=%d own_pages=%d",
            row, page, expected, found, self._owner[page], len(own),
        )  # fmt: skip
        return Abort(page, expected, found, _pages(sound), _pages(own), own_row=True)

    def is_usable(self, page: int) -> bool:
        """Whether `page` is not in quarantine."""
        return self._tags[page] != QUARANTINED

    @property
    def quarantined(self) -> int:
        """How many pages are in quarantine."""
        return self._counters[Counter.QUARANTINED]

    def _poison(self, page: int) -> None:
        if 0 < page < self._size and self._tags[page] != QUARANTINED:
            self._tags[page] = QUARANTINED
            self._owner[page] = FREE
            self._counters[Counter.QUARANTINED] += 1
            self._suspect([page])

    def _suspect(self, pages: Iterable[int]) -> None:
        """Whoever expects one of `pages`, which have changed, is looked at from now on."""
        changed = set(pages)
        self._suspects |= {
            row for row, held in self._rows.items() if not changed.isdisjoint(held.pages)
        }

    def metrics(self) -> Mapping[str, int]:
        return self._findings.metrics()

    @property
    def healthy(self) -> bool:
        return self._findings.healthy


def _pages(pages: Sequence[int]) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int32)
