"""The routed experts of one layer: measured, quantized, and then passed by the tokens.

Some experts at a time: gate and up are solved as one weight for the input they share, then down,
of more experts at once since it is smaller, for its input behind the *quantized* gate and up.
Finished experts wait, packed, until all are done. While a GPU computes Hessians it gets the next
weights and gives away what is finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from halfbyte.calibration.inputs import ExpertInputs, check_inputs, second_moment
from halfbyte.calibration.limits import BATCH_TOKENS
from halfbyte.calibration.routing import Dispatch, Routing
from halfbyte.calibration.runner import LayerRunner, State, expert_batches
from halfbyte.core import LinearReport, Placement, Settings, TensorPlan
from halfbyte.formats import int4
from halfbyte.kernels.reference import decode_int4
from halfbyte.quantize.feedback import RowFeedback
from halfbyte.quantize.memory import DOWN_CHUNKS
from halfbyte.quantize.phases import Phases
from halfbyte.quantize.smoothing import ScaleSearch
from halfbyte.quantize.solver import Collected, report_of, solve
from halfbyte.quantize.transfers import Transfers
from halfbyte.ranks import Ranks, even_parts

EXPERT_STACKS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
"""Linears of an expert that read the same input, and are solved as one weight."""

Emit = Callable[[Sequence[tuple[TensorPlan, torch.Tensor, torch.Tensor]]], None]
"""Takes the packed codes int32 [N, K/8] and the scales [N, groups] of finished linears away."""

Stored = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A weight between its quantization and the tokens' way through it: packed codes and scales, or
itself when it is not quantized."""


def solving_order(experts: range, at_once: int) -> list[list[range]]:
    """`experts` in chunks of at most `at_once`, whose gate and up are solved together, as even as
    can be; and these in lists of those whose down is."""
    parts = even_parts(len(experts), math.ceil(len(experts) / at_once))
    chunks = [experts[part.start : part.stop] for part in parts]
    return [chunks[i : i + DOWN_CHUNKS] for i in range(0, len(chunks), DOWN_CHUNKS)]


@dataclass
class LayerExperts:
    """The routed experts of layer `index`, of which this rank solves its share."""

    index: int
    routing: Routing
    """Of the tokens of all ranks."""
    search: ScaleSearch
    emit: Emit
    runner: LayerRunner
    settings: Settings
    placement: Placement
    feedback: RowFeedback | None
    """For down projections."""
    phases: Phases
    ranks: Ranks
    _finished: list[tuple[Sequence[TensorPlan], torch.Tensor, torch.Tensor]] = field(
        default_factory=list, init=False
    )
    """Not emitted yet: that is done while a GPU is busy."""

    def __post_init__(self) -> None:
        self._prefix = f"{self.runner.architecture.layer_name(self.index)}mlp.experts."
        self._experts: list[dict[str, Stored]] = [{} for _ in range(self.routing.experts)]
        """By stack, as the tokens will pass them."""
        self._transfers = Transfers(self.runner.device)

    def quantize(self) -> list[LinearReport]:
        """Quantize them all, the share of this rank by itself; the first rank emits them.

        Raises CalibrationError when an input is not finite.
        """
        _scale_experts_input(self.routing, self._prefix, self.search)
        settings = self.settings
        inputs = ExpertInputs(self.routing, settings.expert_hessian, affinity=settings.affinity)
        shares = self.ranks.shares(self.routing.experts)
        own = shares[self.ranks.rank]
        reports: list[LinearReport] = []
        for chunks in solving_order(own, self.placement.experts_at_once):
            behind = Collected(sum(map(len, chunks)))
            """Statistics of what the down projections read."""
            for chunk in chunks:
                read = Collected(len(chunk))
                self._transfers.follow()
                with self.phases("Hessians"):
                    if self._plans("gate_up", chunk):
                        for expert in chunk:
                            read.add(inputs.gate_up(expert))
                weights = self._loaded("gate_up", chunk)
                self._scale(chunk, weights, inputs)
                reports += self._quantized("gate_up", chunk, weights, read)
                del weights, read
                self._transfers.follow()
                with self.phases("Hessians"):
                    if self._plans("down", chunk):
                        for expert in chunk:
                            gate_up = self._decoded(self._experts[expert]["gate_up"])
                            behind.add(inputs.down(expert, self.runner, gate_up))
            batch = range(chunks[0].start, chunks[-1].stop)
            weights = self._loaded("down", batch)
            self._scale_down(batch, weights)
            reports += self._quantized("down", batch, weights, behind)
            del weights, behind
        if self.ranks.count > 1:
            with self.phases("exchange experts"):
                self._exchange(shares)
                reports = [report for part in self.ranks.everyone(reports) for report in part]
                smoothing = self.search.smoothing
                for found in self.ranks.everyone(smoothing.on_host()):
                    smoothing.found.update(found)
        return reports

    def add_outputs(self, state: State, first_sequence: int) -> None:
        """Add what the quantized experts make of their tokens to `state`, some tokens at a time.

        The state's first sequence is number `first_sequence` of those in the routing.
        """
        sequences, length, _ = state.hidden.shape
        batches = expert_batches(sequences, length)
        for batch in batches:
            start, stop = (length * (first_sequence + n) for n in (batch.start, batch.stop))
            dispatch = self.routing.dispatch(start, stop)
            part, inputs = state.hidden[batch], self.routing.hidden[start:stop]
            for expert, stacks in self._on_device(dispatch):
                weights = {name: self._decoded(stack) for name, stack in stacks.items()}
                self.runner.add_expert(part.flatten(0, 1), inputs, dispatch, expert, weights)
                self._emit_finished(1)  # takes less than the GPU needs for the expert
            state.hidden[batch] = part
            del part, inputs  # before the next are copied
        self._emit_finished()

    def _name(self, expert: int, leaf: str) -> str:
        return f"{self._prefix}{expert}.{leaf}"

    def _plans(self, stack: str, experts: range) -> list[list[TensorPlan]]:
        """Of the linears of a stack, by expert; none when it is not quantized."""
        # One scheme for all experts of a layer, gate with up: the recipe guarantees it.
        planned, leaves = self.search.planned, EXPERT_STACKS[stack]
        if self._name(0, leaves[0]) not in planned:
            return []
        return [[planned[self._name(expert, leaf)] for leaf in leaves] for expert in experts]

    def _loaded(self, stack: str, experts: range) -> torch.Tensor:
        """Weights of a stack as stored, float32 [experts, rows, columns]; and what is finished is
        given away meanwhile."""
        with self.phases("write"):
            self._emit_finished()
        with self.phases("read"):
            with self._transfers():
                weights = self.runner.load_experts(self.index, experts, EXPERT_STACKS[stack])
            self._transfers.wait()
        return weights

    def _quantized(
        self, stack: str, experts: range, weights: torch.Tensor, collected: Collected
    ) -> list[LinearReport]:
        """Solve a stack of some experts and keep it for the tokens."""
        plans = self._plans(stack, experts)
        if not plans:
            for expert, weight in zip(experts, weights, strict=True):
                self._experts[expert][stack] = self._kept(weight.to(self.runner.dtype))
            return []
        inputs = collected.inputs()
        if inputs is not None:
            names = [f"expert {expert} of layers.{self.index}" for expert in experts]
            check_inputs(inputs.hessians, names)
        with self.phases(f"solve {stack}"):
            scheme = plans[0][0].scheme
            assert scheme is not None
            parts = [weights.shape[1] // len(plans[0])] * len(plans[0])
            feedback = self.feedback if stack == "down" else None
            solved = solve(weights, scheme, inputs, self.settings, parts, feedback)
        with self.phases("write"):
            packed = int4.pack(solved.codes)
            self._transfers.follow()
            reports = []
            for item, expert in enumerate(experts):
                stored = packed[item], solved.scales[item]
                self._finished.append((plans[item], *stored))
                self._experts[expert][stack] = self._kept(stored[0]), self._kept(stored[1])
                for plan, linear in zip(plans[item], solved.linears[item], strict=True):
                    reports.append(report_of(plan, linear, collected.notes[item]))
        return reports

    def _emit_finished(self, count: int | None = None) -> None:
        """Emit the first of the finished linears, all by default."""
        now = self._finished[:count]
        del self._finished[:count]
        with self._transfers():
            for plans, packed, scales in now:
                for part in (packed, scales):
                    self._transfers.lend(part)
                rows = len(packed) // len(plans)
                parts = packed.split(rows), scales.split(rows)
                self.emit([*zip(plans, *parts, strict=True)])

    def _exchange(self, shares: Sequence[range]) -> None:
        """Get the experts of the other ranks; rank 0 is to emit them."""
        if self.placement.experts_on_host and self.runner.device.type == "cuda":
            torch.cuda.current_stream(self.runner.device).synchronize()  # they are on their way
        config = self.runner.architecture.config
        device = "cpu" if self.placement.experts_on_host else self.runner.device
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        count, own = shares[-1].stop, shares[self.ranks.rank]
        for stack, (rows, columns) in shapes.items():
            plans = self._plans(stack, range(count))
            if not plans:
                plain = torch.empty(count, rows, columns, dtype=self.runner.dtype, device=device)
                parts: tuple[torch.Tensor, ...] = (plain,)
            else:
                scheme = plans[0][0].scheme
                assert scheme is not None
                groups = scheme.groups(columns)
                packed = torch.empty(count, rows, columns // 8, dtype=torch.int32, device=device)
                scales = torch.empty(count, rows, groups, dtype=torch.bfloat16, device=device)
                parts = (packed, scales)
            for expert in own:
                kept = self._experts[expert][stack]
                values = (kept,) if isinstance(kept, torch.Tensor) else kept
                for part, value in zip(parts, values, strict=True):
                    part[expert] = value
            for part in parts:
                self.ranks.complete(part, shares)
            for expert, stacks in enumerate(self._experts):
                if not plans:
                    stacks[stack] = parts[0][expert]
                    continue
                stacks[stack] = parts[0][expert], parts[1][expert]
                if self.ranks.first and expert not in own:
                    self._finished.append((plans[expert], parts[0][expert], parts[1][expert]))
        self._transfers.follow()

    def _scale(self, chunk: range, weights: torch.Tensor, inputs: ExpertInputs) -> None:
        """Scale the columns of gate and up for the norm before them, and search the scales between
        up and down and apply them to up, before any of them is quantized."""
        smoothing = self.search.smoothing
        if not smoothing.inputs:
            return
        with self.phases("scale inputs"):
            for expert, gate_up in zip(chunk, weights, strict=True):
                gate, up = gate_up.chunk(2)
                gate.copy_(smoothing.apply(self._name(expert, "gate_proj") + ".weight", gate))
                up.copy_(smoothing.apply(self._name(expert, "up_proj") + ".weight", up))
                down = self._name(expert, "down_proj")
                if down not in self.search.planned or smoothing.input_of(down) is None:
                    continue
                stats = None
                if inputs.tokens(expert):
                    stats = inputs.down(expert, self.runner, gate_up)
                    assert stats is not None
                    check_inputs(stats.hessian[None], [down])
                self.search.inner(down, self.search.read(down + ".weight"), stats)
                if (rows := smoothing.rows(self._name(expert, "up_proj"))) is not None:
                    up /= rows[:, None]

    def _scale_down(self, experts: range, weights: torch.Tensor) -> None:
        """Scale the columns of down projections for what they read."""
        smoothing = self.search.smoothing
        for expert, weight in zip(experts, weights, strict=True):
            weight.copy_(smoothing.apply(self._name(expert, "down_proj") + ".weight", weight))

    def _on_device(self, dispatch: Dispatch) -> Iterator[tuple[int, dict[str, Stored]]]:
        """Experts that tokens reach, and their stacks where they are needed: the next expert's are
        copied there while one is at work."""
        reached = [e for e in range(len(self._experts)) if dispatch.tokens(e)]
        if not self.placement.experts_on_host:
            yield from ((expert, self._experts[expert]) for expert in reached)
            return
        device, ahead = self.runner.device, []

        def copy(experts: Sequence[int]) -> None:
            self._transfers.follow()  # memory that is used again
            with self._transfers():
                for expert in experts:
                    stacks = self._experts[expert].items()
                    ahead.append({name: _moved(stack, device) for name, stack in stacks})

        copy(reached[:1])
        for place, expert in enumerate(reached):
            self._transfers.wait()
            stacks = ahead.pop()
            copy(reached[place + 1 : place + 2])
            yield expert, stacks

    def _decoded(self, stack: Stored) -> torch.Tensor:
        stack = _moved(stack, self.runner.device)
        if isinstance(stack, torch.Tensor):
            return stack
        return decode_int4(*stack, self.runner.dtype)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor to keep until the tokens come, where such tensors wait."""
        if not self.placement.experts_on_host:
            return tensor
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return kept.copy_(tensor, non_blocking=True)


def _moved(stack: Stored, device: torch.device) -> Stored:
    """A stack on the device; one that is there already is itself."""
    if isinstance(stack, torch.Tensor):
        return stack.to(device, non_blocking=True)
    packed, scales = stack
    return packed.to(device, non_blocking=True), scales.to(device, non_blocking=True)


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
