"""Every INT4 linear of a checkpoint through the product that serves it, on the bytes as stored.

Each product is held against float64 with the decoded weights, which is a hard bound
(`quantize.products`), and with the source at hand against the source's weights, which is a figure
for people. Inputs are what the linears read when text runs through the checkpoint, or normal
numbers. Memory is that of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from halfbyte.calibration.architecture import Architecture
from halfbyte.calibration.families import is_routed_expert, language_model
from halfbyte.calibration.inputs import evenly
from halfbyte.calibration.mtp import mtp_input
from halfbyte.calibration.routing import Dispatch, Routing
from halfbyte.calibration.runner import EXPERT_LINEARS, LayerRunner, State, check_finite
from halfbyte.core import Checkpoint, LinearReport, StoredWeight
from halfbyte.devices import resolve_dtype
from halfbyte.errors import CalibrationError, CheckpointError, UsageError
from halfbyte.formats import int4
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import layer_index
from halfbyte.kernels import reference
from halfbyte.kernels.w4a16 import Packed, usable
from halfbyte.progress import Progress
from halfbyte.quantize.products import (
    DTYPE,
    TOKENS,
    Judged,
    Linear,
    Routed,
    Together,
    Width,
)

FAR = 3.0
"""How many times what the run's report has for a linear its outputs may be off by on other text."""
FAR_FOR_NORMAL = 1.5
"""The same for normal numbers, whose outputs are off as the weights are, but for chance."""


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """What is to be checked, on what."""

    device: str = "cpu"
    tokens: torch.Tensor | None = None
    """int64 [sequences, length] to run through the checkpoint; None for normal numbers."""
    layers: frozenset[int] | None = None
    """Decoder layers by index, MTP layers included; None is everything that is INT4."""


@dataclass(frozen=True, slots=True)
class ProductCheck:
    """A linear, or all routed experts of a layer together, and how far off their products are.

    Errors are relative, |y - z| / |z|, of the product of most tokens; None where outputs are not
    finite.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    """[N, K]; of experts together [experts, intermediate, hidden]."""
    by_kernel: bool
    """Whether CUDA kernels made them, not plain torch."""
    reached_by: int | None
    """Tokens of the text that come by; those of others join where an expert has few. None for
    normal numbers."""
    error: float | None
    """Against float64 with the decoded weights."""
    rounding: float | None
    """Of that float64 product, rounded to the dtype of the result."""
    of_allowance: float | None
    """The largest share of what float32 sums may be off by, of any output; above 1 is a fault."""
    output_error: float | None = None
    """Against float64 with the source's weights."""
    reported_error: float | None = None
    """The same as the run's report has it, on its own text; for normal numbers that of weights."""


@dataclass(frozen=True, slots=True)
class KernelResult:
    """What was checked. What was found is in the mismatches of `VerifyResult`."""

    engine: str
    inputs: str
    linears: tuple[ProductCheck, ...]
    experts: tuple[ProductCheck, ...]
    """Of each layer with routed experts, all in one launch."""


class Fault(NamedTuple):
    """A product that is not what it must be."""

    kind: str
    """"kernel" or "output"."""
    name: str
    message: str


def check_kernels(
    checkpoint: Checkpoint,
    weights: Mapping[str, StoredWeight],
    request: KernelRequest,
    progress: Progress,
    *,
    original: Callable[[str], torch.Tensor | None] | None = None,
    reports: Mapping[str, LinearReport] | None = None,
) -> tuple[KernelResult, tuple[Fault, ...], tuple[str, ...]]:
    """Check the INT4 weights among `weights`: the result, the faults, and what was left out.

    `original` gives the source of a weight by its name, float32 [N, K]; `reports` are the run's, by
    module. Raises what `check_request` does; what is wrong with the checkpoint itself is a fault.
    """
    check_request(checkpoint, weights, request)
    chosen = _chosen(weights, request.layers)
    with ShardReader(checkpoint) as reader:
        checker = _Checker(
            checkpoint,
            weights,
            chosen,
            reader,
            torch.device(request.device),
            progress,
            original or (lambda name: None),
            reports or {},
        )
        progress.start("check kernels", sum(w.nbytes for w in chosen.values()), "bytes")
        try:
            if request.tokens is None:
                checker.on_normal_numbers()
            else:
                checker.on_text(request.tokens)
        except (CheckpointError, CalibrationError) as error:
            checker.faults.append(Fault("kernel", checkpoint.path.name, f"stopped: {error}"))
    inputs = "standard normal numbers"
    if request.tokens is not None:
        inputs = f"what linears read of {request.tokens.numel():,} tokens of text"
    result = KernelResult(checker.engine(), inputs, tuple(checker.linears), tuple(checker.experts))
    return result, tuple(checker.faults), tuple(checker.notes)


def check_request(
    checkpoint: Checkpoint, weights: Mapping[str, StoredWeight], request: KernelRequest
) -> None:
    """Raises UsageError for layers without INT4 linears, UnsupportedModelError for text and a model
    that it cannot be run through."""
    _chosen(weights, request.layers)
    if request.tokens is not None:
        language_model(checkpoint)


def _chosen(
    weights: Mapping[str, StoredWeight], layers: frozenset[int] | None
) -> dict[str, StoredWeight]:
    packed = {n: w for n, w in weights.items() if w.encoding == "int4"}
    if not packed:
        raise UsageError(
            "--kernels: no linear of the checkpoint is INT4, so there is no product to check",
            hint="name a folder that `quantize SOURCE --to int4` wrote",
        )
    if layers is None:
        return packed
    present = sorted({index for n in packed if (index := layer_index(n)) is not None})
    if absent := sorted(layers - set(present)):
        raise UsageError(
            f"--layers: layer {absent[0]} has no INT4 linear",
            hint=f"those that have are {', '.join(map(str, present)) or 'none'}",
        )
    return {n: w for n, w in packed.items() if layer_index(n) in layers}


@dataclass
class _Checker:
    """Goes through a checkpoint and gathers what it finds."""

    checkpoint: Checkpoint
    weights: Mapping[str, StoredWeight]
    chosen: Mapping[str, StoredWeight]
    """Those to check, in model order."""
    reader: ShardReader
    device: torch.device
    progress: Progress
    original: Callable[[str], torch.Tensor | None]
    reports: Mapping[str, LinearReport]
    linears: list[ProductCheck] = field(default_factory=list)
    experts: list[ProductCheck] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def engine(self) -> str:
        if self.device.type != "cuda":
            return "plain torch on the CPU (no GPU: this checks the bytes, not the kernels)"
        name = torch.cuda.get_device_name(self.device)
        checks = [*self.linears, *self.experts]
        if (made := sum(check.by_kernel for check in checks)) == len(checks):
            return f"CUDA kernels on {name}"
        return f"CUDA kernels on {name} for {made:,} of {len(checks):,} products, else plain torch"

    @torch.no_grad()
    def on_normal_numbers(self) -> None:
        """Check all on inputs that are the same in every run and on every device."""
        for index, names in _by_layer(self.chosen).items():
            together = None
            if (width := self._width(index)) is not None:
                together = Together(Routed.at_random(self._normal(width.hidden), width), width)
            for name in names:
                linear = self._linear(name, self._normal(self.chosen[name].shape[1]), None)
                if together is not None:
                    together.take(name, linear)
            if together is not None:
                self._experts(together, None)

    @torch.no_grad()
    def on_text(self, tokens: torch.Tensor) -> None:
        """Check all on what reaches them when text runs through the checkpoint."""
        architecture = Architecture.of(self.checkpoint)
        runner = LayerRunner(
            architecture,
            self.weights,
            self.reader,
            device=str(self.device),
            dtype=getattr(torch, resolve_dtype("auto", str(self.device))),
        )
        by_layer = _by_layer(self.chosen)
        outside = by_layer.pop(None, [])
        state = runner.embed(tokens)
        for index in range(max((i for i in by_layer if i is not None), default=-1) + 1):
            if (depth := index - architecture.layers) >= 0:
                state = mtp_input(runner, index, state, tokens, depth)
            if index in by_layer:
                self._layer(runner, index, state, by_layer[index])
            else:
                runner.advance(index, state)
        for name in outside:
            self._unseen(name)

    def _layer(self, runner: LayerRunner, index: int, state: State, names: Sequence[str]) -> None:
        """Check a layer while the tokens move through it."""
        prefix = runner.architecture.layer_name(index)
        layer = runner.load_layer(index)
        plain = [name for name in names if not is_routed_expert(_module(name))]
        with _watched(layer, {name: _module(name).removeprefix(prefix) for name in plain}) as seen:
            routing = runner.forward(layer, state)
        del layer
        for name in plain:
            if name in seen:
                self._linear(name, seen[name].rows, seen[name].tokens)
            else:
                self._unseen(name)
        if routing is not None:
            self._routed(runner, index, state, routing)
        check_finite(state.hidden, f"layer {index}")

    def _routed(self, runner: LayerRunner, index: int, state: State, routing: Routing) -> None:
        """Check the routed experts of a layer, alone and together, and add what they make."""
        prefix = f"{runner.architecture.layer_name(index)}mlp.experts."
        together = None
        if (width := self._width(index)) is not None:
            together = Together(Routed.sample(routing), width)
        dispatch, whole, hidden = routing.dispatch(), state.hidden[:], routing.hidden[:]
        for expert in range(routing.experts):
            x = hidden[_rows_for(dispatch, expert, len(hidden))]
            made: dict[str, torch.Tensor] = {}
            for leaf in EXPERT_LINEARS:
                name = f"{prefix}{expert}.{leaf}.weight"
                if leaf == "down_proj":
                    made["gate_up"] = torch.cat([made.pop("gate_proj"), made.pop("up_proj")])
                    x = runner.inner(x, made["gate_up"])
                if name not in self.chosen:
                    made[leaf] = runner.read(name, torch.float32)
                    continue
                linear = self._linear(name, x, dispatch.tokens(expert))
                made[leaf] = linear.weight
                if together is not None:
                    together.take(name, linear)
            made["down"] = made.pop("down_proj")
            runner.add_expert(whole.flatten(0, 1), hidden, dispatch, expert, made)
        state.hidden[:] = whole
        if together is not None:
            self._experts(together, len(hidden))

    def _unseen(self, name: str) -> None:
        self.notes.append(f"{_module(name)} reads nothing of the text: standard normal numbers")
        self._linear(name, self._normal(self.chosen[name].shape[1]), None)

    def _linear(self, name: str, inputs: torch.Tensor, reached_by: int | None) -> Linear:
        """Check the products of a linear with the rows of `inputs` [M, K]."""
        stored, module = self.chosen[name], _module(name)
        assert stored.scheme is not None
        parts = {
            f"weight_{key}": self.reader.read(info).to(self.device)
            for key, info in stored.parts.items()
        }
        codes, scales = int4.unpack(parts, stored.scheme)
        weight = reference.dequantize_int4(codes, scales)
        linear = Linear(Packed(parts["weight_packed"], scales), weight)
        x = inputs.to(DTYPE).contiguous()
        judged, y = linear.judged(x)
        check = self._check(module, stored.shape, usable(linear.stored), reached_by, judged)
        found, reported = self._against_source(name, x, y, real=reached_by is not None)
        self.linears.append(replace(check, output_error=found, reported_error=reported))
        self.progress.advance(stored.nbytes)
        return linear

    def _experts(self, together: Together, reached_by: int | None) -> None:
        width = together.width
        shape = width.experts, width.intermediate, width.hidden
        judged = together.judged()
        name = f"{width.prefix}experts"
        self.experts.append(self._check(name, shape, together.by_kernel, reached_by, judged))

    def _check(
        self,
        name: str,
        shape: tuple[int, ...],
        by_kernel: bool,
        reached_by: int | None,
        judged: Sequence[Judged],
    ) -> ProductCheck:
        faults = [one.fault for one in judged if one.fault is not None]
        if faults:  # the others say the same again
            self.faults.append(Fault("kernel", name, faults[0]))
        shares = [one.of_allowance for one in judged]
        known = [share for share in shares if share is not None]
        return ProductCheck(
            name=name,
            layer=layer_index(f"{name}."),
            shape=shape,
            by_kernel=by_kernel,
            reached_by=reached_by,
            error=judged[-1].error,
            rounding=judged[-1].rounding,
            of_allowance=max(known) if len(known) == len(shares) else None,
        )

    def _against_source(
        self, name: str, x: torch.Tensor, y: torch.Tensor, *, real: bool
    ) -> tuple[float | None, float | None]:
        """How far off the outputs `y` [M, N] are, and by the report, of the source's."""
        source = self.original(name)
        if source is None or source.shape != self.chosen[name].shape or len(y) != len(x):
            return None, None
        wanted = x.double() @ source.to(self.device).double().T
        norm = float(wanted.norm())
        found = float((y.double() - wanted).norm()) / norm if norm else 0.0
        error = found if math.isfinite(found) else None
        report = self.reports.get(_module(name))
        if report is None:
            return error, None
        weights = math.sqrt(report.weight_error)
        reported, largest = weights, FAR_FOR_NORMAL * weights
        if real:
            reported = math.sqrt(report.error)
            largest = FAR * max(reported, weights)
        if error is not None and error > largest:
            message = (
                f"outputs are off by {found:.3f} of their norm against the source, the report says "
                f"{reported:.3f}; on these inputs it may be {largest:.3f}"
            )
            self.faults.append(Fault("output", _module(name), message))
        return error, reported

    def _normal(self, width: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(TOKENS[-1], width, generator=generator).to(self.device)

    def _width(self, index: int | None) -> Width | None:
        """Of the experts of a layer if one launch can take them all."""
        own = {name: w for name, w in self.weights.items() if layer_index(name) == index}
        width = Width.of(own, self.checkpoint.config)
        if isinstance(width, str):
            self.notes.append(f"experts of layer {index} were not checked in one launch: {width}")
            return None
        return width


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _by_layer(names: Mapping[str, StoredWeight]) -> dict[int | None, list[str]]:
    layers: dict[int | None, list[str]] = {}
    for name in names:
        layers.setdefault(layer_index(name), []).append(name)
    return layers


class _Seen(NamedTuple):
    rows: torch.Tensor
    tokens: int
    """That came by, of which these are some."""


@contextmanager
def _watched(layer: nn.Module, modules: Mapping[str, str]) -> Iterator[dict[str, _Seen]]:
    """What linears of a layer read meanwhile, by the keys of `modules`."""
    seen: dict[str, _Seen] = {}

    def watch(key: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def see(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            rows = args[0].flatten(0, -2)
            first = seen.get(key) or _Seen(rows[evenly(TOKENS[-1], len(rows), rows.device)], 0)
            seen[key] = _Seen(first.rows, first.tokens + len(rows))

        return module.register_forward_pre_hook(see)

    handles = [watch(key, layer.get_submodule(name)) for key, name in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _rows_for(dispatch: Dispatch, expert: int, tokens: int) -> torch.Tensor:
    """int64 [n]: tokens to try an expert with, its own first, then others of the layer."""
    own = dispatch.rows(expert)
    own = own[evenly(TOKENS[-1], len(own), own.device)]
    others = evenly(TOKENS[-1], tokens, own.device)
    others = others[~torch.isin(others, own)]
    return torch.cat([own, others[: TOKENS[-1] - len(own)]])
