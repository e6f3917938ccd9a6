"""From weights and the statistics of their inputs to codes and scales: the quantizer of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from halfbyte.core import (
    InputStats,
    LinearReport,
    QuantizedWeight,
    Scheme,
    Settings,
    TensorPlan,
)
from halfbyte.kernels.reference import dequantize_int4, rounding_errors, squared_sums
from halfbyte.quantize import llmcompressor
from halfbyte.quantize.feedback import RowFeedback
from halfbyte.quantize.gptq import (
    DIAGONAL,
    Factor,
    factorize,
    gptq,
    gptq_and_scales,
)
from halfbyte.quantize.refine import refine
from halfbyte.quantize.rtn import round_to_nearest
from halfbyte.quantize.scales import group_scales

HELD_OUT = "rtn: better on held-out tokens"
"""The fallback of a linear that plain rounding serves better, on tokens that no Hessian saw."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is known of the inputs of a batch of weights [B, N, K]."""

    hessians: torch.Tensor
    """Second moments, float32 [B, K, K], or [1, K, K] when all weights read the same input."""
    held_out: Sequence[torch.Tensor] | None = None
    """Inputs [m, K] for each of B weights, or one for all, that the Hessians have not seen. Not
    padded to one length: a library may add up products of other shapes in another order."""

    def held_out_of(self, item: int) -> torch.Tensor | None:
        """Held-out inputs of one weight of the batch; None when there were too few tokens."""
        if self.held_out is None:
            return None
        held_out = self.held_out[item % len(self.held_out)]
        return held_out if len(held_out) else None


@dataclass(frozen=True, slots=True)
class Solved:
    """A batch of quantized weights, each the stacked rows of linears that read the same input."""

    codes: torch.Tensor
    """int8 [B, N, K]."""
    scales: torch.Tensor
    """bfloat16 [B, N, groups]."""
    linears: tuple[tuple[QuantizedWeight, ...], ...]
    """Per weight of the batch its linears, in the order of their rows."""

    def dequantized(self, item: int) -> torch.Tensor:
        """Weight `item` as it will be served, float32 [N, K]."""
        return dequantize_int4(self.codes[item], self.scales[item])


def solve(
    weights: torch.Tensor,
    scheme: Scheme,
    inputs: Inputs | None,
    settings: Settings,
    parts: Sequence[int] = (),
    feedback: RowFeedback | None = None,
) -> Solved:
    """Quantize `weights` float32 [B, N, K] by the method, engine and scale search of `settings`.

    `parts` are the rows of the linears that each weight is a stack of; by default it is one. With
    `feedback` rows make up for each other when GPTQ is used.
    Without `inputs` a weight is rounded on its own, which under methods that compensate is the
    fallback "rtn"; those that only round (rtn, awq) measure with them. A linear that plain rounding
    serves better on the held-out inputs is rounded plainly, and says so. No weight's result depends
    on the others in the batch. Raises CalibrationError when a Hessian is not finite,
    DependencyError without the engine.
    """
    parts = tuple(parts) or (weights.shape[1],)
    batch = weights.shape[0]
    search, signed = settings.scale_search, settings.signed_scales
    if not settings.compensates or inputs is None:
        importance = None
        if settings.scales_inputs and inputs is not None:
            # Scaled columns are far from equal: unweighted, clipping would hit the loud ones.
            importance = inputs.hessians.diagonal(dim1=1, dim2=2)
        scales = group_scales(weights, scheme, search, importance, signed=signed)
        codes = rounded = round_to_nearest(weights, scales, scheme)
        plain = scales
        fallbacks: list[str | None] = ["rtn" if settings.compensates else None] * batch
    else:
        group = scheme.columns_per_group(weights.shape[-1])
        together = group if settings.searches_in_turn(group) else 1
        factor = factorize(inputs.hessians, settings.dampening, together=together)
        # What GPTQ minimises is the rounding errors weighed by its pivots, so scales are chosen
        # for that. On calibration inputs this beats the plain squared error and the Hessian's
        # diagonal, which counts errors that later columns make up for.
        plain = group_scales(weights, scheme, search, factor.pivots, signed=signed)
        rounded = round_to_nearest(weights, plain, scheme)
        if feedback is None:
            codes, scales, steps = _compensated(weights, factor, inputs, scheme, settings, plain)
            factor = replace(factor, lower=factor.lower.new_empty(0))  # as large as all Hessians
            hessians, damping = inputs.hessians, factor.damping
            codes, scales = refine(
                weights, codes, scales, hessians, damping, scheme, settings.refine
            )
        else:
            codes, scales = _by_blocks(weights, feedback, factor, inputs, scheme, settings)
            steps = factor.fallbacks
        for item in range(batch):
            if factor.fallbacks[item % len(factor.fallbacks)] == DIAGONAL:
                # Refinement would descend without end.
                codes[item], scales[item] = rounded[item], plain[item]
        del factor
        fallbacks = list(steps) * (batch // len(steps))
    errors = rounding_errors(weights, codes, scales)
    rounding = errors if codes is rounded else rounding_errors(weights, rounded, plain)
    energy, error, rtn_error = (
        _by_part(_energy(rows, inputs), parts) for rows in (weights, errors, rounding)
    )
    held = [inputs is not None and inputs.held_out_of(item) is not None for item in range(batch)]
    worse = (error > rtn_error) & torch.tensor(held, device=error.device)[:, None]
    for item, rows in _true(worse.tolist(), parts):
        codes[item, rows], scales[item, rows] = rounded[item, rows], plain[item, rows]
        errors[item, rows] = rounding[item, rows]
    error = torch.where(worse, rtn_error, error)
    off, square = (_by_part(squared_sums(rows), parts) for rows in (errors, weights))
    # A linear whose output is always zero cannot be wrong by much either.
    shares = [part / whole.where(whole > 0, torch.inf) for part, whole in
              ((error, energy), (rtn_error, energy), (off, square))]  # fmt: skip
    sizes = _scale_sizes(scales, parts)
    peaks = _peaks(weights, square, parts)
    measured = torch.stack([*shares, *sizes, peaks, worse.double()], dim=-1).tolist()
    linears = []
    for item in range(batch):
        start, stack = 0, []
        for height, (*figures, plainly) in zip(parts, measured[item], strict=True):
            names = ("error", "rtn_error", "weight_error", *_SCALE_SIZES, "peak")
            numbers = dict(zip(names, map(_digits, figures), strict=True))
            where = item, slice(start, start + height)
            start += height
            stack.append(
                QuantizedWeight(
                    codes[where],
                    scales[where],
                    fallback=HELD_OUT if plainly else fallbacks[item],
                    **numbers,
                )
            )
        linears.append(tuple(stack))
    return Solved(codes, scales, tuple(linears))


def _compensated(
    weights: torch.Tensor,
    factor: Factor,
    inputs: Inputs,
    scheme: Scheme,
    settings: Settings,
    plain: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, tuple[str | None, ...]]:
    """Codes by GPTQ, their scales, and what it fell back to per Hessian. `plain` are the scales of
    the weights on their own, if they are known."""
    search, signed = settings.scale_search, settings.signed_scales
    if factor.together > 1:
        found = gptq_and_scales(weights, factor, scheme, settings.block_size, signed=signed)
        return *found, factor.fallbacks
    scales = plain
    if scales is None:
        scales = group_scales(weights, scheme, search, factor.pivots, signed=signed)
    if settings.engine == "llmcompressor":
        codes, steps = llmcompressor.gptq(
            weights,
            inputs.hessians,
            scales,
            scheme,
            dampening=settings.dampening,
            block_size=settings.block_size,
        )
        return codes, scales, steps
    return gptq(weights, factor, scales, scheme, settings.block_size), scales, factor.fallbacks


def _by_blocks(
    weights: torch.Tensor,
    feedback: RowFeedback,
    factor: Factor,
    inputs: Inputs,
    scheme: Scheme,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and refined scales, block by block of the rows, each for what errors before ask of it.
    Shapes as in `Solved`."""
    batch, rows, columns = weights.shape
    codes = torch.empty_like(weights, dtype=torch.int8)
    scales = weights.new_empty(batch, rows, scheme.groups(columns), dtype=torch.bfloat16)
    # BF16 is exact enough for what errors ask of other rows, and fast on a GPU.
    errors = torch.empty_like(weights, dtype=torch.bfloat16 if weights.is_cuda else torch.float32)
    for block, target in feedback.targets(weights, errors):
        own, found, _ = _compensated(target, factor, inputs, scheme, settings)
        own, found = refine(
            target, own, found, inputs.hessians, factor.damping, scheme, settings.refine
        )
        codes[:, block], scales[:, block] = own, found
        errors[:, block] = rounding_errors(weights[:, block], own, found).to(errors.dtype)
    return codes, scales


class Collected:
    """Statistics of the inputs of a batch of weights, as they come.

    Each Hessian goes to its place in the batch at once, so that none exists twice.
    """

    def __init__(self, count: int) -> None:
        self.notes: list[InputStats | None] = []
        """Without the matrices, for the report."""
        self._count = count
        self._hessians: torch.Tensor | None = None
        self._held_out: list[torch.Tensor] = []

    def add(self, stats: InputStats | None) -> None:
        """Of the next weight; None when no token was seen, which is then so for all of them."""
        if stats is None:
            self.notes.append(None)
            return
        if self._hessians is None:
            self._hessians = stats.hessian.new_empty(self._count, *stats.hessian.shape)
        self._hessians[len(self.notes)] = stats.hessian
        if stats.held_out is not None:
            self._held_out.append(stats.held_out)
        self.notes.append(replace(stats, hessian=stats.hessian.new_empty(0), held_out=None))

    def inputs(self) -> Inputs | None:
        """What `solve` needs to know of them."""
        if self._hessians is None:
            return None
        return Inputs(self._hessians, self._held_out or None)


def report_of(
    plan: TensorPlan, quantized: QuantizedWeight, stats: InputStats | None
) -> LinearReport:
    """The line of the run report on a quantized linear."""
    return LinearReport(
        name=plan.module,
        scheme=str(plan.scheme),
        error=quantized.error,
        rtn_error=quantized.rtn_error,
        weight_error=quantized.weight_error,
        tokens=stats.tokens if stats else 0,
        rung=stats.rung if stats else "weights-only",
        fallback=quantized.fallback,
        smallest_scale=quantized.smallest_scale,
        mean_scale=quantized.mean_scale,
        largest_scale=quantized.largest_scale,
        peak=quantized.peak,
    )


def _digits(number: float) -> float:
    """Nine digits; those behind them tell the order of summing, which reports must not show."""
    return float(f"{number:.9g}")


def _energy(rows: torch.Tensor, inputs: Inputs | None) -> torch.Tensor:
    """Squared output of each row of [B, N, K], float64 [B, N]: summed over the held-out inputs, or
    else x H xᵀ, or without any inputs |x|²."""
    if inputs is None:
        return squared_sums(rows)
    energy = torch.empty(rows.shape[:2], dtype=torch.float64, device=rows.device)
    # One by one: a library may add up a batch of products in another order than a single one.
    for item, row in enumerate(rows):
        held_out = inputs.held_out_of(item)
        if held_out is not None:
            outputs = held_out @ row.to(held_out.dtype).T
            energy[item] = outputs.float().square().sum(0, dtype=torch.float64)
        else:
            hessian = inputs.hessians[item % len(inputs.hessians)]
            energy[item] = (row @ hessian).mul_(row).sum(-1, dtype=torch.float64)
    return energy


def _by_part(rows: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
    """Sums [B, parts] of numbers [B, N] by the linear a row belongs to."""
    return torch.stack([part.sum(1) for part in rows.split(tuple(parts), dim=1)], dim=1)


_SCALE_SIZES = ("smallest_scale", "mean_scale", "largest_scale")


def _scale_sizes(scales: torch.Tensor, parts: Sequence[int]) -> list[torch.Tensor]:
    """Smallest, mean and largest size of the scales [B, N, groups] of each linear, float64
    [B, parts] each."""
    sizes = scales.abs().double().split(tuple(parts), dim=1)
    kinds = torch.Tensor.amin, torch.Tensor.mean, torch.Tensor.amax
    return [torch.stack([kind(part, dim=(1, 2)) for part in sizes], dim=1) for kind in kinds]


def _peaks(weights: torch.Tensor, square: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
    """Largest over root mean square of the weights [B, N, K] of each linear, whose sums of squares
    are `square` [B, parts]; 0 for a linear of zeros."""
    low, high = weights.aminmax(dim=-1)  # unlike abs(), no second copy of the weights
    largest = torch.maximum(-low, high).double()
    peaks = torch.stack([part.amax(1) for part in largest.split(tuple(parts), dim=1)], dim=1)
    counts = [height * weights.shape[-1] for height in parts]
    means = torch.stack([square[:, i] / count for i, count in enumerate(counts)], dim=1)
    return peaks / means.sqrt().where(square > 0, torch.inf)


def _true(flags: list[list[bool]], parts: Sequence[int]) -> list[tuple[int, slice]]:
    """Item and rows of each flag [B, parts] that is set."""
    ends = [sum(parts[: i + 1]) for i in range(len(parts))]
    return [
        (item, slice(ends[part] - parts[part], ends[part]))
        for item, row in enumerate(flags)
        for part, flag in enumerate(row)
        if flag
    ]
