"""Reading ahead of the program itself: what is read, how much of it, and when it ends."""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Lock, active_count
from typing import Any

import pytest

from halfbyte.core import Checkpoint
from halfbyte.formats import pagecache
from halfbyte.formats.pagecache import PIECE, page_cache_filling

SIZES = {"a.safetensors": 3 * PIECE + 5, "b.safetensors": 7}


class Disk:
    """Notes what is read, and may keep its readers waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[tuple[str, int, int]] = []
        self.seconds = 0.0
        self._lock = Lock()
        preadv = os.preadv

        def noting(descriptor: int, buffers: Any, offset: int) -> int:
            time.sleep(self.seconds)
            name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
            with self._lock:
                self.read.append((name, offset, len(buffers[0])))
            return preadv(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", noting)

    def wait_for(self, count: int) -> None:
        while len(self.read) < count:
            time.sleep(0.001)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    for name, size in SIZES.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    return Checkpoint(tmp_path, {}, {}, SIZES, ())


def test_every_byte_of_every_shard_is_read(checkpoint: Checkpoint, disk: Disk) -> None:
    with page_cache_filling(checkpoint):
        disk.wait_for(5)
    pieces = [("a.safetensors", n * PIECE, PIECE) for n in range(3)]
    pieces += [("a.safetensors", 3 * PIECE, 5), ("b.safetensors", 0, 7)]
    assert sorted(disk.read) == pieces


def test_no_more_than_the_limit_is_read(checkpoint: Checkpoint, disk: Disk) -> None:
    with page_cache_filling(checkpoint, limit=PIECE + 3):
        disk.wait_for(2)
    assert sorted(disk.read) == [("a.safetensors", 0, PIECE), ("a.safetensors", PIECE, 3)]


def test_by_default_a_quarter_of_the_free_memory_is_the_limit(
    checkpoint: Checkpoint, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagecache, "_free_memory", lambda: 4 * 100)
    with page_cache_filling(checkpoint):
        disk.wait_for(1)
    assert disk.read == [("a.safetensors", 0, 100)]


def test_the_free_memory_of_this_machine_is_known() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < pagecache._free_memory() < total


def interrupted(disk: Disk) -> None:
    disk.wait_for(1)
    raise KeyboardInterrupt


def test_it_ends_with_the_block_whatever_is_left(tmp_path: Path, disk: Disk) -> None:
    disk.seconds = 0.01
    (tmp_path / "a.safetensors").touch()
    large = Checkpoint(tmp_path, {}, {}, {"a.safetensors": 1000 * PIECE}, ())
    before = active_count()
    with pytest.raises(KeyboardInterrupt), page_cache_filling(large, 2**60):
        interrupted(disk)
    assert active_count() == before
    assert len(disk.read) < 1000


def test_what_cannot_be_read_is_left_to_others(checkpoint: Checkpoint, disk: Disk) -> None:
    (checkpoint.path / "a.safetensors").unlink()
    with page_cache_filling(checkpoint):
        disk.wait_for(1)
    assert disk.read == [("b.safetensors", 0, 7)]
