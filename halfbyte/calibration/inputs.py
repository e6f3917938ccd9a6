"""Second moments of linear inputs: the Hessians that GPTQ minimises against.

Statistics belong to an input, not to a linear: the gate and up projection of an expert read the
same vectors and share one Hessian, so do q_a and kv_a, or q, k and v.

A routed expert sees few tokens, some experts very few, so its own Hessian is uncertain. What all
tokens of the layer would show it is certain and a little beside the point. Which of the two serves
best is measured in docs/results.md; the default blends them, `BLEND` tokens per feature of the
layer's mean to the expert's own. The rung of a linear says what its Hessian is made of:

- `routed`: its own tokens;
- `blended`: its own and the layer's mean;
- `all-tokens`: the layer's alone;
- `weights-only`: there was no token at all; the weight is rounded without calibration.

Every `HELD_OUT_STRIDE`-th token is kept out of all statistics, to check their results on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from halfbyte.calibration.limits import HELD_OUT_STRIDE, HELD_OUT_TOKENS, MOMENT_TOKENS, SAMPLE
from halfbyte.calibration.routing import Routing
from halfbyte.calibration.runner import LayerRunner, State
from halfbyte.core import ExpertHessian, InputStats, Rung
from halfbyte.errors import CalibrationError
from halfbyte.formats.rows import Rows

BLEND = 8
"""Tokens per input feature that the layer's mean counts for in a blended Hessian."""
FEW_HELD_OUT = 64
"""Held-out tokens below which an expert's are joined by others of the layer."""

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


def second_moment(inputs: torch.Tensor | Rows) -> torch.Tensor:
    """Sum of x xᵀ over the rows of `inputs` [n, K]; float32 [K, K] whatever the input's dtype."""
    columns = inputs.shape[1]
    total = torch.zeros(columns, columns, device=inputs.device)
    # In slices: an expert that most tokens reach has as many rows as the calibration text.
    for rows in inputs.split(MOMENT_TOKENS[inputs.device.type]):
        add_second_moment(total, rows)
    return total


def add_second_moment(total: torch.Tensor, rows: torch.Tensor) -> None:
    """total [K, K] += rowsᵀ rows, in float32.

    Products of BF16 are exact in float32, which is what a GPU's matrix units sum them in; there the
    lower half is computed by quarters and mirrored.
    """
    if not (rows.is_cuda and rows.dtype == torch.bfloat16):
        rows = rows.float()
        total.addmm_(rows.T, rows)
        return
    step = max(256, rows.shape[1] // 4)
    for start in range(0, rows.shape[1], step):
        part = rows[:, start : start + step]
        below = rows[:, start:]
        block = torch.mm(below.T, part, out_dtype=torch.float32)
        total[start:, start : start + step] += block
        total[start : start + step, start + step :] += block[step:].T


def evenly(count: int, among: int, device: torch.device) -> torch.Tensor:
    """int64 [min(count, among)]: indices below `among`, evenly spread."""
    count = min(count, among)
    spread = torch.linspace(0, among - 1, count, device=device, dtype=torch.float64)
    return spread.round().long()


def check_inputs(hessians: torch.Tensor, names: Sequence[str]) -> None:
    """Raises CalibrationError for the first of `hessians` [n, K, K], those of the inputs `names`,
    that a bad activation got into: its square is in the diagonal, whatever it meets elsewhere."""
    finite = torch.isfinite(hessians.diagonal(dim1=1, dim2=2)).all(1)
    for name, sound in zip(names, finite.tolist(), strict=True):
        if not sound:
            raise CalibrationError(
                f"the inputs of {name} are not finite", hint="compute in float32: --dtype float32"
            )


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
    held_out: dict[str, list[torch.Tensor]] = {}
    stride = max(HELD_OUT_STRIDE, state.hidden.shape[:2].numel() // HELD_OUT_TOKENS)

    def watch(key: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def see(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            rows = args[0].flatten(0, -2)
            moment = second_moment(rows)
            # From where the last call stopped: batches are of many lengths.
            held = rows[(stride - 1 - tokens.get(key, 0)) % stride :: stride].clone()
            moment -= second_moment(held)
            held_out.setdefault(key, []).append(held)
            sums[key] = sums[key].add_(moment) if key in sums else moment
            tokens[key] = tokens.get(key, 0) + len(rows)

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
    stats = {}
    for key, total in sums.items():
        held = torch.cat(held_out[key])
        mean = total / max(1, tokens[key] - len(held))
        check_inputs(mean[None], [key])
        stats[key] = InputStats(mean, tokens[key], held_out=held)
    return stats


class ExpertInputs:
    """Statistics of the inputs of one layer's routed experts. Not checked: that would wait for the
    GPU once for each of them."""

    def __init__(
        self,
        routing: Routing,
        choice: ExpertHessian = "blend",
        *,
        affinity: bool = False,
    ) -> None:
        """With `affinity` a token counts by the square of its router weight, relative to the mean
        square of the expert's tokens."""
        self._hidden = routing.hidden
        self._own, self._held = routing.split()
        self._choice = choice
        self._affinity = affinity
        self._mean: torch.Tensor | None = None
        self._sampled: torch.Tensor | None = None
        device = routing.hidden.device
        first = HELD_OUT_STRIDE - 1
        self._all_held = torch.arange(len(routing.hidden), device=device)[first::HELD_OUT_STRIDE]
        spread = evenly(HELD_OUT_TOKENS, len(self._all_held), device)
        self._layer_held = self._all_held[spread]

    def tokens(self, expert: int) -> int:
        """How many tokens the router sends to an expert, those held out among them."""
        return self._own.tokens(expert) + self._held.tokens(expert)

    def gate_up(self, expert: int) -> InputStats | None:
        """Of the hidden states that gate and up read; None when the layer saw no token."""
        return self._stats(expert, lambda rows: self._hidden[rows], self._layer_mean)

    def down(self, expert: int, runner: LayerRunner, gate_up: torch.Tensor) -> InputStats | None:
        """Of the vectors that down reads behind `gate_up` [2 I, H], gate and up as quantized."""

        def inner(rows: torch.Tensor) -> torch.Tensor:
            return runner.inner(self._hidden[rows], gate_up)

        def mean() -> torch.Tensor:
            sample = runner.inner(self._sample(SAMPLE * gate_up.shape[0] // 2), gate_up)
            return second_moment(sample) / max(1, len(sample))

        return self._stats(expert, inner, mean)

    def _stats(
        self,
        expert: int,
        inputs_of: Callable[[torch.Tensor], torch.Tensor],
        layer_mean: Callable[[], torch.Tensor],
    ) -> InputStats | None:
        """`inputs_of` gives the input vectors [n, K] of some tokens of the layer."""
        if not len(self._hidden):
            return None
        held = inputs_of(self._held_rows(expert))
        count, features = self._own.tokens(expert), held.shape[1]
        alone = self._choice == "all" or not count
        if alone:
            total, weight = layer_mean().clone(), 1
        else:
            total, weight = self._own_moment(expert, inputs_of, features), count
            if self._choice == "blend":
                total.add_(layer_mean(), alpha=BLEND * features)
                weight += BLEND * features
        rung: Rung = "all-tokens" if alone else "blended" if self._choice == "blend" else "routed"
        return InputStats(total.div_(weight), self.tokens(expert), rung, held)

    def _own_moment(
        self, expert: int, inputs_of: Callable[[torch.Tensor], torch.Tensor], features: int
    ) -> torch.Tensor:
        """Sum of x xᵀ over an expert's tokens, a slice of them at a time."""
        rows = self._own.rows(expert)
        total = torch.zeros(features, features, device=rows.device)
        step = MOMENT_TOKENS[rows.device.type]
        weights: Sequence[torch.Tensor | None] = [None] * -(-len(rows) // step)
        if self._affinity:
            weight = self._own.weight(expert)
            weights = (weight / weight.square().mean().sqrt()).split(step)
        for part, weight_of_part in zip(rows.split(step), weights, strict=True):
            inputs = inputs_of(part)
            if weight_of_part is not None:
                inputs = inputs * weight_of_part.to(inputs.dtype)
            add_second_moment(total, inputs)
        return total

    def _held_rows(self, expert: int) -> torch.Tensor:
        rows = self._held.rows(expert)
        rows = rows[evenly(HELD_OUT_TOKENS, len(rows), rows.device)]
        if len(rows) < FEW_HELD_OUT:
            others = self._layer_held[~torch.isin(self._layer_held, rows)]
            spread = evenly(FEW_HELD_OUT - len(rows), len(others), others.device)
            rows = torch.cat([rows, others[spread]])
        return rows

    def _layer_mean(self) -> torch.Tensor:
        if self._mean is None:
            total = second_moment(self._hidden)
            for held in self._all_held.split(MOMENT_TOKENS[total.device.type]):
                total -= second_moment(self._hidden[held])
            self._mean = total / max(1, len(self._hidden) - len(self._all_held))
        return self._mean

    def _sample(self, count: int) -> torch.Tensor:
        """What `count` tokens of the layer, evenly spread and none of them held out, show to all
        experts, [count, H]."""
        if self._sampled is None:  # all experts are of one width, and ask for as many
            tokens = self._hidden.shape[0]
            free = tokens - tokens // HELD_OUT_STRIDE
            place = evenly(count, free, self._hidden.device)
            self._sampled = self._hidden[place + place // (HELD_OUT_STRIDE - 1)]
        return self._sampled
