"""The quantizer of the run: what each setting selects, and what it says about its errors."""

from __future__ import annotations

import pytest
import torch

from halfbyte.core import Method, Scheme, Settings
from halfbyte.kernels.reference import dequantize_int4
from halfbyte.quantize.gptq import factorize, gptq
from halfbyte.quantize.rtn import round_to_nearest
from halfbyte.quantize.scales import group_scales
from halfbyte.quantize.solver import solve
from halfbyte.testing.numeric import first_difference

SCHEME = Scheme()


def inputs(batch: int = 3, rows: int = 24, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(batch, 500, 6, generator=generator) @ torch.randn(
        batch, 6, columns, generator=generator
    )
    x += torch.randn(batch, 500, columns, generator=generator)
    weights = torch.randn(batch, rows, columns, generator=generator) / columns**0.5
    return weights, x.mT @ x / 500


def relative_error(
    weight: torch.Tensor, code: torch.Tensor, scale: torch.Tensor, h: torch.Tensor
) -> float:
    w, e, h = weight.double(), (weight - dequantize_int4(code, scale)).double(), h.double()
    return float(((e @ h) * e).sum() / ((w @ h) * w).sum())


def test_gptq_solves_for_scales_weighed_by_its_pivots() -> None:
    weights, hessians = inputs()
    factor = factorize(hessians, 0.01)
    scales = group_scales(weights, SCHEME, "mse", factor.pivots)
    solved = solve(weights, SCHEME, hessians, Settings())
    assert first_difference(solved.scales, scales) is None
    assert first_difference(solved.codes, gptq(weights, factor, scales, SCHEME)) is None
    assert solved.fallbacks == (None, None, None)
    assert (
        first_difference(solved.dequantized(1), dequantize_int4(solved.codes[1], scales[1])) is None
    )


def test_errors_are_relative_to_the_output_of_each_linear() -> None:
    """Rows 0-9 and 10-23 as two linears that share an input."""
    weights, hessians = inputs()
    solved = solve(weights, SCHEME, hessians, Settings())
    rounded = round_to_nearest(weights, solved.scales, SCHEME)
    for start, stop in ((0, 10), (10, 24), (0, 24)):
        quantized, rtn_error = solved.rows(2, start, stop)
        part = slice(start, stop)
        expected = [
            relative_error(weights[2, part], codes[2, part], solved.scales[2, part], hessians[2])
            for codes in (solved.codes, rounded)
        ]
        assert quantized.error == pytest.approx(expected[0], rel=1e-4)
        assert rtn_error == pytest.approx(expected[1], rel=1e-4)
        assert quantized.error < rtn_error
        assert first_difference(quantized.codes, solved.codes[2, part]) is None
        assert first_difference(quantized.scales, solved.scales[2, part]) is None


@pytest.mark.parametrize(("method", "fallback"), [("gptq", "rtn"), ("rtn", None)])
def test_without_statistics_a_weight_is_rounded_on_its_own(
    method: str, fallback: str | None
) -> None:
    weights, _ = inputs()
    solved = solve(weights, SCHEME, None, Settings(method=method))
    scales = group_scales(weights, SCHEME, "mse")
    assert first_difference(solved.scales, scales) is None
    assert first_difference(solved.codes, round_to_nearest(weights, scales, SCHEME)) is None
    quantized, rtn_error = solved.rows(0, 0, 24)
    expected = relative_error(weights[0], solved.codes[0], scales[0], torch.eye(128))
    assert quantized.error == rtn_error == pytest.approx(expected, rel=1e-5)
    assert quantized.fallback == fallback


def test_rtn_uses_statistics_only_to_measure() -> None:
    weights, hessians = inputs()
    solved = solve(weights, SCHEME, hessians, Settings(method="rtn"))
    assert first_difference(solved.codes, solve(weights, SCHEME, None, Settings()).codes) is None
    quantized, rtn_error = solved.rows(1, 0, 24)
    expected = relative_error(weights[1], solved.codes[1], solved.scales[1], hessians[1])
    assert quantized.error == rtn_error == pytest.approx(expected, rel=1e-4)


def test_awq_rounds_with_scales_weighed_by_what_each_column_carries() -> None:
    weights, hessians = inputs()
    solved = solve(weights, SCHEME, hessians, Settings(method="awq"))
    scales = group_scales(weights, SCHEME, "mse", hessians.diagonal(dim1=1, dim2=2))
    assert first_difference(solved.scales, scales) is None
    assert first_difference(solved.codes, round_to_nearest(weights, scales, SCHEME)) is None
    unweighted = solve(weights, SCHEME, hessians, Settings(method="rtn"))
    assert solved.error.sum() < unweighted.error.sum()


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_plain_rounding_is_no_fallback_where_it_is_asked_for(method: Method) -> None:
    weights, _ = inputs()
    assert solve(weights, SCHEME, None, Settings(method=method)).fallbacks == (None, None, None)


def test_minmax_scales_are_those_of_the_weights_alone() -> None:
    weights, hessians = inputs()
    solved = solve(weights, SCHEME, hessians, Settings(scale_search="minmax"))
    assert first_difference(solved.scales, group_scales(weights, SCHEME, "minmax")) is None


def test_one_hessian_serves_all_weights() -> None:
    weights, hessians = inputs()
    shared = solve(weights, SCHEME, hessians[:1], Settings())
    each = solve(weights, SCHEME, hessians[:1].expand(3, -1, -1).contiguous(), Settings())
    assert first_difference(shared.codes, each.codes) is None
    assert len(shared.fallbacks) == 3
    torch.testing.assert_close(shared.error, each.error)


def test_a_fallback_is_reported_for_its_weight_alone() -> None:
    weights, hessians = inputs()
    hessians[1] -= 9 * hessians[1].diagonal().mean() * torch.eye(128)
    solved = solve(weights, SCHEME, hessians, Settings())
    assert solved.fallbacks == (None, "diagonal", None)
    alone = solve(weights[:1], SCHEME, hessians[:1], Settings())
    assert first_difference(solved.codes[:1], alone.codes) is None


def test_a_linear_without_output_has_no_error() -> None:
    weights, hessians = torch.zeros(1, 4, 64), torch.eye(64)[None]
    quantized, rtn_error = solve(weights, SCHEME, hessians, Settings()).rows(0, 0, 4)
    assert quantized.error == rtn_error == 0


def test_the_other_engine_solves_the_same_problem() -> None:
    pytest.importorskip("llmcompressor")
    weights, hessians = inputs()
    ours = solve(weights, SCHEME, hessians, Settings())
    theirs = solve(weights, SCHEME, hessians, Settings(engine="llmcompressor"))
    assert first_difference(theirs.scales, ours.scales) is None
    assert float((theirs.codes == ours.codes).float().mean()) > 0.99
    assert float(theirs.error.sum()) == pytest.approx(float(ours.error.sum()), rel=0.02)
