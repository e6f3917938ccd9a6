"""Calibrated quantization of one decoder layer: the statistics, the solve and the way on.

The order inside a layer: plain linears (attention, dense and shared MLP) are measured in one
forward pass with the weights as stored and replaced by their quantized selves; then one pass with
them gives the experts' input and routing; then, some experts at a time, gate and up are quantized,
the down projection's input is measured behind the *quantized* gate and up, and down is quantized;
then the tokens go through the quantized experts. What leaves the layer is what the quantized layer
makes.

When inputs are scaled (AWQ), a norm's scales are searched once its output's second moment is known.
Plain linears are solved in scaled space and put into the layer with the scaling undone: the layer
stays as it was. The experts' input is divided by its scales once, since nothing else reads it, and
all that follows is in scaled space by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from halfbyte.calibration.families import is_routed_expert
from halfbyte.calibration.inputs import (
    ExpertInputs,
    collect_linear_inputs,
    input_of,
    second_moment,
)
from halfbyte.calibration.mtp import mtp_input
from halfbyte.calibration.routing import Routing
from halfbyte.calibration.runner import LayerRunner, State, check_finite, expert_batches
from halfbyte.core import (
    InputStats,
    LinearReport,
    Placement,
    QuantizedWeight,
    Settings,
    TensorPlan,
    Unit,
)
from halfbyte.errors import ResumeError
from halfbyte.formats.files import file_sha256
from halfbyte.kernels.reference import decode_int4, pack_int4, unpack_int4
from halfbyte.quantize.phases import Phases
from halfbyte.quantize.readers import ScalableInput, scalable_inputs
from halfbyte.quantize.smoothing import ScaleSearch, Smoothing
from halfbyte.quantize.solver import Inputs, Solved, solve
from halfbyte.ranks import Ranks

EXPERT_STACKS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
"""Linears of an expert that read the same input, and are solved as one weight."""


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What became of a layer."""

    reports: tuple[LinearReport, ...]
    smoothing: Smoothing
    """The scales of its inputs; its tensors that stay floating point are written with them."""


Emit = Callable[[TensorPlan, QuantizedWeight], None]
"""Takes a finished linear away, to be packed and written."""


@dataclass
class LayerQuantizer:
    """Carries the calibration state from layer to layer and quantizes each on the way."""

    runner: LayerRunner
    settings: Settings
    tokens: torch.Tensor
    """int64 [sequences, length]."""
    placement: Placement
    state: State | None = None
    """Input of the next layer; None before the embedding."""
    phases: Phases = field(default_factory=Phases)
    ranks: Ranks = field(default_factory=Ranks)
    """Those that share the run: each has some of the sequences, and solves some of the experts."""

    def __post_init__(self) -> None:
        sequences, length = self.tokens.shape
        units = expert_batches(sequences, length)
        self._sequences = [
            range(units[share.start].start, units[share.stop - 1].stop) if share else range(0)
            for share in self.ranks.shares(len(units))
        ]
        self._own = slice(
            self._sequences[self.ranks.rank].start, self._sequences[self.ranks.rank].stop
        )

    def run(self, unit: Unit, emit: Emit) -> LayerResult:
        """Quantize what the plan says of a decoder (or MTP) layer and move the state through it.

        Raises CalibrationError when an activation is not finite.
        """
        assert unit.index is not None
        if self.state is None:
            self.state = self.runner.embed(self.tokens[self._own])
        depth = unit.index - self.runner.architecture.layers
        if depth >= 0:
            tokens = self.tokens[self._own]
            self.state = mtp_input(self.runner, unit.index, self.state, tokens, depth)
        planned = {t.module: t for t in unit.tensors if t.action == "quantize"}
        search = self._scale_search(unit, planned)
        layer = self.runner.load_layer(unit.index)
        reports = self._plain_linears(unit, layer, search, emit)
        with self.phases("attention and router"):
            routing = self.runner.forward(layer, self.state)
        del layer
        if routing is not None:
            reports += self._experts(unit.index, self._everywhere(routing), search, emit)
        del routing
        check_finite(self.state.hidden, unit.name)
        # Not in the order of solving, which follows how many experts are solved at once.
        place = {tensor.module: number for number, tensor in enumerate(unit.tensors)}
        reports.sort(key=lambda report: place[report.name])
        return LayerResult(tuple(reports), search.smoothing)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The state of all ranks by name, as `load` takes it up again. It changes with the next
        layer."""
        whole = self._whole_state()
        tensors = {"hidden": whole.hidden}
        if whole.topk is not None:
            tensors["topk"] = whole.topk
        return tensors

    def _whole_state(self) -> State:
        """The state with the sequences of all ranks."""
        assert self.state is not None
        if self.ranks.count == 1:
            return self.state
        topk = self.state.topk
        some = any(self.ranks.everyone(topk is not None))
        if some and topk is None:  # a rank without sequences selected nothing
            width = self.runner.architecture.index_topk
            assert width is not None
            topk = self.state.hidden.new_empty(
                *self.state.hidden.shape[:2], width, dtype=torch.int32
            )
        return State(
            self._completed(self.state.hidden, self._sequences),
            None if topk is None else self._completed(topk, self._sequences),
        )

    def _completed(self, own: torch.Tensor, shares: Sequence[range]) -> torch.Tensor:
        """All ranks' rows, of which this one has its share."""
        whole = own.new_empty(max(share.stop for share in shares), *own.shape[1:])
        share = shares[self.ranks.rank]
        whole[share.start : share.stop] = own
        self.ranks.complete(whole, shares)
        return whole

    def _everywhere(self, routing: Routing) -> Routing:
        """The routing of the tokens of all ranks, in their order."""
        if self.ranks.count == 1:
            return routing
        assert self.state is not None
        length = self.state.hidden.shape[1]
        shares = [range(s.start * length, s.stop * length) for s in self._sequences]
        return Routing(
            self._completed(routing.hidden, shares),
            self._completed(routing.index, shares),
            self._completed(routing.weight, shares),
            routing.experts,
        )

    def load(self, path: Path, digest: str) -> None:
        """Take up the state that `tensors` gave. Raises ResumeError when it is not that."""
        if not path.exists() or file_sha256(path) != digest:
            raise ResumeError(
                f"the calibration state {path} is missing or damaged",
                hint="start again with --overwrite",
            )
        tensors = load_file(path)
        stored = tensors["hidden"][self._own]
        hidden = self.runner.new_hidden(*stored.shape)
        hidden.copy_(stored)
        topk = tensors.get("topk")
        self.state = State(hidden, None if topk is None else topk[self._own].to(hidden.device))

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
        planned, smoothing = search.planned, search.smoothing
        modules = [name for name in planned if not is_routed_expert(name)]
        if not modules:
            return []
        assert self.state is not None
        assert unit.index is not None
        prefix = self.runner.architecture.layer_name(unit.index)
        # By every rank for all sequences: few recipes have such linears, and few layers.
        inputs = collect_linear_inputs(self.runner, layer, prefix, modules, self._whole_state())
        by_module = {m: inputs[input_of(m)] for m in modules if input_of(m) in inputs}
        per_token = int(getattr(self.runner.architecture.config, "num_experts_per_tok", 0) or 0)
        search.plain_inputs(by_module, per_token)
        reports = []
        for module in modules:
            plan = planned[module]
            weight = smoothing.apply(plan.name, self.runner.read(plan.name, torch.float32))
            stats = by_module.get(module)
            known, _ = _collected(1, [_scaled(stats, module, smoothing)])
            solved = self._solve(weight[None], plan, known)
            emit(plan, solved.linears[0][0])
            reports.append(report_of(plan, solved.linears[0][0], stats))
            linear = layer.get_submodule(module.removeprefix(prefix))
            served = smoothing.undo(plan.name, solved.dequantized(0))
            linear.weight = nn.Parameter(served.to(self.runner.dtype), requires_grad=False)
        return reports

    def _experts(
        self, index: int, routing: Routing, search: ScaleSearch, emit: Emit
    ) -> list[LinearReport]:
        """Quantize the routed experts of a layer, then send the tokens through them."""
        runner, settings, planned = self.runner, self.settings, search.planned
        prefix = f"{runner.architecture.layer_name(index)}mlp.experts."
        _scale_experts_input(routing, prefix, search)
        inputs = ExpertInputs(
            routing, f"layers.{index}", settings.expert_hessian, affinity=settings.affinity
        )
        step = self.placement.experts_at_once
        experts: list[dict[str, _Stored]] = []
        reports = []
        shares = self.ranks.shares(routing.experts)
        own_experts = shares[self.ranks.rank]
        for start in range(own_experts.start, own_experts.stop, step):
            chunk = range(start, min(start + step, own_experts.stop))
            with self.phases("read"):
                loaded = [runner.load_expert(index, expert) for expert in chunk]
            if search.smoothing.inputs:
                with self.phases("scale inputs"):
                    for expert, single in zip(chunk, loaded, strict=True):
                        self._scale_expert(f"{prefix}{expert}.", single, inputs, expert, search)
            weights = _stacked(loaded)
            stacks: list[dict[str, _Stored]] = [{} for _ in chunk]
            # One scheme for all experts of a layer, gate with up: the recipe guarantees it.
            for stack, leaves in EXPERT_STACKS.items():
                weight = weights.pop(stack)
                plans = [[planned.get(f"{prefix}{e}.{leaf}") for leaf in leaves] for e in chunk]
                if plans[0][0] is None:
                    for own, plain in zip(stacks, weight, strict=True):
                        own[stack] = self._kept(plain.to(runner.dtype))
                    continue
                with self.phases("Hessians"):
                    known, stats = _collected(
                        len(chunk),
                        (
                            inputs.gate_up(expert)
                            if stack == "gate_up"
                            else inputs.down(expert, runner, self._decoded(own["gate_up"]))
                            for expert, own in zip(chunk, stacks, strict=True)
                        ),
                    )
                with self.phases(f"solve {stack}"):
                    solved = self._solve(weight, plans[0][0], known, len(leaves))
                del weight, known
                with self.phases("write"):
                    for item, own in enumerate(stacks):
                        for plan, linear in zip(plans[item], solved.linears[item], strict=True):
                            assert plan is not None
                            emit(plan, linear)
                            reports.append(report_of(plan, linear, stats[item]))
                        packed = pack_int4(solved.codes[item])
                        own[stack] = self._kept(packed), self._kept(solved.scales[item])
            experts += stacks
        if self.ranks.count > 1:
            with self.phases("exchange experts"):
                experts = self._exchanged(experts, shares, planned, prefix, emit)
                reports = [report for part in self.ranks.everyone(reports) for report in part]
                for found in self.ranks.everyone(search.smoothing.on_host()):
                    search.smoothing.found.update(found)
        with self.phases("experts forward"):
            self._through_experts(routing, experts)
        return reports

    def _exchanged(
        self,
        own: list[dict[str, _Stored]],
        shares: Sequence[range],
        planned: Mapping[str, TensorPlan],
        prefix: str,
        emit: Emit,
    ) -> list[dict[str, _Stored]]:
        """The experts of all ranks, of which this one has its share; rank 0 emits the others'."""
        config = self.runner.architecture.config
        device = "cpu" if self.placement.experts_on_host else self.runner.device
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        count, mine = shares[-1].stop, shares[self.ranks.rank]
        experts: list[dict[str, _Stored]] = [{} for _ in range(count)]
        for stack, leaves in EXPERT_STACKS.items():
            rows, columns = shapes[stack]
            plan = planned.get(f"{prefix}0.{leaves[0]}")
            if plan is None:
                plain = torch.empty(count, rows, columns, dtype=self.runner.dtype, device=device)
                parts: tuple[torch.Tensor, ...] = (plain,)
            else:
                assert plan.scheme is not None
                groups = plan.scheme.groups(columns)
                packed = torch.empty(count, rows, columns // 8, dtype=torch.int32, device=device)
                scales = torch.empty(count, rows, groups, dtype=torch.bfloat16, device=device)
                parts = (packed, scales)
            for expert, stacks in zip(mine, own, strict=True):
                kept = stacks[stack]
                values = (kept,) if isinstance(kept, torch.Tensor) else kept
                for part, value in zip(parts, values, strict=True):
                    part[expert] = value
            for part in parts:
                self.ranks.complete(part, shares)
            for expert in range(count):
                if plan is None:
                    experts[expert][stack] = parts[0][expert]
                    continue
                experts[expert][stack] = parts[0][expert], parts[1][expert]
                if self.ranks.first and expert not in mine:
                    codes = unpack_int4(parts[0][expert], columns)
                    start = 0
                    for leaf in leaves:
                        linear = planned[f"{prefix}{expert}.{leaf}"]
                        where = slice(start, start + rows // len(leaves))
                        start = where.stop
                        emit(linear, QuantizedWeight(codes[where], parts[1][expert][where]))
        return experts

    def _scale_expert(
        self,
        prefix: str,
        weights: dict[str, torch.Tensor],
        inputs: ExpertInputs,
        expert: int,
        search: ScaleSearch,
    ) -> None:
        """Scale the columns of gate and up for the norm before them, and search and apply the
        scales between up and down, before any of them is quantized."""
        smoothing = search.smoothing
        for leaf in ("gate_proj", "up_proj"):
            weights[leaf] = smoothing.apply(f"{prefix}{leaf}.weight", weights[leaf])
        down = prefix + "down_proj"
        if down in search.planned and smoothing.input_of(down) is not None:
            stats = None
            if inputs.tokens(expert):
                gate_up = torch.cat([weights["gate_proj"], weights["up_proj"]])
                stats = inputs.down(expert, self.runner, gate_up)
            search.inner(down, weights["down_proj"], stats)
            if (rows := smoothing.rows(prefix + "up_proj")) is not None:
                weights["up_proj"] = weights["up_proj"] / rows[:, None]
        weights["down_proj"] = smoothing.apply(down + ".weight", weights["down_proj"])

    def _through_experts(self, routing: Routing, experts: Sequence[Mapping[str, _Stored]]) -> None:
        """Add what the experts make of their tokens to the state, some tokens at a time."""
        assert self.state is not None
        sequences, length, width = self.state.hidden.shape
        hidden, runner = self.state.hidden.view(-1, width), self.runner
        before = self._own.start * length  # tokens of the ranks before this one
        for batch in expert_batches(sequences, length):
            own = slice(batch.start * length, batch.stop * length)
            tokens = slice(before + own.start, before + own.stop)
            dispatch = routing.dispatch(tokens.start, tokens.stop)
            part = hidden[own].to(runner.device)
            for expert, stacks in enumerate(experts):
                if dispatch.tokens(expert):
                    weights = {name: self._decoded(stack) for name, stack in stacks.items()}
                    runner.add_expert(part, routing.hidden[tokens], dispatch, expert, weights)
            if part.device != hidden.device:
                hidden[own] = part

    def _decoded(self, stack: _Stored) -> torch.Tensor:
        device = self.runner.device
        if isinstance(stack, torch.Tensor):
            return stack.to(device, non_blocking=True)
        packed, scales = (part.to(device, non_blocking=True) for part in stack)
        return decode_int4(packed, scales, self.runner.dtype)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor to keep until the tokens come: not a part of a batch that goes."""
        if not self.placement.experts_on_host:
            return tensor.clone()
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return kept.copy_(tensor, non_blocking=True)

    def _solve(
        self,
        weights: torch.Tensor,
        plan: TensorPlan | None,
        inputs: Inputs | None,
        linears: int = 1,
    ) -> Solved:
        """Quantize `weights` [B, N, K], each a stack of so many linears that read one input."""
        assert plan is not None
        assert plan.scheme is not None
        parts = [weights.shape[1] // linears] * linears
        return solve(weights, plan.scheme, inputs, self.settings, parts)


def _scale_experts_input(routing: Routing, prefix: str, search: ScaleSearch) -> None:
    """Search the scales of what the routed experts read, if they may be scaled, and divide by
    them, in place. Scales of norms are powers of two, so that rounds nothing."""
    tokens = len(routing.hidden)
    if not search.smoothing.inputs or not tokens:
        return
    dispatch = routing.dispatch()
    loads = [dispatch.tokens(expert) / tokens for expert in range(routing.experts)]
    search.experts_input(second_moment(routing.hidden) / tokens, loads)
    if (columns := search.smoothing.columns(f"{prefix}0.gate_proj")) is not None:
        routing.hidden.div_(columns.to(routing.hidden))


def _scaled(stats: InputStats | None, module: str, smoothing: Smoothing) -> InputStats | None:
    """Statistics of what a linear reads after scaling."""
    columns = smoothing.columns(module)
    if stats is None or columns is None:
        return stats
    held_out = None if stats.held_out is None else stats.held_out / columns.to(stats.held_out)
    hessian = smoothing.moment(module, stats.hessian)
    return replace(stats, hessian=hessian, held_out=held_out)


def _stacked(experts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """[experts, rows, columns] of each of `EXPERT_STACKS`. Takes the experts' weights away."""
    stacks = {}
    for name, leaves in EXPERT_STACKS.items():
        rows = sum(experts[0][leaf].shape[0] for leaf in leaves)
        stack = experts[0][leaves[0]].new_empty(len(experts), rows, experts[0][leaves[0]].shape[1])
        for weights, own in zip(experts, stack, strict=True):
            torch.cat([weights.pop(leaf) for leaf in leaves], out=own)
        stacks[name] = stack
    return stacks


def _collected(
    count: int, stats: Iterable[InputStats | None]
) -> tuple[Inputs | None, list[InputStats | None]]:
    """Statistics of `count` inputs as one batch, and without the matrices, for the report.

    Each Hessian goes to its place in the batch as soon as it is made, so that none exists twice.
    """
    hessians: torch.Tensor | None = None
    held_out: list[torch.Tensor] = []
    notes: list[InputStats | None] = []
    for item, own in enumerate(stats):
        if own is None:
            notes.append(None)
            continue
        if hessians is None:
            hessians = own.hessian.new_empty(count, *own.hessian.shape)
        hessians[item] = own.hessian
        if own.held_out is not None:
            held_out.append(own.held_out)
        notes.append(replace(own, hessian=own.hessian.new_empty(0), held_out=None))
    if hessians is None:
        return None, notes
    return Inputs(hessians, held_out or None), notes


_Stored = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A weight between its quantization and the tokens' way through it: packed codes and scales, or
itself when it is not quantized."""


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
    )
