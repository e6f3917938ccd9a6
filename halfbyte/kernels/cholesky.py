"""Batched Cholesky factorization in FP32 for the GPU, at the speed of its matrix units.

Left-looking in blocks of 128 columns: a block column is brought up to date by one matrix product,
its diagonal block is factored by one program, and the rows below are solved against it. Products
are 3xTF32, which keeps float32's accuracy (each operand is split in two TF32 parts).

Every matrix is worked on by programs of its own with a fixed order of sums, so a factor does not
depend on what else is in the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from halfbyte.kernels.rounding import nearest_tf32

BLOCK = 128
"""Columns that are factored together; matrices are padded to a multiple of it."""
_PIECE = 32
"""Columns that one program holds in registers at a time; four to a block."""


def damped_cholesky(
    matrices: torch.Tensor, order: torch.Tensor, damping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """L Lᵀ = A[order][:, order] + damping I, for each A of `matrices` float32 [B, K, K].

    `order` is int64 [B, K], `damping` float32 [B]. Returns float32 [B, P, P], P being K rounded up
    to a multiple of `BLOCK` with an identity in the corner that padding adds, and bool [B]: whether
    the matrix was not positive definite, in which case its factor means nothing. The lower triangle
    holds L; the upper one its mirror image Lᵀ rounded to TF32, as matrix products will read it.
    """
    batch, columns, _ = matrices.shape
    padded = triton.cdiv(columns, BLOCK) * BLOCK
    factor = matrices.new_empty(batch, padded, padded)
    failed = torch.zeros(batch, dtype=torch.int32, device=matrices.device)
    inverses = matrices.new_empty(batch, BLOCK // _PIECE, _PIECE, _PIECE)
    _gather[(padded, batch)](
        matrices, order.int(), damping, factor, columns, padded, WIDTH=1024, num_warps=4
    )
    for start in range(0, padded, BLOCK):
        below = (padded - start) // BLOCK
        if start:
            _update[(below, batch)](
                factor, padded, start, BLOCK=BLOCK, DEPTH=32, num_warps=8, num_stages=3
            )
        _factor_diagonal[(batch,)](
            factor, inverses, failed, padded, start, PIECE=_PIECE, PIECES=BLOCK // _PIECE,
            num_warps=4,
        )  # fmt: skip
        if below > 1:
            _solve[(below - 1, batch)](
                factor, inverses, padded, start, BLOCK=BLOCK, PIECE=_PIECE,
                PIECES=BLOCK // _PIECE, num_warps=8, num_stages=1,
            )  # fmt: skip
    return factor, failed.bool()


@triton.jit
def _gather(matrix, order, damping, out, columns, padded, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row of the lower triangle of A[order][:, order] + damping I, padded by an identity.

    A whole row to a program: its numbers are picked from one row of A, which stays in the cache.
    """
    row, item = tl.program_id(0), tl.program_id(1).to(tl.int64)
    order += item * columns
    source = tl.load(order + tl.minimum(row, columns - 1)).to(tl.int64)
    matrix += item * columns * columns + source * columns
    out += item * padded * padded + row.to(tl.int64) * padded
    own = tl.where(row < columns, tl.load(damping + item), 1.0)
    for start in range(0, row + 1, WIDTH):
        col = start + tl.arange(0, WIDTH)
        inside = (col < columns) & (col * 0 + row < columns)
        value = tl.load(matrix + tl.load(order + col, mask=inside, other=0), mask=inside, other=0.0)
        tl.store(out + col, value + tl.where(col == row, own, 0.0), mask=col <= row)


@triton.jit
def _update(factor, size, start, BLOCK: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A[rows, block] -= L[rows, :start] L[block, :start]ᵀ for one tile of rows from `start` on."""
    factor += tl.program_id(1).to(tl.int64) * size * size
    rows = start + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cols = start + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, start, DEPTH):
        left = tl.load(factor + rows[:, None] * size + (k + depth)[None, :])
        right = tl.load(factor + cols[:, None] * size + (k + depth)[None, :])
        total = tl.dot(left, tl.trans(right), total, input_precision="tf32x3")
    place = factor + rows[:, None] * size + cols[None, :]
    tl.store(place, tl.load(place) - total)


@triton.jit
def _factor_diagonal(  # type: ignore[no-untyped-def]
    factor, inverses, failed, size, start, PIECE: tl.constexpr, PIECES: tl.constexpr
):
    """Factor one diagonal block, piece by piece, and invert the factors of its diagonal pieces."""
    item = tl.program_id(0).to(tl.int64)
    factor += item * size * size + start.to(tl.int64) * size + start
    inverses += item * PIECES * PIECE * PIECE
    line = tl.arange(0, PIECE)
    row, col = line[:, None], line[None, :]
    within = row * size + col
    mirrored = col * size + row
    dense = row * PIECE + col
    bad = 0
    for p in tl.static_range(PIECES):
        here = factor + p * PIECE * (size + 1)
        a = tl.load(here + within)
        a = tl.where(row >= col, a, tl.trans(a))
        for j in range(PIECE):
            pivot = tl.sum(tl.sum(tl.where((row == j) & (col == j), a, 0.0), 1), 0)
            bad = tl.where(pivot > 0.0, bad, 1)
            root = tl.sqrt(tl.where(pivot > 0.0, pivot, 1.0))
            below = tl.where(line >= j, tl.sum(tl.where(col == j, a, 0.0), 1), 0.0) / root
            beside = tl.where(line > j, tl.sum(tl.where(row == j, a, 0.0), 0), 0.0) / root
            a = tl.where(col == j, below[:, None], a - below[:, None] * beside[None, :])
        lower = tl.where(row >= col, a, 0.0)
        inverse = tl.where(row == col, 1.0, 0.0)
        for j in range(PIECE):
            pivot = tl.sum(tl.sum(tl.where((row == j) & (col == j), lower, 0.0), 1), 0)
            done = tl.sum(tl.where(row == j, inverse, 0.0), 0) / pivot
            below = tl.where(line > j, tl.sum(tl.where(col == j, lower, 0.0), 1), 0.0)
            inverse = tl.where(row == j, done[None, :], inverse - below[:, None] * done[None, :])
        tl.store(here + within, lower, mask=row >= col)
        tl.store(here + mirrored, nearest_tf32(lower), mask=row > col)
        tl.store(inverses + p * PIECE * PIECE + dense, inverse)
        for q in tl.static_range(p + 1, PIECES):
            there = factor + q * PIECE * size + p * PIECE
            solved = tl.dot(tl.load(there + within), tl.trans(inverse), input_precision="tf32x3")
            tl.store(there + within, solved)
            tl.store(factor + p * PIECE * size + q * PIECE + mirrored, nearest_tf32(solved))
        tl.debug_barrier()
        for q in tl.static_range(p + 1, PIECES):
            for r in tl.static_range(p + 1, q + 1):
                left = tl.load(factor + q * PIECE * size + p * PIECE + within)
                right = tl.load(factor + r * PIECE * size + p * PIECE + within)
                place = factor + q * PIECE * size + r * PIECE + within
                update = tl.dot(left, tl.trans(right), input_precision="tf32x3")
                tl.store(place, tl.load(place) - update)
        tl.debug_barrier()
    if bad != 0:
        tl.store(failed + item, 1)


@triton.jit
def _solve(  # type: ignore[no-untyped-def]
    factor, inverses, size, start, BLOCK: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr
):
    """L[rows, block] = A[rows, block] L[block, block]⁻ᵀ for one tile of rows below the block."""
    item = tl.program_id(1).to(tl.int64)
    factor += item * size * size
    inverses += item * PIECES * PIECE * PIECE
    rows = start + (tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)
    line = tl.arange(0, PIECE)
    dense = line[:, None] * PIECE + line[None, :]
    for p in tl.static_range(PIECES):
        cols = start + p * PIECE + line
        piece = tl.load(factor + rows[:, None] * size + cols[None, :])
        for q in tl.static_range(p):
            before = start + q * PIECE + line
            left = tl.load(factor + rows[:, None] * size + before[None, :])
            right = tl.load(factor + cols[:, None] * size + before[None, :])
            piece -= tl.dot(left, tl.trans(right), input_precision="tf32x3")
        inverse = tl.load(inverses + p * PIECE * PIECE + dense)
        piece = tl.dot(piece, tl.trans(inverse), input_precision="tf32x3")
        tl.store(factor + rows[:, None] * size + cols[None, :], piece)
        tl.store(factor + cols[None, :] * size + rows[:, None], nearest_tf32(piece))
        tl.debug_barrier()
