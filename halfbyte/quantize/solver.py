"""From weights and the statistics of their inputs to codes and scales: the quantizer of the run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.core import QuantizedWeight, Scheme, Settings
from halfbyte.kernels.reference import dequantize_int4
from halfbyte.quantize import llmcompressor
from halfbyte.quantize.gptq import factorize, gptq
from halfbyte.quantize.rtn import round_to_nearest
from halfbyte.quantize.scales import group_scales


@dataclass(frozen=True, slots=True)
class Solved:
    """A batch of quantized weights and, row by row, what quantization did to their outputs.

    Rows are kept apart because linears that read the same input (gate and up of an expert) are
    solved as one weight with the rows of both. Energies are float64 [B, N]: the mean square of a
    row's output over the calibration tokens, x H xᵀ with the undamped Hessian, or without one |x|².
    """

    codes: torch.Tensor
    """int8 [B, N, K]."""
    scales: torch.Tensor
    """bfloat16 [B, N, groups]."""
    fallbacks: tuple[str | None, ...]
    """Per weight: None, or the step of the ladder it took; see `QuantizedWeight.fallback`."""
    energy: torch.Tensor
    """Of the weights as given."""
    error: torch.Tensor
    """Of weights minus quantized weights."""
    rtn_error: torch.Tensor
    """Of weights minus plainly rounded weights, with the same scales."""

    def rows(self, item: int, start: int, stop: int) -> tuple[QuantizedWeight, float]:
        """The linear in rows `start` to `stop` of weight `item`, and its error when only rounded.

        Both errors are relative to the energy of the linear; see `QuantizedWeight.error`.
        """
        where = item, slice(start, stop)
        energy, error, rtn_error = (
            float(energies[where].sum()) for energies in (self.energy, self.error, self.rtn_error)
        )
        # A linear whose output is always zero cannot be wrong by much either.
        relative = 1 / energy if energy > 0 else 0.0
        quantized = QuantizedWeight(
            self.codes[where], self.scales[where], error * relative, self.fallbacks[item]
        )
        return quantized, rtn_error * relative

    def dequantized(self, item: int) -> torch.Tensor:
        """Weight `item` as it will be served, float32 [N, K]."""
        return dequantize_int4(self.codes[item], self.scales[item])


def solve(
    weights: torch.Tensor, scheme: Scheme, hessians: torch.Tensor | None, settings: Settings
) -> Solved:
    """Quantize `weights` float32 [B, N, K] by the method, engine and scale search of `settings`.

    `hessians` float32 [B, K, K] are the second moments of their inputs, or [1, K, K] when all
    read the same one. Methods that only round (rtn, awq) measure with them. Without them a weight
    is rounded on its own, which under the others is the fallback "rtn". No weight's result
    depends on the others in the batch.
    Raises CalibrationError when a Hessian is not finite, DependencyError without the engine.
    """
    batch = weights.shape[0]
    fallbacks: tuple[str | None, ...]
    if not settings.compensates or hessians is None:
        importance = None
        if settings.scales_inputs and hessians is not None:
            # Scaled columns are far from equal: unweighted, clipping would hit the loud ones.
            importance = hessians.diagonal(dim1=-2, dim2=-1)
        scales = group_scales(weights, scheme, settings.scale_search, importance)
        codes = rounded = round_to_nearest(weights, scales, scheme)
        fallbacks = ("rtn" if settings.compensates else None,)
    else:
        factor = factorize(hessians, settings.dampening)
        # What GPTQ minimises is the rounding errors weighed by its pivots, so scales are chosen
        # for that. On calibration inputs this beats the plain squared error and the Hessian's
        # diagonal, which counts errors that later columns make up for.
        scales = group_scales(weights, scheme, settings.scale_search, factor.pivots)
        rounded = round_to_nearest(weights, scales, scheme)
        if settings.engine == "llmcompressor":
            codes, fallbacks = llmcompressor.gptq(
                weights,
                hessians,
                scales,
                scheme,
                dampening=settings.dampening,
                block_size=settings.block_size,
            )
        else:
            codes = gptq(weights, factor, scales, scheme, settings.block_size)
            fallbacks = factor.fallbacks
    energy = weights.new_empty(3, batch, weights.shape[1], dtype=torch.float64)
    for item, weight in enumerate(weights):
        hessian = None if hessians is None else hessians[item % len(hessians)]
        energy[0, item] = _output_energy(weight, hessian)
        for row, result in enumerate((codes, rounded), start=1):
            error = weight - dequantize_int4(result[item], scales[item])
            energy[row, item] = _output_energy(error, hessian)
    return Solved(codes, scales, fallbacks * (batch // len(fallbacks)), *energy)


def _output_energy(weight: torch.Tensor, hessian: torch.Tensor | None) -> torch.Tensor:
    """Mean square output of each row of [N, K], float64 [N]."""
    projected = weight if hessian is None else weight @ hessian
    return projected.mul(weight).sum(-1, dtype=torch.float64)
