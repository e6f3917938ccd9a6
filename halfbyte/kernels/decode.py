"""INT4 and FP8 to floating point in one pass on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def decode_packed(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weight [N, K] of `packed` int32 [N, K/8] and `scales` [N, groups]."""
    rows, words = packed.shape
    weight = torch.empty(rows, 8 * words, dtype=dtype, device=packed.device)
    columns_per_group = 8 * words // scales.shape[1]
    count, size = packed.numel(), 512
    _decode[(triton.cdiv(count, size),)](
        packed.contiguous(), scales.contiguous(), weight, count, words, columns_per_group,
        scales.shape[1], ALIGNED=columns_per_group % 8 == 0, SIZE=size, num_warps=4,
    )  # fmt: skip
    return weight


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    packed, scales, weight, count, words, columns_per_group, groups,
    ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Some words, eight codes each. `ALIGNED`: the codes of a word have one scale."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    lane = tl.arange(0, 8)[None, :]
    row, column = place // words, place % words * 8
    word = tl.load(packed + place, mask=inside, other=0)[:, None]
    code = ((word >> (lane * 4)) & 15) - 8
    if ALIGNED:
        own = scales + row * groups + column // columns_per_group
        scale = tl.load(own, mask=inside, other=0.0)[:, None]
    else:
        each = scales + (row * groups)[:, None] + (column[:, None] + lane) // columns_per_group
        scale = tl.load(each, mask=inside[:, None], other=0.0)
    value = code.to(tl.float32) * scale.to(tl.float32)
    target = weight + place[:, None] * 8 + lane
    tl.store(target, value.to(weight.dtype.element_ty), mask=inside[:, None])


def decode_fp8(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """See `halfbyte.kernels.reference.dequantize_fp8`."""
    rows, columns = weight.shape
    decoded = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    _decode_fp8[(rows, triton.cdiv(columns, 1024))](
        weight.contiguous().view(torch.uint8), scale.contiguous(), decoded, columns, *block,
        scale.shape[1], SIZE=1024, num_warps=4,
    )  # fmt: skip
    return decoded


@triton.jit
def _decode_fp8(  # type: ignore[no-untyped-def]
    weight, scales, decoded, columns, block_rows, block_columns, blocks, SIZE: tl.constexpr
):
    """E4M3 by its definition, since not every GPU knows it: bias 7, no infinity, 127 is NaN."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < columns
    byte = tl.load(weight + row * columns + column, mask=inside, other=0).to(tl.int32)
    exponent, fraction = (byte >> 3) & 15, byte & 7
    normal = (((exponent + 120) << 23) | (fraction << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, fraction.to(tl.float32) * 0.001953125, normal)
    size = tl.where((byte & 127) == 127, float("nan"), size)
    value = tl.where(byte > 127, -size, size)
    scale = tl.load(
        scales + row // block_rows * blocks + column // block_columns, mask=inside, other=0.0
    ).to(tl.float32)
    tl.store(
        decoded + row * columns + column, (value * scale).to(decoded.dtype.element_ty), mask=inside
    )
