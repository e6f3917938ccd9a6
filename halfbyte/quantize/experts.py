"""The routed experts of one layer: measured, quantized, and then passed by the tokens.

Some experts at a time: gate and up are solved as one weight for the input they share, down for its
input behind the *quantized* gate and up. Finished experts wait, packed, until all are done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from halfbyte.calibration.inputs import ExpertInputs, check_inputs, second_moment
from halfbyte.calibration.limits import BATCH_TOKENS
from halfbyte.calibration.routing import Routing
from halfbyte.calibration.runner import LayerRunner, State, expert_batches
from halfbyte.core import LinearReport, Placement, Settings, TensorPlan
from halfbyte.formats import int4
from halfbyte.kernels.reference import decode_int4
from halfbyte.quantize.feedback import RowFeedback
from halfbyte.quantize.phases import Phases
from halfbyte.quantize.smoothing import ScaleSearch
from halfbyte.quantize.solver import collected, report_of, solve
from halfbyte.ranks import Ranks

EXPERT_STACKS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
"""Linears of an expert that read the same input, and are solved as one weight."""

Emit = Callable[[TensorPlan, torch.Tensor, torch.Tensor], None]
"""Takes the packed codes int32 [N, K/8] and the scales [N, groups] of a finished linear away."""

Stored = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A weight between its quantization and the tokens' way through it: packed codes and scales, or
itself when it is not quantized."""


@dataclass(frozen=True)
class ExpertQuantizer:
    """Quantizes the experts of a layer, those of this rank by itself."""

    runner: LayerRunner
    settings: Settings
    placement: Placement
    feedback: RowFeedback | None
    """For down projections."""
    phases: Phases
    ranks: Ranks

    def quantize(
        self, index: int, routing: Routing, search: ScaleSearch, emit: Emit
    ) -> tuple[list[LinearReport], list[dict[str, Stored]]]:
        """Quantize the routed experts of layer `index`; their reports, and all of them by stack.

        `routing` is of the tokens of all ranks. Each rank solves its share of the experts and has
        those of the others in the end; the first rank emits them all.
        Raises CalibrationError when an input is not finite.
        """
        runner, settings, planned = self.runner, self.settings, search.planned
        prefix = f"{runner.architecture.layer_name(index)}mlp.experts."
        _scale_experts_input(routing, prefix, search)
        inputs = ExpertInputs(routing, settings.expert_hessian, affinity=settings.affinity)
        step = self.placement.experts_at_once
        experts: list[dict[str, Stored]] = []
        reports = []
        finished: list[tuple[list[TensorPlan | None], torch.Tensor, torch.Tensor]] = []
        """Not emitted yet: that is done while a GPU is busy with the Hessians of the next batch."""

        def emit_finished() -> None:
            with self.phases("write"):
                for rows in finished:
                    _emit_rows(emit, *rows)
                finished.clear()

        shares = self.ranks.shares(routing.experts)
        own_experts = shares[self.ranks.rank]
        for start in range(own_experts.start, own_experts.stop, step):
            chunk = range(start, min(start + step, own_experts.stop))
            with self.phases("read"):
                loaded = runner.load_experts(index, chunk)
            if search.smoothing.inputs:
                with self.phases("scale inputs"):
                    for expert, single in zip(chunk, loaded, strict=True):
                        self._scale_expert(f"{prefix}{expert}.", single, inputs, expert, search)
            weights = _stacked(loaded)
            stacks: list[dict[str, Stored]] = [{} for _ in chunk]
            # One scheme for all experts of a layer, gate with up: the recipe guarantees it.
            for stack, leaves in EXPERT_STACKS.items():
                weight = weights.pop(stack)
                plans = [[planned.get(f"{prefix}{e}.{leaf}") for leaf in leaves] for e in chunk]
                if plans[0][0] is None:
                    for own, plain in zip(stacks, weight, strict=True):
                        own[stack] = self._kept(plain.to(runner.dtype))
                    continue
                with self.phases("Hessians"):
                    known, stats = collected(
                        len(chunk),
                        (
                            inputs.gate_up(expert)
                            if stack == "gate_up"
                            else inputs.down(expert, runner, self._decoded(own["gate_up"]))
                            for expert, own in zip(chunk, stacks, strict=True)
                        ),
                    )
                emit_finished()
                if known is not None:
                    names = [f"expert {expert} of layers.{index}" for expert in chunk]
                    check_inputs(known.hessians, names)
                with self.phases(f"solve {stack}"):
                    scheme = plans[0][0].scheme
                    assert scheme is not None
                    parts = [weight.shape[1] // len(leaves)] * len(leaves)
                    feedback = self.feedback if stack == "down" else None
                    solved = solve(weight, scheme, known, settings, parts, feedback)
                del weight, known
                with self.phases("write"):
                    packed = int4.pack(solved.codes)
                    for item, own in enumerate(stacks):
                        kept = packed[item], solved.scales[item]
                        finished.append((plans[item], *kept))
                        for plan, linear in zip(plans[item], solved.linears[item], strict=True):
                            assert plan is not None
                            reports.append(report_of(plan, linear, stats[item]))
                        own[stack] = self._kept(kept[0]), self._kept(kept[1])
            experts += stacks
        emit_finished()
        if self.ranks.count > 1:
            with self.phases("exchange experts"):
                experts = self._exchanged(experts, shares, planned, prefix, emit)
                reports = [report for part in self.ranks.everyone(reports) for report in part]
                for found in self.ranks.everyone(search.smoothing.on_host()):
                    search.smoothing.found.update(found)
        return reports, experts

    def _exchanged(
        self,
        own: list[dict[str, Stored]],
        shares: Sequence[range],
        planned: Mapping[str, TensorPlan],
        prefix: str,
        emit: Emit,
    ) -> list[dict[str, Stored]]:
        """The experts of all ranks, of which this one has its share; rank 0 emits the others'."""
        config = self.runner.architecture.config
        device = "cpu" if self.placement.experts_on_host else self.runner.device
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        count, mine = shares[-1].stop, shares[self.ranks.rank]
        experts: list[dict[str, Stored]] = [{} for _ in range(count)]
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
                    plans = [planned[f"{prefix}{expert}.{leaf}"] for leaf in leaves]
                    _emit_rows(emit, plans, parts[0][expert], parts[1][expert])
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
                assert stats is not None
                check_inputs(stats.hessian[None], [down])
            search.inner(down, weights["down_proj"], stats)
            if (rows := smoothing.rows(prefix + "up_proj")) is not None:
                weights["up_proj"] = weights["up_proj"] / rows[:, None]
        weights["down_proj"] = smoothing.apply(down + ".weight", weights["down_proj"])

    def add_outputs(
        self,
        state: State,
        first_sequence: int,
        routing: Routing,
        experts: Sequence[Mapping[str, Stored]],
    ) -> None:
        """Add what the experts make of their tokens to `state`, some tokens at a time.

        The state's first sequence is number `first_sequence` of those in `routing`.
        """
        sequences, length, _ = state.hidden.shape
        for batch in expert_batches(sequences, length):
            start, stop = (length * (first_sequence + n) for n in (batch.start, batch.stop))
            dispatch = routing.dispatch(start, stop)
            part, inputs = state.hidden[batch], routing.hidden[start:stop]
            for expert, stacks in enumerate(experts):
                if dispatch.tokens(expert):
                    weights = {name: self._decoded(stack) for name, stack in stacks.items()}
                    self.runner.add_expert(part.flatten(0, 1), inputs, dispatch, expert, weights)
            state.hidden[batch] = part
            del part, inputs  # before the next are copied

    def _decoded(self, stack: Stored) -> torch.Tensor:
        device = self.runner.device
        if isinstance(stack, torch.Tensor):
            return stack.to(device, non_blocking=True)
        packed, scales = (part.to(device, non_blocking=True) for part in stack)
        return decode_int4(packed, scales, self.runner.dtype)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor to keep until the tokens come, where such tensors wait."""
        if not self.placement.experts_on_host:
            return tensor
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return kept.copy_(tensor, non_blocking=True)


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
        for rows in routing.hidden.slices(BATCH_TOKENS):
            values = routing.hidden[rows]
            routing.hidden[rows] = values / columns.to(values)


def _emit_rows(
    emit: Emit, plans: Sequence[TensorPlan | None], packed: torch.Tensor, scales: torch.Tensor
) -> None:
    """Emit the linears that a quantized weight is a stack of."""
    rows = len(packed) // len(plans)
    for plan, *linear in zip(plans, packed.split(rows), scales.split(rows), strict=True):
        assert plan is not None
        emit(plan, *linear)


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
