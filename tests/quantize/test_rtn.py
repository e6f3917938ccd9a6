"""Plain rounding: the codes of compressed-tensors, half to even, clipped to the code range."""

from __future__ import annotations

import pytest
import torch

from halfbyte.core import Scheme, Settings
from halfbyte.quantize.rtn import round_to_nearest
from halfbyte.quantize.scales import group_scales
from halfbyte.quantize.solver import solve
from halfbyte.testing.numeric import first_difference


def test_half_goes_to_even_and_the_rest_is_clipped() -> None:
    weights = torch.tensor([[-9.0, -8.5, -7.5, -0.5, 0.5, 1.5, 2.5, 7.5]])
    codes = round_to_nearest(weights, torch.ones(1, 1, dtype=torch.bfloat16), Scheme())
    assert codes.tolist() == [[-8, -8, -8, 0, 0, 2, 2, 7]]


def test_each_group_uses_its_own_scale() -> None:
    weights = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    scales = torch.tensor([[1.0, 0.5]], dtype=torch.bfloat16)
    assert round_to_nearest(weights, scales, Scheme(group_size=2)).tolist() == [[1, 2, 6, 7]]


@pytest.mark.parametrize("group_size", [32, 128, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_those_of_compressed_tensors(bits: int, group_size: int | None) -> None:
    from compressed_tensors.quantization import QuantizationArgs, quantize

    weights = torch.randn(3, 24, 256, generator=torch.Generator().manual_seed(0))
    scheme = Scheme(bits, group_size)
    scales = group_scales(weights, scheme, "mse")
    arguments = QuantizationArgs(
        num_bits=bits,
        symmetric=True,
        strategy="channel" if group_size is None else "group",
        group_size=group_size,
    )
    codes = round_to_nearest(weights, scales, scheme)
    for weight, scale, code in zip(weights, scales.float(), codes, strict=True):
        expected = quantize(weight, scale, torch.zeros_like(scale), arguments, dtype=torch.int8)
        assert first_difference(code, expected) is None


def test_how_many_threads_compute_changes_no_bit() -> None:
    """So ranks, and machines, may go on with what others began."""
    weights = torch.randn(1, 700, 1024, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    solved = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            solved.append(solve(weights.clone(), Scheme(), None, Settings(method="rtn")))
    finally:
        torch.set_num_threads(before)
    one, many = solved
    assert torch.equal(one.codes, many.codes)
    assert torch.equal(one.scales, many.scales)
    numbers = [
        [(q.error, q.rtn_error, q.weight_error) for q in result.linears[0]] for result in solved
    ]
    assert numbers[0] == numbers[1]
