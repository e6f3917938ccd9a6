"""What is read, in which order, and that batches and slices change no byte."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.core import Settings
from halfbyte.errors import CheckpointError
from halfbyte.formats import shards
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.readahead import ReadAhead
from halfbyte.quantize import conversion, pipeline
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe
from halfbyte.testing.tiny import write_tiny

RTN = Settings(method="rtn")


def run(source: Path, out: Path, settings: Settings = RTN) -> dict[str, bytes]:
    plan = make_plan(open_checkpoint(source), load_recipe("glm-5"), settings)
    tokens = None
    if settings.method != "rtn":
        shape = (settings.samples, settings.sequence_length)
        tokens = torch.randint(10, 300, shape, generator=torch.Generator().manual_seed(5))
    pipeline.run(plan, out, tokens=tokens)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize("elements", [10_000, 1 << 27])
def test_batches_change_no_byte(
    tiny: Path, tmp_path: Path, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linears of two shapes, gate and up [64, 128] and down [128, 64], alternate in a batch."""
    expected = run(tiny, tmp_path / "one by one")
    solved = []
    solve = conversion.solve

    def watched(weights: torch.Tensor, *rest: Any) -> Any:
        solved.append(tuple(weights.shape))
        return solve(weights, *rest)

    monkeypatch.setattr(conversion, "solve", watched)
    monkeypatch.setitem(conversion.BATCH_ELEMENTS, "cpu", elements)  # type: ignore[misc]
    assert run(tiny, tmp_path / "batches") == expected
    if elements > 10_000:
        assert solved == [(4, 128, 64), (8, 64, 128)] * 4
    else:
        assert {shape[0] for shape in solved} == {1}


def test_slices_of_copies_change_no_byte(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(tiny, tmp_path / "whole")
    monkeypatch.setattr(conversion, "row_slices", lambda part: shards.row_slices(part, 10_000))
    assert run(tiny, tmp_path / "slices") == expected


def test_a_bad_value_in_a_later_slice_is_found_where_it_is(
    tiny_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = open_checkpoint(tiny_copy).tensors["model.embed_tokens.weight"]
    with (tiny_copy / info.shard).open("r+b") as file:
        file.seek(info.begin + 2 * (300 * info.shape[1] + 5))
        file.write((0x7FC0).to_bytes(2, "little"))
    monkeypatch.setattr(conversion, "row_slices", lambda part: shards.row_slices(part, 10_000))
    with pytest.raises(CheckpointError, match=r"decodes to nan at \[300, 5\]"):
        run(tiny_copy, tmp_path / "out")


def test_a_data_free_run_reads_every_byte_once_and_ahead(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, counts = os.preadv, []

    def counting(*arguments: Any) -> int:
        counts.append(preadv(*arguments))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    found = hits_and_misses(monkeypatch)
    run(tiny, tmp_path / "out")
    tensors = open_checkpoint(tiny).tensors.values()
    assert sum(counts) == sum(info.nbytes for info in tensors)
    assert found["misses"] == 0


def test_a_calibrated_run_finds_most_of_what_it_reads_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the embedding, which calibration reads beside the order of the plan."""
    source = write_tiny(tmp_path / "tiny")
    found = hits_and_misses(monkeypatch)
    run(source, tmp_path / "out", Settings(samples=2, sequence_length=16))
    assert found["hits"] > 300
    assert found["misses"] <= 10


def hits_and_misses(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    found: Counter[str] = Counter()
    take = ReadAhead.take

    def watched(self: ReadAhead, wanted: Any) -> torch.Tensor | None:
        data = take(self, wanted)
        found["misses" if data is None else "hits"] += 1
        return data

    monkeypatch.setattr(ReadAhead, "take", watched)
    return found
