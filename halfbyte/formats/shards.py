"""Read tensors out of safetensors shards, whole or a range of rows, and decode weights.

Reads go through `pread` into fresh memory. A memory map would be shorter, but its pages count
as resident memory and a truncated file would kill the process instead of raising.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from threading import Lock
from types import TracebackType
from typing import Self

import torch

from halfbyte.core import Checkpoint, StoredWeight, TensorInfo
from halfbyte.errors import CheckpointError
from halfbyte.formats import int4
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

MAX_OPEN_SHARDS = 32


class _OpenShard:
    """A file descriptor that closes with its last reference.

    So a shard that is evicted while another thread reads it stays open until that read ends.
    """

    def __init__(self, path: os.PathLike[str]) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class ShardReader:
    """Reads the tensors of a checkpoint. Safe to use from several threads; a context manager."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._open: OrderedDict[str, _OpenShard] = OrderedDict()
        self._lock = Lock()

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
        with self._lock:
            self._open.clear()

    def read(self, info: TensorInfo, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The stored tensor, or its rows [begin, end), in its stored dtype, on the CPU.

        Raises `CheckpointError` naming tensor, shard and byte range when the bytes cannot be had.
        """
        shape, begin, end = info.shape, info.begin, info.end
        if rows is not None:
            if not shape or not 0 <= rows[0] <= rows[1] <= shape[0]:
                raise ValueError(f"rows {rows} are not within {info.name} of shape {list(shape)}")
            row_bytes = info.nbytes // shape[0] if shape[0] else 0
            begin, end = begin + rows[0] * row_bytes, begin + rows[1] * row_bytes
            shape = (rows[1] - rows[0], *shape[1:])
        data = torch.empty(end - begin, dtype=torch.uint8)
        try:
            shard = self._shard(info.shard)
            _fill(data.numpy().data, shard.fd, begin)
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"cannot read {info.name}, bytes {begin}..{end} of "
                f"{self.checkpoint.path / info.shard}: {error}",
                hint="the shard changed or is damaged; download it again",
            ) from error
        return data.view(TORCH_DTYPES[info.dtype]).reshape(shape)

    def read_weight(
        self,
        stored: StoredWeight,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """The logical weight, decoded in float32 and cast to `dtype`, on and by `device`.

        Raises `CheckpointError` for values that are not finite and for FP8 scales that are not
        positive, with the first such coordinate: both mean a damaged file. INT4 scales may be
        negative: AutoRound turns a group whose largest weight is positive around, since there is
        a code -8 but no 8.
        """
        parts = {key: self.read(info).to(device) for key, info in stored.parts.items()}
        if "scale" in parts:
            fp8 = stored.encoding == "fp8"
            require_finite(stored.parts["scale"], parts["scale"], positive=fp8)
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
        require_finite(next(iter(stored.parts.values())), weight)
        return weight

    def _shard(self, name: str) -> _OpenShard:
        with self._lock:
            shard = self._open.pop(name, None)
            if shard is None:
                shard = _OpenShard(self.checkpoint.path / name)
                size, expected = os.fstat(shard.fd).st_size, self.checkpoint.shards[name]
                if size != expected:
                    raise EOFError(f"it now has {size} bytes, {expected} when it was opened first")
            self._open[name] = shard
            if len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
            return shard


def _fill(buffer: memoryview, fd: int, offset: int) -> None:
    """Fill `buffer` from `offset`; the kernel returns at most 2 GiB a call."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise EOFError(f"it ends at byte {os.fstat(fd).st_size}")
        done += count


def require_finite(info: TensorInfo, values: torch.Tensor, *, positive: bool = False) -> None:
    """Raise unless all values are finite, and positive where asked."""
    if not values.numel():
        return
    # The extremes carry NaN and infinity, and need no memory of the size of the tensor.
    extremes = torch.stack(values.aminmax())
    if bool(torch.isfinite(extremes).all()) and not (positive and extremes[0] <= 0):
        return
    bad = ~torch.isfinite(values)
    if positive:
        bad |= values <= 0
    where = [int(i) for i in bad.nonzero()[0]]
    raise CheckpointError(
        f"{info.name} in {info.shard} decodes to {float(values[tuple(where)])} at {where}",
        hint="the shard is damaged; download it again",
    )
