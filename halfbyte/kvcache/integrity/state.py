"""What the tracker knows of a pool, as tensors on the pool's device, and how verdicts are written.

Everything that reads or changes it is in `reference` (plain torch) and `fused` (Triton), which are
equal; `page_tags` is the host's side. `host` keeps the same in plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from halfbyte.errors import IntegrityError

CLEAN = 2**31 - 1
"""The verdict of a row without a fault: more than any other, since the least of two is kept."""
VERDICT_STEP = 16
"""A verdict is `index * VERDICT_STEP + kind`, so the least names the first bad page."""
QUARANTINED = -2
"""The tag of a page that nobody may use. It is even, and no expectation ever equals it."""
RESERVED_TAG = 1
"""Of page 0, which padding rows write to. It is odd and stays, so page 0 needs no exception."""

FREE, FRESH, SHARED, RESERVED, NOBODY = -1, -2, -3, -4, -5
"""Who may write to a page that is no row's: nobody; the row that claims it; nobody, since a prefix
cache has it; padding rows. No page has the last one."""


class Kind(IntEnum):
    """What can be wrong. The first six are of a request, the others of the allocator or a batch."""

    TABLE = 1
    """The page table names another page than the request was given."""
    TAG = 2
    """The page was freed, given to somebody else or quarantined since the request got it."""
    LENGTH = 3
    """More pages are read than the request has."""
    ROW = 4
    """The request's row was freed, or belongs to another request by now."""
    WRITE = 5
    """A write to another place than the next one of the request's own last page."""
    CLAIM = 6
    """The request was given a page that was not free before, or that another request has."""
    ACQUIRE = 7
    """The allocator hands out a page that is in use or quarantined."""
    RELEASE = 8
    """A page is freed that is free already, or that has changed hands since."""
    PADDING = 9
    """A padding row writes to another page than 0."""


class Counter(IntEnum):
    """Places in `State.counters`."""

    CHECKS = 0
    ROWS = 1
    QUARANTINED = 2
    CLAIM = 3
    ACQUIRE = 4
    RELEASE = 5
    PADDING = 6


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a pool and of the engine's page table.

    Raises IntegrityError for sizes that no pool has.
    """

    pages: int
    """Of the pool, page 0 included, which is for padding."""
    page_size: int
    """Tokens of a page."""
    rows: int
    """Of the page table: requests at once."""
    pages_per_row: int
    """The most that a request can have."""
    table_holds_slots: bool = True
    """Whether an entry of the page table is a token's slot, one for each token, as in SGLang's
    `req_to_token`; else it is a page, one for each page, as in vLLM's block table."""
    padding_row: int = 0
    """The row that stands for padding in a batch; -1 where no row of the table does."""

    def __post_init__(self) -> None:
        for name in ("pages", "page_size", "rows", "pages_per_row"):
            if getattr(self, name) < 1:
                raise IntegrityError(f"a KV pool with {name} {getattr(self, name)}; at least 1")
        if not -1 <= self.padding_row < self.rows:
            raise IntegrityError(f"padding row {self.padding_row} of a table of {self.rows} rows")
        if self.pages * self.page_size >= 2**31 or self.pages_per_row >= CLEAN // VERDICT_STEP:
            raise IntegrityError(
                f"a KV pool of {self.pages} pages of {self.page_size} tokens, {self.pages_per_row} "
                f"to a request; slots and verdicts are int32",
                hint="split the pool, or use larger pages",
            )

    @property
    def table_stride(self) -> int:
        """Entries of the page table from one page to the next."""
        return self.page_size if self.table_holds_slots else 1


@dataclass(frozen=True, slots=True)
class State:
    """The tensors, all int32. Functions change them in place, so graphs can hold their addresses.

    An expectation's columns after the last page are never read: lanes without work write there.
    """

    layout: Layout
    tags: torch.Tensor
    """[pages]: odd while a page is in use, even while it is free; one more at each change."""
    owner: torch.Tensor
    """[pages]: the row that may write, or FREE, FRESH, SHARED, RESERVED."""
    expected_pages: torch.Tensor
    """[rows, pages_per_row and some]"""
    expected_tags: torch.Tensor
    """[rows, pages_per_row and some]"""
    held: torch.Tensor
    """[rows]: how many pages are expected."""
    generation: torch.Tensor
    """[rows]: odd while a request has the row; one more at each change."""
    verdict: torch.Tensor
    """[rows]: the first bad page that was found since the row was bound, or CLEAN."""
    counters: torch.Tensor
    """[Counter]: events since the start; they wrap."""

    @classmethod
    def empty(cls, layout: Layout, device: torch.device | str, seed: int) -> State:
        """Nothing in use. Tags start at random even numbers, so that memory which was never
        written, or is a copy of another pool's, does not look valid."""
        generator = torch.Generator().manual_seed(seed)
        tags = torch.randint(0, 2**29, (layout.pages,), generator=generator, dtype=torch.int32) * 2
        tags[0] = RESERVED_TAG
        owner = torch.full((layout.pages,), FREE, dtype=torch.int32)
        owner[0] = RESERVED

        # Rows that begin at 64 bytes are read four entries at once.
        width = layout.pages_per_row // 16 * 16 + 16

        def full(*shape: int, value: int = 0) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        return cls(
            layout=layout,
            tags=tags.to(device),
            owner=owner.to(device),
            expected_pages=full(layout.rows, width),
            expected_tags=full(layout.rows, width),
            held=full(layout.rows),
            generation=full(layout.rows),
            verdict=full(layout.rows, value=CLEAN),
            counters=full(len(Counter)),
        )
