"""GPTQ: round the columns of a weight one after the other, each making up for the errors before it.

A linear with weight W [N, K] whose inputs have the second moment H [K, K] changes its output by
tr(E H Eᵀ) per token when W is rounded to Q, E = W - Q. With the Cholesky factorization

    H + damping = L Lᵀ,    L lower triangular,

a row's share of that is Σᵢ lᵢᵢ² (wᵢ + Σ_{j>i} eⱼ lⱼᵢ / lᵢᵢ - qᵢ)², so each column, from the last to
the first, is rounded to what is nearest to wᵢ + Σ_{j>i} eⱼ lⱼᵢ / lᵢᵢ. With columns in ascending
order of energy these are the codes of GPTQ with act-order (Frantar et al., arXiv 2210.17323), which
takes them in descending order from a Cholesky factor of H⁻¹; here nothing is inverted.

The scale of a group of 32 columns can be searched when the group's turn comes
(`gptq_and_scales`): by then the errors behind it are known, and with them what its columns have to
be rounded to. That takes groups whole, one after the other, where act-order alone scatters them.

Rows do not interact. Weights that read the same input are therefore just more rows of one weight,
and so they are solved: one factorization, one matrix product.

On the CPU this is plain torch; on a GPU the same in the kernels of `halfbyte.kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from halfbyte.core import Scheme
from halfbyte.errors import CalibrationError
from halfbyte.quantize.scales import divisors_of, least_squares_scales, stored_scales

DAMPING_STEPS = (1, 10, 100)
"""Multiples of the damping that are tried in turn until the Hessian factorizes."""
NEARBY = (1.0, 0.98, 0.96, 0.93, 1.03)
"""Multiples of a group's scale, and with signed scales their opposites, that are tried in full."""
DIAGONAL = "diagonal"
"""The fallback of a Hessian that never does: all beside its diagonal is ignored."""


@dataclass(frozen=True, slots=True)
class Factor:
    """H + damping = L Lᵀ for each of the Hessians [H, K, K] given to `factorize`."""

    order: torch.Tensor
    """int64 [H, K]: columns of the weight in the factor's order; the last is rounded first."""
    lower: torch.Tensor
    """float32 [H, P, P]: L in the lower triangle, rows and columns in that order. P is K, or more
    when a kernel pads; what the upper triangle holds is the kernel's business."""
    pivots: torch.Tensor
    """float32 [H, K], by column of the weight: lᵢᵢ², what a squared rounding error there costs."""
    damping: torch.Tensor
    """float32 [H]: what was added to the diagonal."""
    fallbacks: tuple[str | None, ...]
    """Per Hessian: None, "damping x10", "damping x100", or `DIAGONAL`."""
    together: int = 1
    """So many columns of the weight, from the first on, follow each other in the order."""


def factorize(
    hessians: torch.Tensor, dampening: float, *, act_order: bool = True, together: int = 1
) -> Factor:
    """Factorize second moments float32 [H, K, K], each by itself.

    `dampening` times the mean of the diagonal is added to the diagonal. With `act_order` columns
    are rounded in descending order of the diagonal, those with the most energy first, while later
    ones can still make up for their errors; `together` of them stay together, and go by their sum.
    An input that is always zero needs no special case:
    damping leaves its column on its own, so it is plainly rounded and disturbs nothing.

    A matrix that is not positive definite even so (too few or badly accumulated tokens) climbs the
    ladder of `DAMPING_STEPS`, and last loses all but its diagonal, which makes GPTQ plain rounding.
    Raises CalibrationError when a matrix holds NaN or infinity.
    """
    count, columns, _ = hessians.shape
    diagonal = hessians.diagonal(dim1=1, dim2=2)
    # One infinite activation makes a diagonal infinite, too, and NaN is in every sum.
    extremes = torch.stack(hessians.reshape(count, -1).aminmax(dim=1))
    if bad := (~torch.isfinite(extremes).all(0)).nonzero().flatten().tolist():
        raise CalibrationError(
            f"Hessian {bad[0]} of {count} [{columns}, {columns}] is not finite",
            hint="one infinite activation is enough; compute in float32: --dtype float32",
        )
    if act_order:
        energy = diagonal.unflatten(1, (-1, together))
        within = energy.argsort(dim=2, descending=True, stable=True)
        total = energy.sum(2, dtype=torch.float64)
        groups = total.argsort(dim=1, descending=True, stable=True)[..., None]
        within = within.gather(1, groups.expand_as(within))
        order = (groups * together + within).flatten(1).flip(1)
    else:
        order = torch.arange(columns, device=hessians.device).flip(0).repeat(count, 1)
    # In float64, so that no order of summing shows: it differs with the number of Hessians.
    damping = dampening * diagonal.mean(1, dtype=torch.float64).float()
    lower, failed = _cholesky(hessians, order, damping)
    factor = Factor(order, lower, diagonal, damping, (None,) * count, together)
    for item in failed.nonzero().flatten().tolist():
        factor = _with_more_damping(factor, item, hessians[item])
    pivots = torch.empty_like(diagonal, memory_format=torch.contiguous_format)
    found = factor.lower.diagonal(dim1=1, dim2=2)[:, :columns].square()
    return replace(factor, pivots=pivots.scatter_(1, order, found))


def _cholesky(
    hessians: torch.Tensor, order: torch.Tensor, damping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of ordered, damped matrices, and bool [H]: which of them failed."""
    if hessians.is_cuda:
        from halfbyte.kernels.cholesky import damped_cholesky

        return damped_cholesky(hessians, order, damping)
    lower = torch.empty_like(hessians)
    failed = torch.empty(len(hessians), dtype=torch.bool)
    for item, hessian in enumerate(hessians):
        damped = hessian[order[item]][:, order[item]]
        damped.diagonal().add_(damping[item])
        lower[item], info = torch.linalg.cholesky_ex(damped)
        failed[item] = info != 0
    return lower, failed


def _with_more_damping(factor: Factor, item: int, hessian: torch.Tensor) -> Factor:
    """The factor with one Hessian, which did not factorize, taken up the ladder."""
    one = slice(item, item + 1)
    fallback, damping = DIAGONAL, factor.damping[one]
    for step in DAMPING_STEPS[1:]:
        lower, failed = _cholesky(hessian[None], factor.order[one], step * damping)
        if not bool(failed):
            fallback = f"damping x{step}"
            factor.lower[one], factor.damping[one] = lower, step * damping
            break
    else:
        tiny = torch.finfo(hessian.dtype).tiny
        factor.lower[item] = torch.eye(factor.lower.shape[-1], device=hessian.device)
        own = hessian.diagonal()[factor.order[item]] + damping
        factor.lower[item].diagonal()[: len(own)] = own.clamp(min=tiny).sqrt()
    steps = (*factor.fallbacks[:item], fallback, *factor.fallbacks[item + 1 :])
    return replace(factor, fallbacks=steps)


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
    only where float32 rounding decides a tie. On a GPU blocks are of 128, whatever is asked for.
    """
    fixed = scales.reshape(len(factor.order), -1, scales.shape[-1]).contiguous()
    return _round(weights, factor, fixed, scheme, block_size)


def gptq_and_scales(
    weights: torch.Tensor,
    factor: Factor,
    scheme: Scheme,
    block_size: int = 128,
    *,
    signed: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as from `gptq`, and the scales, bfloat16 [B, N, groups], that were found on the way.

    Each group gets what `group_scales` finds for the columns as they stand when it is their turn,
    or a scale near it (`NEARBY`) with less error when they are rounded one after the other. The
    factor keeps the columns of a group together.
    """
    batch, rows, columns = weights.shape
    group = scheme.columns_per_group(columns)
    if factor.together != group:
        raise ValueError(f"a factor of groups of {factor.together} columns for groups of {group}")
    hessians = len(factor.order)
    shape = hessians, batch * rows // hessians, scheme.groups(columns)
    scales = torch.empty(shape, dtype=torch.bfloat16, device=weights.device)
    divisors = divisors_of(scheme, group, signed=signed)
    multiples = (*NEARBY, *(-multiple for multiple in NEARBY)) if signed else NEARBY
    codes = _round(weights, factor, scales, scheme, block_size, divisors, multiples)
    return codes, scales.reshape(batch, rows, -1)


def _round(
    weights: torch.Tensor,
    factor: Factor,
    scales: torch.Tensor,
    scheme: Scheme,
    block_size: int,
    divisors: Sequence[float] = (),
    multiples: Sequence[float] = (),
) -> torch.Tensor:
    """Codes int8 [B, N, K] for `scales` bfloat16 [H, rows, groups], H Hessians for all rows. With
    `divisors` these are searched, and written: at first the largest weight over each of them, then
    the `multiples` of what does best."""
    columns = weights.shape[-1]
    hessians, rows, _ = scales.shape
    group = scheme.columns_per_group(columns)
    shared = weights.reshape(hessians, rows, columns)
    if weights.is_cuda:
        from halfbyte.kernels.columns import round_columns

        codes = round_columns(
            shared,
            factor.lower,
            factor.order,
            scales,
            group,
            scheme.code_min,
            scheme.code_max,
            divisors,
            multiples,
        )
        return codes.reshape(weights.shape)
    # Transposed, so that a column lies in one piece: [hessians, columns, rows of all sharers].
    # Holds the weights at first, and their errors once they are rounded.
    errors = torch.empty_like(shared.mT, memory_format=torch.contiguous_format)
    for item, order in enumerate(factor.order):
        errors[item] = shared[item].mT[order]
    if divisors:
        block_size = max(block_size // group, 1) * group
    group_of_column = factor.order[..., None] // group
    pivot_roots = factor.lower.diagonal(dim1=1, dim2=2)
    codes = torch.empty_like(errors, dtype=torch.int8)
    for stop in range(columns, 0, -block_size):
        block = slice(max(0, stop - block_size), stop)
        lower = factor.lower[:, block.start :, block]
        # lⱼᵢ / lᵢᵢ: what an error in column j asks of column i.
        lower = lower / lower.diagonal(dim1=1, dim2=2)[:, None, :]
        width = lower.shape[-1]
        target = torch.baddbmm(errors[:, block], lower[:, width:].mT, errors[:, stop:columns])
        scale = torch.take_along_dim(scales.mT, group_of_column[:, block], 1).float()
        for i in reversed(range(width)):
            if divisors and (i + 1) % group == 0:
                own = slice(i + 1 - group, i + 1)
                turn = _Group(
                    errors[:, block][:, own],
                    target[:, own],
                    lower[:, own, own],
                    pivot_roots[:, block][:, own],
                    scheme,
                )
                found = turn.scales(divisors, multiples)[..., None]
                scale[:, own] = found.mT
                scales.scatter_(2, group_of_column[:, block][:, i : i + 1].expand_as(found), found)
            code = target[:, i]
            code.div_(scale[:, i]).round_().clamp_(scheme.code_min, scheme.code_max)
            error = errors[:, block.start + i].addcmul_(code, scale[:, i], value=-1)
            target[:, :i].addcmul_(lower[:, i, :i, None], error[:, None])
        codes[:, block] = target
    for item, order in enumerate(factor.order):
        codes[item, order] = codes[item].clone()
    return codes.mT.reshape(weights.shape).contiguous()


@dataclass(frozen=True, slots=True)
class _Group:
    """The columns of a group when it is their turn, in the order of the factor."""

    weights: torch.Tensor
    """float32 [H, columns, rows]."""
    target: torch.Tensor
    """float32 [H, columns, rows]: the same and what errors behind the group ask of them."""
    lower: torch.Tensor
    """float32 [H, columns, columns]: what an error in a column asks of those before it."""
    pivot_roots: torch.Tensor
    """float32 [H, columns]: what an error is multiplied with before it is squared."""
    scheme: Scheme

    def scales(self, divisors: Sequence[float], multiples: Sequence[float]) -> torch.Tensor:
        """bfloat16 [H, rows]: the largest magnitude over the divisor with the least error of each
        column on its own, or that multiple of it with the least when all are rounded in turn."""
        values = self._unrounded().permute(2, 0, 1).contiguous()
        start = least_squares_scales(values, self.scheme, divisors, self.pivot_roots).T.float()
        best = torch.empty_like(start, dtype=torch.bfloat16)
        least = torch.full_like(start, torch.inf)
        for multiple in multiples:
            candidate = stored_scales(start * multiple)
            total = self._error(candidate.float())
            better = total < least
            best = torch.where(better, candidate, best)
            least = torch.where(better, total, least)
        return best

    def _unrounded(self) -> torch.Tensor:
        """What the columns would be without any rounding, [H, columns, rows]: each makes up for the
        errors behind the group, and for those that the columns after it get from doing so."""
        values = self.target.clone()
        for i in reversed(range(values.shape[1])):
            self._pass_on(i, values[:, i], values)
        return values

    def _error(self, scale: torch.Tensor) -> torch.Tensor:
        """[H, rows]: squared errors, weighed, of columns rounded in turn with `scale` [H, rows]."""
        low, high = self.scheme.code_min, self.scheme.code_max
        values, total = self.target.clone(), torch.zeros_like(scale)
        for i in reversed(range(values.shape[1])):
            made = (values[:, i] / scale).round_().clamp_(low, high).mul_(scale)
            off = (values[:, i] - made).mul_(self.pivot_roots[:, i, None])
            total.addcmul_(off, off)
            self._pass_on(i, made, values)
        return total

    def _pass_on(self, i: int, made: torch.Tensor, values: torch.Tensor) -> None:
        """Have the columns before column `i` make up for what became of it."""
        error = self.weights[:, i] - made
        values[:, :i].addcmul_(self.lower[:, i, :i, None], error[:, None])
