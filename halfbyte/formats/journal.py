"""The journal of a run: what is finished, in JSON lines, so that a killed run can go on.

A line holds the units that became final together, as a rule one. It is appended and fsynced only
after all that it speaks of is on the disk. A line that a crash cut in half is the last one: nobody
reads it, and who appends next drops it. So the journal always ends where a run can go on. Hashes
are of shard prefixes: a shard's units are written in order, so a unit's hashes pin every byte of
its shards up to its own end.

Several processes may share a journal. The file is the truth: each appends under a lock and reads
what the others appended.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from halfbyte.errors import ResumeError
from halfbyte.formats.files import sync_folder

JOURNAL_VERSION = 3


@dataclass(frozen=True, slots=True)
class Commit:
    """One finished unit."""

    unit: str
    shards: Mapping[str, tuple[int, str]]
    """Shard file -> (bytes from its start that are final, SHA-256 of them)."""
    record: Mapping[str, Any]
    """What the run wants back on resume: reports of the unit's linears, the state file."""


class Journal:
    """Append-only file; `identity` names everything that a resumed run must have in common."""

    def __init__(self, path: Path) -> None:
        """Raises ResumeError when the file does not begin as a journal of this version."""
        self.path = path
        self._commits: list[Commit] = []
        self._end = 0
        """Bytes that were read."""
        with self._intact():
            header, *entries = self._new_lines()
            if header["journal"] != JOURNAL_VERSION:
                raise KeyError
            self.identity: Mapping[str, Any] = header["identity"]
            self._commits += _commits(entries)

    @classmethod
    def create(cls, path: Path, identity: Mapping[str, Any]) -> Journal:
        path.parent.mkdir(parents=True, exist_ok=True)
        _append(path, {"journal": JOURNAL_VERSION, "identity": identity})
        sync_folder(path.parent)
        return cls(path)

    @property
    def commits(self) -> Sequence[Commit]:
        """What is committed by now, by whichever process. Raises ResumeError when damaged."""
        with self._intact():
            self._commits += _commits(self._new_lines())
        return self._commits

    def append(self, commits: Sequence[Commit]) -> None:
        """Make these units final, all or none of them."""
        _append(self.path, {"units": [asdict(commit) for commit in commits]})

    def _new_lines(self) -> list[Any]:
        """The records of all lines that were finished since the last call."""
        with open(self.path, "rb") as file:
            file.seek(self._end)
            finished = file.read().split(b"\n")[:-1]
        self._end += sum(len(line) + 1 for line in finished)
        return [_checked(line) for line in finished]

    @contextmanager
    def _intact(self) -> Iterator[None]:
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:
            raise ResumeError(
                f"{self.path} is damaged or of another version",
                hint="start again with --overwrite",
            ) from error


def _commits(lines: Iterable[Any]) -> list[Commit]:
    return [
        Commit(
            unit["unit"],
            {file: (int(end), str(digest)) for file, (end, digest) in unit["shards"].items()},
            unit["record"],
        )
        for line in lines
        for unit in line["units"]
    ]


def _append(path: Path, record: Mapping[str, Any]) -> None:
    text = json.dumps(record, sort_keys=True).encode()
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        _drop_torn_line(file)
        file.write(_mark(text) + b" " + text + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _drop_torn_line(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read() not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def _mark(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:16].encode()


def _checked(line: bytes) -> Any:
    """The record of a line. Raises ValueError when it is not what was written."""
    mark, _, text = line.partition(b" ")
    if mark != _mark(text):
        raise ValueError("a line does not have its checksum")
    return json.loads(text)


def identity_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first value that differs, as "<key> was <a>, now <b>"; nested keys joined by dots."""
    for key in [*now, *(key for key in before if key not in now)]:
        old, new = _numbered(before.get(key)), _numbered(now.get(key))
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if (inner := identity_difference(old, new)) is not None:
                return f"{key}.{inner}"
        elif old != new:
            return f"{key} was {old}, now {new}"
    return None


def _numbered(value: Any) -> Any:
    """A list as a mapping from the numbers of its entries, to name the one that differs."""
    return {str(i): v for i, v in enumerate(value, 1)} if isinstance(value, list) else value
