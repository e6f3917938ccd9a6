"""Weighted rows added to some rows of a matrix, in one pass on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def add_weighted(
    total: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, weight: torch.Tensor
) -> None:
    """total[rows] += values * weight; see `halfbyte.kernels.reference.add_rows`."""
    count, width = values.shape
    block = min(1024, triton.next_power_of_2(width))
    _add_weighted[(count, triton.cdiv(width, block))](
        total, rows, values.contiguous(), weight.contiguous(), width, BLOCK=block, num_warps=4
    )


@triton.jit
def _add_weighted(total, rows, values, weight, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    item = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = total + tl.load(rows + item) * width + column
    added = tl.load(values + item * width + column, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    after = before + added * tl.load(weight + item)
    tl.store(place, after.to(total.dtype.element_ty), mask=inside)
