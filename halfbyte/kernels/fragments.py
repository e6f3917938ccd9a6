"""INT4 weights in the order in which the tensor cores of a GPU take them.

The kernels of `halfbyte.kernels.w4a16` do not read a weight [N, K] as a checkpoint stores it, but
in blocks of 16 rows and 128 columns. The blocks of 16 rows lie one after the other, so that a
program reads long pieces of memory, and a block is what a warp multiplies: for each 64 columns 16
bytes of every lane, four operands of `mma.m16n8k16`, and then the scales of its rows.

A lane has rows `lane / 4` and 8 more, and of each 16 columns those from `lane % 4 * 2` on, two and
eight further on two more. The eight codes are one word, in the order in which masks find them.
"""

from __future__ import annotations

import torch

ROWS, COLUMNS = 16, 128
"""Of a block."""
WORDS = ROWS * COLUMNS // 8
"""int32 of its codes, before those of its scales."""
_NIBBLES = tuple(
    (row, column, eight, 16 * column + 8 * row + 4 * eight)
    for row in (0, 1)
    for column in (0, 1)
    for eight in (0, 1)
)
"""Of a lane's word: upper or lower row, column, whether eight further on, and the lowest bit."""


def scales_of_block(columns: int, groups: int) -> int:
    """How many scales a row has in a block, for a weight with so many columns and groups."""
    return max(1, COLUMNS * groups // columns) if groups > 1 else 1


def to_fragments(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int32 [..., ceil(N / 16), ceil(K / 128), 256 + 8 S] of codes int32 [..., N, K/8] and scales
    bfloat16 [..., N, groups], with S scales of a row in a block. What blocks have beyond the weight
    is zero, and so are its scales."""
    *leading, rows, stored_words = codes.shape
    columns, groups = 8 * stored_words, scales.shape[-1]
    strips, blocks = -(-rows // ROWS), -(-columns // COLUMNS)
    count = scales_of_block(columns, groups)
    padded = codes.new_zeros(*leading, ROWS * strips, 16 * blocks)
    padded[..., :rows, :stored_words] = codes
    # half of the rows, row; block, half of it, 16 columns of that, eight of those
    stored = padded.view(-1, strips, 2, 8, blocks, 2, 4, 2)
    words = torch.zeros_like(stored[:, :, 0, :, :, :, :, 0]).unsqueeze(-1).repeat_interleave(4, -1)
    for lane in range(4):
        for row, column, eight, place in _NIBBLES:
            nibble = stored[:, :, row, :, :, :, :, eight] >> 4 * (2 * lane + column) & 15
            words[..., lane] |= nibble << place
    # strip, row, block, half, 16 columns, lane of four -> the four 16 columns last
    ordered = words.permute(0, 1, 3, 4, 2, 6, 5).reshape(*leading, strips, blocks, WORDS)
    if groups > 1 and columns // groups > COLUMNS:
        scales = scales.repeat_interleave(columns // groups // COLUMNS, dim=-1)
    elif groups == 1:
        scales = scales.expand(*scales.shape[:-1], blocks)
    all_scales = scales.new_zeros(*leading, ROWS * strips, blocks * count)
    all_scales[..., :rows, : scales.shape[-1]] = scales
    # row: upper and lower half -> the eight rows of a half, each with its scales of both
    by_row = all_scales.view(-1, strips, 2, 8, blocks, count).permute(0, 1, 4, 3, 2, 5)
    by_block = by_row.reshape(*leading, strips, blocks, ROWS * count)
    return torch.cat((ordered, by_block.view(torch.int32)), dim=-1)


def from_fragments(
    fragments: torch.Tensor, rows: int, columns: int, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and scales that `to_fragments` was given, bit for bit."""
    *leading, strips, blocks, _ = fragments.shape
    by_lane = fragments[..., :WORDS].reshape(-1, strips, blocks, 2, 8, 4, 4)
    words = by_lane.permute(0, 1, 4, 2, 3, 6, 5)
    stored = words.new_zeros(words.shape[0], strips, 2, 8, blocks, 2, 4, 2)
    for lane in range(4):
        for row, column, eight, place in _NIBBLES:
            nibble = words[..., lane] >> place & 15
            stored[:, :, row, :, :, :, :, eight] |= nibble << 4 * (2 * lane + column)
    codes = stored.reshape(*leading, ROWS * strips, 16 * blocks)
    count = scales_of_block(columns, groups)
    scales = fragments[..., WORDS:].contiguous().view(torch.bfloat16)
    by_row = scales.reshape(-1, strips, blocks, 8, 2, count).permute(0, 1, 4, 3, 2, 5)
    all_scales = by_row.reshape(*leading, ROWS * strips, blocks * count)
    step = columns // groups // COLUMNS if groups > 1 else blocks
    return codes[..., :rows, : columns // 8].contiguous(), (
        all_scales[..., :rows, :: max(1, step)][..., :groups].contiguous()
    )
