"""GPTQ against the textbook: the column loop of arXiv 2210.17323 over H⁻¹, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from halfbyte.core import SEARCHED_GROUP, Scheme
from halfbyte.errors import CalibrationError
from halfbyte.kernels.reference import dequantize_int4
from halfbyte.quantize.gptq import Factor, factorize, gptq, gptq_and_scales
from halfbyte.quantize.rtn import round_to_nearest
from halfbyte.quantize.scales import group_scales
from halfbyte.testing.numeric import first_difference, relative_error

DAMPENING = 0.01
TIE = 1e-4
"""Distance from half a step, in steps, within which float32 may round the other way."""


def moments(batch: int, columns: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Second moments [B, K, K] of correlated inputs of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    causes = torch.randn(batch, tokens, 8, generator=generator)
    mix = torch.randn(batch, 8, columns, generator=generator)
    noise = torch.randn(batch, tokens, columns, generator=generator)
    sizes = torch.randn(batch, 1, columns, generator=generator).exp()
    inputs = (causes @ mix + noise) * sizes
    return inputs.mT @ inputs / tokens


def random_weights(batch: int, rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, rows, columns, generator=generator) / columns**0.5


def textbook(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    scales: torch.Tensor,
    scheme: Scheme,
    order: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of one weight [N, K] and, in steps, how far from a tie each rounding was."""
    weight, hessian, scales = weight.double().clone(), hessian.double(), scales.double()
    columns = weight.shape[1]
    group = scheme.columns_per_group(columns)
    hessian = hessian + DAMPENING * hessian.diagonal().mean() * torch.eye(columns)
    inverse = torch.linalg.inv(hessian[order][:, order])
    upper = torch.linalg.cholesky((inverse + inverse.T) / 2, upper=True)
    codes, margin = torch.zeros_like(weight), torch.zeros_like(weight)
    work = weight[:, order]
    for i, column in enumerate(order):
        scale = scales[:, column // group]
        target = work[:, i] / scale
        codes[:, column] = target.round().clamp(scheme.code_min, scheme.code_max)
        clipped = target.clamp(scheme.code_min, scheme.code_max)
        margin[:, column] = (clipped - clipped.floor() - 0.5).abs()
        error = (work[:, i] - codes[:, column] * scale) / upper[i, i]
        work[:, i:] -= error[:, None] * upper[i, i:]
    return codes.to(torch.int8), margin


def loss(weight: torch.Tensor, quantized: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr(E H Eᵀ), damped as GPTQ minimises it."""
    error, hessian = (weight - quantized).double(), hessian.double()
    damping = DAMPENING * hessian.diagonal().mean()
    return float(((error @ hessian) * error).sum() + damping * error.square().sum())


def assert_equal_up_to_ties(
    codes: torch.Tensor, expected: torch.Tensor, margin: torch.Tensor, order: list[int]
) -> None:
    """In every row, the first column in rounding order that differs was a tie.

    What follows a tie in its row may differ by right, so few rows may have one.
    """
    different = (codes != expected)[:, order]
    rows = different.any(1).nonzero().flatten()
    first = different[rows].int().argmax(1)
    margins = margin[:, order][rows, first]
    assert bool((margins < TIE).all()), (
        f"{first_difference(codes, expected)}, {margins.max()} steps off a tie"
    )
    assert len(rows) <= 0.05 * len(codes) + 1


GROUPS_OF_32 = Scheme()


@dataclass(frozen=True)
class Case:
    columns: int
    scheme: Scheme = GROUPS_OF_32
    tokens: int = 512
    rows: int = 48
    block_size: int = 64


CASES = {
    "groups of 32": Case(256),
    "groups of 128": Case(384, Scheme(group_size=128)),
    "one scale per row": Case(160, Scheme(group_size=None)),
    "8 bits": Case(128, Scheme(bits=8)),
    "fewer tokens than columns": Case(256, tokens=40),
    "one token": Case(64, tokens=1),
    "no multiple of the block": Case(224, block_size=100),
    "smaller than a block": Case(96, block_size=128),
    "one row": Case(128, rows=1),
}


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_codes_are_those_of_the_textbook_up_to_ties(case: Case, act_order: bool) -> None:
    columns, scheme = case.columns, case.scheme
    hessians = moments(2, columns, case.tokens)
    weights = random_weights(2, case.rows, columns)
    scales = group_scales(weights, scheme, "mse")
    factor = factorize(hessians, DAMPENING, act_order=act_order)
    codes = gptq(weights, factor, scales, scheme, case.block_size)
    assert factor.fallbacks == (None, None)
    for i in range(2):
        energies = hessians[i].diagonal().tolist()
        order = sorted(range(columns), key=lambda c: -energies[c] if act_order else c)
        expected, margin = textbook(weights[i], hessians[i], scales[i], scheme, order)
        assert_equal_up_to_ties(codes[i], expected, margin, order)
        losses = [
            loss(weights[i], dequantize_int4(c, scales[i]), hessians[i])
            for c in (codes[i], expected)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def grouped_order(energies: torch.Tensor, group: int) -> list[int]:
    """Groups by their energy, and the columns of each by theirs, in descending order."""
    groups = sorted(
        range(0, len(energies), group), key=lambda g: -float(energies[g : g + group].sum())
    )
    return [
        c for g in groups for c in sorted(range(g, g + group), key=lambda c: -float(energies[c]))
    ]


def textbook_with_search(
    weight: torch.Tensor, hessian: torch.Tensor, divisors: list[float], order: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """GPTQ over H⁻¹ in float64 for groups of 32 in one piece of `order`. A group's scale is the
    largest magnitude of what its columns have become, over that divisor with the least error,
    weighed as GPTQ does, or that multiple of it with the least when the columns make up for each
    other. Codes and scales."""
    weight, hessian = weight.double(), hessian.double()
    columns = len(hessian)
    hessian = hessian + DAMPENING * hessian.diagonal().mean() * torch.eye(columns)
    inverse = torch.linalg.inv(hessian[order][:, order])
    upper = torch.linalg.cholesky((inverse + inverse.T) / 2, upper=True)
    codes, work = torch.zeros_like(weight), weight[:, order]
    scales = weight.new_empty(len(weight), columns // 32)
    for i, column in enumerate(order):
        if i % 32 == 0:
            now, pivots = work[:, i : i + 32], upper.diagonal()[i : i + 32] ** -2
            largest = now.abs().amax(1).float()
            candidates = torch.stack([(largest / d).bfloat16().double() for d in divisors])
            made = (now / candidates[..., None]).round().clamp(-8, 7) * candidates[..., None]
            errors = ((made - now).square() * pivots).sum(-1)
            best = errors.argmin(0)
            start = candidates.gather(0, best[None])[0]
            least = torch.full_like(start, torch.inf)
            for multiple in (1, 0.98, 0.96, 0.93, 1.03, -1, -0.98, -0.96, -0.93, -1.03):
                if multiple < 0 and min(divisors) > 0:
                    continue
                candidate = (start.float() * multiple).bfloat16().double()
                trial, total = now.clone(), torch.zeros_like(least)
                for j in range(32):
                    made = (trial[:, j] / candidate).round().clamp(-8, 7) * candidate
                    error = (trial[:, j] - made) / upper[i + j, i + j]
                    total += error.square()
                    trial -= error[:, None] * upper[i + j, i : i + 32].where(
                        torch.arange(32) > j, 0
                    )
                scales[:, column // 32] = torch.where(
                    total < least, candidate, scales[:, column // 32]
                )
                least = least.minimum(total)
        scale = scales[:, column // 32]
        codes[:, column] = (work[:, i] / scale).round().clamp(-8, 7)
        error = (work[:, i] - codes[:, column] * scale) / upper[i, i]
        work[:, i:] -= error[:, None] * upper[i, i:]
    return codes.to(torch.int8), scales


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("columns", "block_size"), [(32, 128), (256, 64), (224, 100), (160, 8)])
def test_scales_searched_in_turn_are_those_of_the_textbook(
    columns: int, block_size: int, signed: bool
) -> None:
    scheme = Scheme()
    hessians, weights = moments(2, columns, 512), random_weights(2, 64, columns)
    factor = factorize(hessians, DAMPENING, together=SEARCHED_GROUP)
    codes, scales = gptq_and_scales(weights, factor, scheme, block_size, signed=signed)
    shrunk = [7.5 / (1 - 0.02 * i) for i in range(16)]
    divisors = [*shrunk[:1], 7, *([8] if signed else []), *shrunk[1:]]
    divisors += [-d for d in divisors] if signed else []
    for i in range(2):
        order = grouped_order(hessians[i].diagonal(), 32)
        assert factor.order[i].flip(0).tolist() == order
        expected, theirs = textbook_with_search(weights[i], hessians[i], divisors, order)
        same = (codes[i] == expected).all(1) & (scales[i] == theirs).all(1)
        # What differs was a tie, of codes or of scales, and what followed from it.
        assert int((~same).sum()) <= 0.1 * len(weights[i])
        losses = [
            loss(weights[i], dequantize_int4(c, s.bfloat16()), hessians[i])
            for c, s in ((codes[i], scales[i]), (expected, theirs))
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_scales_searched_in_turn_beat_those_of_the_weights_alone() -> None:
    scheme, hessians, weights = Scheme(), moments(4, 256, 512), random_weights(4, 64, 256)
    factor = factorize(hessians, DAMPENING, together=32)
    fixed = group_scales(weights, scheme, "mse", factor.pivots)
    made = gptq(weights, factor, fixed, scheme), fixed
    in_turn = gptq_and_scales(weights, factor, scheme)
    before, after = (
        sum(loss(weights[i], dequantize_int4(codes[i], scales[i]), hessians[i]) for i in range(4))
        for codes, scales in (made, in_turn)
    )
    assert after < 0.97 * before


def test_a_search_in_turn_needs_the_columns_of_a_group_together() -> None:
    factor = factorize(moments(1, 64, 100), DAMPENING)
    with pytest.raises(ValueError, match="groups of 1 columns for groups of 32"):
        gptq_and_scales(random_weights(1, 4, 64), factor, Scheme())


@pytest.mark.parametrize("tokens", [64, 2048])
def test_loss_is_below_that_of_plain_rounding(tokens: int) -> None:
    scheme = Scheme(group_size=64)
    hessians, weights = moments(4, 256, tokens), random_weights(4, 64, 256)
    scales = group_scales(weights, scheme, "minmax")
    codes = gptq(weights, factorize(hessians, DAMPENING), scales, scheme)
    rounded = round_to_nearest(weights, scales, scheme)
    for i in range(4):
        ours, plain = (
            loss(weights[i], dequantize_int4(c[i], scales[i]), hessians[i])
            for c in (codes, rounded)
        )
        assert ours < 0.6 * plain


def test_factor_multiplies_back_to_the_damped_matrix_in_its_order() -> None:
    hessian = moments(1, 96, 400)
    factor = factorize(hessian, DAMPENING)
    order, lower = factor.order[0], factor.lower[0].double()
    diagonal = hessian[0].diagonal()
    # The last is rounded first: the column with the most energy.
    assert first_difference(diagonal[order], diagonal.sort().values) is None
    assert first_difference(lower, lower.tril()) is None
    assert bool((lower.diagonal() > 0).all())
    damping = DAMPENING * float(diagonal.double().mean())
    assert factor.damping.tolist() == pytest.approx([damping], rel=1e-6)
    damped = hessian[0].double() + damping * torch.eye(96)
    assert relative_error(lower @ lower.T, damped[order][:, order]) < 1e-6
    assert relative_error(factor.pivots[0][order], lower.diagonal().square()) < 1e-6


def test_uncorrelated_inputs_are_plainly_rounded() -> None:
    scheme, weights = Scheme(), random_weights(1, 32, 96)
    scales = group_scales(weights, scheme, "minmax")
    hessian = torch.diag(torch.rand(96) + 0.1)[None]
    codes = gptq(weights, factorize(hessian, DAMPENING), scales, scheme)
    assert first_difference(codes, round_to_nearest(weights, scales, scheme)) is None


def test_an_input_that_is_always_zero_is_plainly_rounded_and_disturbs_nothing() -> None:
    scheme, columns, dead = Scheme(), 128, [0, 17, 18, 127]
    hessian = moments(1, columns, 600)
    hessian[:, dead], hessian[:, :, dead] = 0, 0
    weights = random_weights(1, 32, columns)
    scales = group_scales(weights, scheme, "minmax")
    factor = factorize(hessian, DAMPENING)
    codes = gptq(weights, factor, scales, scheme)
    assert factor.fallbacks == (None,)
    rounded = round_to_nearest(weights, scales, scheme)
    assert first_difference(codes[:, :, dead], rounded[:, :, dead]) is None
    changed = weights.clone()
    changed[:, :, dead] *= -0.7
    live = [c for c in range(columns) if c not in dead]
    again = gptq(changed, factor, scales, scheme)
    assert first_difference(again[:, :, live], codes[:, :, live]) is None


def test_weights_that_share_a_hessian_are_solved_as_if_alone() -> None:
    scheme, hessian, weights = Scheme(), moments(1, 192, 900), random_weights(5, 24, 192)
    scales = group_scales(weights, scheme, "mse")
    factor = factorize(hessian, DAMPENING)
    codes = gptq(weights, factor, scales, scheme)
    for i in range(5):
        one = slice(i, i + 1)
        alone = gptq(weights[one], factor, scales[one], scheme)
        assert first_difference(codes[one], alone) is None


def test_a_batch_does_not_change_the_results_in_it() -> None:
    """One of the batch is degenerate and climbs the ladder; its neighbours do not notice."""
    scheme, weights, hessians = Scheme(), random_weights(8, 40, 256), moments(8, 256, 700)
    hessians[3] = indefinite(hessians[3], DAMPENING * 5)
    scales = group_scales(weights, scheme, "mse")
    factor = factorize(hessians, DAMPENING)
    codes = gptq(weights, factor, scales, scheme)
    assert [f for f in factor.fallbacks if f] == ["damping x10"]
    for i in range(8):
        one = slice(i, i + 1)
        alone = gptq(weights[one], factorize(hessians[one], DAMPENING), scales[one], scheme)
        assert first_difference(codes[one], alone) is None
    factor = factorize(hessians, DAMPENING, together=32)
    codes, scales = gptq_and_scales(weights, factor, scheme)
    for i in range(8):
        one = slice(i, i + 1)
        factor = factorize(hessians[one], DAMPENING, together=32)
        alone, own = gptq_and_scales(weights[one, 7:30], factor, scheme)
        assert first_difference(codes[one, 7:30], alone) is None
        assert first_difference(scales[one, 7:30], own) is None


def indefinite(hessian: torch.Tensor, share: float) -> torch.Tensor:
    """Push the smallest eigenvalue to `-share` of the mean of the diagonal."""
    values, vectors = torch.linalg.eigh(hessian.double())
    smallest = vectors[:, :1]
    # One direction of K: the mean moves by less than 1 / K of the push.
    push = values[0] + share * hessian.diagonal().double().mean()
    return (hessian.double() - push * smallest @ smallest.T).float()


@pytest.mark.parametrize(
    ("share", "step"),
    [(0.5, None), (5, "damping x10"), (50, "damping x100"), (5000, "diagonal")],
)
def test_an_indefinite_matrix_climbs_the_ladder(share: float, step: str | None) -> None:
    scheme, weights = Scheme(), random_weights(1, 32, 128)
    hessian = indefinite(moments(1, 128, 700)[0], share * DAMPENING)[None]
    scales = group_scales(weights, scheme, "minmax")
    factor = factorize(hessian, DAMPENING)
    codes = gptq(weights, factor, scales, scheme)
    rounded = round_to_nearest(weights, scales, scheme)
    assert factor.fallbacks == (step,)
    assert bool(torch.isfinite(factor.pivots).all())
    assert (first_difference(codes, rounded) is None) == (step == "diagonal")


def test_an_all_zero_matrix_falls_back_to_its_diagonal() -> None:
    scheme, weights = Scheme(), random_weights(1, 8, 64)
    scales = group_scales(weights, scheme, "minmax")
    factor = factorize(torch.zeros(1, 64, 64), DAMPENING)
    codes = gptq(weights, factor, scales, scheme)
    assert factor.fallbacks == ("diagonal",)
    assert first_difference(codes, round_to_nearest(weights, scales, scheme)) is None


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_a_hessian_that_is_not_finite_is_refused(value: float) -> None:
    hessians = moments(3, 64, 100)
    hessians[1, 5, 7] = value
    with pytest.raises(CalibrationError, match="Hessian 1 of 3"):
        factorize(hessians, DAMPENING)


def test_a_group_of_zeros_stays_finite() -> None:
    scheme, weights = Scheme(), random_weights(1, 16, 96)
    weights[:, :, 32:64] = 0
    scales = group_scales(weights, scheme, "mse")
    codes = gptq(weights, factorize(moments(1, 96, 400), DAMPENING), scales, scheme)
    dequantized = dequantize_int4(codes[0], scales[0])
    assert float(dequantized[:, 32:64].abs().max()) < 1e-30


def test_inputs_are_left_as_they_were() -> None:
    hessians, weights = moments(2, 64, 300), random_weights(2, 8, 64)
    scales = group_scales(weights, Scheme(), "mse")
    before = [t.clone() for t in (hessians, weights, scales)]
    factor = factorize(hessians, DAMPENING)
    assert isinstance(factor, Factor)
    gptq(weights, factor, scales, Scheme())
    for now, then in zip((hessians, weights, scales), before, strict=True):
        assert first_difference(now, then) is None
