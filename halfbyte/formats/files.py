"""Durable file writing: a file exists complete under its name, or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

CHUNK = 8 << 20


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


class PrefixHash:
    """SHA-256 of a growing prefix of a file, each byte hashed once."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.length = 0

    def extend(self, descriptor: int, end: int) -> str:
        """Hash the bytes from where we stand up to `end`; the digest of the whole prefix."""
        while self.length < end:
            chunk = os.pread(descriptor, min(CHUNK, end - self.length), self.length)
            if not chunk:
                raise EOFError(f"file ends at byte {self.length}, {end} expected")
            self._hash.update(chunk)
            self.length += len(chunk)
        return self._hash.hexdigest()
