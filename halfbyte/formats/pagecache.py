"""Lets the disk work while Python imports torch, which takes seconds that it would be idle."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock, Thread

from halfbyte.core import Checkpoint
from halfbyte.formats.budgets import DISK_THREADS
from halfbyte.formats.files import read_at

PIECE = 4 << 20
"""Bytes of a request, and of memory for each thread."""
SHARE = 4
"""One part in so many of the memory that is free may be filled."""


@contextmanager
def page_cache_filling(checkpoint: Checkpoint, limit: int | None = None) -> Iterator[None]:
    """Read the shards in order, into the page cache, for as long as the `with` block lasts.

    At most `limit` bytes, by default a quarter of what memory is free. What cannot be read is left
    to the reader that will want it, and can explain.
    """
    pieces = _pieces(checkpoint, _free_memory() // SHARE if limit is None else limit)
    turn, stop = Lock(), Event()

    def work() -> None:
        buffer = memoryview(bytearray(PIECE))
        while not stop.is_set():
            with turn:
                piece = next(pieces, None)
            if piece is None:
                return
            path, begin, size = piece
            with contextlib.suppress(OSError, EOFError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    read_at(descriptor, begin, buffer[:size])
                finally:
                    os.close(descriptor)

    threads = [
        Thread(target=work, name=f"page-cache-{n}", daemon=True) for n in range(DISK_THREADS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _pieces(checkpoint: Checkpoint, limit: int) -> Iterator[tuple[Path, int, int]]:
    """File, first byte and size of each request: `limit` bytes together at most."""
    for shard, nbytes in checkpoint.shards.items():
        for begin in range(0, nbytes, PIECE):
            size = min(PIECE, nbytes - begin, limit)
            if not size:
                return
            limit -= size
            yield checkpoint.path / shard, begin, size


def _free_memory() -> int:
    """Bytes that the kernel could give to a new program without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
