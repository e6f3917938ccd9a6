"""Read tensors out of safetensors shards, whole or a range of rows, and decode weights.

Reads go through `pread` into fresh memory. A memory map would be shorter, but its pages count
as resident memory and a truncated file would kill the process instead of raising.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, Self

import torch

from halfbyte.core import Checkpoint, StoredWeight, TensorInfo
from halfbyte.errors import CheckpointError
from halfbyte.formats import int4
from halfbyte.formats.budgets import COPYING, PIECE, page_locked
from halfbyte.formats.files import read_at
from halfbyte.formats.readahead import ByteRange, ReadAhead
from halfbyte.kernels.reference import dequantize_fp8, dequantize_int4

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""torch dtype of each safetensors dtype."""

Sign = Literal["any", "positive", "nonzero"]

MAX_OPEN_SHARDS = 32


class ShardFiles(Protocol):
    """Where the bytes of shards come from. Safe to use from several threads."""

    def read(self, wanted: ByteRange, buffer: memoryview) -> None:
        """Fill `buffer` with a range of a shard. Raises OSError or EOFError, HalfbyteError."""

    def expect(self, order: Iterable[ByteRange]) -> None:
        """Say what will be read from now on, in that order or nearly so."""

    def close(self) -> None:
        """Let go of the files that no other thread is reading right now."""


class _OpenShard:
    """A file descriptor that closes with its last reference.

    So a shard that is evicted while another thread reads it stays open until that read ends.
    """

    def __init__(self, path: os.PathLike[str]) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class _FolderShards:
    """Shards that lie in the checkpoint's folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open: OrderedDict[str, _OpenShard] = OrderedDict()
        self._lock = Lock()

    def read(self, wanted: ByteRange, buffer: memoryview) -> None:
        shard = self._shard(wanted.shard)  # held, so that it stays open
        read_at(shard.fd, wanted.begin, buffer)

    def expect(self, order: Iterable[ByteRange]) -> None:
        pass  # they are there already

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def _shard(self, name: str) -> _OpenShard:
        with self._lock:
            shard = self._open.pop(name, None)
            if shard is None:
                shard = _OpenShard(self._checkpoint.path / name)
                size, expected = os.fstat(shard.fd).st_size, self._checkpoint.shards[name]
                if size != expected:
                    raise EOFError(f"it now has {size} bytes, {expected} when it was opened first")
            self._open[name] = shard
            if len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
            return shard


class Request(NamedTuple):
    """What `ShardReader.read` is given: a stored tensor, or its rows [begin, end)."""

    info: TensorInfo
    rows: tuple[int, int] | None = None


class _Copies:
    """Copies to a GPU from page-locked memory, which is used again when they are done.

    The host, which only queues them, waits as soon as they hold more than `COPYING` bytes.
    """

    def __init__(self) -> None:
        self._queued = 0
        """Bytes since the last event."""
        self._event: torch.cuda.Event | None = None
        self._lock = Lock()

    def queue(self, data: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """`data` on `device`, or on its way there."""
        moved = data.to(device, non_blocking=True)
        if moved.is_cuda and not data.is_cuda:
            with self._lock:
                self._queued += page_locked(data.nbytes)
                if self._queued >= COPYING // 2:
                    if self._event is not None:
                        self._event.synchronize()
                    self._event = torch.cuda.Event(blocking=True)
                    self._event.record(torch.cuda.current_stream(moved.device))
                    self._queued = 0
        return moved


class ShardReader:
    """Reads the tensors of a checkpoint. Safe to use from several threads; a context manager.

    Shards of a repository are downloaded when they are needed: into `scratch`, where few of them
    lie at once, or, without it, into the cache of huggingface_hub, which keeps them.
    """

    def __init__(self, checkpoint: Checkpoint, scratch: Path | None = None) -> None:
        self.checkpoint = checkpoint
        self._ahead: ReadAhead | None = None
        self._files = _shard_files(checkpoint, scratch)
        self._copies = _Copies()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the shards that no other thread is reading right now."""
        self._files.close()

    @contextmanager
    def read_ahead(self, order: Iterable[Request], device: str, budget: int) -> Iterator[None]:
        """For a while, read at most `budget` bytes of what will be asked for, for use by `device`.

        `order` says what and in which order; see `ReadAhead` for those who depart from it. Whole
        weights are the requests of their parts.
        """
        pinned = device.startswith("cuda")
        if pinned:
            torch.empty(1, device=device)  # or threads would begin to use another GPU
        ranges = [byte_range(*request) for request in order]
        self._files.expect(ranges)
        ahead = ReadAhead(self._files.read, ranges, budget=budget, pinned=pinned)
        self._ahead = ahead
        try:
            yield
        except BaseException:
            self._files.close()  # or who waits for a shard would wait for its download
            raise
        finally:
            self._ahead = None
            self._files.expect(())
            ahead.close()

    def read(self, info: TensorInfo, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The stored tensor, or its rows [begin, end), in its stored dtype, on the CPU.

        Raises `CheckpointError` naming tensor, shard and byte range when the bytes cannot be had.
        """
        wanted = byte_range(info, rows)
        data = self._ahead.take(wanted) if self._ahead is not None else None
        if data is None:
            data = torch.empty(wanted.end - wanted.begin, dtype=torch.uint8)
            try:
                self._files.read(wanted, data.numpy().data)
            except (OSError, EOFError) as error:
                raise CheckpointError(
                    f"cannot read {info.name}, bytes {wanted.begin}..{wanted.end} of "
                    f"{self.checkpoint.path / info.shard}: {error}",
                    hint="the shard changed or is damaged; download it again",
                ) from error
        shape = info.shape if rows is None else (rows[1] - rows[0], *info.shape[1:])
        return data.view(TORCH_DTYPES[info.dtype]).reshape(shape)

    def read_weight(
        self,
        stored: StoredWeight,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        checks: Checks | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The logical weight, decoded in float32 and cast to `dtype`, on and by `device`; put into
        `out` if that is given.

        Raises, or has `checks` raise when they are settled, `CheckpointError` for values that are
        not finite and for FP8 scales that are not positive, with the first such coordinate: both
        mean a damaged file. INT4 scales may be negative, but not zero: AutoRound and halfbyte turn
        a group whose largest weight is positive around, since there is a code -8 but no 8.
        """
        now = checks or Checks()
        # From page-locked memory, that is from reading ahead, the copy runs beside other work.
        parts = {k: self._copies.queue(self.read(i), device) for k, i in stored.parts.items()}
        if "scale" in parts:
            sign: Sign = "nonzero" if stored.encoding == "int4" else "positive"
            now.add(stored.parts["scale"], parts["scale"], sign)
        if stored.encoding == "fp8":
            assert stored.block is not None
            (rows, columns), (block_rows, block_columns) = stored.shape, stored.block
            scale = parts["scale"].reshape(-(-rows // block_rows), -(-columns // block_columns))
            weight = dequantize_fp8(parts["weight"], scale, stored.block, dtype)
        elif stored.encoding == "int4":
            assert stored.scheme is not None
            local = {f"weight_{key}": part for key, part in parts.items()}
            try:
                codes, scales = int4.unpack(local, stored.scheme)
            except CheckpointError as error:
                raise CheckpointError(f"{stored.name}: {error}") from None
            weight = dequantize_int4(codes, scales, dtype)
        else:
            weight = parts["weight"].to(dtype)
        if out is not None:
            weight = out.copy_(weight)
        now.add(next(iter(stored.parts.values())), weight)
        if checks is None:
            now.settle()
        return weight


def _shard_files(checkpoint: Checkpoint, scratch: Path | None) -> ShardFiles:
    if checkpoint.repository is None:
        return _FolderShards(checkpoint)
    from halfbyte.formats.fetching import FetchedShards

    return FetchedShards(checkpoint, scratch)


def byte_range(info: TensorInfo, rows: tuple[int, int] | None = None) -> ByteRange:
    """Where a tensor, or its rows [begin, end), lie in its shard. Raises ValueError for rows that
    it does not have."""
    if rows is None:
        return ByteRange(info.shard, info.begin, info.end)
    if not info.shape or not 0 <= rows[0] <= rows[1] <= info.shape[0]:
        raise ValueError(f"rows {rows} are not within {info.name} of shape {list(info.shape)}")
    row = info.nbytes // info.shape[0] if info.shape[0] else 0
    return ByteRange(info.shard, info.begin + rows[0] * row, info.begin + rows[1] * row)


def row_slices(info: TensorInfo, nbytes: int = PIECE) -> Iterator[tuple[int, int] | None]:
    """Ranges of rows of about `nbytes`; None is the whole of a small tensor."""
    if info.nbytes <= nbytes or not info.shape:
        yield None
        return
    step = max(1, nbytes * info.shape[0] // info.nbytes)
    for start in range(0, info.shape[0], step):
        yield start, min(start + step, info.shape[0])


class Checks:
    """Checks of values that were read. Settled together they wait for a GPU only once."""

    def __init__(self) -> None:
        self._waiting: list[tuple[TensorInfo, torch.Tensor, Sign, int]] = []
        self._extremes: list[torch.Tensor] = []
        """Smallest and largest of each: they carry NaN and infinity, and need no memory of the size
        of the tensor."""
        self._without_zero: list[torch.Tensor] = []

    def add(
        self, info: TensorInfo, values: torch.Tensor, sign: Sign = "any", *, first_row: int = 0
    ) -> None:
        """Have `settle` require that all values, rows from `first_row` on, are finite, and positive
        or at least not zero where asked."""
        if not values.numel():
            return
        self._extremes += values.aminmax()
        if sign == "nonzero":
            self._without_zero.append(values.all())
        self._waiting.append((info, values, sign, first_row))

    def settle(self) -> None:
        """Raise CheckpointError for the first values that are not as required."""
        waiting, extremes, without_zero = self._waiting, self._extremes, self._without_zero
        self._waiting, self._extremes, self._without_zero = [], [], []
        if not waiting:
            return
        found = torch.stack([*extremes, *without_zero]).tolist()
        whole = iter(found[len(extremes) :])
        for check, low, high in zip(waiting, found[0::2], found[1::2], strict=False):
            sign = check[2]
            sound = math.isfinite(low) and math.isfinite(high)
            sound = sound and (sign != "positive" or low > 0)
            if not (sound and (sign != "nonzero" or next(whole))):
                raise _damage(*check)


def _damage(info: TensorInfo, values: torch.Tensor, sign: Sign, first_row: int) -> CheckpointError:
    """The error about the first value that is not as required."""
    bad = ~torch.isfinite(values)
    if sign != "any":
        bad |= values <= 0 if sign == "positive" else values == 0
    where = [int(i) for i in bad.nonzero()[0]]
    value = float(values[tuple(where)])
    if where:
        where[0] += first_row
    return CheckpointError(
        f"{info.name} in {info.shard} decodes to {value} at {where}",
        hint="the shard is damaged; download it again",
    )
