"""Second moments of linear inputs: the Hessians that GPTQ minimises against.

Statistics belong to an input, not to a linear: the gate and up projection of an expert read the
same vectors and share one Hessian, so do q_a and kv_a, or q, k and v.

An expert whose router sends it fewer than `2 * in_features` tokens has a Hessian too uncertain to
trust. It is topped up to that many tokens with what the whole layer sees; the rung says how:

- `routed`: enough tokens of its own;
- `blended`: its own tokens, topped up with tokens (or the mean Hessian) of the whole layer;
- `all-tokens`: none of its own, only the layer's;
- `weights-only`: no token at all; the weight is rounded without calibration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from halfbyte.calibration.limits import BATCH_TOKENS
from halfbyte.calibration.routing import Routing
from halfbyte.calibration.runner import LayerRunner, State
from halfbyte.core import InputStats, Rung
from halfbyte.errors import CalibrationError

TOKENS_PER_FEATURE = 2
"""Tokens per input feature below which a Hessian is topped up."""

_SHARED_INPUTS = {
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "q_a_proj": "q_kv_a",
    "kv_a_proj_with_mqa": "q_kv_a",
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
}


def input_of(module: str) -> str:
    """Name of the input that a linear reads; equal for linears that share it.

    `model.layers.3.mlp.gate_proj` and `...up_proj` both read `model.layers.3.mlp.gate_up`.
    """
    owner, _, leaf = module.rpartition(".")
    return f"{owner}.{_SHARED_INPUTS.get(leaf, leaf)}"


def is_routed_expert(module: str) -> bool:
    """Whether a module is a linear of a routed expert."""
    return re.search(r"\.experts\.\d+\.(gate|up|down)_proj$", module) is not None


def second_moment(inputs: torch.Tensor) -> torch.Tensor:
    """Sum of x xᵀ over the rows of `inputs` [n, K]; float32 [K, K] whatever the input's dtype."""
    columns = inputs.shape[-1]
    total = inputs.new_zeros(columns, columns, dtype=torch.float32)
    # In slices: an expert that most tokens reach has as many rows as the calibration text.
    for part in inputs.reshape(-1, columns).split(BATCH_TOKENS):
        rows = part.float()
        total.addmm_(rows.T, rows)
    return total


def checked(stats: InputStats, where: str) -> InputStats:
    """Raises CalibrationError when a Hessian is not finite: one bad activation spoils them all."""
    if not bool(torch.isfinite(stats.hessian).all()):
        raise CalibrationError(
            f"the inputs of {where} are not finite", hint="compute in float32: --dtype float32"
        )
    return stats


@torch.no_grad()
def collect_linear_inputs(
    runner: LayerRunner, layer: nn.Module, prefix: str, modules: Sequence[str], state: State
) -> Mapping[str, InputStats]:
    """Statistics of the inputs of plain linears (not routed experts) of one layer.

    `modules` are full names starting with `prefix`. The key is `input_of` the module. The state
    is not moved on.
    """
    sums: dict[str, torch.Tensor] = {}
    tokens: dict[str, int] = {}

    def watch(key: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def see(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            moment = second_moment(args[0])
            sums[key] = sums[key].add_(moment) if key in sums else moment
            tokens[key] = tokens.get(key, 0) + args[0].numel() // args[0].shape[-1]

        return module.register_forward_pre_hook(see)

    first = {input_of(name): name for name in reversed(modules)}
    handles = [
        watch(key, layer.get_submodule(name.removeprefix(prefix))) for key, name in first.items()
    ]
    try:
        runner.forward(layer, state, keep=False)
    finally:
        for handle in handles:
            handle.remove()
    return {
        key: checked(InputStats(total / tokens[key], tokens[key]), key)
        for key, total in sums.items()
    }


class ExpertInputs:
    """Statistics of the routed experts of one layer, each topped up where its tokens are few."""

    def __init__(self, routing: Routing, layer: str) -> None:
        """`layer` names the experts' layer in errors."""
        self._routing = routing
        self._layer = layer
        self._layer_moment: torch.Tensor | None = None

    def gate_up(self, expert: int) -> InputStats | None:
        """Of the hidden states that gate and up read; None when the layer saw no token."""
        routing = self._routing
        own = routing.tokens(expert)
        missing = self._missing(own, routing.hidden.shape[1])
        total = second_moment(routing.hidden[routing.rows(expert)])
        if missing:
            total += missing * self._layer_mean()
        return self._stats(total, own, missing)

    def down(
        self, runner: LayerRunner, inner: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> InputStats | None:
        """Of the vectors that down reads: `inner` [n, I] of its own tokens, and when they are few
        those that the expert would make of tokens spread evenly over the layer's."""
        own, width = inner.shape
        missing = self._missing(own, width)
        total = second_moment(inner)
        if missing:
            everything = self._routing.hidden
            spread = (
                torch.linspace(
                    0,
                    everything.shape[0] - 1,
                    missing,
                    device=everything.device,
                    dtype=torch.float64,
                )
                .round()
                .long()
            )
            total += second_moment(runner.inner(everything[spread], gate, up))
        return self._stats(total, own, missing)

    def _missing(self, own: int, features: int) -> int:
        available = self._routing.hidden.shape[0]
        return min(available, max(0, TOKENS_PER_FEATURE * features - own))

    def _layer_mean(self) -> torch.Tensor:
        if self._layer_moment is None:
            hidden = self._routing.hidden
            self._layer_moment = second_moment(hidden) / hidden.shape[0]
        return self._layer_moment

    def _stats(self, total: torch.Tensor, own: int, missing: int) -> InputStats | None:
        if own + missing == 0:
            return None
        rung: Rung = "routed" if not missing else "blended" if own else "all-tokens"
        stats = InputStats(total / (own + missing), own, rung)
        return checked(stats, f"the experts of {self._layer}")
