"""Shards of a repository, downloaded when their turn comes and gone after it.

What a run reads, and in which order, is known beforehand, so the next shards are downloaded while
one is read. A folder of ours holds at most `SHARDS_ON_DISK` of them at once: for the one that is
needed next goes the one that is needed last. As with reading ahead the order is a promise, not a
duty: who asks for something else gets it, at worst by a download of its own. Shards that are to be
kept lie in the cache of huggingface_hub instead, where nothing is removed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread

from halfbyte.core import Checkpoint
from halfbyte.errors import HubError
from halfbyte.formats.budgets import SHARDS_ON_DISK
from halfbyte.formats.files import read_at
from halfbyte.formats.readahead import ByteRange

DOWNLOADS = 2
"""Shards that are downloaded at once, and that lie there before anything was read of them."""
LAG = 4096
"""Requests after which one that was passed over is not waited for any more."""


def downloaded_bytes(
    order: Iterable[str], sizes: Mapping[str, int], limit: int = SHARDS_ON_DISK
) -> int:
    """Bytes that reading these shards one after the other downloads, when at most `limit` of them
    lie on the disk and the one that is needed last goes first."""
    turns = [shard for shard, _ in itertools.groupby(order)]
    uses: dict[str, deque[int]] = {}
    for number, shard in enumerate(turns):
        uses.setdefault(shard, deque()).append(number)
    held: set[str] = set()
    total = 0
    for shard in turns:
        uses[shard].popleft()
        if shard not in held:
            total += sizes[shard]
            if len(held) == limit:
                held.remove(max(held, key=lambda name: uses[name][0] if uses[name] else math.inf))
            held.add(shard)
    return total


@dataclass(slots=True, eq=False)
class _Held:
    """A shard on this disk."""

    path: Path
    descriptor: int
    ours: bool
    """Whether it is ours to delete."""
    readers: int = 0
    """Threads that read it right now."""
    turn: int = 0
    """When it was read last, by a count of reads; 0 for never."""


class FetchedShards:
    """The bytes of a repository's shards. Safe to use from several threads.

    With `folder` few shards lie there at once, and what a killed run left there is used; without,
    all stay in huggingface_hub's cache. Downloads are verified (`formats.hub`).
    """

    def __init__(self, checkpoint: Checkpoint, folder: Path | None = None) -> None:
        self._checkpoint = checkpoint
        self._folder = folder
        self._limit = math.inf if folder is None else SHARDS_ON_DISK
        self._held: dict[str, _Held] = {}
        self._loading: set[str] = set()
        self._asked: Counter[str] = Counter()
        """Shards that somebody waits for."""
        self._failed: dict[str, Exception] = {}
        """What could not be downloaded, however often it was tried."""
        self._places: dict[tuple[str, int], deque[tuple[int, int]]] = {}
        """Shard and first byte -> number in the order, and last byte, of what was not read yet."""
        self._uses: dict[str, list[int]] = {}
        """Shard -> the numbers of what is read of it."""
        self._read = bytearray()
        """By number, whether it was read."""
        self._front = 0
        """Number of what was read last."""
        self._turns = 0
        self._threads: list[Thread] = []
        self._closed = False
        self._changed = Condition()

    def expect(self, order: Iterable[ByteRange]) -> None:
        """Say what will be read from now on, in that order or nearly so."""
        with self._changed:
            self._places, self._uses, self._front = {}, {}, 0
            number = 0
            for wanted in order:
                if wanted.begin == wanted.end:
                    continue
                place = self._places.setdefault((wanted.shard, wanted.begin), deque())
                place.append((number, wanted.end))
                self._uses.setdefault(wanted.shard, []).append(number)
                number += 1
            self._read = bytearray(number)
            self._start()
            self._changed.notify_all()

    def read(self, wanted: ByteRange, buffer: memoryview) -> None:
        """Fill `buffer` with a range of a shard, which is waited for. Raises HubError, OSError."""
        if not len(buffer):
            return
        with self._changed:
            self._start()
            held = self._wait_for(wanted.shard)
            self._turns += 1
            held.readers, held.turn = held.readers + 1, self._turns
        try:
            read_at(held.descriptor, wanted.begin, buffer)
        finally:
            with self._changed:
                held.readers -= 1
                self._pass(wanted)
                if self._closed:
                    self._let_go()
                self._changed.notify_all()

    def close(self) -> None:
        """Let go of the shards. A download under way ends by itself, or with the process."""
        with self._changed:
            self._closed = True
            self._let_go()
            self._changed.notify_all()

    def _let_go(self) -> None:
        for name in [name for name, held in self._held.items() if not held.readers]:
            os.close(self._held.pop(name).descriptor)

    def _wait_for(self, name: str) -> _Held:
        self._asked[name] += 1
        try:
            while (held := self._held.get(name)) is None:
                if self._closed:
                    raise HubError(f"{name} is asked for when reading has ended")
                if (error := self._failed.get(name)) is not None:
                    raise error
                self._changed.notify_all()
                self._changed.wait()
            return held
        finally:
            self._asked[name] -= 1
            if not self._asked[name]:
                del self._asked[name]

    def _pass(self, wanted: ByteRange) -> None:
        """Note what was read: a range of the order, or several that lie side by side."""
        begin = wanted.begin
        while begin < wanted.end and (place := self._places.get((wanted.shard, begin))):
            self._front, begin = place.popleft()
            self._read[self._front] = True

    def _next_use(self, name: str) -> float:
        """Number of what is read next of a shard; infinite when nothing is."""
        uses = self._uses.get(name, [])
        for place in range(bisect_left(uses, self._front - LAG), len(uses)):
            if not self._read[uses[place]]:
                return uses[place]
        # What was read out of turn may be read again in its turn.
        return uses[-1] if uses and uses[-1] > self._front else math.inf

    def _next(self) -> tuple[str, str | None] | None:
        """The shard to download now, and the one to delete for it; None when there is no need."""
        here = self._held.keys() | self._loading
        full = len(here) >= self._limit
        free = [n for n, held in self._held.items() if not held.readers and n not in self._asked]
        last = max(free, key=lambda n: (self._next_use(n), -self._held[n].turn), default=None)
        for name in self._asked:
            if name not in here and (not full or last is not None):
                return name, last if full else None
        unread = sum(not held.turn for held in self._held.values()) + len(self._loading)
        if unread >= DOWNLOADS:
            return None
        ahead = [n for n in self._uses if n not in here and n not in self._failed]
        name = min(ahead, key=self._next_use, default="")
        if not name or self._next_use(name) == math.inf:
            return None
        if not full:
            return name, None
        if last is not None and self._next_use(last) > self._next_use(name):
            return name, last
        return None

    def _start(self) -> None:
        """At first use, when the folder is ours."""
        if self._threads:
            return
        if self._folder is not None:
            self._take_up(self._folder)
        for number in range(DOWNLOADS):
            thread = Thread(target=self._work, name=f"fetch-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _take_up(self, folder: Path) -> None:
        """Make what a killed run left ours, but for downloads that did not end."""
        for path in folder.rglob("*.incomplete"):
            path.unlink()
        for path in sorted(folder.glob("*.safetensors")):
            if path.name in self._checkpoint.shards and len(self._held) < self._limit:
                with contextlib.suppress(HubError):  # it is gone then, and downloaded when needed
                    self._held[path.name] = self._fetch(path.name)
            else:
                path.unlink()

    def _work(self) -> None:
        while (name := self._begin()) is not None:
            held, error = None, None
            try:
                held = self._fetch(name)
            except Exception as failure:
                error = failure
            with self._changed:
                self._loading.discard(name)
                if error is not None:
                    self._failed[name] = error
                elif held is not None and self._closed:
                    os.close(held.descriptor)
                elif held is not None:
                    self._held[name] = held
                self._changed.notify_all()

    def _begin(self) -> str | None:
        """The next shard to download, with room made for it; None at the end."""
        with self._changed:
            while not self._closed:
                if (step := self._next()) is not None:
                    name, victim = step
                    if victim is not None:
                        self._drop(victim)
                    self._loading.add(name)
                    return name
                self._changed.wait()
            return None

    def _drop(self, name: str) -> None:
        held = self._held.pop(name)
        os.close(held.descriptor)
        if held.ours:
            held.path.unlink()

    def _fetch(self, name: str) -> _Held:
        from halfbyte.formats.hub import download

        assert self._checkpoint.repository is not None
        # What the cache has already need not be downloaded, and is not ours.
        ours = self._folder is not None and not (self._checkpoint.path / name).is_file()
        try:
            path = download(self._checkpoint.repository, name, self._folder if ours else None)
            return _Held(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), ours)
        except OSError as error:
            place = self._folder or self._checkpoint.path
            raise HubError(
                f"{name} cannot be stored in {place}: {error.strerror or error}",
                hint="free some space there; what is finished is kept for --resume",
            ) from error
