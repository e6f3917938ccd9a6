"""The layout of Marlin, a W4A16 kernel of vLLM and SGLang: from `pack-quantized` and back.

A weight W [N, K] of y = x Wᵀ is stored as codes int32 [N, K/8] and scales [N, G] (`formats.int4`).
Marlin reads codes int32 [K/16, 2N] and scales [G, N]: 64 rows by 16 columns of W are 512 bytes in a
row, 16 for each lane of a warp, the fragments of `mma.m16n8k16` that it multiplies. Symmetric only,
so there are no zero points. Leading dimensions `...` are experts. Pure functions, on any device.

Sources: `gptq_marlin_repack` and `marlin_permute_scales` of vLLM 0.24; codes lie as in the original
kernel (arXiv 2408.11743).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from halfbyte.core import Scheme
from halfbyte.errors import CheckpointError, RecipeError
from halfbyte.formats.int4 import PACK_FACTOR

if TYPE_CHECKING:
    import torch

GROUP_SIZES = (32, 64, 128)
"""Columns that may share a scale, besides those of a whole row."""

DENSE_MULTIPLES = ((128, 64), (64, 128))
"""What must divide the rows and columns of a dense weight: either pair."""

ZERO_CODES = -0x77777778
"""An int32 of eight nibbles 8, which are codes 0."""

LANE_ORDER = (-3, -7, -4, -1, -6, -2, -5)
"""Where Marlin's dimensions are among the stored ones: tile of 64 rows, block of 16, half of it,
row; tile of 16 columns, half of it, pair of columns."""


def check_dense(rows: int, columns: int, scheme: Scheme) -> None:
    """Raises `RecipeError` when Marlin cannot read a dense weight [rows, columns] as it is."""
    fitting = padded_shape(rows, columns, scheme)
    if fitting != (rows, columns):
        raise RecipeError(
            f"Marlin cannot read {[rows, columns]}: 128 must divide the rows and 64 the columns, "
            "or 64 the rows and 128 the columns",
            hint=f"pad it to {list(fitting)}",
        )


def check_experts(hidden: int, intermediate: int, scheme: Scheme) -> None:
    """Raises `RecipeError` when Marlin's MoE kernel cannot read experts, which are not padded: gate
    and up [intermediate, hidden], down [hidden, intermediate]."""
    for columns in (hidden, intermediate):  # the K of gate and up, that of down
        _group_size(columns, scheme)
    _require_multiple(hidden, 128, "the hidden size of experts")
    _require_multiple(intermediate, 64, "the intermediate size of experts")


def padded_shape(rows: int, columns: int, scheme: Scheme) -> tuple[int, int]:
    """The smallest shape of a dense weight that Marlin reads and that [rows, columns] fits in.

    Between two of a size, the one with fewer columns, which inputs must be padded to. Raises
    `RecipeError` for groups that Marlin cannot read.
    """
    _group_size(columns, scheme)
    # Rounding up to 64 or 128 keeps groups of 32, 64 and 128 whole where they were.
    return min(
        ((math.ceil(rows / n) * n, math.ceil(columns / k) * k) for n, k in DENSE_MULTIPLES),
        key=math.prod,
    )


def pad(
    packed: torch.Tensor, scales: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int32 [..., N, K/8] and scales [..., N, G], with N and K of `padded_shape`.

    New codes are 0 and new scales 1, so that products stay what they are and new outputs are 0.
    Raises `CheckpointError` when the two contradict each other, otherwise as `padded_shape`.
    """
    shape = packed.shape[-2], PACK_FACTOR * packed.shape[-1]
    rows, columns = padded_shape(*shape, scheme)
    _check_stored(packed, scales, shape, scheme.groups(shape[1]))
    groups = columns // (_group_size(shape[1], scheme) or columns)
    return (
        _extended(packed, rows, columns // PACK_FACTOR, ZERO_CODES),
        _extended(scales, rows, groups, 1),
    )


def unpad(
    packed: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pad` for a weight that had `shape` [N, K]; raises as it does."""
    rows, columns = shape
    padded = padded_shape(rows, columns, scheme)
    _check_stored(packed, scales, padded, padded[1] // (_group_size(columns, scheme) or padded[1]))
    return (
        packed[..., :rows, : columns // PACK_FACTOR].contiguous(),
        scales[..., :rows, : scheme.groups(columns)].contiguous(),
    )


def weights_to_marlin(packed: torch.Tensor) -> torch.Tensor:
    """Codes int32 [..., N, K/8] as int32 [..., K/16, 2N].

    The code of row n and column k goes to row k // 16, column 128 (n // 64) + 4 lane + n % 64 // 16
    with lane = 4 (n % 8) + k % 8 // 2, nibble 4 (k % 2) + 2 (n % 16 // 8) + k % 16 // 8.
    Raises `RecipeError` when N is not a multiple of 64 or K of 16.
    """
    import torch

    _require_multiple(packed.shape[-2], 64, "rows of codes")
    _require_multiple(PACK_FACTOR * packed.shape[-1], 16, "columns of codes")
    stored = _as_bytes(packed).unflatten(-1, (-1, 2, 4)).unflatten(-4, (-1, 4, 2, 8))
    ordered = _swap_nibbles(stored.movedim(LANE_ORDER, tuple(range(-7, 0))))
    return ordered.flatten(-6).view(torch.int32)


def weights_from_marlin(weights: torch.Tensor) -> torch.Tensor:
    """The inverse of `weights_to_marlin`: int32 [..., K/16, 2N] as codes int32 [..., N, K/8]."""
    import torch

    _require_multiple(weights.shape[-1], 2 * 64, "twice the rows of codes")
    ordered = _as_bytes(weights).unflatten(-1, (-1, 8, 4, 4, 2, 2))
    stored = _swap_nibbles(ordered).movedim(tuple(range(-7, 0)), LANE_ORDER)
    return stored.flatten(-3).flatten(-5, -2).view(torch.int32)


def scales_to_marlin(scales: torch.Tensor) -> torch.Tensor:
    """Scales [..., N, G] of any dtype as [..., G, N].

    Grouped: among each 64 rows, row n goes to 8 (n % 8) + n // 8. Channelwise (G = 1): among each
    32, to 8 (n % 8 // 2) + 2 (n // 8) + n % 2, for these are multiplied with results, not weights.
    Raises `RecipeError` when N is not a multiple of 64, or of 32.
    """
    return _swap_scales(scales.mT)


def scales_from_marlin(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `scales_to_marlin`: [..., G, N] as [..., N, G]."""
    return _swap_scales(scales).mT.contiguous()


def _as_bytes(words: torch.Tensor) -> torch.Tensor:
    """Codes int32 [..., C] as uint8 [..., 4 C], low byte first; raises `CheckpointError` for other
    dtypes, which would be read as other shapes."""
    import torch

    if words.dtype != torch.int32:
        raise CheckpointError(f"codes {list(words.shape)} are {words.dtype}, not torch.int32")
    return words.contiguous().view(torch.uint8)


def _swap_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales [..., G, N] from the order of rows to Marlin's, and just so from it."""
    channelwise = scales.shape[-2] == 1
    size, kind, tile = (32, "channelwise", (4, 4, 2)) if channelwise else (64, "grouped", (8, 8, 1))
    _require_multiple(scales.shape[-1], size, f"rows of {kind} scales")
    tiles: torch.Tensor = scales.unflatten(-1, (-1, *tile))
    return tiles.transpose(-3, -2).flatten(-4)


def _swap_nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """Bytes [..., 2, n]: columns (0, 1) and (8, 9) as (0, 8) and (1, 9), and just so back."""
    import torch

    first, second = pairs.unbind(-2)
    low = (first & 0x0F) | (second << 4)
    high = (first >> 4) | (second & 0xF0)
    return torch.stack((low, high), dim=-2)


def _group_size(columns: int, scheme: Scheme) -> int | None:
    """Columns of a group, None where it is the whole row, which stays one when columns are added.
    Raises `RecipeError` for groups that Marlin cannot read."""
    size = scheme.columns_per_group(columns)
    if scheme.bits != 4:
        raise RecipeError(f"Marlin's layout of {scheme} is another than that of INT4")
    if size == columns:
        return None
    if size not in GROUP_SIZES or columns % size:
        raise RecipeError(
            f"Marlin cannot read rows of {columns} columns in groups of {size}",
            hint="choose groups of 32, 64 or 128 that divide the columns, or one per channel",
        )
    return size


def _require_multiple(size: int, divisor: int, what: str) -> None:
    if size % divisor:
        raise RecipeError(
            f"Marlin takes {what} in multiples of {divisor}, not {size}",
            hint="pad a dense weight; leave experts in another layout",
        )


def _check_stored(
    packed: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], groups: int
) -> None:
    expected = (shape[0], shape[1] // PACK_FACTOR), (shape[0], groups)
    stored = packed.shape[-2:], scales.shape[-2:]
    if stored != expected or packed.shape[:-2] != scales.shape[:-2]:
        raise CheckpointError(
            f"weight_packed {list(packed.shape)} and weight_scale {list(scales.shape)} should be "
            f"{list(expected[0])} and {list(expected[1])}, after the same dimensions"
        )


def _extended(tensor: torch.Tensor, rows: int, columns: int, value: int) -> torch.Tensor:
    extended = tensor.new_full((*tensor.shape[:-2], rows, columns), value)
    extended[..., : tensor.shape[-2], : tensor.shape[-1]] = tensor
    return extended
