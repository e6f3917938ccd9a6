"""GPTQ: round the columns of a weight one after the other, each making up for the errors before it.

A linear with weight W [N, K] whose inputs have the second moment H [K, K] changes its output by
tr(E H Eᵀ) per token when W is rounded to Q, E = W - Q. With the factorization

    H + damping = U D Uᵀ,    U unit upper triangular, D diagonal,

a row's share of that is Σᵢ dᵢ (wᵢ + Σ_{j<i} eⱼ Uⱼᵢ - qᵢ)², so each column in turn is rounded to
what is nearest to wᵢ + Σ_{j<i} eⱼ Uⱼᵢ. These are the codes of GPTQ (Frantar et al., arXiv
2210.17323), which gets them from a Cholesky factor of H⁻¹; here nothing is inverted, and one
Cholesky factorization of H with rows and columns reversed gives U and D.

Rows do not interact. Weights that read the same input are therefore just more rows of one weight,
and so they are solved: one factorization, one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.core import Scheme
from halfbyte.errors import CalibrationError

DAMPING_STEPS = (1, 10, 100)
"""Multiples of the damping that are tried in turn until the Hessian factorizes."""


@dataclass(frozen=True, slots=True)
class Factor:
    """H + damping = U D Uᵀ for each of the Hessians [H, K, K] given to `factorize`."""

    order: torch.Tensor
    """int64 [H, K]: the columns in the order they are rounded."""
    upper: torch.Tensor
    """U, float32 [H, K, K], rows and columns in that order."""
    pivots: torch.Tensor
    """D, float32 [H, K], by column of the weight: what a squared rounding error there costs."""
    fallbacks: tuple[str | None, ...]
    """Per Hessian: None, "damping x10", "damping x100", or "diagonal": all beside it ignored."""


def factorize(hessians: torch.Tensor, dampening: float, *, act_order: bool = True) -> Factor:
    """Factorize second moments float32 [H, K, K], each by itself.

    `dampening` times the mean of the diagonal is added to the diagonal. With `act_order` columns
    are rounded in descending order of the diagonal, those with the most energy first, while later
    ones can still make up for their errors. An input that is always zero needs no special case:
    damping leaves its column on its own, so it is plainly rounded and disturbs nothing.

    A matrix that is not positive definite even so (too few or badly accumulated tokens) climbs the
    ladder of `DAMPING_STEPS`, and last loses all but its diagonal, which makes GPTQ plain rounding.
    Raises CalibrationError when a matrix holds NaN or infinity.
    """
    count, columns, _ = hessians.shape
    order = torch.empty(count, columns, dtype=torch.int64, device=hessians.device)
    upper = torch.empty_like(hessians)
    pivots = torch.empty_like(hessians[:, 0])
    fallbacks: list[str | None] = []
    for item, hessian in enumerate(hessians):
        if not bool(torch.isfinite(hessian).all()):
            raise CalibrationError(
                f"Hessian {item} of {count} [{columns}, {columns}] is not finite",
                hint="one infinite activation is enough; compute in float32: --dtype float32",
            )
        diagonal = hessian.diagonal()
        if act_order:
            order[item] = diagonal.argsort(descending=True, stable=True)
        else:
            torch.arange(columns, out=order[item])
        last_first = order[item].flip(0)
        lower, fallback = _cholesky(hessian[last_first][:, last_first], dampening)
        fallbacks.append(fallback)
        scale = lower.diagonal()
        upper[item] = (lower / scale).flip(0, 1)
        pivots[item, last_first] = scale.square()
    return Factor(order, upper, pivots, tuple(fallbacks))


def _cholesky(matrix: torch.Tensor, dampening: float) -> tuple[torch.Tensor, str | None]:
    """Lower Cholesky factor of a damped matrix [K, K], and the step of the ladder it took."""
    diagonal = matrix.diagonal()
    damping = dampening * diagonal.mean()
    for step in DAMPING_STEPS:
        damped = matrix.clone()
        damped.diagonal().add_(step * damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            return lower, None if step == 1 else f"damping x{step}"
    return torch.diag(diagonal.clamp(min=torch.finfo(matrix.dtype).tiny).sqrt()), "diagonal"


def gptq(
    weights: torch.Tensor,
    factor: Factor,
    scales: torch.Tensor,
    scheme: Scheme,
    block_size: int = 128,
) -> torch.Tensor:
    """Codes int8 [B, N, K] of `weights` float32 [B, N, K] for fixed `scales` [B, N, groups].

    The factor holds B Hessians, or one that all weights share. Scales belong to groups of columns
    as stored, whatever the order of rounding, and codes come back in stored order, so nothing of
    the order needs to be kept ("static" act-order).

    Works in blocks of `block_size` columns: one matrix product brings a block up to date with the
    errors so far, then its columns follow one by one, touching only the block. It changes codes
    only where float32 rounding decides a tie.
    """
    batch, rows, columns = weights.shape
    hessians = factor.order.shape[0]
    shared = weights.reshape(hessians, -1, columns)
    # Transposed, so that a column lies in one piece: [hessians, columns, rows of all sharers].
    # Holds the weights at first, and their errors once they are rounded.
    errors = torch.empty_like(shared.mT, memory_format=torch.contiguous_format)
    for item, order in enumerate(factor.order):
        errors[item] = shared[item].mT[order]
    group_scales = scales.float().reshape(hessians, -1, scales.shape[-1]).mT
    group_of_column = factor.order[:, :, None] // scheme.columns_per_group(columns)
    codes = torch.empty_like(errors, dtype=torch.int8)
    for start in range(0, columns, block_size):
        block = slice(start, min(start + block_size, columns))
        upper = factor.upper[:, :, block]
        target = torch.baddbmm(errors[:, block], upper[:, :start].mT, errors[:, :start])
        scale = torch.take_along_dim(group_scales, group_of_column[:, block], 1)
        for i, column in enumerate(range(block.start, block.stop)):
            code = target[:, i]
            code.div_(scale[:, i]).round_().clamp_(scheme.code_min, scheme.code_max)
            error = errors[:, column].addcmul_(code, scale[:, i], value=-1)
            target[:, i + 1 :].addcmul_(upper[:, column, i + 1 :, None], error[:, None])
        codes[:, block] = target
    for item, order in enumerate(factor.order):
        codes[item, order] = codes[item].clone()
    return codes.mT.reshape(batch, rows, columns)
