"""Reads what will be wanted before it is asked for, on threads of its own.

The order is a promise, not a duty. What is asked for in another order is found as long as it lies
within what has been read; whoever jumps further, or asks for what is not in the order, reads it
himself; who does so again and again makes the reading jump along. So no order can give wrong bytes
or stand still, and no single request can spoil what was read for others.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Literal, NamedTuple

import torch

from halfbyte.formats.budgets import DISK_THREADS, page_locked

SMALL = 1 << 20
"""A range of at most this many bytes is read along with the one that it follows in its file."""
PATIENCE = 16
"""Requests in a row for what is out of reach, after which the reading goes where they are."""
TOGETHER = 64
"""Ranges in one request at most, and requests between two that become one."""


class ByteRange(NamedTuple):
    """Bytes `begin` to `end` of a shard."""

    shard: str
    begin: int
    end: int


Fill = Callable[[ByteRange, memoryview], None]
"""Reads a range into memory of its size. Raises OSError or EOFError when that cannot be done."""


@dataclass(slots=True, eq=False)
class _Read:
    """One request to the disk, for one range or for several that lie side by side."""

    bytes: ByteRange
    wanted: int = 1
    """Ranges in it that nobody has taken yet."""
    state: Literal["waiting", "reading", "ready", "failed", "dropped"] = "waiting"
    data: torch.Tensor | None = field(default=None, repr=False)
    error: Exception | None = None


class ReadAhead:
    """Hands out ranges of bytes, most of them read beforehand. Safe to use from several threads.

    At most `budget` bytes are held for ranges that nobody has taken yet. A range larger than that
    is not read ahead. With `pinned`, buffers are page-locked, which a copy to a GPU needs to run
    beside other work: torch's allocator of such memory recycles a buffer when its copies are done,
    and rounds sizes up to powers of two, which the budget counts.
    """

    def __init__(
        self, fill: Fill, order: Iterable[ByteRange], *, budget: int, pinned: bool = False
    ) -> None:
        self._fill = fill
        self._budget = budget
        self._pinned = pinned
        self._reads: list[_Read] = []
        self._ends: dict[tuple[str, int], int] = {}
        """Shard and last byte -> the last read that ends there."""
        self._places: dict[ByteRange, deque[int]] = {}
        """Range -> the reads that hold it and were not taken, by number."""
        for wanted in order:
            self._plan(wanted)
        self._ends.clear()
        self._next = 0
        """Number of the first read that is not begun."""
        self._held: dict[int, _Read] = {}
        """Reads that are begun and hold, or will hold, something that nobody has taken."""
        self._used = 0
        self._missed = 0
        """Requests in a row for what was out of reach."""
        self._closed = False
        self._changed = Condition()
        self._threads = [
            Thread(target=self._work, name=f"read-ahead-{n}", daemon=True)
            for n in range(DISK_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def used(self) -> int:
        """Bytes held for ranges that nobody has taken."""
        return self._used

    def take(self, wanted: ByteRange) -> torch.Tensor | None:
        """The bytes of a range as uint8, waiting for them if they are on their way.

        None for what is not in the order (any more) or far ahead in it, and for what the disk
        refused: whoever asks reads it again and meets the error where it can be explained.
        """
        with self._changed:
            number = self._place(wanted)
            if number is None:
                return None
            read = self._reads[number]
            while read.state in ("waiting", "reading") and not self._closed:
                if read.state == "waiting" and not self._in_reach(number):
                    self._missed += 1
                    if self._missed <= PATIENCE:
                        self._taken(number)
                        return None
                    self._jump(number)
                self._changed.wait()
            self._missed = 0
            if read.error is not None and not isinstance(read.error, (OSError, EOFError)):
                raise read.error
            if read.data is None:
                return None
            start = wanted.begin - read.bytes.begin
            data = read.data[start : start + wanted.end - wanted.begin]
            if len(data) < len(read.data) and len(data) <= SMALL:
                data = data.clone()  # or a norm would keep the large weight before it in memory
            self._taken(number)
            return data

    def close(self) -> None:
        """End the threads, each after the request that it is in, and forget what was read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        with self._changed:
            for number in list(self._held):
                self._release(number)

    def _plan(self, wanted: ByteRange) -> None:
        if not 0 < self._cost(wanted) <= self._budget:
            return
        number = self._neighbour(wanted)
        if number is None:
            number = len(self._reads)
            self._reads.append(_Read(wanted))
        else:
            read = self._reads[number]
            read.bytes = read.bytes._replace(end=wanted.end)
            read.wanted += 1
        self._ends[wanted.shard, wanted.end] = number
        self._places.setdefault(wanted, deque()).append(number)

    def _neighbour(self, wanted: ByteRange) -> int | None:
        """The read that a small range is to be part of: of what lies before it in the file, and
        is wanted not long before it. Files written by safetensors hold all scales together."""
        number = self._ends.get((wanted.shard, wanted.begin))
        if number is None or wanted.end - wanted.begin > SMALL:
            return None
        read = self._reads[number]
        together = read.bytes._replace(end=wanted.end)
        cost = self._cost(together)
        joins = (
            len(self._reads) - number <= TOGETHER
            and read.wanted < TOGETHER
            and read.bytes.end == wanted.begin
            and cost <= self._budget
            and (cost <= SMALL or cost <= self._cost(read.bytes) + self._cost(wanted))
        )
        return number if joins else None

    def _cost(self, wanted: ByteRange) -> int:
        size = wanted.end - wanted.begin
        return page_locked(size) if self._pinned else size

    def _place(self, wanted: ByteRange) -> int | None:
        """Number of the next read that holds a range, which counts as taken from it."""
        places = self._places.get(wanted, ())
        while places:
            number = places.popleft()
            if self._reads[number].state != "dropped":
                return number
        return None

    def _in_reach(self, number: int) -> bool:
        """Whether there is room for a read that is not begun, and for those before it."""
        left = self._budget - self._used
        for read in self._reads[self._next : number + 1]:
            left -= self._cost(read.bytes) if read.state == "waiting" else 0
            if left < 0:
                return False
        return True

    def _jump(self, number: int) -> None:
        """Give up what was read, and what comes before a read that is not begun."""
        for held in list(self._held):
            self._release(held)
        for read in self._reads[self._next : number]:
            read.state = "dropped"
        self._next = number
        self._changed.notify_all()

    def _taken(self, number: int) -> None:
        """One range of a read is taken, or never will be."""
        read = self._reads[number]
        read.wanted -= 1
        if not read.wanted:
            self._release(number)

    def _release(self, number: int) -> None:
        """Give up the bytes of a read; one that is under way gives them up when it ends."""
        read = self._reads[number]
        self._held.pop(number, None)
        if read.state == "ready":
            self._used -= self._cost(read.bytes)
        read.state, read.data = "dropped", None
        self._changed.notify_all()

    def _begin(self) -> tuple[int, _Read] | None:
        """The next read, when there is room for it; None when there is none left."""
        with self._changed:
            while not self._closed and self._next < len(self._reads):
                number = self._next
                read = self._reads[number]
                if read.state == "dropped":
                    self._next += 1
                    continue
                if self._used + self._cost(read.bytes) <= self._budget:
                    self._next += 1
                    self._used += self._cost(read.bytes)
                    self._held[number] = read
                    read.state = "reading"
                    return number, read
                self._changed.wait()
            return None

    def _work(self) -> None:
        while (begun := self._begin()) is not None:
            number, read = begun
            data: torch.Tensor | None = None
            error: Exception | None = None
            try:
                data = self._read(read.bytes)
            except Exception as failure:
                error = failure
            with self._changed:
                if read.state == "reading" and error is None:
                    read.state, read.data = "ready", data
                else:
                    self._used -= self._cost(read.bytes)
                    self._held.pop(number, None)
                    read.error = error
                    if error is not None:
                        read.state = "failed"
                self._changed.notify_all()
            del data, read, begun

    def _read(self, wanted: ByteRange) -> torch.Tensor:
        data = _buffer(wanted.end - wanted.begin, pinned=self._pinned)
        self._fill(wanted, data.numpy().data)
        return data


def _buffer(size: int, *, pinned: bool) -> torch.Tensor:
    """Fresh memory, uint8 [size], which goes back to where it came from with its last view."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    # Not from malloc: what one thread allocates and another frees piles up in its arenas.
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
