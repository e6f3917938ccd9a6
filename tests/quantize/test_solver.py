"""The quantizer of the run: what each setting selects, and what it says about its errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.core import Method, QuantizedWeight, Scheme, Settings
from halfbyte.kernels.reference import dequantize_int4
from halfbyte.quantize.gptq import factorize, gptq, gptq_and_scales
from halfbyte.quantize.refine import refine
from halfbyte.quantize.rtn import round_to_nearest
from halfbyte.quantize.scales import group_scales
from halfbyte.quantize.solver import HELD_OUT, Inputs, Solved, solve
from halfbyte.testing.numeric import first_difference

SCHEME = Scheme()
UNREFINED = Settings(refine=0)


def make_inputs(batch: int, tokens: int, columns: int, seed: int) -> torch.Tensor:
    """Correlated inputs [B, tokens, K]; what is correlated depends on the seed."""
    generator = torch.Generator().manual_seed(seed)
    causes = torch.randn(batch, tokens, 6, generator=generator)
    mix = torch.randn(batch, 6, columns, generator=generator)
    return causes @ mix + torch.randn(batch, tokens, columns, generator=generator)


def problem(
    batch: int = 3, rows: int = 24, columns: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [B, N, K] and Hessians [B, K, K]."""
    x = make_inputs(batch, 500, columns, 7)
    generator = torch.Generator().manual_seed(8)
    weights = torch.randn(batch, rows, columns, generator=generator) / columns**0.5
    return weights, x.mT @ x / 500


def relative_error(
    weight: torch.Tensor, code: torch.Tensor, scale: torch.Tensor, h: torch.Tensor
) -> float:
    """By definition, in float64."""
    group = weight.shape[1] // scale.shape[1]
    made = code.double() * scale.double().repeat_interleave(group, dim=1)
    w, e, h = weight.double(), weight.double() - made, h.double()
    return float(torch.trace(e @ h @ e.T) / torch.trace(w @ h @ w.T))


def only(solved: Solved, item: int) -> QuantizedWeight:
    (linear,) = solved.linears[item]
    return linear


def fallbacks(solved: Solved) -> list[list[str | None]]:
    return [[linear.fallback for linear in linears] for linears in solved.linears]


@pytest.mark.parametrize("scheme", [Scheme(group_size=64), Scheme(group_size=None)], ids=str)
def test_gptq_solves_for_scales_weighed_by_its_pivots(scheme: Scheme) -> None:
    weights, hessians = problem()
    factor = factorize(hessians, 0.01)
    scales = group_scales(weights, scheme, "mse", factor.pivots)
    solved = solve(weights, scheme, Inputs(hessians), UNREFINED)
    assert first_difference(solved.scales, scales) is None
    assert first_difference(solved.codes, gptq(weights, factor, scales, scheme)) is None
    assert fallbacks(solved) == [[None]] * 3
    expected = dequantize_int4(solved.codes[1], scales[1])
    assert first_difference(solved.dequantized(1), expected) is None


def test_groups_of_32_have_their_scales_searched_in_turn() -> None:
    weights, hessians = problem()
    codes, scales = gptq_and_scales(weights, factorize(hessians, 0.01, together=32), SCHEME)
    solved = solve(weights, SCHEME, Inputs(hessians), UNREFINED)
    assert first_difference(solved.scales, scales) is None
    assert first_difference(solved.codes, codes) is None
    # Not with scales that no search chose.
    minmax = solve(weights, SCHEME, Inputs(hessians), replace(UNREFINED, scale_search="minmax"))
    scales = group_scales(weights, SCHEME, "minmax")
    assert first_difference(minmax.scales, scales) is None
    codes = gptq(weights, factorize(hessians, 0.01), scales, SCHEME)
    assert first_difference(minmax.codes, codes) is None
    for item in range(3):
        assert only(solved, item).error < only(minmax, item).error


@pytest.mark.parametrize("sweeps", [1, 4])
def test_refinement_starts_from_gptq(sweeps: int) -> None:
    weights, hessians = problem()
    factor = factorize(hessians, 0.01)
    start = solve(weights, SCHEME, Inputs(hessians), UNREFINED)
    codes, scales = refine(
        weights, start.codes, start.scales, hessians, factor.damping, SCHEME, sweeps
    )
    solved = solve(weights, SCHEME, Inputs(hessians), Settings(refine=sweeps))
    assert first_difference(solved.codes, codes) is None
    assert first_difference(solved.scales, scales) is None
    for item in range(3):
        assert only(solved, item).error < only(start, item).error
        assert only(solved, item).rtn_error == only(start, item).rtn_error


def test_errors_are_relative_to_the_output_of_each_linear() -> None:
    """Rows 0-9 and 10-23 as two linears that share an input, and all as one."""
    weights, hessians = problem()
    plain = group_scales(weights, SCHEME, "mse", factorize(hessians, 0.01, together=32).pivots)
    rounded = round_to_nearest(weights, plain, SCHEME)
    for parts in ((10, 14), (24,), ()):
        solved = solve(weights, SCHEME, Inputs(hessians), Settings(), parts)
        for item in range(3):
            start = 0
            assert len(solved.linears[item]) == max(1, len(parts))
            for linear, height in zip(solved.linears[item], parts or (24,), strict=True):
                part = slice(start, start + height)
                start += height
                weight, codes, scales = (
                    weights[item, part],
                    solved.codes[item, part],
                    solved.scales[item, part],
                )
                assert first_difference(linear.codes, codes) is None
                assert first_difference(linear.scales, scales) is None
                ours = relative_error(weight, codes, scales, hessians[item])
                theirs = relative_error(
                    weight, rounded[item, part], plain[item, part], hessians[item]
                )
                unweighted = relative_error(weight, codes, scales, torch.eye(128))
                assert linear.error == pytest.approx(ours, rel=1e-4)
                assert linear.rtn_error == pytest.approx(theirs, rel=1e-4)
                assert linear.weight_error == pytest.approx(unweighted, rel=1e-4)
                assert linear.error < linear.rtn_error


def test_each_linear_tells_its_scales_and_its_outliers() -> None:
    weights, hessians = problem()
    weights[1, 11, 5] = -40.0
    weights[2, :10] = 0.0
    parts = (10, 14)
    solved = solve(weights, SCHEME, Inputs(hessians), Settings(), parts)
    for item in range(3):
        for linear, weight in zip(solved.linears[item], weights[item].split(parts), strict=True):
            sizes = linear.scales.double().abs()
            found = [linear.smallest_scale, linear.mean_scale, linear.largest_scale]
            assert found == pytest.approx(
                [float(size) for size in (sizes.min(), sizes.mean(), sizes.max())], rel=1e-8
            )
            root = weight.double().square().mean().sqrt()
            peak = weight.double().abs().max() / root if root else 0.0
            assert linear.peak == pytest.approx(float(peak), rel=1e-6)
    assert solved.linears[1][1].peak > 20
    assert solved.linears[2][0].peak == 0


@pytest.mark.parametrize(("method", "fallback"), [("gptq", "rtn"), ("rtn", None)])
def test_without_statistics_a_weight_is_rounded_on_its_own(
    method: str, fallback: str | None
) -> None:
    weights, _ = problem()
    solved = solve(weights, SCHEME, None, Settings(method=method))
    scales = group_scales(weights, SCHEME, "mse")
    assert first_difference(solved.scales, scales) is None
    assert first_difference(solved.codes, round_to_nearest(weights, scales, SCHEME)) is None
    linear = only(solved, 0)
    expected = relative_error(weights[0], solved.codes[0], scales[0], torch.eye(128))
    assert linear.error == linear.rtn_error == linear.weight_error
    assert linear.error == pytest.approx(expected, rel=1e-5)
    assert linear.fallback == fallback


@pytest.mark.parametrize("held_out", [True, False])
def test_rtn_uses_statistics_only_to_measure(held_out: bool) -> None:
    weights, hessians = problem()
    held = make_inputs(3, 9, 128, 1) if held_out else None
    solved = solve(weights, SCHEME, Inputs(hessians, held), Settings(method="rtn"))
    assert first_difference(solved.codes, solve(weights, SCHEME, None, Settings()).codes) is None
    linear = only(solved, 1)
    seen = hessians[1] if held is None else held[1].T @ held[1]
    expected = relative_error(weights[1], solved.codes[1], solved.scales[1], seen)
    assert linear.error == linear.rtn_error == pytest.approx(expected, rel=1e-4)
    assert fallbacks(solved) == [[None]] * 3


def test_errors_are_measured_on_held_out_inputs_where_there_are_any() -> None:
    weights, hessians = problem()
    held = make_inputs(3, 40, 128, 7)
    solved = solve(weights, SCHEME, Inputs(hessians, held), Settings(), (10, 14))
    plain = group_scales(weights, SCHEME, "mse", factorize(hessians, 0.01, together=32).pivots)
    rounded = round_to_nearest(weights, plain, SCHEME)
    for item in range(3):
        for part, linear in zip((slice(10), slice(10, 24)), solved.linears[item], strict=True):
            where = item, part
            moment = held[item].double().T @ held[item].double()
            ours = relative_error(weights[where], linear.codes, linear.scales, moment)
            theirs = relative_error(weights[where], rounded[where], plain[where], moment)
            assert linear.error == pytest.approx(ours, rel=1e-4)
            assert linear.rtn_error == pytest.approx(theirs, rel=1e-4)


def test_awq_rounds_with_scales_weighed_by_what_each_column_carries() -> None:
    weights, hessians = problem()
    solved = solve(weights, SCHEME, Inputs(hessians), Settings(method="awq"))
    scales = group_scales(weights, SCHEME, "mse", hessians.diagonal(dim1=1, dim2=2))
    assert first_difference(solved.scales, scales) is None
    assert first_difference(solved.codes, round_to_nearest(weights, scales, SCHEME)) is None
    unweighted = solve(weights, SCHEME, Inputs(hessians), Settings(method="rtn"))

    def cost(made: Solved) -> float:
        served = torch.stack([made.dequantized(item) for item in range(3)])
        carried = hessians.diagonal(dim1=1, dim2=2)[:, None]
        return float(((weights - served).square() * carried).sum())

    assert cost(solved) < cost(unweighted)


@pytest.mark.parametrize("method", ["rtn", "awq"])
def test_plain_rounding_is_no_fallback_where_it_is_asked_for(method: Method) -> None:
    weights, _ = problem()
    assert fallbacks(solve(weights, SCHEME, None, Settings(method=method))) == [[None]] * 3


def test_minmax_scales_are_those_of_the_weights_alone() -> None:
    weights, hessians = problem()
    settings = Settings(scale_search="minmax", refine=0)
    solved = solve(weights, SCHEME, Inputs(hessians), settings)
    assert first_difference(solved.scales, group_scales(weights, SCHEME, "minmax")) is None


@pytest.mark.parametrize("refined", [0, 4])
def test_scales_are_positive_when_they_must_be(refined: int) -> None:
    weights, hessians = problem()
    settings = Settings(signed_scales=False, refine=refined)
    assert bool((solve(weights, SCHEME, Inputs(hessians), settings).scales > 0).all())
    assert bool((solve(weights, SCHEME, None, settings).scales > 0).all())


def test_one_hessian_serves_all_weights() -> None:
    weights, hessians = problem()
    held = make_inputs(1, 40, 128, 7)
    one = Inputs(hessians[:1], held)
    every = Inputs(hessians[:1].repeat(3, 1, 1), held.repeat(3, 1, 1))
    shared, each = (solve(weights, SCHEME, inputs, Settings()) for inputs in (one, every))
    assert first_difference(shared.codes, each.codes) is None
    assert first_difference(shared.scales, each.scales) is None
    assert fallbacks(shared) == fallbacks(each)
    for item in range(3):
        assert only(shared, item).error == pytest.approx(only(each, item).error, rel=1e-5)


@pytest.mark.parametrize("group_size", [32, 128, None])
def test_gate_and_up_in_one_stack_are_solved_as_if_apart(group_size: int | None) -> None:
    scheme = Scheme(group_size=group_size)
    weights, hessians = problem(2, 48)
    inputs = Inputs(hessians[:1], make_inputs(1, 40, 128, 7))
    stack = solve(weights.reshape(1, 96, 128), scheme, inputs, Settings(), (48, 48))
    for item, linear in enumerate(stack.linears[0]):
        alone = only(solve(weights[item : item + 1], scheme, inputs, Settings()), 0)
        assert first_difference(linear.codes, alone.codes) is None
        assert first_difference(linear.scales, alone.scales) is None
        assert linear.fallback == alone.fallback
        assert linear.error == pytest.approx(alone.error, rel=1e-6)
        assert linear.rtn_error == pytest.approx(alone.rtn_error, rel=1e-6)


def test_a_batch_does_not_change_the_results_in_it() -> None:
    """With held-out inputs of different number, and one that falls back."""
    weights, hessians = problem(5)
    hessians[2] = without_factor(128)
    held = [make_inputs(1, 9 * (item + 1), 128, 7 * item)[0] for item in range(5)]
    solved = solve(weights, SCHEME, Inputs(hessians, held), Settings(), (10, 14))
    for item in range(5):
        one = slice(item, item + 1)
        alone = solve(
            weights[one], SCHEME, Inputs(hessians[one], held[item][None]), Settings(), (10, 14)
        )
        assert first_difference(solved.codes[one], alone.codes) is None
        assert first_difference(solved.scales[one], alone.scales) is None
        for ours, theirs in zip(solved.linears[item], alone.linears[0], strict=True):
            for name in ("error", "rtn_error", "weight_error", "fallback"):
                assert getattr(ours, name) == getattr(theirs, name)


def without_factor(columns: int) -> torch.Tensor:
    """A sound diagonal, and correlations above 1: no damping of the ladder makes it positive."""
    return torch.full((columns, columns), 3.0) - 2 * torch.eye(columns)


def test_a_fallback_is_reported_for_its_weight_alone() -> None:
    """What is reported as "diagonal" is rounded plainly: nothing descends on a bad Hessian."""
    weights, hessians = problem()
    hessians[1] = without_factor(128)
    solved = solve(weights, SCHEME, Inputs(hessians), Settings())
    assert fallbacks(solved) == [[None], ["diagonal"], [None]]
    alone = solve(weights[:1], SCHEME, Inputs(hessians[:1]), Settings())
    assert first_difference(solved.codes[:1], alone.codes) is None
    plain = group_scales(weights, SCHEME, "mse", factorize(hessians, 0.01, together=32).pivots)
    assert first_difference(solved.scales[1], plain[1]) is None
    rounded = round_to_nearest(weights, plain, SCHEME)
    assert first_difference(solved.codes[1], rounded[1]) is None


def test_a_linear_without_output_has_no_error() -> None:
    weights, hessians = torch.zeros(1, 4, 64), torch.eye(64)[None]
    solved = solve(weights, SCHEME, Inputs(hessians), Settings())
    linear = only(solved, 0)
    assert linear.error == linear.rtn_error == linear.weight_error == 0
    assert not bool(solved.codes.any())


def test_the_other_engine_solves_the_same_problem() -> None:
    pytest.importorskip("llmcompressor")
    # Groups whose scales are fixed beforehand: only our own engine can search them in turn.
    (weights, hessians), scheme = problem(), Scheme(group_size=64)
    ours = solve(weights, scheme, Inputs(hessians), UNREFINED)
    engine = replace(UNREFINED, engine="llmcompressor")
    theirs = solve(weights, scheme, Inputs(hessians), engine)
    refined = solve(weights, scheme, Inputs(hessians), replace(engine, refine=2))
    for item in range(3):
        assert only(refined, item).error < only(theirs, item).error
    assert first_difference(theirs.scales, ours.scales) is None
    assert float((theirs.codes == ours.codes).float().mean()) > 0.99
    sums = [sum(only(solved, item).error for item in range(3)) for solved in (theirs, ours)]
    assert sums[0] == pytest.approx(sums[1], rel=0.02)


# The check on held-out inputs.


def output_error(weight: torch.Tensor, made: torch.Tensor, inputs: torch.Tensor) -> float:
    return float((inputs.double() @ (weight - made).double().T).square().sum())


def starved_problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights [2, N, K], Hessians of 12 tokens, held-out inputs like them, and unlike them."""
    weights, _ = problem(2)
    seen = make_inputs(1, 400, 128, 7)[0]
    few = seen[:12]
    hessian = few.T @ few / 12
    unlike = torch.randn(1, 60, 128, generator=torch.Generator().manual_seed(5))
    return weights, hessian[None].repeat(2, 1, 1), few[None] * 1.1, unlike


def test_a_result_that_fits_only_what_it_has_seen_gives_way_to_plain_rounding() -> None:
    """GPTQ on 12 tokens moves errors to where those are silent; held-out ones are not."""
    weights, hessians, like, unlike = starved_problem()
    rows = max(like.shape[1], unlike.shape[1])
    held = torch.zeros(2, rows, 128)
    held[0, : like.shape[1]], held[1, : unlike.shape[1]] = like[0], unlike[0]
    free = solve(weights, SCHEME, Inputs(hessians), Settings())
    solved = solve(weights, SCHEME, Inputs(hessians, held), Settings())
    assert fallbacks(solved) == [[None], [HELD_OUT]]
    assert first_difference(solved.codes[0], free.codes[0]) is None

    plain = group_scales(weights, SCHEME, "mse", factorize(hessians, 0.01, together=32).pivots)
    rounded = round_to_nearest(weights, plain, SCHEME)
    assert first_difference(solved.codes[1], rounded[1]) is None
    assert first_difference(solved.scales[1], plain[1]) is None
    linear = only(solved, 1)
    assert first_difference(linear.codes, rounded[1]) is None
    assert linear.error == linear.rtn_error
    expected = relative_error(weights[1], rounded[1], plain[1], unlike[0].T @ unlike[0])
    assert linear.error == pytest.approx(expected, rel=1e-4)
    # The choice is the right one in both cases.
    for item in range(2):
        errors = [
            output_error(weights[item], made, held[item])
            for made in (
                solved.dequantized(item),
                free.dequantized(item),
                dequantize_int4(rounded[item], plain[item]),
            )
        ]
        assert errors[0] == min(errors)


def test_the_check_is_made_for_each_linear_of_a_stack() -> None:
    """Rows on the grid are exact either way, and stay; those beside them are rounded plainly."""
    weights, hessians, _, unlike = starved_problem()
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-6, 7, (10, 128), generator=generator)
    codes[:, ::32] = -7
    weights[0, :10] = codes / 16
    inputs = Inputs(hessians[:1], unlike)
    solved = solve(weights[:1], SCHEME, inputs, Settings(), (10, 14))
    assert fallbacks(solved) == [[None, HELD_OUT]]
    assert solved.linears[0][0].error == 0
    assert torch.equal(solved.dequantized(0)[:10], weights[0, :10])


def test_rows_of_zeros_count_for_nothing() -> None:
    weights, hessians, _, unlike = starved_problem()
    one = Inputs(hessians, torch.zeros(2, 3, 128))
    assert fallbacks(solve(weights, SCHEME, one, Settings())) == [[None], [None]]
    assert fallbacks(solve(weights, SCHEME, Inputs(hessians, unlike), Settings())) == [
        [HELD_OUT],
        [HELD_OUT],
    ]


def test_no_held_out_input_at_all_is_as_if_none_were_given() -> None:
    """Fewer tokens than one in so many hold none out: errors are those on the Hessian."""
    weights, hessians, _, _ = starved_problem()
    empty = solve(weights, SCHEME, Inputs(hessians, torch.zeros(2, 0, 128)), Settings())
    none = solve(weights, SCHEME, Inputs(hessians), Settings())
    assert fallbacks(empty) == [[None], [None]]
    for item in range(2):
        assert 0 < only(empty, item).error == only(none, item).error
        assert 0 < only(empty, item).rtn_error == only(none, item).rtn_error
