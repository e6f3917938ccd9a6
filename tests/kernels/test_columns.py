"""The CUDA column kernels against float64 and against their plain-torch twins.

Without a GPU `host_kernel` compiles the very source with the host's compiler, and Triton interprets
the matrix products around it. What that cannot see is how matrix units round their sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from halfbyte.core import Scheme
from halfbyte.kernels.reference import dequantize_int4
from halfbyte.quantize.gptq import NEARBY, Factor, factorize, gptq, gptq_and_scales
from halfbyte.quantize.refine import refine
from halfbyte.quantize.scales import divisors_of, group_scales
from halfbyte.testing.numeric import first_difference

pytest.importorskip("triton", reason="Triton is not installed; it comes with torch on Linux")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHANNEL = Scheme(group_size=None)
DAMPENING = 0.01


@pytest.fixture(autouse=True)
def _on_the_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cuda":
        return
    from halfbyte.kernels import columns, refinement

    request.getfixturevalue("bfloat16_products")
    kernel = request.getfixturevalue("host_kernel")
    monkeypatch.setattr(columns, "kernel", kernel)
    monkeypatch.setattr(refinement, "kernel", kernel)


def problem(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [2, N, K] and Hessians [2, K, K] of correlated inputs."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(2, 400, 6, generator=generator) @ torch.randn(
        2, 6, columns, generator=generator
    )
    x += torch.randn(2, 400, columns, generator=generator)
    x *= torch.randn(2, 1, columns, generator=generator).mul(0.5).exp()
    weights = torch.randn(2, rows, columns, generator=generator) / columns**0.5
    return weights, x.mT @ x / 400


# GPTQ.


def as_kernels_store_it(factor: Factor) -> torch.Tensor:
    """Padded to whole blocks by an identity, with the mirror image in TF32 above the diagonal."""
    count, columns, _ = factor.lower.shape
    padded = -(-columns // 128) * 128
    lower = torch.eye(padded).repeat(count, 1, 1)
    lower[:, :columns, :columns] = factor.lower.tril()
    fraction, exponent = torch.frexp(lower.tril(-1))
    return lower + torch.ldexp((fraction * 2**11).round() / 2**11, exponent).mT


def rounded_by_kernels(
    weights: torch.Tensor,
    factor: Factor,
    scales: torch.Tensor,
    scheme: Scheme,
    divisors: tuple[float, ...] = (),
    multiples: tuple[float, ...] = (),
) -> torch.Tensor:
    from halfbyte.kernels.columns import round_columns

    return round_columns(
        weights.to(DEVICE),
        as_kernels_store_it(factor).to(DEVICE),
        factor.order.to(DEVICE),
        scales.to(DEVICE),
        scheme.columns_per_group(weights.shape[-1]),
        scheme.code_min,
        scheme.code_max,
        divisors,
        multiples,
    ).cpu()


def textbook(
    weight: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """GPTQ over H⁻¹ in float64 (arXiv 2210.17323): codes, steps off a tie, and the order."""
    weight, hessian, scales = weight.double(), hessian.double(), scales.double()
    columns = len(hessian)
    order = hessian.diagonal().argsort(descending=True)
    damped = hessian + DAMPENING * hessian.diagonal().mean() * torch.eye(columns)
    inverse = torch.linalg.inv(damped[order][:, order])
    upper = torch.linalg.cholesky((inverse + inverse.T) / 2, upper=True)
    work, codes, margin = weight[:, order], torch.zeros_like(weight), torch.zeros_like(weight)
    for i, column in enumerate(order):
        scale = scales[:, column // scheme.columns_per_group(columns)]
        target = (work[:, i] / scale).clamp(scheme.code_min, scheme.code_max)
        codes[:, column] = target.round()
        margin[:, column] = (target - target.floor() - 0.5).abs()
        error = (work[:, i] - codes[:, column] * scale) / upper[i, i]
        work[:, i:] -= error[:, None] * upper[i, i:]
    return codes.to(torch.int8), margin, order


@pytest.mark.parametrize(
    ("rows", "columns", "scheme"),
    [
        (130, 96, Scheme()),
        (20, 128, Scheme(group_size=64)),
        (5, 104, CHANNEL),
        (33, 200, CHANNEL),
        (20, 256, Scheme(group_size=128)),
        (20, 672, Scheme()),
    ],
)
def test_codes_are_those_of_the_textbook_up_to_ties(
    rows: int, columns: int, scheme: Scheme
) -> None:
    # Between blocks of 128 columns errors and factor go as TF32, of 10 bits.
    tie = 1e-4 if columns <= 128 else 1e-2
    weights, hessians = problem(rows, columns)
    factor = factorize(hessians, DAMPENING)
    scales = group_scales(weights, scheme, "mse", factor.pivots)
    codes = rounded_by_kernels(weights, factor, scales, scheme)
    plain = gptq(weights, factor, scales, scheme)
    for item in range(2):
        expected, margin, order = textbook(weights[item], hessians[item], scales[item], scheme)
        for other in (expected, plain[item]):
            different = (codes[item] != other)[:, order]
            differing = different.any(1).nonzero().flatten()
            # What follows a tie may differ by right.
            first = different[differing].int().argmax(1)
            assert bool((margin[:, order][differing, first] < tie).all())
            assert len(differing) <= (0.05 if columns <= 128 else 0.5) * rows + 1
        losses = [
            loss(weights[item], hessians[item], c, scales[item]) for c in (codes[item], expected)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def loss(
    weight: torch.Tensor, hessian: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> float:
    error = weight.double() - dequantize_int4(codes, scales, torch.float64)
    damping = DAMPENING * hessian.diagonal().double().mean()
    return float(((error @ hessian.double()) * error).sum() + damping * error.square().sum())


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(130, 96), (5, 32), (20, 256), (20, 672)])
def test_scales_searched_in_turn_are_those_of_plain_torch_up_to_ties(
    rows: int, columns: int, signed: bool
) -> None:
    weights, hessians = problem(rows, columns)
    weights[0, 0, :32] = 0
    factor = factorize(hessians, DAMPENING, together=32)
    divisors = divisors_of(Scheme(), 32, signed=signed)
    scales = torch.full((2, rows, columns // 32), 99.0, dtype=torch.bfloat16, device=DEVICE)
    multiples = (*NEARBY, *(-m for m in NEARBY)) if signed else NEARBY
    codes = rounded_by_kernels(weights, factor, scales, Scheme(), divisors, multiples)
    scales = scales.cpu()
    expected, theirs = gptq_and_scales(weights, factor, Scheme(), signed=signed)
    same = ((codes == expected).all(2) & (scales == theirs).all(2)).float()
    # Between blocks of 128 columns errors and factor go as TF32, of 10 bits.
    assert float(same.mean()) > (0.95 if columns <= 128 else 0.5)
    for item in range(2):
        ours, plain = (
            loss(weights[item], hessians[item], c[item], s[item])
            for c, s in ((codes, scales), (expected, theirs))
        )
        assert ours == pytest.approx(plain, rel=1e-2)


def test_codes_of_a_row_do_not_depend_on_the_others() -> None:
    weights, hessians = problem(130, 256)
    factor = factorize(hessians, DAMPENING)
    scales = group_scales(weights, Scheme(), "mse", factor.pivots)
    codes = rounded_by_kernels(weights, factor, scales, Scheme())
    alone = rounded_by_kernels(
        weights[1:, 125:].contiguous(),
        factorize(hessians[1:], DAMPENING),
        scales[1:, 125:].contiguous(),
        Scheme(),
    )
    assert first_difference(codes[1:, 125:], alone) is None


# Refinement.


@dataclass
class Descent:
    """What refinement starts from, and what the kernels make of it."""

    weights: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    hessians: torch.Tensor
    damping: torch.Tensor
    scheme: Scheme

    def by_kernels(self, sweeps: int) -> tuple[torch.Tensor, torch.Tensor]:
        from halfbyte.kernels.refinement import descend

        columns = self.weights.shape[-1]
        made = self.errors(self.codes, self.scales), *self.start()
        errors, codes, scales = (tensor.to(DEVICE) for tensor in made)
        descend(
            errors,
            codes,
            scales,
            self.hessians.to(DEVICE),
            self.damping.to(DEVICE),
            self.scheme.columns_per_group(columns),
            self.scheme.code_min,
            self.scheme.code_max,
            sweeps,
        )
        errors, codes, scales = errors.cpu(), codes.cpu(), scales.cpu()
        # They keep the errors up to date themselves.
        torch.testing.assert_close(errors, self.errors(codes, scales), rtol=0, atol=2e-6)
        return codes, scales

    def by_torch(self, sweeps: int) -> tuple[torch.Tensor, torch.Tensor]:
        return refine(self.weights, *self.start(), self.hessians, self.damping, self.scheme, sweeps)

    def start(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codes.clone(), self.scales.clone()

    def errors(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        made = [dequantize_int4(c, s) for c, s in zip(codes, scales, strict=True)]
        return self.weights - torch.stack(made)

    def objective(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Of each row, float64 [B, N]."""
        error = self.errors(codes, scales).double()
        damped = self.hessians.double()
        damped = damped + self.damping.double()[:, None, None] * torch.eye(damped.shape[-1])
        return ((error @ damped) * error).sum(-1)


def exact_start(rows: int, columns: int, scheme: Scheme) -> Descent:
    """Numbers that BF16 holds: weights of 256ths, scales of an eighth, Hessians of integers."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randint(-1, 2, (2, 60, columns), generator=generator).float()
    weights = torch.randint(-230, 231, (2, rows, columns), generator=generator) / 256
    shape = 2, rows, scheme.groups(columns)
    scales = torch.randint(0, 2, shape, generator=generator).mul(2).sub(1).bfloat16() / 8
    group = scheme.columns_per_group(columns)
    steps = weights / scales.float().repeat_interleave(group, dim=-1)
    codes = steps.round().clamp(-8, 7).to(torch.int8)
    damping = torch.tensor([0.5, 2.0])
    return Descent(weights, codes, scales, x.mT @ x, damping, scheme)


@pytest.mark.parametrize("columns", [96, 256, 672])
def test_codes_descend_exactly_as_in_plain_torch(columns: int) -> None:
    """With numbers that no BF16 rounds, and scales that stay."""
    start = exact_start(130 if columns == 256 else 7, columns, Scheme(group_size=columns))
    start.scheme = Scheme(group_size=None)
    codes, scales = start.by_kernels(2)
    if columns > 128:
        expected, _ = start.by_torch(2)
        assert first_difference(codes, expected) is None
    assert first_difference(scales, start.scales) is None
    assert first_difference(codes, start.codes) is not None
    before = start.objective(start.codes, start.scales)
    assert bool((start.objective(codes, scales) <= before).all())


@pytest.mark.parametrize("group", [32, 64, 128])
def test_one_block_descends_as_in_plain_torch_up_to_ties(group: int) -> None:
    """Codes and scales of 128 columns: nothing is rounded to BF16 on the way but scales."""
    start = exact_start(130, 128, Scheme(group_size=group))
    codes, scales = start.by_kernels(1)
    expected_codes, expected_scales = start.by_torch(1)
    same = (codes == expected_codes).all(-1) & (scales == expected_scales).all(-1)
    assert float(same.float().mean()) > 0.97
    assert float((scales != start.scales).float().mean()) > 0.3
    # A row behind a tie ends elsewhere, but no worse on the whole.
    ours = float(start.objective(codes, scales).sum())
    assert ours == pytest.approx(
        float(start.objective(expected_codes, expected_scales).sum()), rel=0.01
    )


@pytest.mark.parametrize(
    ("columns", "scheme"),
    [
        (96, Scheme()),
        (160, Scheme()),
        (192, Scheme(group_size=64)),
        (384, Scheme(group_size=128)),
        (256, CHANNEL),
        (640, Scheme()),
    ],
    ids=str,
)
def test_real_numbers_end_where_plain_torch_ends(columns: int, scheme: Scheme) -> None:
    """BF16 products only have to tell which way is down: the objective falls as far."""
    weights, hessians = problem(9, columns)
    factor = factorize(hessians, DAMPENING)
    scales = group_scales(weights, scheme, "mse", factor.pivots)
    codes = gptq(weights, factor, scales, scheme)
    start = Descent(weights, codes, scales, hessians, factor.damping, scheme)
    before = start.objective(codes, scales)
    ours, plain = (start.objective(*made) for made in (start.by_kernels(3), start.by_torch(3)))
    assert bool((ours <= before * (1 + 1e-3)).all())
    assert float(ours.sum()) < float(before.sum())
    assert float(ours.sum()) == pytest.approx(float(plain.sum()), rel=0.01)
    codes, scales = start.by_kernels(3)
    assert bool((codes >= scheme.code_min).all() & (codes <= scheme.code_max).all())
    assert torch.equal(scales > 0, start.scales > 0)
    assert bool(torch.isfinite(scales).all() & (scales != 0).all())
