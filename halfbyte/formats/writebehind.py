"""Tensors on their way to files: copied to the host, written, hashed, made durable.

The caller goes on computing while bytes are copied and written. Everything happens in the order of
the calls, on one thread, and no more than a budget of bytes is on its way; beyond that the caller
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.core import ShardLayout
from halfbyte.errors import OutputError
from halfbyte.formats.background import Background
from halfbyte.formats.budgets import PIECE, page_locked
from halfbyte.formats.files import GrowingFile, PrefixHash

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Target:
    """A file to be written: where, what it will look like, and the hash of its beginning."""

    path: Path
    layout: ShardLayout
    prefix: PrefixHash = field(default_factory=PrefixHash, compare=False)


class WriteBehind:
    """Writes into the files of a folder with at most `budget` bytes on their way.

    What fails in the background is raised by the next call but `close`, an OSError as an
    OutputError about the folder. `sync` and `release` are for tasks, which have the files.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder = folder
        self._files: dict[Path, GrowingFile] = {}
        self._hasher = ThreadPoolExecutor(1, "hasher")
        self._background = Background("writer", budget)

    def put(
        self, target: Target, place: int, tensor: torch.Tensor, *, borrowed: bool = False
    ) -> None:
        """Have the bytes of a tensor written from byte `place` on.

        The tensor may not change any more, unless it is `borrowed`, which copies it before this
        returns or, on a GPU, before what is queued there next.
        """
        for piece in _bytes_of(tensor).split(PIECE):
            cost = page_locked(len(piece)) if piece.is_cuda else len(piece)
            self._background.reserve(cost)
            data = _on_host(piece, copy=borrowed)

            def write(data: Callable[[], memoryview] = data, place: int = place) -> None:
                self._open(target).write(place, data())

            self.submit(write, cost)
            place += len(piece)

    def submit(self, task: Callable[[], None], reserved: int = 0) -> None:
        """Append a task to what is done in the background."""

        def run() -> None:
            with explained(self._folder):
                task()

        self._background.submit(run, reserved)

    def sync(self, target: Target, end: int) -> str:
        """Make a file durable; SHA-256 of its first `end` bytes."""
        return self._open(target).sync(end)

    def release(self, target: Target) -> None:
        """Close a file, if it is open."""
        if (file := self._files.pop(target.path, None)) is not None:
            file.close()

    def drain(self) -> None:
        """Wait until everything is done."""
        self._background.drain()

    def close(self) -> None:
        """Finish what was handed over, unless something has failed, and close the files."""
        try:
            self._background.close()
        finally:
            self._hasher.shutdown()
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _open(self, target: Target) -> GrowingFile:
        """The growing file, created with its header and full (sparse) size."""
        if (file := self._files.get(target.path)) is None:
            layout = target.layout
            file = GrowingFile(
                target.path, layout.header, layout.nbytes, target.prefix, self._hasher
            )
            self._files[target.path] = file
        return file


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn a failing write into an OutputError that says how to go on."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"writing to {folder} failed: {error.strerror or error}",
            hint="finished layers are kept: make room, then repeat the command with --resume",
        ) from error


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype in the spelling of safetensors."""
    from halfbyte.formats.shards import TORCH_DTYPES

    return next(name for name, known in TORCH_DTYPES.items() if known == dtype)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8 [n], where it is."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _on_host(data: torch.Tensor, *, copy: bool) -> Callable[[], memoryview]:
    """Bytes in memory of the host; the result waits until they are there.

    A GPU is not waited for: the copy queues behind the work that the tensor comes from.
    """
    import torch

    if data.device.type != "cuda":
        host = data.clone() if copy else data
        return lambda: memoryview(host.numpy().data)
    host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
    host.copy_(data, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)
    copied.record(torch.cuda.current_stream(data.device))

    def wait() -> memoryview:
        copied.synchronize()
        return memoryview(host.numpy().data)

    return wait
