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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from halfbyte.calibration.families import is_routed_expert
from halfbyte.calibration.inputs import collect_linear_inputs, input_of
from halfbyte.calibration.mtp import mtp_input
from halfbyte.calibration.routing import Routing
from halfbyte.calibration.runner import (
    LayerRunner,
    State,
    batches,
    check_finite,
    expert_batches,
)
from halfbyte.core import (
    InputStats,
    LinearReport,
    Placement,
    Settings,
    TensorPlan,
    Unit,
)
from halfbyte.errors import ResumeError
from halfbyte.formats import int4
from halfbyte.formats.checkpoint import read_header
from halfbyte.formats.files import file_sha256
from halfbyte.formats.rows import InMemory, OnDisk, Rows
from halfbyte.formats.shards import TORCH_DTYPES
from halfbyte.quantize.experts import Emit, LayerExperts
from halfbyte.quantize.feedback import RowFeedback, logit_metric, row_feedback
from halfbyte.quantize.phases import Phases
from halfbyte.quantize.readers import ScalableInput, scalable_inputs
from halfbyte.quantize.smoothing import ScaleSearch, Smoothing
from halfbyte.quantize.solver import Collected, report_of, solve
from halfbyte.ranks import Ranks

EXCHANGED_BYTES = 1 << 28
"""Of hidden states that ranks send at a time."""


RESIDUAL_WRITERS = (".o_proj", ".down_proj")
"""Linears whose output is added to the residual stream."""


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
    placement: Placement
    state: State | None = None
    """Input of the next layer."""
    phases: Phases = field(default_factory=Phases)
    feedback: RowFeedback | None = None
    """Among the rows of what writes into the residual stream."""
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

    def prepare(self) -> None:
        """Make the state before the first layer, unless one was taken up, and read what is needed
        of other layers, out of the order in which they are read ahead."""
        if self.state is None:
            self.state = self.runner.embed(self.tokens[self._own])
        if self.settings.feeds_back:
            norm = self.runner.read(self.runner.architecture.prefix + "model.norm.weight")
            self.feedback = row_feedback(logit_metric(self.runner.head(), norm, self.tokens))

    def run(self, unit: Unit, emit: Emit) -> LayerResult:
        """Quantize what the plan says of a decoder (or MTP) layer and move the state through it.
        `prepare` comes before the first.

        Raises CalibrationError when an activation is not finite.
        """
        assert unit.index is not None
        assert self.state is not None
        assert self.feedback is not None or not self.settings.feeds_back
        depth = unit.index - self.runner.architecture.layers
        if depth >= 0:
            tokens = self.tokens[self._own]
            self.state = mtp_input(self.runner, unit.index, self.state, tokens, depth)
        planned = {t.module: t for t in unit.tensors if t.action == "quantize"}
        search = self._scale_search(unit, planned)
        with self.phases("read"):
            layer = self.runner.load_layer(unit.index)
        reports = self._plain_linears(unit, layer, search, emit)
        with self.phases("attention and router"):
            routing = self.runner.forward(layer, self.state)
        del layer
        if routing is not None:
            with self.phases("exchange inputs"):
                routing = self._everywhere(routing)
            reports += self._experts(unit.index, routing, search, emit)
        del routing
        with self.phases("check"):
            check_finite(self.state.hidden, unit.name)
        # Not in the order of solving, which follows how many experts are solved at once.
        place = {tensor.module: number for number, tensor in enumerate(unit.tensors)}
        reports.sort(key=lambda report: place[report.name])
        return LayerResult(tuple(reports), search.smoothing)

    def tensors(self) -> Mapping[str, Rows]:
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
        own, new = self.state, self.runner.new_states
        shape = (len(self.tokens), *own.hidden.shape[1:])
        whole = State(new(shape))
        self._complete(whole.hidden, own.hidden, self._sequences)
        if any(self.ranks.everyone(own.topk is not None)):
            width = self.runner.architecture.index_topk
            assert width is not None
            whole.topk = new((*shape[:2], width), torch.int32)
            # A rank without sequences selected nothing, and has nothing to give.
            given = whole.topk if own.topk is None else own.topk
            self._complete(whole.topk, given, self._sequences)
        return whole

    def _complete(self, whole: Rows, own: Rows, shares: Sequence[range]) -> None:
        """Put all ranks' rows into `whole`; this one's are `own`."""
        step = max(1, EXCHANGED_BYTES // max(1, whole.row_bytes))
        for rank, share in enumerate(shares):
            for start in range(share.start, share.stop, step):
                rows = slice(start, min(start + step, share.stop))
                if rank == self.ranks.rank:
                    piece = own[rows.start - share.start : rows.stop - share.start]
                else:
                    shape = (rows.stop - rows.start, *whole.shape[1:])
                    piece = torch.empty(shape, dtype=whole.dtype, device=whole.device)
                self.ranks.broadcast(piece, rank)
                whole[rows] = piece

    def _everywhere(self, routing: Routing) -> Routing:
        """The routing of the tokens of all ranks, in their order."""
        if self.ranks.count == 1:
            return routing
        assert self.state is not None
        length = self.state.hidden.shape[1]
        shares = [range(s.start * length, s.stop * length) for s in self._sequences]
        tokens = len(self.tokens) * length
        hidden = self.runner.new_inputs(tokens, routing.hidden.shape[1])
        self._complete(hidden, routing.hidden, shares)
        index, weight = (
            own.new_empty(tokens, own.shape[1]) for own in (routing.index, routing.weight)
        )
        self._complete(InMemory(index), InMemory(routing.index), shares)
        self._complete(InMemory(weight), InMemory(routing.weight), shares)
        return Routing(hidden, index, weight, routing.experts)

    def load(self, path: Path, digest: str) -> None:
        """Take up the state that `tensors` gave. Raises ResumeError when it is not that."""
        if not path.exists() or file_sha256(path) != digest:
            raise ResumeError(
                f"the calibration state {path} is missing or damaged",
                hint="start again with --overwrite",
            )
        header, _ = read_header(path)
        loaded = {}
        with path.open("rb") as file:
            for name, info in header.items():
                dtype, device = TORCH_DTYPES[info.dtype], self.runner.device
                stored = OnDisk(file, path.parent, info.shape, dtype, device, info.begin)
                first, count = self._own.start, self._own.stop - self._own.start
                own = self.runner.new_states((count, *info.shape[1:]), dtype)
                for rows in batches(*own.shape[:2]):
                    own[rows] = stored[first + rows.start : first + rows.stop]
                loaded[name] = own
        self.state = State(loaded["hidden"], loaded.get("topk"))

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
            collected = Collected(1)
            collected.add(_scaled(stats, module, smoothing))
            assert plan.scheme is not None
            feedback = self.feedback if module.endswith(RESIDUAL_WRITERS) else None
            solved = solve(
                weight[None], plan.scheme, collected.inputs(), self.settings, feedback=feedback
            )
            linear = solved.linears[0][0]
            emit([(plan, int4.pack(linear.codes), linear.scales)])
            reports.append(report_of(plan, linear, stats))
            served = smoothing.undo(plan.name, solved.dequantized(0))
            place = layer.get_submodule(module.removeprefix(prefix))
            place.weight = nn.Parameter(served.to(self.runner.dtype), requires_grad=False)
        return reports

    def _experts(
        self, index: int, routing: Routing, search: ScaleSearch, emit: Emit
    ) -> list[LinearReport]:
        """Quantize the routed experts of a layer, then send the tokens through them."""
        assert self.state is not None
        experts = LayerExperts(
            index,
            routing,
            search,
            emit,
            self.runner,
            self.settings,
            self.placement,
            self.feedback,
            self.phases,
            self.ranks,
        )
        reports = experts.quantize()
        with self.phases("experts forward"):
            experts.add_outputs(self.state, self._own.start)
        return reports


def _scaled(stats: InputStats | None, module: str, smoothing: Smoothing) -> InputStats | None:
    """Statistics of what a linear reads after scaling."""
    columns = smoothing.columns(module)
    if stats is None or columns is None:
        return stats
    held_out = None if stats.held_out is None else stats.held_out / columns.to(stats.held_out)
    hessian = smoothing.moment(module, stats.hessian)
    return replace(stats, hessian=hessian, held_out=held_out)
