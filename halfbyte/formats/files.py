"""Durable file writing: a file exists complete under its name, or not at all."""

from __future__ import annotations

import ctypes
import hashlib
import os
from concurrent.futures import Executor
from pathlib import Path
from threading import Lock

CHUNK = 8 << 20
WRITEBACK = 32 << 20
"""Bytes after which the disk is told to begin writing what the page cache holds."""
WORTH_A_THREAD = 1 << 20
"""Bytes that take longer to hash than handing them to another thread does."""


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes) -> None:
    """Write to a temporary sibling, fsync, rename over `path`."""
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def copy_atomic(source: Path, path: Path) -> None:
    """Copy bytes (not links, not permissions) as `write_atomic` does."""
    temporary = path.with_name(path.name + ".partial")
    with open(source, "rb") as reader, open(temporary, "wb") as writer:
        while chunk := reader.read(CHUNK):
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_at(descriptor: int, begin: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes of a file from `begin` on. Raises EOFError when it is too short,
    OSError."""
    done = 0
    while done < len(buffer):  # the kernel returns at most 2 GiB a call
        count = os.preadv(descriptor, [buffer[done:]], begin + done)
        if count == 0:
            raise EOFError(f"it ends at byte {os.fstat(descriptor).st_size}")
        done += count


def write_at(descriptor: int, begin: int, data: memoryview) -> None:
    """Write all of `data` into a file from byte `begin` on. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], begin + done)


class PrefixHash:
    """SHA-256 of a growing prefix of a file, each byte hashed once.

    One thread writes, and has bytes hashed as they come (`feed`); where it wants to know a digest
    it makes a `mark`. Bytes that came in another order are read again for that (`extend`), by any
    thread, and until it is done the writer's are left for later.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._lock = Lock()
        self._marks = 0
        self.length = 0

    def feed(self, begin: int, data: memoryview) -> None:
        """Hash bytes that are about to be written, if they are the next ones."""
        if begin == self.length and not self._marks:
            self._hash.update(data)
            self.length += len(data)

    def mark(self, end: int) -> str | None:
        """The digest of the first `end` bytes, which are written, if they are hashed already;
        otherwise somebody has to `extend` up to there, and to every mark in turn."""
        with self._lock:
            if self.length == end and not self._marks:
                return self._hash.hexdigest()
            self._marks += 1
            return None

    def extend(self, descriptor: int, end: int) -> str:
        """Hash the bytes from where we stand up to a mark; the digest of the whole prefix."""
        while self.length < end:
            chunk = os.pread(descriptor, min(CHUNK, end - self.length), self.length)
            if not chunk:
                raise EOFError(f"file ends at byte {self.length}, {end} expected")
            self._hash.update(chunk)
            self.length += len(chunk)
        digest = self._hash.hexdigest()
        with self._lock:
            self._marks = max(0, self._marks - 1)
        return digest


class GrowingFile:
    """A file of known size that is written in pieces and hashed from the start on the way.

    Pieces that come in the order of the file are hashed, large ones by `hasher` while we write
    them; what came in another order is read again, from the page cache as a rule, when it is made
    durable. Raises OSError.
    """

    def __init__(
        self, path: Path, header: bytes, nbytes: int, prefix: PrefixHash, hasher: Executor
    ) -> None:
        self._prefix = prefix
        self._hasher = hasher
        self._unsent = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(self._descriptor, nbytes)
            self.write(0, memoryview(header))
            sync_folder(path.parent)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, begin: int, data: memoryview) -> None:
        """Put bytes at their place, each place once."""
        hashed = None
        if len(data) >= WORTH_A_THREAD:
            hashed = self._hasher.submit(self._prefix.feed, begin, data)
        else:
            self._prefix.feed(begin, data)
        write_at(self._descriptor, begin, data)
        self._unsent += len(data)
        if self._unsent >= WRITEBACK:
            start_writeback(self._descriptor)
            self._unsent = 0
        if hashed is not None:
            hashed.result()

    def mark(self, end: int) -> str | None:
        """What `sync` wants to know of the first `end` bytes, when just these are written."""
        return self._prefix.mark(end)

    def sync(self, end: int, marked: str | None) -> str:
        """Make the file durable; SHA-256 of its first `end` bytes. More may be written meanwhile,
        after the mark."""
        os.fsync(self._descriptor)
        return marked or self._prefix.extend(self._descriptor, end)

    def close(self) -> None:
        os.close(self._descriptor)


def start_writeback(descriptor: int) -> None:
    """Let the disk begin with what was written, so that a later fsync has little to wait for.

    Only a hint, so what a file system says to it does not matter.
    """
    if (call := getattr(ctypes.CDLL(None), "sync_file_range", None)) is not None:
        call(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(2))
