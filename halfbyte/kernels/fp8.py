"""Products of FP8 activations with FP8 weights: torch's own, and what they mean in plain torch.

A weight has one scale, and activations come with a scale of 1: what is fastest. Blocks of 128 x 128
with scales of their own, which GLM and DeepSeek have, cost more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from halfbyte.kernels.reference import routed_experts, silu_gated
from halfbyte.kernels.w4a16 import Work

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Scaled:
    """FP8 weights [..., N, K] and the float32 scale [...] of each."""

    values: torch.Tensor
    scales: torch.Tensor

    def decoded(self, *index: int) -> torch.Tensor:
        """One weight, float64 [N, K]."""
        return self.values[index].double() * self.scales[index].double()


def linear(x: torch.Tensor, x_scale: torch.Tensor, weight: Scaled) -> torch.Tensor:
    """FP8 x [M, K] times `weight` [N, K] transposed: BF16 [M, N]. K and N are multiples of 16."""
    return torch._scaled_mm(
        x, weight.values.t(), x_scale, weight.scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def experts(
    x: torch.Tensor, gate_up: Scaled, down: Scaled, chosen: torch.Tensor, router: torch.Tensor
) -> torch.Tensor:
    """The routed experts of a layer in plain torch: BF16 [M, H] for FP8 `x` [M, H].

    `gate_up` [E, 2 I, H] has the gates first, `down` is [E, H, I]; `chosen` int32 [M, T] are the
    experts of a token, `router` float32 [M, T] their weights. silu(gate) times up is rounded to
    FP8; all else is float32.
    """

    def weights(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return gate_up.decoded(expert).float(), down.decoded(expert).float()

    return routed_experts(x, gate_up.values.shape[0], weights, chosen, router).bfloat16()


@dataclass(frozen=True)
class GroupedExperts:
    """The same by torch's grouped products, both of which round to BF16."""

    gate_up: Scaled
    """A scale to a row, [E, 2 I]."""
    down: Scaled
    numbers: torch.Tensor
    """int32 [E], from 0."""

    @staticmethod
    def of(gate_up: Scaled, down: Scaled) -> GroupedExperts:
        first, second = (
            Scaled(w.values, w.scales[:, None].expand(w.values.shape[:2]).contiguous())
            for w in (gate_up, down)
        )
        count, device = gate_up.values.shape[0], gate_up.values.device
        return GroupedExperts(first, second, torch.arange(count, dtype=torch.int32, device=device))

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
        """Raises what torch raises where it has no grouped products of FP8."""
        order = self._order(chosen)
        token = order // chosen.shape[1]
        ends = torch.searchsorted(chosen.flatten()[order], self.numbers, right=True, out_int32=True)
        # Bytes, since not every build of torch can gather FP8.
        rows = x.view(torch.uint8)[token].view(x.dtype)
        gated = silu_gated(_grouped(rows, self.gate_up, ends)).to(FP8)
        made = _grouped(gated, self.down, ends) * router.flatten()[order, None]
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return y.index_add_(0, token, made).bfloat16()

    def _order(self, chosen: torch.Tensor) -> torch.Tensor:
        """int32 [M T], the pairs (token, expert) by expert."""
        if chosen.is_cuda:
            return Work.of(chosen, len(self.numbers)).order
        return chosen.flatten().argsort(stable=True).int()


def _grouped(x: torch.Tensor, weight: Scaled, ends: torch.Tensor) -> torch.Tensor:
    """BF16: the rows of `x` up to each of `ends` times the weight of that expert."""
    ones = torch.ones(x.shape[0], device=x.device)
    if x.is_cuda:
        return torch._scaled_grouped_mm(
            x, weight.values.mT, ones, weight.scales, offs=ends, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip
    # torch has it for GPUs alone.
    starts = [0, *ends.tolist()]
    made = [
        x[start:end].float() @ (weight.values[i].float() * weight.scales[i, :, None]).T
        for i, (start, end) in enumerate(pairwise(starts))
    ]
    return torch.cat(made).bfloat16()
