"""Tensors on their way to files: copied to the host, written, hashed, made durable.

The caller goes on computing while bytes are copied and written, in the order of the calls, on one
thread. Another makes files durable, which takes as long again, in the order of the calls, too. No
more than a budget of bytes is on its way; beyond that the caller waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.core import ShardLayout
from halfbyte.errors import OutputError
from halfbyte.formats.background import Background
from halfbyte.formats.budgets import PIECE
from halfbyte.formats.files import GrowingFile, PrefixHash
from halfbyte.formats.pagelock import lock_pages

if TYPE_CHECKING:
    import torch


HASHERS = 3
"""Threads that hash: what is written, and two files that are made durable."""
RESUMED = "finished layers are kept: make room, then repeat the command with --resume"
COMMITS = 1
"""Tasks at most that make files durable while more is written."""


@dataclass(frozen=True, slots=True)
class Target:
    """A file to be written: where, what it will look like, and the hash of its beginning."""

    path: Path
    layout: ShardLayout
    prefix: PrefixHash = field(default_factory=PrefixHash, compare=False)


class _Ring:
    """Page-locked memory that is lent, and comes back, in one order.

    torch's own allocator of such memory would take powers of two, and keep what it once had of
    each of them: in the end nearly twice the budget.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """`memory` is uint8 [capacity]."""
        self._bytes = memory
        self._next = 0

    @classmethod
    def locked(cls, capacity: int, device: str) -> _Ring:
        import torch

        with torch.cuda.device(device):
            return cls(lock_pages(torch.empty(capacity, dtype=torch.uint8)))

    def cost(self, size: int) -> int:
        """Bytes until the end of the next `size` that lie together; at most the capacity."""
        left = len(self._bytes) - self._next
        return size if size <= left else left + size

    def lend(self, size: int) -> torch.Tensor:
        """The next bytes, uint8 [size]: their cost, and all lent before it, is within the
        capacity, or they are the only ones."""
        begin = self._next if self._next + size <= len(self._bytes) else 0
        self._next = begin + size
        return self._bytes[begin : begin + size]


class WriteBehind:
    """Writes into the files of a folder with at most `budget` bytes on their way.

    What fails in the background is raised by the next call but `close`, an OSError as an
    OutputError about the folder. `sync`, `release` and `settle` are for tasks, which have the
    files.
    """

    def __init__(self, folder: Path, budget: int, device: str = "cpu") -> None:
        """`device` is where tensors may come from."""
        self._folder = folder
        self._files: dict[Path, GrowingFile] = {}
        self._hasher = ThreadPoolExecutor(HASHERS, "hasher")
        self._ring: Future[_Ring] | None = None
        """For what comes from a GPU: locking gigabytes takes a second, so that begins now."""
        if device.startswith("cuda") and budget:
            self._ring = self._hasher.submit(_Ring.locked, max(budget, PIECE), device)
        self._copied: torch.cuda.Event | None = None
        """Done when the last copy into it is."""
        self._background = Background("writer", budget)
        self._committer = Background("committer", COMMITS)

    def put(
        self, target: Target, place: int, *tensors: torch.Tensor, borrowed: bool = False
    ) -> None:
        """Have the bytes of tensors, one behind the other, written from byte `place` on.

        They may not change any more, unless they are `borrowed`, which copies them before this
        returns or, on a GPU, before what is queued there next.
        """
        for pieces in _together([_bytes_of(tensor) for tensor in tensors]):
            size = sum(map(len, pieces))
            if any(piece.is_cuda for piece in pieces):
                assert self._ring is not None
                ring = self._ring.result()
                cost = ring.cost(size)
                self._background.reserve(cost)
                data = self._copied_to(ring.lend(size), pieces)
            else:
                cost = size
                self._background.reserve(cost)
                data = _on_host(pieces, copy=borrowed)

            def write(data: Callable[[], Sequence[memoryview]] = data, place: int = place) -> None:
                file = self._open(target)
                for part in data():
                    file.write(place, part)
                    place += len(part)

            self.submit(write, cost)
            place += size

    def _copied_to(
        self, host: torch.Tensor, pieces: Sequence[torch.Tensor]
    ) -> Callable[[], Sequence[memoryview]]:
        """Copy bytes of a GPU into `host`; the result waits until they are there.

        The GPU is not waited for: copies queue behind the work that the tensors come from.
        """
        import torch

        for place, piece in zip(host.split([len(p) for p in pieces]), pieces, strict=True):
            place.copy_(piece, non_blocking=True)
        device = next(piece.device for piece in pieces if piece.is_cuda)
        copied = self._copied = torch.cuda.Event(blocking=True)
        copied.record(torch.cuda.current_stream(device))

        def wait() -> Sequence[memoryview]:
            copied.synchronize()
            return [memoryview(host.numpy().data)]

        return wait

    def submit(self, task: Callable[[], None], reserved: int = 0) -> None:
        """Append a task to what is done in the background."""

        def run() -> None:
            with explained(self._folder):
                task()

        self._background.submit(run, reserved)

    def commit(self, ends: Sequence[tuple[Target, int]], task: Callable[[list[str]], None]) -> None:
        """Make durable what was put so far, the first bytes of these files up to their ends, and
        then do a task with their SHA-256, while more is written."""

        def hand_over() -> None:
            marks = self._marked(ends)
            self._committer.reserve(1)

            def finish() -> None:
                with explained(self._folder):
                    task(self._synced(marks))

            self._committer.submit(finish, 1)

        self.submit(hand_over)

    def settle(self) -> None:
        """Wait until all that is to be durable is."""
        self._committer.drain()

    def sync(self, target: Target, end: int) -> str:
        """Make a file durable; SHA-256 of its first `end` bytes."""
        return self._synced(self._marked([(target, end)]))[0]

    def _marked(
        self, ends: Sequence[tuple[Target, int]]
    ) -> list[tuple[GrowingFile, int, str | None]]:
        files = [(self._open(target), end) for target, end in ends]
        return [(file, end, file.mark(end)) for file, end in files]

    def _synced(self, marks: Sequence[tuple[GrowingFile, int, str | None]]) -> list[str]:
        hashes = [self._hasher.submit(file.sync, end, marked) for file, end, marked in marks]
        return [digest.result() for digest in hashes]

    def release(self, target: Target) -> None:
        """Close a file, if it is open."""
        if (file := self._files.pop(target.path, None)) is not None:
            file.close()

    def drain(self) -> None:
        """Wait until everything is done."""
        self._background.drain()
        self._committer.drain()

    def close(self) -> None:
        """Finish what was handed over, unless something has failed, and close the files."""
        try:
            try:
                self._background.close()
            finally:
                self._committer.close()
        finally:
            self._hasher.shutdown()
            for file in self._files.values():
                file.close()
            self._files.clear()
            if self._copied is not None:
                self._copied.synchronize()  # before the memory is given up
            self._ring = None

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
def explained(folder: Path, hint: str = RESUMED) -> Iterator[None]:
    """Turn a failing write into an OutputError that says how to go on."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"writing to {folder} failed: {error.strerror or error}",
            hint=hint,
        ) from error


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype in the spelling of safetensors."""
    from halfbyte.formats.shards import TORCH_DTYPES

    return next(name for name, known in TORCH_DTYPES.items() if known == dtype)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8 [n], where it is."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _together(parts: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Bytes in lists of at most `PIECE`, in order."""
    pieces: list[torch.Tensor] = []
    for part in parts:
        for piece in part.split(PIECE):
            if pieces and sum(map(len, pieces)) + len(piece) > PIECE:
                yield pieces
                pieces = []
            pieces.append(piece)
    if pieces:
        yield pieces


def _on_host(pieces: Sequence[torch.Tensor], *, copy: bool) -> Callable[[], Sequence[memoryview]]:
    """Bytes in memory of the host as they are there, or copies of them."""
    kept = [piece.clone() if copy else piece for piece in pieces]
    return lambda: [memoryview(piece.numpy().data) for piece in kept]
