"""The reference kernels against golden words, compressed-tensors and float64 loops."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings

from halfbyte.kernels.reference import (
    dequantize_fp8,
    dequantize_int4,
    pack_int4,
    unpack_int4,
)


def random_codes(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (rows, columns), dtype=torch.int8, generator=generator)


def random_fp8(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Every finite F8_E4M3 value occurs, subnormals and both zeros included."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8, generator=generator)
    sign = torch.randint(0, 2, (rows, columns), dtype=torch.uint8, generator=generator) << 7
    return (codes | sign).view(torch.float8_e4m3fn)


def decode_e4m3(byte: int) -> float:
    """One F8_E4M3 value by the definition of the format (OFP8 specification, section 5)."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_packed_words_are_the_published_ones() -> None:
    row = torch.arange(-8, 8, dtype=torch.int8)[None]
    words = [word & 0xFFFFFFFF for word in pack_int4(row)[0].tolist()]
    assert words == [0x76543210, 0xFEDCBA98]


@given(rows=st.integers(1, 9), words=st.integers(1, 17), seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_packing_equals_compressed_tensors(rows: int, words: int, seed: int) -> None:
    codes = random_codes(rows, 8 * words, seed)
    packed = pack_int4(codes)
    assert packed.dtype == torch.int32
    assert packed.is_contiguous()
    assert torch.equal(packed, pack_to_int32(codes, 4))
    shape = torch.Size((rows, 8 * words))
    assert torch.equal(unpack_int4(packed, 8 * words), unpack_from_int32(packed, 4, shape))


@given(words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20))
@settings(deadline=None)
def test_every_word_survives_unpacking_and_packing(words: list[int]) -> None:
    packed = torch.tensor([words], dtype=torch.int32)
    codes = unpack_int4(packed, 8 * len(words))
    assert codes.dtype == torch.int8
    assert torch.equal(pack_int4(codes), packed)


def test_packing_takes_strided_and_stacked_codes() -> None:
    codes = torch.stack([random_codes(16, 24, seed) for seed in range(3)])
    transposed = codes.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(pack_int4(transposed), torch.stack([pack_int4(c) for c in codes]))
    assert torch.equal(unpack_int4(pack_int4(codes)[:, ::2], 24), codes[:, ::2])


def test_unpacking_stops_at_the_asked_column() -> None:
    codes = random_codes(4, 16, seed=1)
    assert torch.equal(unpack_int4(pack_int4(codes), 11), codes[:, :11])


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int4_values_are_code_times_scale_of_the_group(groups: int, dtype: torch.dtype) -> None:
    codes = random_codes(6, 64, seed=2)
    scales = torch.rand(6, groups, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    values = dequantize_int4(codes, scales, dtype)
    expected = [
        [codes[n, k].item() * scales[n, k * groups // 64].item() for k in range(64)]
        for n in range(6)
    ]
    # A 4-bit code times an 8-bit significand is exact in float32, so one rounding is left.
    assert torch.equal(values, torch.tensor(expected, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((160, 256), (128, 128)),  # two scale rows, not two blocks of 80
        ((576, 256), (128, 128)),  # five scale rows; kv_a_proj_with_mqa of GLM-5.2
        ((130, 200), (128, 128)),  # partial blocks on both edges
        ((64, 96), (128, 128)),  # smaller than one block
        ((12, 40), (1, 40)),  # a channel scale
        ((12, 40), (12, 40)),  # a tensor scale
        ((30, 50), (7, 16)),
    ],
)
def test_fp8_values_are_weight_times_scale_of_the_block(
    shape: tuple[int, int], block: tuple[int, int]
) -> None:
    (rows, columns), (height, width) = shape, block
    weight = random_fp8(rows, columns)
    grid = (math.ceil(rows / height), math.ceil(columns / width))
    scale = torch.rand(grid, generator=torch.Generator().manual_seed(1)) * 0.01 + 1e-4
    before = weight.view(torch.uint8).clone()

    values = dequantize_fp8(weight, scale, block)

    stored = weight.view(torch.uint8).tolist()
    expected = torch.tensor(
        [
            [
                decode_e4m3(stored[n][k]) * scale[n // height, k // width].item()
                for k in range(columns)
            ]
            for n in range(rows)
        ],
        dtype=torch.float64,
    )
    # The float64 product of two float32 values is exact: the float32 result is its rounding.
    assert torch.equal(values, expected.to(torch.float32))
    assert torch.equal(weight.view(torch.uint8), before)
    in_bf16 = dequantize_fp8(weight, scale, block, torch.bfloat16)
    assert torch.equal(in_bf16, values.to(torch.bfloat16))


def test_all_fp8_bytes_decode_by_the_definition() -> None:
    finite = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    weight = torch.tensor([finite], dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = dequantize_fp8(weight, torch.ones(1, 1), (1, len(finite)))
    assert values[0].tolist() == [decode_e4m3(byte) for byte in finite]
    assert values.max() == 448


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_returns_the_same_bits() -> None:
    codes, weight = random_codes(48, 256, seed=5), random_fp8(160, 256)
    scales, scale = torch.rand(48, 8).to(torch.bfloat16), torch.rand(2, 2)
    packed = pack_int4(codes.cuda())
    assert torch.equal(packed.cpu(), pack_int4(codes))
    assert torch.equal(unpack_int4(packed, 256).cpu(), codes)
    assert torch.equal(
        dequantize_int4(codes.cuda(), scales.cuda()).cpu(), dequantize_int4(codes, scales)
    )
    assert torch.equal(
        dequantize_fp8(weight.cuda(), scale.cuda(), (128, 128)).cpu(),
        dequantize_fp8(weight, scale, (128, 128)),
    )
