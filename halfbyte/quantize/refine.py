"""Coordinate descent after rounding: better codes and group scales for the same Hessian.

GPTQ looks at each column once, and its scales are fixed beforehand. What it leaves is improved here
column by column: with all other codes as they are, J = E (H + damping) Eᵀ of a row is a parabola in
the scale s of one group (minimum at s + c·g / c·H c, c the group's codes, g = E H its gradient) and
in one code q (minimum at q + gᵢ / s hᵢᵢ). Scales are rounded to BF16 and taken only where J falls.
Sweeps over all columns are repeated. Scale updates with the codes frozen are those of arXiv
2602.02126, the descent over codes is that of QuantEase (arXiv 2309.01885).
"""

from __future__ import annotations

import torch

from halfbyte.core import Scheme
from halfbyte.kernels.reference import rounding_errors

_SCALED_GROUP = 128
"""Columns of the largest group whose scale is refined; the codes of larger ones are."""
_BLOCK = 128


def refine(
    weights: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    hessians: torch.Tensor,
    damping: torch.Tensor,
    scheme: Scheme,
    sweeps: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [B, N, K] and scales bfloat16 [B, N, groups] that do better than those given.

    `weights` float32 [B, N, K]; `hessians` float32 [B or 1, K, K] with `damping` float32 [B or 1],
    one for all weights or one each. K is a multiple of 8.
    """
    batch, rows, columns = weights.shape
    count = hessians.shape[0]
    groups = scales.shape[-1]
    errors = rounding_errors(weights, codes, scales).reshape(count, -1, columns)
    codes = codes.reshape(count, -1, columns).clone()
    scales = scales.reshape(count, -1, groups).clone()
    # The kernel takes columns, and groups, by 32.
    if weights.is_cuda and columns % 32 == scheme.columns_per_group(columns) % 32 == 0:
        from halfbyte.kernels.refinement import descend

        descend(
            errors,
            codes,
            scales,
            hessians,
            damping,
            scheme.columns_per_group(columns),
            scheme.code_min,
            scheme.code_max,
            sweeps,
        )
    else:
        damped = hessians.clone()
        damped.diagonal(dim1=1, dim2=2).add_(damping[:, None])
        _descend(errors, codes, scales, damped, scheme, sweeps)
    return codes.reshape(batch, rows, columns), scales.reshape(batch, rows, groups)


def _descend(
    errors: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    hessians: torch.Tensor,
    scheme: Scheme,
    sweeps: int,
) -> None:
    """Sweeps over all columns, in place; see `halfbyte.kernels.refinement.descend`."""
    columns = errors.shape[-1]
    group = scheme.columns_per_group(columns)
    step = group if group <= _SCALED_GROUP else min(_BLOCK, columns)
    for _ in range(sweeps):
        for start in range(0, columns, step):
            part = slice(start, min(start + step, columns))
            gradient = errors @ hessians[:, :, part]
            within = hessians[:, part, part]
            scale = scales[:, :, start // group].float()
            if group <= _SCALED_GROUP:
                scale = _refine_scale(
                    errors[:, :, part], codes[:, :, part], scale, gradient, within
                )
                scales[:, :, start // group] = scale.bfloat16()
            _descend_codes(errors[:, :, part], codes[:, :, part], scale, gradient, within, scheme)


def _refine_scale(
    errors: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    gradient: torch.Tensor,
    hessian: torch.Tensor,
) -> torch.Tensor:
    """The best scale of a group for its codes; brings `errors` and `gradient` up to date."""
    code = codes.float()
    pull = code @ hessian
    slope, curve = (code * gradient).sum(-1), (code * pull).sum(-1)
    best = (scale + slope / torch.where(curve > 0, curve, 1)).bfloat16().float()
    change = best - scale
    better = (curve > 0) & (best * scale > 0) & (change * (change * curve - 2 * slope) < 0)
    change = torch.where(better, change, 0)[..., None]
    errors.addcmul_(code, change, value=-1)
    gradient.addcmul_(pull, change, value=-1)
    return torch.where(better, best, scale)


def _descend_codes(
    errors: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    gradient: torch.Tensor,
    hessian: torch.Tensor,
    scheme: Scheme,
) -> None:
    """Each code in turn to where it is best while the others stay; all in place."""
    # Transposed, so that a column lies in one piece.
    gradient = gradient.mT.contiguous()
    now = codes.mT.float()
    moved = torch.empty_like(gradient)
    curve = hessian.diagonal(dim1=1, dim2=2)
    inverse = torch.where(curve > 0, 1 / curve, 0)
    for i in range(gradient.shape[1]):
        best = now[:, i] + gradient[:, i] / scale * inverse[:, i, None]
        best = best.round_().clamp_(scheme.code_min, scheme.code_max)
        torch.mul(now[:, i] - best, scale, out=moved[:, i])
        now[:, i] = best
        gradient[:, i + 1 :].addcmul_(hessian[:, i, i + 1 :, None], moved[:, i, None])
    codes.copy_(now.mT)
    errors.add_(moved.mT)
