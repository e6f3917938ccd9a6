"""Coordinate descent over codes and group scales for the GPU; see `halfbyte.quantize.refine`.

A matrix product gives the gradient E H of 512 columns, a small one adds what the first of them
changed for the next 128, and a thread to a row walks those: each group's scale, then its codes
(`cuda/columns.cu`). Products take BF16: a gradient only has to tell which way is down.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.kernels.cholesky import BLOCK
from halfbyte.kernels.columns import WIDE
from halfbyte.kernels.jit import kernel

_ROWS = 128
_SHARED_BYTES = 4 * (4 * 128 * 33 + 32 * 32)
"""Of `descend_block`: changes of a tile of rows, and a square of the Hessian."""
_TILE_BYTES = 4 * 128 * 33
"""A tile of the gradient besides, where a group is more than 32 columns."""


def descend(
    errors: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    hessians: torch.Tensor,
    damping: torch.Tensor,
    columns_per_group: int,
    code_min: int,
    code_max: int,
    sweeps: int,
) -> None:
    """Lower E (H + damping) Eᵀ of every row by `sweeps` sweeps over all columns, in place.

    `errors` float32 [H, N, K], `codes` int8 [H, N, K], `scales` bfloat16 [H, N, groups], `hessians`
    float32 [H, K, K], `damping` float32 [H]; K is a multiple of 32. Scales change, too, where
    groups are of 32, 64 or 128 columns.
    """
    count, rows, columns = errors.shape
    refine = columns_per_group in (32, 64, 128)
    shared_bytes = _SHARED_BYTES + (0 if columns_per_group == 32 else _TILE_BYTES)
    descend_block = kernel("columns", "descend_block", shared_bytes)
    halves, hessian_halves = errors.bfloat16(), hessians.bfloat16()
    pitch = min(WIDE, triton.cdiv(columns, BLOCK) * BLOCK)
    gradient = errors.new_empty(count, rows, pitch)
    moved = torch.empty_like(gradient, dtype=torch.bfloat16)
    tiles = triton.cdiv(rows, _ROWS)
    for _ in range(sweeps):
        for first in range(0, columns, WIDE):
            stop = min(first + WIDE, columns)
            width = 2 * BLOCK if pitch % (2 * BLOCK) == 0 else BLOCK
            _add_product[(triton.cdiv(stop - first, width), tiles, count)](
                halves, hessian_halves, gradient, damping, errors, rows, columns, columns, pitch,
                first, 0, 0, columns, FRESH=True, ROWS=_ROWS, BLOCK=width, DEPTH=64,
                num_warps=8, num_stages=3,
            )  # fmt: skip
            for start in range(first, stop, BLOCK):
                if start > first:
                    _add_product[(1, tiles, count)](
                        moved, hessian_halves, gradient, damping, errors, rows, columns, pitch,
                        pitch, start, start - first, first, start - first, FRESH=False,
                        ROWS=_ROWS, BLOCK=BLOCK, DEPTH=64, num_warps=4, num_stages=3,
                    )  # fmt: skip
                descend_block(
                    (tiles, count), _ROWS, gradient, errors, codes, scales, hessians, damping,
                    halves, moved, rows, columns, scales.shape[-1], columns_per_group, start,
                    min(BLOCK, columns - start) // 32, int(refine), pitch, start - first,
                    float(code_min), float(code_max),
                )  # fmt: skip


@triton.jit
def _add_product(  # type: ignore[no-untyped-def]
    left, hessian, gradient, damping, errors, rows, columns, left_pitch, pitch,
    start, offset, row_start, depth_end,
    FRESH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """gradient[block] += left[:, :depth_end] H[row_start:row_start + depth_end, block].

    With `FRESH`, it starts from damping times the errors of the block.
    """
    item = tl.program_id(2).to(tl.int64)
    hessian += item * columns * columns
    left += item * rows * left_pitch
    errors += item * rows * columns
    gradient += item * rows * pitch
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    line = row[:, None]
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = start + tile
    known = col < columns
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for k in range(0, depth_end, DEPTH):
        within = (k + depth < depth_end)[None, :]
        a = tl.load(
            left + line * left_pitch + (k + depth)[None, :], mask=inside & within, other=0.0
        )
        b = tl.load(
            hessian + col[:, None] * columns + (row_start + k + depth)[None, :],
            mask=known[:, None] & within, other=0.0,
        )  # fmt: skip
        total = tl.dot(a, tl.trans(b), total)
    place = gradient + line * pitch + (offset + tile)[None, :]
    if FRESH:
        own = tl.load(
            errors + line * columns + col[None, :], mask=inside & known[None, :], other=0.0
        )
        total += tl.load(damping + item) * own
    else:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)
