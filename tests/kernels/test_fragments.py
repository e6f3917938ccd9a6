"""Weights in the order of tensor cores: every code and scale where the instruction wants it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.kernels.fragments import from_fragments, to_fragments


def weight(*shape: int, group: int = 32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    *leading, rows, columns = shape
    codes = torch.randint(-(2**31), 2**31, (*leading, rows, columns // 8), generator=generator)
    scales = torch.randn(*leading, rows, columns // (group or columns), generator=generator)
    return codes.int(), scales.bfloat16()


@given(
    st.integers(1, 40), st.integers(1, 12), st.sampled_from([32, 64, 128, 256, 0]), st.booleans()
)
def test_back_and_forth(rows: int, groups: int, group: int, experts: bool) -> None:
    columns = groups * (group or 8)
    shape = (2, rows, columns) if experts else (rows, columns)
    codes, scales = weight(*shape, group=group)
    fragments = to_fragments(codes, scales)
    assert fragments.shape[-3:-1] == (-(-rows // 16), -(-columns // 128))
    again = from_fragments(fragments, rows, columns, scales.shape[-1])
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


def test_operands_are_those_of_the_instruction() -> None:
    """The A operand of mma.m16n8k16, as the PTX manual draws it: of lane `4 g + t` register 0 has
    row g and columns 2 t and 2 t + 1, register 1 row g + 8, registers 2 and 3 the same rows eight
    columns further on. A word has registers 0, 2, 1, 3, each in a nibble of either half."""
    codes, scales = weight(32, 256)
    values = torch.stack([codes >> 4 * i & 15 for i in range(8)], dim=-1).flatten(1)
    fragments = to_fragments(codes, scales)
    for strip in range(2):
        for block in range(2):
            words = fragments[strip, block]
            for half in range(2):
                for lane in range(32):
                    g, t = lane // 4, lane % 4
                    for k in range(4):
                        word = int(words[128 * half + 4 * lane + k])
                        first = 128 * block + 64 * half + 16 * k + 2 * t
                        for nibble, (row, column) in enumerate(((0, 0), (0, 8), (8, 0), (8, 8))):
                            for upper in range(2):
                                code = word >> 4 * nibble + 16 * upper & 15
                                assert code == values[16 * strip + g + row, first + column + upper]


@pytest.mark.parametrize("group", [32, 64, 128, 0])
def test_scales_follow_their_codes(group: int) -> None:
    codes, scales = weight(16, 256, group=group)
    fragments = to_fragments(codes, scales)[0, :, 256:].contiguous().view(torch.bfloat16)
    count = max(1, 128 // (group or 256))
    for block in range(2):
        by_row = fragments[block].view(8, 2, count)
        for row in range(16):
            first = 128 * block // (group or 256)
            assert torch.equal(by_row[row % 8, row // 8], scales[row, first : first + count])


def test_what_is_beyond_a_weight_is_zero() -> None:
    codes, scales = weight(17, 160)
    fragments = to_fragments(codes, scales)
    back, zero = from_fragments(fragments, 32, 256, 8)
    assert not back[17:].any()
    assert not back[:, 20:].any()
    assert not zero[17:].any()
    assert not zero[:, 5:].any()
