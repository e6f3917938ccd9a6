"""Calibrated quantization of one decoder layer: the statistics, the solve and the way on.

The order inside a layer: plain linears (attention, dense and shared MLP) are measured in one
forward pass with the weights as stored and replaced by their quantized selves; then one pass with
them gives the experts' input and routing; then, expert by expert, gate and up are quantized, the
down projection's input is measured behind the *quantized* gate and up, down is quantized, and the
expert's output joins the residual stream. What leaves the layer is what the quantized layer makes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from halfbyte.calibration.inputs import (
    ExpertInputs,
    collect_linear_inputs,
    input_of,
    is_routed_expert,
    second_moment,
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
from halfbyte.formats.files import file_sha256, sync_folder
from halfbyte.kernels.reference import dequantize_int4
from halfbyte.quantize.memory import experts_at_once
from halfbyte.quantize.readers import ScalableInput, scalable_inputs
from halfbyte.quantize.smoothing import ScaleSearch, Smoothing
from halfbyte.quantize.solver import solve

Stack = Sequence[tuple[TensorPlan | None, torch.Tensor]]
"""Linears that read the same input, quantized as one: their plans and weights float32 [N, K]."""
Emit = Callable[[TensorPlan, QuantizedWeight], None]
"""Takes a finished linear away, to be packed and written."""


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What became of a layer."""

    reports: tuple[LinearReport, ...]
    smoothing: Smoothing
    """The scales of its inputs; its tensors that stay floating point are written with them."""


@dataclass
class LayerQuantizer:
    """Carries the calibration state from layer to layer and quantizes each on the way."""

    runner: LayerRunner
    settings: Settings
    tokens: torch.Tensor
    """int64 [sequences, length]."""
    state: State | None = None
    """Input of the next layer; None before the embedding."""

    def run(self, unit: Unit, emit: Emit) -> LayerResult:
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
        search = self._scale_search(unit, planned)
        layer = self.runner.load_layer(unit.index)
        reports = self._plain_linears(unit, layer, search, emit)
        routing = self.runner.forward(layer, self.state)
        del layer
        if routing is not None:
            reports += self._experts(unit.index, routing, search, emit)
        del routing
        check_finite(self.state.hidden, unit.name)
        return LayerResult(tuple(reports), search.smoothing)

    def save(self, path: Path) -> str:
        """Store the state, durably; the SHA-256 of the file."""
        assert self.state is not None
        tensors = {"hidden": self.state.hidden.cpu()}
        if self.state.topk is not None:
            tensors["topk"] = self.state.topk.cpu()
        save_file(tensors, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        sync_folder(path.parent)
        return file_sha256(path)

    def load(self, path: Path, digest: str) -> None:
        """Take up the state that `save` stored. Raises ResumeError when it is not that."""
        if not path.exists() or file_sha256(path) != digest:
            raise ResumeError(
                f"the calibration state {path} is missing or damaged",
                hint="start again with --overwrite",
            )
        tensors = load_file(path, device=str(self.runner.device))
        self.state = State(tensors["hidden"], tensors.get("topk"))

    def _scale_search(self, unit: Unit, planned: Mapping[str, TensorPlan]) -> ScaleSearch:
        """For the inputs of a layer that may be scaled: none under methods that do not."""
        inputs: tuple[ScalableInput, ...] = ()
        if self.settings.scales_inputs:
            inputs, _ = scalable_inputs(unit)
        read = partial(self.runner.read, dtype=torch.float32)
        return ScaleSearch(Smoothing(inputs), planned, read, self.settings)

    def _plain_linears(
        self, unit: Unit, layer: nn.Module, search: ScaleSearch, emit: Emit
    ) -> list[LinearReport]:
        """Quantize the linears that are not routed experts, and put them in their place."""
        planned = search.planned
        modules = [name for name in planned if not is_routed_expert(name)]
        if not modules:
            return []
        assert self.state is not None
        assert unit.index is not None
        prefix = self.runner.architecture.layer_name(unit.index)
        inputs = collect_linear_inputs(self.runner, layer, prefix, modules, self.state)
        by_module = {m: inputs[input_of(m)] for m in modules if input_of(m) in inputs}
        search.plain_inputs(by_module, self._experts_per_token())
        reports = []
        for module in modules:
            plan = planned[module]
            weight = self.runner.read(plan.name, torch.float32)
            batch = [[(plan, weight)]]
            done, [[served]] = self._solve(batch, [by_module.get(module)], search.smoothing, emit)
            reports += done
            linear = layer.get_submodule(module.removeprefix(prefix))
            linear.weight = nn.Parameter(served.to(self.runner.dtype), requires_grad=False)
        return reports

    def _experts_per_token(self) -> int:
        return int(getattr(self.runner.architecture.config, "num_experts_per_tok", 0) or 0)

    def _experts(
        self, index: int, routing: Routing, search: ScaleSearch, emit: Emit
    ) -> list[LinearReport]:
        """Quantize the routed experts of a layer and add their outputs to the state."""
        assert self.state is not None
        runner, reports = self.runner, []
        prefix = f"{runner.architecture.layer_name(index)}mlp.experts."
        inputs = ExpertInputs(routing, f"layers.{index}")
        config = runner.architecture.config
        smoothing = search.smoothing
        if smoothing.inputs and (tokens := len(routing.hidden)):
            loads = [routing.tokens(e) / tokens for e in range(config.n_routed_experts)]
            search.experts_input(second_moment(routing.hidden) / tokens, loads)
        step = experts_at_once(config.to_dict(), self.settings.device)
        for start in range(0, config.n_routed_experts, step):
            chunk = range(start, min(start + step, config.n_routed_experts))
            weights = [runner.load_expert(index, expert) for expert in chunk]
            plans = [
                {leaf: search.planned.get(f"{prefix}{expert}.{leaf}") for leaf in weights[0]}
                for expert in chunk
            ]
            for expert, plan, weight in zip(chunk, plans, weights, strict=True):
                self._scale_inner(routing, inputs, expert, plan["down_proj"], weight, search)
            # One scheme for all experts of a layer, gate with up: the recipe guarantees it.
            if plans[0]["gate_proj"] is not None:
                stats = [inputs.gate_up(expert) for expert in chunk]
                leaves: tuple[str, ...] = ("gate_proj", "up_proj")
                reports += self._solve_experts(leaves, plans, weights, stats, smoothing, emit)
            inner = [
                runner.inner(
                    routing.hidden[routing.rows(expert)], weight["gate_proj"], weight["up_proj"]
                )
                for expert, weight in zip(chunk, weights, strict=True)
            ]
            if plans[0]["down_proj"] is not None:
                stats = [
                    inputs.down(runner, x, weight["gate_proj"], weight["up_proj"])
                    for x, weight in zip(inner, weights, strict=True)
                ]
                leaves = ("down_proj",)
                reports += self._solve_experts(leaves, plans, weights, stats, smoothing, emit)
            for expert, x, weight in zip(chunk, inner, weights, strict=True):
                if len(x):
                    runner.add_expert(self.state, routing, expert, x, weight["down_proj"])
        return reports

    def _scale_inner(
        self,
        routing: Routing,
        inputs: ExpertInputs,
        expert: int,
        down: TensorPlan | None,
        weights: Mapping[str, torch.Tensor],
        search: ScaleSearch,
    ) -> None:
        """Search the scales between up and down of one expert, before either is quantized."""
        if down is None or search.smoothing.input_of(down.module) is None:
            return
        stats = None
        if routing.tokens(expert):
            gate, up = weights["gate_proj"], weights["up_proj"]
            inner = self.runner.inner(routing.hidden[routing.rows(expert)], gate, up)
            stats = inputs.down(self.runner, inner, gate, up)
        search.inner(down.module, weights["down_proj"], stats)

    def _solve_experts(
        self,
        leaves: Sequence[str],
        plans: Sequence[Mapping[str, TensorPlan | None]],
        weights: Sequence[dict[str, torch.Tensor]],
        stats: Sequence[InputStats | None],
        smoothing: Smoothing,
        emit: Emit,
    ) -> list[LinearReport]:
        """Quantize these linears of a chunk of experts, and put them in the weights' place."""
        batch = [
            [(plan[leaf], weight[leaf]) for leaf in leaves]
            for plan, weight in zip(plans, weights, strict=True)
        ]
        reports, served = self._solve(batch, stats, smoothing, emit)
        for weight, parts in zip(weights, served, strict=True):
            weight.update(zip(leaves, parts, strict=True))
        return reports

    def _solve(
        self,
        batch: Sequence[Stack],
        stats: Sequence[InputStats | None],
        smoothing: Smoothing,
        emit: Emit,
    ) -> tuple[list[LinearReport], list[list[torch.Tensor]]]:
        """Quantize stacks of linears, each with the statistics of its input; emit and report each.

        The second result has every linear of every stack as it will be served, float32 [N, K], but
        with the scaling undone: as it acts in the layer as it was.
        """
        scheme = _planned(batch[0][0][0]).scheme
        assert scheme is not None
        weights = torch.stack(
            [
                torch.cat([smoothing.apply(_planned(plan).name, weight) for plan, weight in stack])
                for stack in batch
            ]
        )
        hessians = [
            smoothing.moment(_planned(stack[0][0]).module, known.hessian)
            for stack, known in zip(batch, stats, strict=True)
            if known is not None
        ]
        solved = solve(weights, scheme, torch.stack(hessians) if hessians else None, self.settings)
        reports, served = [], []
        for i, (stack, known) in enumerate(zip(batch, stats, strict=True)):
            whole, parts, row = solved.dequantized(i), [], 0
            for plan, weight in stack:
                plan, stop = _planned(plan), row + weight.shape[0]
                quantized, rtn_error = solved.rows(i, row, stop)
                emit(plan, quantized)
                scaled = weights[i, row:stop]
                reports.append(report_of(plan, scaled, quantized, rtn_error, known))
                parts.append(smoothing.undo(plan.name, whole[row:stop]))
                row = stop
            served.append(parts)
        return reports, served


def _planned(plan: TensorPlan | None) -> TensorPlan:
    assert plan is not None
    return plan


def report_of(
    plan: TensorPlan,
    weight: torch.Tensor,
    quantized: QuantizedWeight,
    rtn_error: float,
    stats: InputStats | None,
) -> LinearReport:
    """The line of the run report on a quantized linear.

    `weight` float32 [N, K] is its source, scaled as `quantized` is.
    """
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
