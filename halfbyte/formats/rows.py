"""Large tensors that are worked on some rows at a time, and lie where there is room for them.

Hidden states of all calibration tokens may lie on the compute device, in host memory or on the
disk. Who works on them says which rows, gets them on the device, and gives them back; where they
come from changes no bit.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import IO

import torch

from halfbyte.core import Place
from halfbyte.errors import OutputError
from halfbyte.formats.budgets import PIECE
from halfbyte.formats.files import read_at, write_at
from halfbyte.formats.pagelock import lock_pages
from halfbyte.formats.writebehind import explained
from halfbyte.units import format_bytes

READERS = 8
"""Threads that fetch scattered rows: a disk is fast only when it is asked for many at once."""


class Rows(ABC):
    """A tensor [n, ...] that is read and written by rows, wherever it lies."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = device
        """Where rows are handed out, and as a rule come from."""
        self._owner: Rows | None = None
        """Whose place this is, which must live as long."""

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @abstractmethod
    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        """Some rows, on the device: a slice without step, or those that int64 [m] names.

        A slice may share memory with the whole; who changes it must put it back.
        """

    @abstractmethod
    def __setitem__(self, rows: slice, values: torch.Tensor) -> None:
        """Replace the rows of a slice without step."""

    @abstractmethod
    def shrunk(self, shape: Sequence[int]) -> Rows:
        """The same place for a tensor of another shape that is no larger, which takes its over: a
        row of it may be written once all rows up to that number have been read."""

    def slices(self, count: int) -> Iterator[slice]:
        """All rows in order, `count` at a time."""
        for start in range(0, len(self), count):
            yield slice(start, min(start + count, len(self)))

    def split(self, count: int) -> Iterator[torch.Tensor]:
        """The rows of each of these slices."""
        return (self[rows] for rows in self.slices(count))


class InMemory(Rows):
    """Rows of a tensor that exists as a whole, on the device or in host memory."""

    def __init__(self, tensor: torch.Tensor, device: torch.device | None = None) -> None:
        """`device` is where rows are handed out, where it is not the tensor's own."""
        super().__init__(tensor.shape, tensor.dtype, device or tensor.device)
        self._tensor = tensor

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        if isinstance(rows, torch.Tensor):
            rows = rows.to(self._tensor.device)
        return self._tensor[rows].to(self.device)

    def __setitem__(self, rows: slice, values: torch.Tensor) -> None:
        place = self._tensor[rows]
        if place.data_ptr() != values.data_ptr():
            place.copy_(values)

    def shrunk(self, shape: Sequence[int]) -> InMemory:
        view = self._tensor.view(-1)[: math.prod(shape)].view(*shape)
        made = InMemory(view, self.device)
        made._owner = self
        return made


class OnDisk(Rows):
    """Rows that lie in a file from byte `offset` on, one behind the other."""

    # Read and written, not mapped: pages of a mapping count as resident memory of the process.

    def __init__(
        self,
        file: IO[bytes],
        folder: Path,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        offset: int = 0,
    ) -> None:
        """`folder` is where the file lies, for errors."""
        super().__init__(shape, dtype, device)
        self._file = file
        self._folder = folder
        self._offset = offset
        self._step = max(1, PIECE // max(1, self.row_bytes))

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        if isinstance(rows, torch.Tensor):
            index = rows.cpu()
        else:
            start, stop, _ = rows.indices(len(self))
            index = torch.arange(start, max(start, stop))
        out = torch.empty(len(index), *self.shape[1:], dtype=self.dtype, device=self.device)
        if not out.numel():
            return out
        on_gpu = self.device.type == "cuda"
        for into, part in zip(out.split(self._step), index.split(self._step), strict=True):
            if not on_gpu:
                self._read(into, part)
                continue
            host = torch.empty(into.shape, dtype=self.dtype, pin_memory=True)
            self._read(host, part)
            into.copy_(host, non_blocking=True)
        return out

    def __setitem__(self, rows: slice, values: torch.Tensor) -> None:
        start, stop, _ = rows.indices(len(self))
        if values.shape != (stop - start, *self.shape[1:]):
            raise ValueError(f"{stop - start} rows of {list(self.shape)} are not {values.shape}")
        with explained(self._folder):
            for part in values.split(self._step):
                data = part.to("cpu", self.dtype).contiguous()
                write_at(self._file.fileno(), self._place(start), _bytes(data))
                start += len(part)

    def shrunk(self, shape: Sequence[int]) -> OnDisk:
        made = OnDisk(self._file, self._folder, shape, self.dtype, self.device, self._offset)
        made._owner = self
        return made

    def _read(self, into: torch.Tensor, index: torch.Tensor) -> None:
        """Rows by number into host memory, neighbours by one call."""
        buffer, size = _bytes(into), self.row_bytes
        breaks = ((index[1:] != index[:-1] + 1).nonzero()[:, 0] + 1).tolist()
        runs = [*pairwise([0, *breaks, len(index)])]
        firsts = index[[begin for begin, _ in runs]].tolist()

        def fetch(turn: int) -> None:
            for number in range(turn, len(runs), READERS):
                begin, end = runs[number]
                where = self._place(firsts[number])
                read_at(self._file.fileno(), where, buffer[begin * size : end * size])

        if len(runs) == 1:
            fetch(0)
        else:
            list(_readers().map(fetch, range(READERS)))

    def _place(self, row: int) -> int:
        return self._offset + row * self.row_bytes


def new_rows(
    place: Place,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    folder: Path | None = None,
) -> Rows:
    """Room for a tensor, with nothing in it yet. On the disk it is a file of `folder` without a
    name, which is gone with its last user, even when the process is killed.

    Raises OutputError when the disk has no room for it.
    """
    if place == "device" or (place == "host" and device.type == "cpu"):
        return InMemory(torch.empty(*shape, dtype=dtype, device=device))
    if place == "host":
        return InMemory(lock_pages(torch.empty(*shape, dtype=dtype)), device)
    assert folder is not None
    nbytes, free = math.prod(shape) * dtype.itemsize, shutil.disk_usage(folder).free
    if nbytes > free:
        raise OutputError(
            f"the disk of {folder} is too small: hidden states need {format_bytes(nbytes)} there, "
            f"{format_bytes(free)} are free",
            hint="free some space, or let them stay in memory with a larger --max-host-memory",
        )
    with explained(folder):
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        os.truncate(file.fileno(), nbytes)
    rows = OnDisk(file, folder, shape, dtype, device)
    weakref.finalize(rows, file.close)
    return rows


@functools.cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(READERS, "rows")


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor that is not empty."""
    return tensor.view(-1).view(torch.uint8).numpy().data
