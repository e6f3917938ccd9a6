"""The protocol that engines call, and the tracker that does nothing.

An engine reports what it does with pages: which the allocator hands out and takes back, which a
request gets, which a prefix cache keeps. Before each step that reads the cache it asks for a check,
and releases the step's tokens only when the check's verdict has come, in the same small copy.

    acquire, release         the allocator's pages change hands
    bind, unbind             a request gets a row of the page table, and gives it back
    extend, expect_prefix    the pages that a row is given, newly or by a hit in the prefix cache
    share, preload           pages go into a prefix cache, which keeps the tags that it is given
    check, report, settle    once a step: on the device, to the host, on the host
    abort                    what to know of a bad request, and which of its pages may be freed

Tensors are int32 or int64 on the pool's device. Nothing before `settle` waits for the device, and
all work on a batch at a time. Calls take effect in the order of the stream that they are made on:
those of one pool belong on one stream, or on streams that wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

    from halfbyte.kvcache.integrity.state import Kind, Layout

Mode = Literal["off", "log", "abort", "raise"]
"""What a fault does: nothing is tracked; it is logged; its request is to be aborted; the step
raises IntegrityError."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A request that read or wrote, or was about to, what is not its own."""

    position: int
    """In the batch of the step."""
    row: int
    """Of the page table."""
    kind: Kind
    index: int
    """The first bad page, counted in the request."""

    def __str__(self) -> str:
        return f"row {self.row}, page {self.index} of the request: {self.kind.name.lower()}"


@dataclass(frozen=True, slots=True)
class Abort:
    """What is known of a bad request when it ends."""

    page: int
    """That the request was given; 0 if the fault is not about one."""
    expected_tag: int
    found_tag: int
    sound_pages: torch.Tensor
    """Those that are still as the request was given them, shared ones too."""
    own_pages: torch.Tensor
    """Those that are the request's alone beyond doubt: only these may be freed. Others are shared,
    somebody else's, free already or quarantined."""
    own_row: bool
    """Whether the row is the request's, to be given back. If not, which pages were its own is not
    known any more, and none is freed."""


class Tracker(Protocol):
    """See the module. Page 0 in a list of pages is skipped, so callers can mask instead of filter.

    A ragged argument lies flat, row after row: `counts` has how many are each row's; without it
    every row has the same number.
    """

    @property
    def mode(self) -> Mode: ...

    def acquire(self, pages: torch.Tensor) -> None:
        """The allocator hands out `pages` [n]. One that is not free is quarantined."""

    def release(self, pages: torch.Tensor, tags: torch.Tensor | None = None) -> None:
        """The allocator takes back `pages` [n]; `tags` [n] are those of a prefix-cache node that
        frees them. A page that is free already, or has another tag, is quarantined."""

    def bind(self, rows: torch.Tensor) -> None:
        """Requests that are new get `rows` [b], without pages and with a clean verdict."""

    def unbind(self, rows: torch.Tensor) -> None:
        """`rows` [b] are given back. Their pages are `release`d apart, before or after."""

    def generations(self, rows: torch.Tensor) -> torch.Tensor:
        """int32 [b]: which request has each of `rows`. Take them when a batch is formed; `check`
        and `report` then tell when a row has gone to another request meanwhile."""

    def extend(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor | None = None,
        generations: torch.Tensor | None = None,
    ) -> None:
        """Requests get places for new tokens: the last ones of each row, up to `lengths` [b] tokens
        of it in all, are in `slots` [n], ragged. The place of a token is its page times the page
        size, and its number in the page. Pages that begin here become the row's own, which they
        can only if they were acquired and are nobody's yet. With `generations` [b] a row that
        another request has by now gets nothing, and the pages become nobody's."""

    def expect_prefix(
        self,
        rows: torch.Tensor,
        pages: torch.Tensor,
        tags: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> None:
        """The first pages of each row are `pages` [n], ragged, of a prefix cache, with the `tags`
        [n] that the cache was given by `share` or `preload`. Never pass tags looked up now: a node
        whose pages are somebody else's by now would seem right."""

    def share(self, row: int, start: int, stop: int) -> torch.Tensor:
        """The pages `start` to `stop` of a row go into a prefix cache. Nobody writes to them any
        more. Returns the tags [stop - start] to keep with them: those that the row was given."""

    def preload(self, pages: torch.Tensor) -> torch.Tensor:
        """The same for acquired `pages` [n] that never were a request's: a prefix that is loaded
        from the host or from another machine. Returns their tags [n]."""

    def check(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor | None = None,
        generations: torch.Tensor | None = None,
    ) -> None:
        """Before a step: are the pages that it will read and write those that its requests own?

        The first `lengths` [b] tokens of each of `rows` [b] are read, by the page `table`
        [rows, entries] of the engine. `slots` [b] or [b, k] are where the last k of them are
        written; None in a step that writes nothing, or as `extend` was told. In modes abort and
        raise a write that is not allowed is turned to page 0, in `slots` itself, so pass the very
        tensor that the model writes by. Can be captured in a graph.
        """

    def report(self, rows: torch.Tensor, generations: torch.Tensor | None = None) -> torch.Tensor:
        """int32, on the device: what `settle` reads, after a `check` of the same rows and on its
        stream. Copy it to the host with the sampled tokens."""

    def settle(self, report: torch.Tensor, rows: Sequence[int | None]) -> Sequence[Violation]:
        """Reads a `report` that has come to the host, one for each step and in their order. Its
        tokens may leave for all requests but those returned. `rows` are those of the step; None
        for padding, and for a request that ended or was retracted since the step was launched,
        whose verdict means nothing.

        Raises IntegrityError, in modes abort and raise, if no check ran since the last report;
        in mode raise for any violation, those of the allocator included.
        """

    def abort(self, violation: Violation) -> Abort:
        """What to know when the engine ends a bad request. Waits for the device. Call it before
        anything of the request is released. Keep its pages out of the prefix cache, which so must
        not get those of a step before the step is settled; and if the bad page is the cache's, let
        nobody find it there any more."""

    def quarantine(self, pages: torch.Tensor) -> None:
        """Nobody may use `pages` [n] until `readmit`: requests that have them fail their next
        check, and `usable` leaves them out."""

    def readmit(self, pages: torch.Tensor) -> None:
        """`pages` [n] of the quarantine are free again. Put each into the free list once."""

    def usable(self, pages: torch.Tensor) -> torch.Tensor:
        """A free list without quarantined pages. The same tensor, without waiting for the device,
        as long as no settled report has told of any; mode log never takes any out."""

    def clear(self) -> None:
        """The engine starts anew: every page is free but those in quarantine, no row is bound, and
        no prefix cache has anything."""

    def metrics(self) -> Mapping[str, int]:
        """Counts since the start, as of the last settled report."""

    @property
    def healthy(self) -> bool:
        """Whether checks run: at least one did before each report that was settled."""


class NoopTracker:
    """Tracks nothing, holds nothing and costs nothing. An engine need not even call it."""

    mode: Mode = "off"
    healthy = True

    def acquire(self, pages: torch.Tensor) -> None: ...

    def release(self, pages: torch.Tensor, tags: torch.Tensor | None = None) -> None: ...

    def bind(self, rows: torch.Tensor) -> None: ...

    def unbind(self, rows: torch.Tensor) -> None: ...

    def generations(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def extend(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor | None = None,
        generations: torch.Tensor | None = None,
    ) -> None: ...

    def expect_prefix(
        self,
        rows: torch.Tensor,
        pages: torch.Tensor,
        tags: torch.Tensor,
        counts: torch.Tensor | None = None,
    ) -> None: ...

    def share(self, row: int, start: int, stop: int) -> torch.Tensor:
        import torch

        return torch.zeros(stop - start, dtype=torch.int32)

    def preload(self, pages: torch.Tensor) -> torch.Tensor:
        return pages

    def check(
        self,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor | None = None,
        generations: torch.Tensor | None = None,
    ) -> None: ...

    def report(self, rows: torch.Tensor, generations: torch.Tensor | None = None) -> torch.Tensor:
        return rows[:0]

    def settle(self, report: torch.Tensor, rows: Sequence[int | None]) -> Sequence[Violation]:
        return ()

    def abort(self, violation: Violation) -> Abort:
        raise AssertionError("nothing is tracked, so there is no violation")

    def quarantine(self, pages: torch.Tensor) -> None: ...

    def readmit(self, pages: torch.Tensor) -> None: ...

    def usable(self, pages: torch.Tensor) -> torch.Tensor:
        return pages

    def clear(self) -> None: ...

    def metrics(self) -> Mapping[str, int]:
        return {}


def open_tracker(
    mode: Mode, layout: Layout, device: torch.device | str, *, seed: int | None = None
) -> Tracker:
    """The tracker of a pool on `device`. `seed` chooses where tags start; None for any.

    Raises IntegrityError for a layout that no tracker can have.
    """
    if mode == "off":
        return NoopTracker()
    from halfbyte.kvcache.integrity.page_tags import PageTagTracker

    return PageTagTracker(mode, layout, device, seed=seed)
