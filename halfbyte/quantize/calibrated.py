"""Calibrated quantization of one decoder layer: the statistics, the solve and the way on.

The order inside a layer: plain linears (attention, dense and shared MLP) are measured in one
forward pass with the weights as stored and replaced by their quantized selves; then one pass with
them gives the experts' input and routing; then, expert by expert, gate and up are quantized, the
down projection's input is measured behind the *quantized* gate and up, down is quantized, and the
expert's output joins the residual stream. What leaves the layer is what the quantized layer makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from halfbyte.calibration.inputs import (
    ExpertInputs,
    collect_linear_inputs,
    input_of,
    is_routed_expert,
)
from halfbyte.calibration.mtp import mtp_input
from halfbyte.calibration.routing import Routing
from halfbyte.calibration.runner import LayerRunner, State, check_finite
from halfbyte.core import (
    InputStats,
    LinearReport,
    QuantizedWeight,
    Settings,
    TensorPlan,
    Unit,
)
from halfbyte.errors import ResumeError
from halfbyte.formats.files import file_sha256
from halfbyte.kernels.reference import dequantize_int4
from halfbyte.quantize.memory import experts_at_once
from halfbyte.quantize.solver import Solved, solve

Emit = Callable[[TensorPlan, QuantizedWeight], None]
"""Takes a finished linear away, to be packed and written."""


@dataclass
class LayerQuantizer:
    """Carries the calibration state from layer to layer and quantizes each on the way."""

    runner: LayerRunner
    settings: Settings
    tokens: torch.Tensor
    """int64 [sequences, length]."""
    state: State | None = None
    """Input of the next layer; None before the embedding."""

    def run(self, unit: Unit, emit: Emit) -> list[LinearReport]:
        """Quantize what the plan says of a decoder (or MTP) layer and move the state through it.

        Raises CalibrationError when an activation is not finite.
        """
        assert unit.index is not None
        if self.state is None:
            self.state = self.runner.embed(self.tokens)
        depth = unit.index - self.runner.architecture.layers
        if depth >= 0:
            self.state = mtp_input(self.runner, unit.index, self.state, self.tokens, depth)
        planned = {t.module: t for t in unit.tensors if t.action == "quantize"}
        layer = self.runner.load_layer(unit.index)
        reports = self._plain_linears(unit, layer, planned, emit)
        routing = self.runner.forward(layer, self.state)
        del layer
        if routing is not None:
            reports += self._experts(unit.index, routing, planned, emit)
        del routing
        check_finite(self.state.hidden, unit.name)
        return reports

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The state by name, as `load` takes it up again. It changes with the next layer."""
        assert self.state is not None
        tensors = {"hidden": self.state.hidden}
        if self.state.topk is not None:
            tensors["topk"] = self.state.topk
        return tensors

    def load(self, path: Path, digest: str) -> None:
        """Take up the state that `tensors` gave. Raises ResumeError when it is not that."""
        if not path.exists() or file_sha256(path) != digest:
            raise ResumeError(
                f"the calibration state {path} is missing or damaged",
                hint="start again with --overwrite",
            )
        tensors = load_file(path, device=str(self.runner.device))
        self.state = State(tensors["hidden"], tensors.get("topk"))

    def _plain_linears(
        self, unit: Unit, layer: nn.Module, planned: Mapping[str, TensorPlan], emit: Emit
    ) -> list[LinearReport]:
        """Quantize the linears that are not routed experts, and put them in their place."""
        modules = [name for name in planned if not is_routed_expert(name)]
        if not modules:
            return []
        assert self.state is not None
        assert unit.index is not None
        prefix = self.runner.architecture.layer_name(unit.index)
        inputs = collect_linear_inputs(self.runner, layer, prefix, modules, self.state)
        reports = []
        for module in modules:
            plan = planned[module]
            weight = self.runner.read(plan.name, torch.float32)
            stats = inputs.get(input_of(module))
            solved = self._solve([weight], plan, [stats])
            reports += _hand_over([(plan, weight)], solved, 0, stats, emit)
            linear = layer.get_submodule(module.removeprefix(prefix))
            linear.weight = nn.Parameter(
                solved.dequantized(0).to(self.runner.dtype), requires_grad=False
            )
        return reports

    def _experts(
        self, index: int, routing: Routing, planned: Mapping[str, TensorPlan], emit: Emit
    ) -> list[LinearReport]:
        """Quantize the routed experts of a layer and add their outputs to the state."""
        assert self.state is not None
        runner, reports = self.runner, []
        prefix = f"{runner.architecture.layer_name(index)}mlp.experts."
        inputs = ExpertInputs(routing, f"layers.{index}")
        config = runner.architecture.config
        step = experts_at_once(config.to_dict(), self.settings.device)
        for start in range(0, config.n_routed_experts, step):
            chunk = range(start, min(start + step, config.n_routed_experts))
            weights = [runner.load_expert(index, expert) for expert in chunk]
            plans = [
                {leaf: planned.get(f"{prefix}{expert}.{leaf}") for leaf in weights[0]}
                for expert in chunk
            ]
            # One scheme for all experts of a layer, gate with up: the recipe guarantees it.
            gate_up = plans[0]["gate_proj"]
            if gate_up is not None:
                stats = [inputs.gate_up(expert) for expert in chunk]
                both = [torch.cat([w["gate_proj"], w["up_proj"]]) for w in weights]
                solved = self._solve(both, gate_up, stats)
                for i, (plan, weight) in enumerate(zip(plans, weights, strict=True)):
                    pair = [(plan[leaf], weight[leaf]) for leaf in ("gate_proj", "up_proj")]
                    reports += _hand_over(pair, solved, i, stats[i], emit)
                    weight["gate_proj"], weight["up_proj"] = solved.dequantized(i).chunk(2)
            inner = [
                runner.inner(
                    routing.hidden[routing.rows(expert)], weight["gate_proj"], weight["up_proj"]
                )
                for expert, weight in zip(chunk, weights, strict=True)
            ]
            if (down := plans[0]["down_proj"]) is not None:
                stats = [
                    inputs.down(runner, x, weight["gate_proj"], weight["up_proj"])
                    for x, weight in zip(inner, weights, strict=True)
                ]
                solved = self._solve([w["down_proj"] for w in weights], down, stats)
                for i, (plan, weight) in enumerate(zip(plans, weights, strict=True)):
                    single = [(plan["down_proj"], weight["down_proj"])]
                    reports += _hand_over(single, solved, i, stats[i], emit)
                    weight["down_proj"] = solved.dequantized(i)
            for expert, x, weight in zip(chunk, inner, weights, strict=True):
                if len(x):
                    runner.add_expert(self.state, routing, expert, x, weight["down_proj"])
        return reports

    def _solve(
        self,
        weights: Sequence[torch.Tensor],
        plan: TensorPlan,
        stats: Sequence[InputStats | None],
    ) -> Solved:
        assert plan.scheme is not None
        hessians = [s.hessian for s in stats if s is not None]
        return solve(
            torch.stack(list(weights)),
            plan.scheme,
            torch.stack(hessians) if hessians else None,
            self.settings,
        )


def _hand_over(
    linears: Sequence[tuple[TensorPlan | None, torch.Tensor]],
    solved: Solved,
    item: int,
    stats: InputStats | None,
    emit: Emit,
) -> list[LinearReport]:
    """Split what was solved as one stack of rows into its linears; emit and report each."""
    reports, row = [], 0
    for plan, weight in linears:
        assert plan is not None
        quantized, rtn_error = solved.rows(item, row, row + weight.shape[0])
        row += weight.shape[0]
        emit(plan, quantized)
        reports.append(report_of(plan, weight, quantized, rtn_error, stats))
    return reports


def report_of(
    plan: TensorPlan,
    weight: torch.Tensor,
    quantized: QuantizedWeight,
    rtn_error: float,
    stats: InputStats | None,
) -> LinearReport:
    """The line of the run report on a quantized linear; `weight` float32 [N, K] is its source."""
    off = weight - dequantize_int4(quantized.codes, quantized.scales)
    energy = float(weight.square().sum(dtype=torch.float64))
    return LinearReport(
        name=plan.module,
        scheme=str(plan.scheme),
        error=quantized.error,
        rtn_error=rtn_error,
        weight_error=float(off.square().sum(dtype=torch.float64)) / energy if energy else 0.0,
        tokens=stats.tokens if stats else 0,
        rung=stats.rung if stats else "weights-only",
        fallback=quantized.fallback,
    )
