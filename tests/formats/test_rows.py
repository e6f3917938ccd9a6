"""Rows are what was put there, wherever they lie, and a file of them is gone with its last user."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.errors import OutputError
from halfbyte.formats import rows as rows_module
from halfbyte.formats.rows import InMemory, OnDisk, Rows, new_rows

CPU = torch.device("cpu")
PLACES: list[Any] = ["device", "host", "disk"]


def filled(place: Any, folder: Path, values: torch.Tensor) -> Rows:
    rows = new_rows(place, values.shape, values.dtype, CPU, folder)
    for part in rows.slices(3):
        rows[part] = values[part]
    return rows


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("shape", [(11, 5), (11, 2, 3), (0, 4), (11, 0, 4), (1, 1)])
@pytest.mark.parametrize("piece", [1, 50, 1 << 20])
def test_rows_come_back_as_they_were_put(
    tmp_path: Path,
    place: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_module, "PIECE", piece)
    values = random(*shape, dtype=dtype)
    rows = filled(place, tmp_path, values)
    assert (len(rows), rows.shape, rows.dtype, rows.device) == (shape[0], shape, dtype, CPU)
    assert rows.row_bytes == values[:1].nbytes or not shape[0]
    assert torch.equal(rows[:], values)
    for some in (slice(3, 8), slice(9, None), slice(4, 4), slice(8, 100)):
        assert torch.equal(rows[some], values[some])
    parts = list(rows.split(4))
    assert [len(part) for part in parts] == [len(values[i : i + 4]) for i in range(0, shape[0], 4)]
    if shape[0] > 8:
        index = torch.tensor([0, 3, 4, 5, 8, 2, 2, 10])
        assert torch.equal(rows[index], values[index])
        assert torch.equal(rows[index[:0]], values[index[:0]])
        rows[2:5] = 2 * values[2:5]
        assert torch.equal(rows[2:6], torch.cat([2 * values[2:5], values[5:6]]))


@pytest.mark.parametrize("place", PLACES)
def test_shrunk_rows_take_the_place_over_row_by_row(tmp_path: Path, place: Any) -> None:
    values = random(10, 4, 3)
    rows = filled(place, tmp_path, values)
    out = rows.shrunk((10, 3, 3))
    for part in rows.slices(4):
        out[part] = rows[part][:, 1:] + 1
    assert torch.equal(out[:], values[:, 1:] + 1)


def test_what_is_changed_in_place_may_be_put_back() -> None:
    rows = InMemory(random(6, 2))
    part = rows[2:4]
    part += 1
    rows[2:4] = part
    expected = random(6, 2)
    expected[2:4] += 1
    assert torch.equal(rows[:], expected)


def test_a_file_has_no_name_and_goes_with_its_last_user(tmp_path: Path) -> None:
    free = len(os.listdir("/proc/self/fd"))
    rows = filled("disk", tmp_path, random(20, 7))
    assert isinstance(rows, OnDisk)
    assert list(tmp_path.iterdir()) == []
    del rows
    assert len(os.listdir("/proc/self/fd")) == free


def test_a_disk_without_room_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1_000_000))
    new_rows("disk", (250, 1000), torch.float32, CPU, tmp_path)
    with pytest.raises(OutputError, match=r"hidden states need 1\.0 MB there, 1\.0 MB are free"):
        new_rows("disk", (251, 1000), torch.float32, CPU, tmp_path)


def test_a_disk_that_fills_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = new_rows("disk", (4, 4), torch.float32, CPU, tmp_path)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match="No space left"):
        rows[0:2] = torch.zeros(2, 4)


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    rows = new_rows("disk", (4, 4), torch.float32, CPU, tmp_path)
    with pytest.raises(ValueError, match="2 rows"):
        rows[0:2] = torch.zeros(3, 4)
