"""Rounding against the definition of e4m3 and against bytes laid out by hand; the same on a GPU."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from halfbyte.kvcache.layout import ByHead, Latent, latent_row, read_attention
from halfbyte.kvcache.rows import (
    cache_of,
    pack_sparse,
    power_of_two_scales,
    round_flat,
    to_e4m3,
    unpack_sparse,
)
from halfbyte.testing.glm52 import glm52_config

from .published import GLM_45

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]

FLAT = {**glm52_config(), "model_type": "deepseek_v3"}


def e4m3_numbers() -> list[float]:
    """All that are not negative, by the definition: bias 7, 3 bits, all ones is NaN."""
    codes = [(code >> 3, code & 7) for code in range(127)]
    return [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e, m in codes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_and_every_boundary(device: str, dtype: torch.dtype) -> None:
    numbers = e4m3_numbers()
    assert (len(numbers), numbers[8], numbers[-1]) == (127, 2.0**-6, 448.0)
    halves = [(low + high) / 2 for low, high in pairwise(numbers)]
    # Halfway goes to the code that is even, which is every second one.
    even = [numbers[i] if i % 2 == 0 else numbers[i + 1] for i in range(126)]
    given = torch.tensor(numbers + halves, dtype=dtype, device=device)
    for sign in (1, -1):
        made = to_e4m3(sign * given)
        assert made.dtype == torch.float8_e4m3fn
        assert made.float().tolist() == [sign * value for value in numbers + even]
    if dtype == torch.float32:
        step = torch.tensor(math.inf, device=device)
        below, above = torch.nextafter(given[127:], -step), torch.nextafter(given[127:], step)
        assert to_e4m3(below).float().tolist() == numbers[:-1]
        assert to_e4m3(above).float().tolist() == numbers[1:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_too_large_saturates_and_nan_stays(device: str, dtype: torch.dtype) -> None:
    given = torch.tensor([449.0, 463.9, 464.0, 465.0, 480.0, 6e4, math.inf], device=device)
    for sign in (1, -1):
        assert to_e4m3(sign * given.to(dtype)).float().tolist() == [sign * 448.0] * 7
    odd = to_e4m3(torch.tensor([math.nan, -0.0], dtype=dtype, device=device)).float()
    assert math.isnan(odd[0].item())
    assert math.copysign(1, odd[1].item()) == -1


@pytest.mark.parametrize("device", DEVICES)
def test_a_scale_moves_the_range(device: str) -> None:
    given = torch.tensor([1000.0, 2.0**-12, 3.3], device=device)
    assert round_flat(given).tolist() == [448.0, 0.0, 3.25]
    assert round_flat(given, 4.0).tolist() == [1024.0, 0.0, 3.25]
    assert round_flat(given, 2.0**-7).tolist() == [3.5, 2.0**-12, 3.25]


@pytest.mark.parametrize("device", DEVICES)
def test_scales_are_the_smallest_powers_of_two(device: str) -> None:
    amax = [0.0, 448.0, 448.00003, 224.0, 1.0, 1e-30, 3e38]
    scales = power_of_two_scales(torch.tensor(amax, device=device)).tolist()
    assert scales[:5] == [1.0, 1.0, 2.0, 0.5, 2.0**-8]
    for value, scale in zip(amax[1:], scales[1:], strict=True):
        assert math.frexp(scale)[0] == 0.5
        assert 224 < torch.tensor(value).item() / scale <= 448


@pytest.mark.parametrize("device", DEVICES)
def test_a_sparse_row_is_656_bytes_with_a_scale_to_each_tile(device: str) -> None:
    latent = torch.zeros(512, device=device)
    latent[0], latent[1] = 896.0, 1.0  # tile 0: scale 2
    latent[128] = 2.0**-20  # tile 1: vLLM's floor
    latent[256] = -300.0  # tile 2: scale 1
    rope = torch.full((64,), 1 + 2.0**-7, device=device)
    row = pack_sparse(latent, rope)
    assert row.dtype == torch.uint8
    assert row.shape == (latent_row(Latent(512, 64, sparse=True), "fp8"),) == (656,)
    # 448 is code 0x7e, 0.5 is 0x30, -288 is 0xf9, 2^-20 / 2^-13 is 2^-7 and subnormal: 4 steps.
    found = {place: int(row[place]) for place in (0, 1, 128, 256, 384)}
    assert found == {0: 0x7E, 1: 0x30, 128: 0x04, 256: 0xF9, 384: 0}
    scales = row[512:528].view(torch.float32).tolist()
    assert scales == [2.0, 2.0**-13, 1.0, 2.0**-13]
    assert bytes(row[528:].tolist()) == bytes([0x81, 0x3F]) * 64
    values, kept = unpack_sparse(row, 512)
    assert [values[place].item() for place in (0, 1, 128, 256)] == [896.0, 1.0, 2.0**-20, -288.0]
    assert kept.equal(rope)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_stays_in_its_place(device: str) -> None:
    latent = torch.ones(2, 256, device=device)
    latent[0, 3] = math.nan
    values, _ = unpack_sparse(pack_sparse(latent, latent[:, :64]), 256)
    assert values.isnan().sum() == 1
    assert values[0, 3].isnan()
    assert values.nan_to_num(1.0).equal(torch.ones_like(values))


def test_layouts_by_model() -> None:
    generator = torch.Generator().manual_seed(0)
    latent, rope = torch.randn(2, 1, 5, 512, generator=generator), torch.full((2, 1, 5, 64), 1.01)
    sparse, flat = read_attention(glm52_config()), read_attention(FLAT)
    heads = read_attention(GLM_45)
    assert isinstance(heads.rows, ByHead)
    assert cache_of(sparse, "fp8")(latent, rope)[1].equal(rope.bfloat16().float())
    assert cache_of(sparse, "fp8-raw")(latent, rope)[1].equal(torch.ones_like(rope))
    assert cache_of(flat, "fp8")(latent, rope)[1].equal(torch.ones_like(rope))
    assert cache_of(flat, "bf16")(latent, rope)[0].equal(latent.bfloat16().float())
    key, value = cache_of(heads, "fp8", (2.0, 0.5))(1000 * latent, latent)
    assert key.equal(round_flat(1000 * latent, 2.0))
    assert value.equal(round_flat(latent, 0.5))
    for cache in (cache_of(sparse, "fp8"), cache_of(flat, "fp8"), cache_of(heads, "fp8", (2, 4))):
        once = cache(latent.bfloat16(), rope.bfloat16())
        assert once[0].dtype == torch.bfloat16
        again = cache(*once)
        assert once[0].equal(again[0])
        assert once[1].equal(again[1])
