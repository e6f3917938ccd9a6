"""INT4 to floating point in one pass on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def decode_packed(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weight [N, K] of `packed` int32 [N, K/8] and `scales` [N, groups]."""
    rows, words = packed.shape
    weight = torch.empty(rows, 8 * words, dtype=dtype, device=packed.device)
    columns_per_group = 8 * words // scales.shape[1]
    grid = (triton.cdiv(weight.numel(), 2048),)
    _decode[grid](
        packed.contiguous(), scales.contiguous(), weight, weight.numel(), 8 * words,
        columns_per_group, scales.shape[1], SIZE=2048, num_warps=4,
    )  # fmt: skip
    return weight


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    packed, scales, weight, count, columns, columns_per_group, groups, SIZE: tl.constexpr
):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    word = tl.load(packed + place // 8, mask=inside, other=0)
    code = ((word >> (place % 8 * 4)) & 15) - 8
    row, column = place // columns, place % columns
    scale = tl.load(scales + row * groups + column // columns_per_group, mask=inside, other=0.0)
    value = code.to(tl.float32) * scale.to(tl.float32)
    tl.store(weight + place, value.to(weight.dtype.element_ty), mask=inside)
