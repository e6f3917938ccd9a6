"""What was read ahead is what a direct read gives, in any order, within the budget."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.core import StoredWeight
from halfbyte.errors import CheckpointError
from halfbyte.formats import int4, readahead
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.readahead import PATIENCE, ByteRange, ReadAhead
from halfbyte.formats.shards import Request, ShardReader, row_slices
from halfbyte.formats.weights import logical_weights
from halfbyte.testing.tiny import write_checkpoint, write_tiny


def requests(weights: Iterable[StoredWeight]) -> Iterator[Request]:
    for stored in weights:
        yield from map(Request, stored.parts.values())


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("read-ahead")]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


AHEAD = 32 << 20


@pytest.fixture(scope="module", params=["fp8", "bf16", "ct-channel", "ct-block", "int4"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each encoding."""
    kind, tmp_path = request.param, tmp_path_factory.mktemp("encodings")
    if kind == "int4":
        generator = torch.Generator().manual_seed(0)
        tensors = {}
        for n in range(9):
            codes = torch.randint(-8, 8, (24, 64), dtype=torch.int8, generator=generator)
            scales = torch.rand(24, 2, generator=generator).to(torch.bfloat16)
            name = f"model.layers.0.mlp.experts.{n}.up_proj.weight"
            tensors |= int4.stored(name, int4.pack(codes), scales)
        group = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}
        config = {"quantization_config": {"config_groups": {"group_0": group}}}
        return write_checkpoint(tmp_path / kind, config, [tensors])
    return write_tiny(tmp_path / kind, source=kind)


@pytest.mark.parametrize("order", ["as planned", "backwards", "shuffled", "every third"])
@pytest.mark.parametrize("ahead", [1 << 30, 40_000, 1])
def test_values_are_those_of_direct_reads(source: Path, order: str, ahead: int) -> None:
    """Scales lie in another shard than their weight; tensors do not fit the smaller budgets."""
    checkpoint = open_checkpoint(source)
    weights = list(logical_weights(checkpoint).values())
    asked = {
        "as planned": weights,
        "backwards": weights[::-1],
        "shuffled": random.Random(1).sample(weights, len(weights)),
        "every third": weights[::3],
    }[order]
    with ShardReader(checkpoint) as reader:
        expected = [reader.read_weight(stored) for stored in asked]
        with reader.read_ahead(requests(weights), "cpu", ahead):
            for stored, value in zip(asked, expected, strict=True):
                assert torch.equal(bits(reader.read_weight(stored)), bits(value)), stored.name
        assert threads() == []
        again = reader.read_weight(asked[0])
    assert torch.equal(bits(again), bits(expected[0]))


def test_reading_in_order_asks_the_disk_for_everything_once(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And small neighbours together: fewer requests than tensors."""
    checkpoint = open_checkpoint(tiny)
    weights = list(logical_weights(checkpoint).values())
    preadv, counts = os.preadv, []

    def counting(*arguments: object) -> int:
        counts.append(preadv(*arguments))  # type: ignore[arg-type]
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    with ShardReader(checkpoint) as reader, reader.read_ahead(requests(weights), "cpu", AHEAD):
        for stored in weights:
            reader.read_weight(stored)
    assert sum(counts) == sum(info.nbytes for info in checkpoint.tensors.values())
    assert len(counts) < len(checkpoint.tensors) / 2


def test_rows_are_read_ahead_as_well(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    info = checkpoint.tensors["model.embed_tokens.weight"]
    slices = list(row_slices(info, 10_000))
    assert len(slices) > 3
    with ShardReader(checkpoint) as reader:
        whole = reader.read(info)
        with reader.read_ahead([Request(info, rows) for rows in slices], "cpu", AHEAD):
            parts = [reader.read(info, rows) for rows in slices]
    assert torch.equal(bits(torch.cat(parts)), bits(whole))


def test_several_threads_may_ask(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    weights = list(logical_weights(checkpoint).values()) * 3
    with ShardReader(checkpoint) as reader:
        expected = [reader.read_weight(stored) for stored in weights]
        with reader.read_ahead(requests(weights), "cpu", 100_000), ThreadPoolExecutor(8) as pool:
            values = list(pool.map(reader.read_weight, weights))
    assert all(torch.equal(value, other) for value, other in zip(values, expected, strict=True))


# The budget


class Disk:
    """A file whose byte n is n modulo 251, and which notices how much is in memory."""

    def __init__(self, refuses: Sequence[ByteRange] = ()) -> None:
        self.refuses = refuses
        self.requests: list[ByteRange] = []

    def fill(self, wanted: ByteRange, buffer: memoryview) -> None:
        self.requests.append(wanted)
        if any(r.begin < wanted.end and wanted.begin < r.end for r in self.refuses):
            raise OSError(5, "Input/output error")
        buffer[:] = bytes(n % 251 for n in range(wanted.begin, wanted.end))


def holds(data: torch.Tensor | None, wanted: ByteRange) -> bool:
    return data is None or data.tolist() == [n % 251 for n in range(wanted.begin, wanted.end)]


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[ByteRange], list[ByteRange], int]:
    """An order, what is asked for (some of it, some of it twice, in some disorder), a budget."""
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=25))
    order, end = [], 0
    for size in sizes:
        gap = draw(st.sampled_from([0, 0, 3]))
        order.append(ByteRange("a", end + gap, end + gap + size))
        end += gap + size
    asked = draw(st.lists(st.sampled_from(order), max_size=40))
    if draw(st.booleans()):
        asked.sort()
    return order, asked, draw(st.integers(1, 200))


@given(walks(), st.sampled_from([0, 10, 1000]))
@settings(max_examples=150, deadline=None)
def test_no_order_gives_wrong_bytes_or_stands_still_or_exceeds_the_budget(
    walk: tuple[list[ByteRange], list[ByteRange], int], small: int
) -> None:
    order, asked, budget = walk
    seen: list[int] = []

    class Watched(Disk):
        def fill(self, wanted: ByteRange, buffer: memoryview) -> None:
            seen.append(ahead.used if "ahead" in spaces else 0)
            super().fill(wanted, buffer)

    spaces: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readahead, "SMALL", small)
        ahead = ReadAhead(Watched().fill, order, budget=budget)
        spaces.add("ahead")
        for wanted in asked:
            assert holds(ahead.take(wanted), wanted)
            seen.append(ahead.used)
        ahead.close()
    assert max(seen, default=0) <= budget
    assert ahead.used == 0
    assert threads() == []


def test_in_order_everything_within_the_budget_comes_from_it() -> None:
    order = [ByteRange("a", 10 * n, 10 * n + 10) for n in range(200)]
    ahead = ReadAhead(Disk().fill, order, budget=35)
    taken = [ahead.take(wanted) for wanted in order]
    assert all(data is not None for data in taken)
    assert ahead.take(order[0]) is None  # once is once
    ahead.close()


def test_who_jumps_again_and_again_takes_the_reading_along() -> None:
    order = [ByteRange("a", 10 * n, 10 * n + 10) for n in range(0, 2000, 2)]
    disk = Disk()
    ahead = ReadAhead(disk.fill, order, budget=50)
    taken = [ahead.take(wanted) is not None for wanted in order[900:]]
    ahead.close()
    assert taken == [False] * PATIENCE + [True] * (100 - PATIENCE)
    assert len(disk.requests) < 150


def test_one_request_from_far_ahead_spoils_nothing() -> None:
    order = [ByteRange("a", 10 * n, 10 * n + 10) for n in range(0, 2000, 2)]
    disk = Disk()
    ahead = ReadAhead(disk.fill, order, budget=50)
    far = {1: order[-1], 7: order[500]}
    for number, wanted in enumerate(order):
        if number in far:
            assert ahead.take(far[number]) is None
        assert (ahead.take(wanted) is None) == (wanted in far.values())
    ahead.close()
    assert sorted(disk.requests) == [wanted for wanted in order if wanted not in far.values()]


def test_a_small_range_does_not_keep_its_large_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readahead, "SMALL", 10)
    large, small = ByteRange("a", 0, 5000), ByteRange("a", 5000, 5010)
    disk = Disk()
    ahead = ReadAhead(disk.fill, [large, small], budget=10_000)
    data = ahead.take(small)
    assert data is not None
    assert data.untyped_storage().nbytes() == 10
    assert holds(ahead.take(large), large)
    ahead.close()
    assert disk.requests == [ByteRange("a", 0, 5010)]


def test_page_locked_memory_is_counted_as_its_allocator_rounds_it() -> None:
    ahead = ReadAhead(Disk().fill, [], budget=1 << 30, pinned=True)
    assert ahead._cost(ByteRange("a", 0, 12_585_984)) == 16 << 20
    assert ahead._cost(ByteRange("a", 0, 16 << 20)) == 16 << 20
    ahead.close()


# What goes wrong


def test_what_the_disk_refuses_is_left_to_the_one_who_asks() -> None:
    order = [ByteRange("a", 10 * n, 10 * n + 10) for n in range(0, 40, 2)]
    ahead = ReadAhead(Disk(refuses=[order[3]]).fill, order, budget=45)
    taken = [ahead.take(wanted) for wanted in order]
    assert [data is None for data in taken] == [n == 3 for n in range(20)]
    ahead.close()
    assert ahead.used == 0


def test_any_other_error_is_raised_where_the_bytes_are_wanted() -> None:
    def fill(wanted: ByteRange, buffer: memoryview) -> None:
        raise ZeroDivisionError

    ahead = ReadAhead(fill, [ByteRange("a", 0, 10)], budget=45)
    with pytest.raises(ZeroDivisionError):
        ahead.take(ByteRange("a", 0, 10))
    ahead.close()


def test_a_short_file_is_reported_as_without_reading_ahead(tiny_copy: Path) -> None:
    checkpoint = open_checkpoint(tiny_copy)
    weights = list(logical_weights(checkpoint).values())
    last = max((i for w in weights for i in w.parts.values()), key=lambda i: (i.shard, i.end))
    with ShardReader(checkpoint) as reader:
        reader.read(last)  # opened while it is whole
        os.truncate(tiny_copy / last.shard, last.end - 3)
        messages = []
        for order in ([], weights):
            with (
                reader.read_ahead(requests(order), "cpu", AHEAD),
                pytest.raises(CheckpointError) as caught,
            ):
                list(map(reader.read_weight, weights))
            messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert f"{last.name}, bytes {last.begin}..{last.end}" in messages[0]
    assert "it ends at byte" in messages[0]
    assert threads() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_thread_and_no_descriptor_is_left(tiny: Path, error: type[BaseException]) -> None:
    checkpoint = open_checkpoint(tiny)
    weights = list(logical_weights(checkpoint).values())
    gc.collect()  # what other tests left
    before = len(os.listdir("/proc/self/fd"))

    def broken_off() -> None:
        with ShardReader(checkpoint) as reader, reader.read_ahead(requests(weights), "cpu", AHEAD):
            reader.read_weight(weights[0])
            raise error

    with pytest.raises(error):
        broken_off()
    assert threads() == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_close_does_not_wait_for_room() -> None:
    """Threads that wait for a budget that nobody frees still end."""
    order = [ByteRange("a", 10 * n, 10 * n + 10) for n in range(0, 40, 2)]
    ahead = ReadAhead(Disk().fill, order, budget=10)
    ahead.close()
    assert threads() == []
    assert ahead.take(order[5]) is None
