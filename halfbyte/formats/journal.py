"""The journal of a run: what is finished, in JSON lines, so that a killed run can go on.

A line holds the units that became final together, as a rule one. It is appended and fsynced only
after all that it speaks of is on the disk. A line that a crash cut in half is the last one and is
dropped on reading, so the journal always ends where a run can go on. Hashes are of shard prefixes:
units are written in shard order, so a unit's hashes pin every byte of its shards up to its own end.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import ResumeError
from halfbyte.formats.files import sync_folder

JOURNAL_VERSION = 2


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

    def __init__(self, path: Path, identity: Mapping[str, Any], commits: list[Commit]) -> None:
        self.path = path
        self.identity = identity
        self.commits = commits

    @classmethod
    def create(cls, path: Path, identity: Mapping[str, Any]) -> Journal:
        path.parent.mkdir(parents=True, exist_ok=True)
        journal = cls(path, identity, [])
        journal._append({"journal": JOURNAL_VERSION, "identity": identity})
        sync_folder(path.parent)
        return journal

    @classmethod
    def load(cls, path: Path) -> Journal:
        """Read a journal back and drop a torn last line.

        Raises ResumeError when the first line is not a journal header of this version.
        """
        lines = path.read_bytes().split(b"\n")
        complete = lines[:-1]  # what follows the last newline was never finished
        try:
            header, *entries = map(_checked, complete)
            if header["journal"] != JOURNAL_VERSION:
                raise KeyError
            commits = [
                Commit(
                    unit["unit"],
                    {file: (int(n), str(h)) for file, (n, h) in unit["shards"].items()},
                    unit["record"],
                )
                for line in entries
                for unit in line["units"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ResumeError(
                f"{path} is damaged or of another version",
                hint="start again with --overwrite",
            ) from error
        os.truncate(path, sum(len(line) + 1 for line in complete))
        return cls(path, header["identity"], commits)

    def append(self, commits: Sequence[Commit]) -> None:
        """Make these units final, all or none of them."""
        self._append({"units": [asdict(commit) for commit in commits]})
        self.commits.extend(commits)

    def _append(self, record: Mapping[str, Any]) -> None:
        with open(self.path, "ab") as file:
            text = json.dumps(record, sort_keys=True).encode()
            file.write(_mark(text) + b" " + text + b"\n")
            file.flush()
            os.fsync(file.fileno())


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
