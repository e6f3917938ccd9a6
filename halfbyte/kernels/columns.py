"""The column loop of GPTQ for the GPU: matrix products, and a block of columns at once.

Columns stand in the order of their factor (see `halfbyte.kernels.cholesky`) and are rounded from
the last to the first, left-looking at two levels: a product brings 512 columns up to date with the
errors of all columns behind them, a small one adds those of the 512 themselves to each 128, and a
thread to a row then rounds the 128 with everything in registers (`cuda/columns.cu`). Two levels,
because a product of 128 columns would wait for memory.

A row's codes do not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from halfbyte.kernels.cholesky import BLOCK
from halfbyte.kernels.jit import kernel

WIDE = 512
"""Columns that one large product brings up to date."""
_ROWS = 128
_SHARED_BYTES = 4 * (4 * 128 * 33 + 32 * 32)
"""Of `round_block`: errors of a tile of rows, and a square of the factor."""


def round_columns(
    weights: torch.Tensor,
    factor: torch.Tensor,
    order: torch.Tensor,
    scales: torch.Tensor,
    columns_per_group: int,
    code_min: int,
    code_max: int,
    divisors: Sequence[float] = (),
    multiples: Sequence[float] = (),
) -> torch.Tensor:
    """Codes int8 [H, N, K], in stored order, of columns rounded one after the other.

    `weights` float32 [H, N, K], `factor` [H, P, P] and `order` int64 [H, K] of the Hessians, and
    `scales` bfloat16 [H, N, groups] of groups of `columns_per_group` columns as stored. With
    `divisors` scales are searched when it is a group's turn, as `halfbyte.quantize.gptq` does it
    with these and `multiples`, and written; groups are of 32 columns then, and the order keeps them
    together.
    """
    hessians, rows, columns = weights.shape
    padded = factor.shape[-1]
    name = "search_and_round_block" if divisors else "round_block"
    round_block = kernel("columns", name, _SHARED_BYTES)
    diagonal = factor.diagonal(dim1=1, dim2=2).contiguous()
    errors = ordered(weights, order, padded)
    codes = torch.empty_like(errors, dtype=torch.int8)
    target = weights.new_empty(hessians, rows, min(WIDE, padded))
    order = order.int()
    candidates = torch.tensor((*divisors, *multiples), dtype=torch.float32, device=weights.device)
    pitch, tiles = target.shape[-1], triton.cdiv(rows, _ROWS)

    def feed_back(start: int, stop: int, behind: int, end: int, first: int) -> None:
        width = 2 * BLOCK if (stop - start) % (2 * BLOCK) == 0 else BLOCK
        _feed_back[((stop - start) // width, tiles, hessians)](
            errors, factor, diagonal, target, rows, padded, start, behind, end, pitch,
            start - first, FRESH=end == padded, ROWS=_ROWS, BLOCK=width, DEPTH=32,
            num_warps=8, num_stages=3 if width > BLOCK else 4,
        )  # fmt: skip

    for stop in range(padded, 0, -WIDE):
        first = max(0, stop - WIDE)
        feed_back(first, stop, stop, padded, first)
        for start in range(stop - BLOCK, first - 1, -BLOCK):
            if start + BLOCK < stop:
                feed_back(start, start + BLOCK, start + BLOCK, stop, first)
            round_block(
                (tiles, hessians), _ROWS, target, errors, codes, factor, scales, order,
                candidates, len(divisors), len(multiples), rows, columns, padded,
                scales.shape[-1], columns_per_group, start, pitch, start - first,
                float(code_min), float(code_max),
            )  # fmt: skip
    return stored(codes, order.long())


def ordered(matrix: torch.Tensor, order: torch.Tensor, padded: int) -> torch.Tensor:
    """[H, N, padded]: columns of [H, N, K] in the order int64 [H, K], zeros behind them."""
    hessians, rows, columns = matrix.shape
    index = order[:, None].expand(-1, rows, -1)
    if columns == padded:
        return matrix.gather(2, index)
    result = matrix.new_zeros(hessians, rows, padded)
    result[..., :columns] = matrix.gather(2, index)
    return result


def stored(matrix: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The inverse of `ordered`: [H, N, padded] -> [H, N, K]."""
    index = order.argsort(dim=1)[:, None].expand(-1, matrix.shape[1], -1)
    return matrix.gather(2, index)


@triton.jit
def _feed_back(  # type: ignore[no-untyped-def]
    errors, factor, diagonal, target, rows, size, start, behind, end, pitch, offset,
    FRESH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """target[block] += errors[:, behind:end] L[behind:end, block] / diagonal[block].

    With `FRESH`, the target starts from the weights, which `errors` holds of columns that are not
    rounded yet. Both operands are rounded to TF32 already.
    """
    item = tl.program_id(2).to(tl.int64)
    errors += item * rows * size
    factor += item * size * size
    target += item * rows * pitch
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    line = row[:, None] * size
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = start + tile
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for k in range(behind, end, DEPTH):
        left = tl.load(errors + line + (k + depth)[None, :], mask=inside, other=0.0)
        right = tl.load(factor + col[:, None] * size + (k + depth)[None, :])
        total = tl.dot(left, tl.trans(right), total, input_precision="tf32")
    total = total / tl.load(diagonal + item * size + col)[None, :]
    place = target + row[:, None] * pitch + (offset + tile)[None, :]
    if FRESH:
        total += tl.load(errors + line + col[None, :], mask=inside, other=0.0)
    else:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)
