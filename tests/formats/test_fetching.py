"""Shards that come over the network while they are read: right bytes, few of them on the disk."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halfbyte.core import Checkpoint, TensorInfo
from halfbyte.errors import HubError
from halfbyte.formats.budgets import SHARDS_ON_DISK
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.fetching import downloaded_bytes
from halfbyte.formats.shards import Request, ShardReader
from halfbyte.formats.source import open_source
from halfbyte.testing.hub import LoopbackHub
from halfbyte.testing.tiny import write_tiny

NAME = "someone/Tiny-FP8"
SHARDS = 8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("source") / "tiny", layers=2, shards=SHARDS)


class Watched(LoopbackHub):
    """Counts downloads, and at the beginning of each the shards in `scratch`."""

    scratch: Path
    most = 0

    def watch(self) -> None:
        files = [p for p in self.scratch.rglob("*") if p.suffix in (".safetensors", ".incomplete")]
        self.most = max(self.most, len(files))

    @property
    def downloads(self) -> Counter[str]:
        names = (r.partition("name=")[2] for r in self.requests if r.startswith("GET /cdn/"))
        return Counter(names)


@pytest.fixture
def hub(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr("time.sleep", lambda _: None)
    with Watched(tmp_path / "hub") as hub, hub.in_use(tmp_path / "home"):
        hub.add(NAME, source)
        hub.scratch = tmp_path / "scratch"
        hub.fail("GET /cdn/", hub.watch, times=10**9)
        yield hub


@pytest.fixture
def checkpoint(hub: Watched) -> Checkpoint:
    checkpoint = open_source(NAME)
    assert len(checkpoint.shards) == SHARDS
    hub.requests.clear()
    hub.most = 0
    return checkpoint


def by_shard(checkpoint: Checkpoint) -> list[TensorInfo]:
    return sorted(checkpoint.tensors.values(), key=lambda t: (t.shard, t.begin))


def require_equal(info: TensorInfo, found: torch.Tensor, local: ShardReader) -> None:
    expected = local.read(info)
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def read_all(
    checkpoint: Checkpoint, order: list[TensorInfo], scratch: Path | None, source: Path, budget: int
) -> None:
    """Read tensors as promised, and compare each with the file of the source."""
    with (
        ShardReader(open_checkpoint(source)) as local,
        ShardReader(checkpoint, scratch) as reader,
        reader.read_ahead(map(Request, order), "cpu", budget),
    ):
        for info in order:
            require_equal(info, reader.read(info), local)


@pytest.mark.parametrize(
    ("order", "limit", "downloads"),
    [
        ("aabbaac", 3, "abc"),
        ("abcabc", 2, "abcb"),  # b goes for c, and a, which is done, for b
        ("abcdabcd", 3, "abcdc"),  # c goes for d
        ("abcd", 1, "abcd"),
        ("", 3, ""),
    ],
)
def test_downloads_are_counted(order: str, limit: int, downloads: str) -> None:
    """Worked out by hand; every shard has a size of its own."""
    sizes = {"a": 1, "b": 10, "c": 100, "d": 1000}
    assert downloaded_bytes(order, sizes, limit) == sum(sizes[shard] for shard in downloads)


@pytest.mark.parametrize("budget", [1 << 25, 1 << 14, 1])
def test_each_shard_comes_once_and_goes(
    hub: Watched, checkpoint: Checkpoint, source: Path, budget: int
) -> None:
    """Whether much is read ahead, little, or nothing."""
    read_all(checkpoint, by_shard(checkpoint), hub.scratch, source, budget)
    assert hub.downloads == Counter(checkpoint.shards.keys())
    assert 1 <= hub.most <= SHARDS_ON_DISK
    assert len(list(hub.scratch.glob("*.safetensors"))) <= SHARDS_ON_DISK


def test_departures_from_the_order_get_the_same_bytes(
    hub: Watched, checkpoint: Checkpoint, source: Path
) -> None:
    order = by_shard(checkpoint)
    other = random.Random(3).sample(order, 40)
    with ShardReader(checkpoint, hub.scratch) as reader, ShardReader(open_checkpoint(source)) as us:
        for info in order[-2:] + order[:2]:  # before there is an order
            require_equal(info, reader.read(info), us)
        with reader.read_ahead(map(Request, order), "cpu", 1 << 16):
            for info in other:
                require_equal(info, reader.read(info), us)
    assert hub.most <= SHARDS_ON_DISK


def test_shards_in_turns_stay_while_they_are_needed(
    hub: Watched, checkpoint: Checkpoint, source: Path
) -> None:
    """As many shards as there may be, read in turns, each come once."""
    per_shard: dict[str, list[TensorInfo]] = {}
    for info in by_shard(checkpoint):
        per_shard.setdefault(info.shard, []).append(info)
    shards = list(per_shard.values())
    order: list[TensorInfo] = []
    for start in range(0, SHARDS, SHARDS_ON_DISK):
        together = shards[start : start + SHARDS_ON_DISK]
        for turn in range(max(map(len, together))):
            order += [tensors[turn] for tensors in together if turn < len(tensors)]
    read_all(checkpoint, order, hub.scratch, source, 1 << 14)
    assert hub.downloads == Counter(checkpoint.shards.keys())
    assert hub.most <= SHARDS_ON_DISK


def test_kept_shards_are_used_again(hub: Watched, checkpoint: Checkpoint, source: Path) -> None:
    for _ in range(2):
        read_all(checkpoint, by_shard(checkpoint), None, source, 1 << 20)
    assert hub.downloads == Counter(checkpoint.shards.keys())
    assert {p.name for p in checkpoint.path.glob("*.safetensors")} == checkpoint.shards.keys()


def test_what_was_left_is_used(hub: Watched, checkpoint: Checkpoint, source: Path) -> None:
    """Of a run that was killed: whole shards, a damaged one, half of a download."""
    order = by_shard(checkpoint)
    first = [info for info in order if info.shard == order[0].shard]
    with ShardReader(checkpoint, hub.scratch) as reader:
        reader.read(order[0])
    shard = hub.scratch / order[0].shard
    half = hub.scratch / ".cache/huggingface/download/x.incomplete"
    half.write_bytes(b"half")
    with ShardReader(checkpoint, hub.scratch) as reader, ShardReader(open_checkpoint(source)) as us:
        require_equal(first[-1], reader.read(first[-1]), us)
    assert hub.downloads[shard.name] == 1
    assert not half.exists()
    shard.write_bytes(bytes(shard.stat().st_size))
    with ShardReader(checkpoint, hub.scratch) as reader, ShardReader(open_checkpoint(source)) as us:
        require_equal(first[-1], reader.read(first[-1]), us)
    assert hub.downloads[shard.name] == 2


def test_a_shard_that_cannot_be_had_ends_the_reading(
    hub: Watched, checkpoint: Checkpoint, source: Path
) -> None:
    shard = sorted(checkpoint.shards)[2]
    hub.fail(f"HEAD .*{shard}", "503", times=10**9)
    with pytest.raises(HubError, match=f"{shard}: .* answers 503"):
        read_all(checkpoint, by_shard(checkpoint), hub.scratch, source, 1 << 14)
