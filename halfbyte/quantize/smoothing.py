"""The scaled inputs of one decoder layer: how they are found, and how they change its tensors.

A calibrated run computes throughout with the layer as it was before scaling. Scales enter only
where a weight is solved (`Smoothing.apply`, `Smoothing.moment`), leave again before the result is
run (`Smoothing.undo`), and change what is written of the tensors that stay floating point.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from halfbyte.core import InputStats, ScaledInput, Settings, TensorPlan
from halfbyte.quantize.awq import (
    LARGEST_POWER,
    ChannelScales,
    Reader,
    evenly_spread,
    identity,
    scaled_moment,
    scales_on_grid,
    search_scales,
)
from halfbyte.quantize.gptq import factorize
from halfbyte.quantize.readers import ScalableInput


@dataclass
class Smoothing:
    """The scales of one layer's inputs, as they become known."""

    inputs: Sequence[ScalableInput] = ()
    """What may be scaled; of anything else nothing changes."""
    found: dict[str, ChannelScales] = field(default_factory=dict)
    """By source."""

    def __post_init__(self) -> None:
        self._by_reader = {reader: i for i in self.inputs for reader in i.readers}

    def on_host(self) -> dict[str, ChannelScales]:
        """What was found, in host memory, for other ranks."""
        return {name: replace(s, scales=s.scales.cpu()) for name, s in self.found.items()}

    def input_of(self, module: str) -> ScalableInput | None:
        """The input that a linear reads, when it may be scaled."""
        return self._by_reader.get(module)

    def columns(self, module: str) -> torch.Tensor | None:
        """What the columns of a linear are multiplied by, float32 [K]; None for nothing."""
        scalable = self._by_reader.get(module)
        return None if scalable is None else self.rows(scalable.source)

    def rows(self, module: str) -> torch.Tensor | None:
        """What the rows of a linear (and its bias), or the weight of a norm, are divided by,
        float32 [N]; None for nothing."""
        scales = self.found.get(module)
        return None if scales is None or scales.exponent is None else scales.scales

    def touches(self, name: str) -> bool:
        """Whether the tensor of this name is another one after scaling."""
        module, _, leaf = name.rpartition(".")
        return self.rows(module) is not None or (
            leaf == "weight" and self.columns(module) is not None
        )

    def apply(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of this name, a weight [N, K], norm [K] or bias [N], after scaling.

        Computed in float32 and returned in its own dtype.
        """
        return self._multiplied(name, tensor, invert=False)

    def undo(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A scaled tensor as it acts where nothing is scaled; the inverse of `apply`."""
        return self._multiplied(name, tensor, invert=True)

    def moment(self, module: str, hessian: torch.Tensor) -> torch.Tensor:
        """Second moment [K, K] of what a linear reads after scaling."""
        columns = self.columns(module)
        return hessian if columns is None else scaled_moment(hessian, columns)

    def report(self) -> tuple[ScaledInput, ...]:
        """What was found, for the report of the run."""
        lines = []
        for scalable in self.inputs:
            if (found := self.found.get(scalable.source)) is None:
                continue
            changed = found.exponent is not None
            lines.append(
                ScaledInput(
                    name=scalable.source,
                    readers=len(scalable.readers),
                    exponent=found.exponent,
                    gain=found.gain,
                    smallest=float(found.scales.amin()),
                    largest=float(found.scales.amax()),
                    steps=scalable.steps,
                    powers=_packed(found.scales, scalable.steps) if changed else "",
                )
            )
        return tuple(lines)

    @classmethod
    def of_report(
        cls, inputs: Sequence[ScalableInput], reported: Mapping[str, ScaledInput]
    ) -> Smoothing:
        """The scales that a run reports, by source, for the inputs of one layer.

        Raises ValueError for scales that no run can have chosen.
        """
        found = {}
        for scalable in inputs:
            record = reported.get(scalable.source)
            if record is not None and record.powers:
                scales = _unpacked(record.powers, scalable.steps)
                found[scalable.source] = ChannelScales(scales, record.exponent or 0.0, record.gain)
        return cls(inputs, found)

    def _multiplied(self, name: str, tensor: torch.Tensor, *, invert: bool) -> torch.Tensor:
        if not self.touches(name):
            return tensor
        module, _, leaf = name.rpartition(".")
        columns = self.columns(module) if leaf == "weight" else None
        rows = self.rows(module)
        out = tensor.float()
        if columns is not None:
            columns = columns.to(out.device)
            out = out / columns if invert else out * columns
        if rows is not None:
            rows = rows.to(out.device).view(-1, *[1] * (out.dim() - 1))
            out = out * rows if invert else out / rows
        return out.to(tensor.dtype)


@dataclass(frozen=True)
class ScaleSearch:
    """Fills the `Smoothing` of one layer, each input when its second moment is known."""

    smoothing: Smoothing
    planned: Mapping[str, TensorPlan]
    """The layer's quantized linears by module."""
    read: Callable[[str], torch.Tensor]
    """A weight by its tensor's name, float32 [N, K], on the compute device."""
    settings: Settings

    def plain_inputs(self, inputs: Mapping[str, InputStats], experts_per_token: int) -> None:
        """Inputs that at least one quantized linear reads that is not a routed expert's.

        `inputs` has the statistics by module. Routed experts behind the same norm take part with
        that norm's second moment and an even share of the tokens: where tokens go is not known.
        """
        for scalable in self.smoothing.inputs:
            stats = next((inputs[m] for m in scalable.quantized if m in inputs), None)
            if stats is None:
                continue
            pairs = evenly_spread(_expert_pairs(scalable))
            readers = [(pair, experts_per_token / len(pairs)) for pair in pairs]
            readers += [((m,), 1.0) for m in scalable.quantized if ".experts." not in m]
            self._search(scalable, stats.hessian, readers)

    def experts_input(self, hessian: torch.Tensor, loads: Sequence[float]) -> None:
        """The norm that only routed experts are quantized behind; nothing if that is not so.

        `hessian` float32 [K, K] is the second moment of what the whole layer reads; `loads` is the
        share of its tokens that each expert gets. At most `limits.READERS_IN_SEARCH` experts that
        get tokens take part, evenly spread by index, each weighed by its load.
        """
        for scalable in self.smoothing.inputs:
            pairs = _expert_pairs(scalable)
            if len(pairs) != len(loads) or scalable.source in self.smoothing.found:
                continue
            reached = [(p, load) for p, load in zip(pairs, loads, strict=True) if load > 0]
            if reached:
                self._search(scalable, hessian, evenly_spread(reached))

    def inner(self, module: str, weight: torch.Tensor, stats: InputStats | None) -> None:
        """The input of an expert's down projection `module`, weight float32 [N, K].

        `stats` is of what it reads behind the expert's gate and up as stored. An expert that no
        token reaches by itself stays as it is: there is nothing to search with.
        """
        scalable = self.smoothing.input_of(module)
        if scalable is None:
            return
        if stats is None or not stats.tokens:
            self.smoothing.found[scalable.source] = identity(weight.shape[1], weight.device)
            return
        scheme = self.planned[module].scheme
        assert scheme is not None
        reader = Reader(weight, self._cost(stats.hessian), scheme)
        self._find(scalable, lambda: [reader])

    def _search(
        self,
        scalable: ScalableInput,
        hessian: torch.Tensor,
        readers: Sequence[tuple[tuple[str, ...], float]],
    ) -> None:
        """`readers` are modules that are stacked to one, and their share of the tokens."""
        cost = self._cost(hessian)

        def load() -> Iterator[Reader]:
            for modules, share in readers:
                plans = [self.planned[m] for m in modules]
                scheme = plans[0].scheme
                assert scheme is not None
                weight = torch.cat([self.read(plan.name) for plan in plans])
                yield Reader(weight, cost, scheme, share)

        self._find(scalable, load)

    def _find(self, scalable: ScalableInput, readers: Callable[[], Iterable[Reader]]) -> None:
        found = search_scales(readers, scalable.source, scalable.steps)
        self.smoothing.found[scalable.source] = found

    def _cost(self, hessian: torch.Tensor) -> torch.Tensor:
        """What rounding errors are weighed with; see `awq.Reader`."""
        # What is not finite is for the search to complain of, which knows where it is from.
        if self.settings.compensates and bool(torch.isfinite(hessian).all()):
            return factorize(hessian[None], self.settings.dampening).pivots[0]
        return hessian


def _packed(scales: torch.Tensor, steps: int) -> str:
    powers = (scales.cpu().log2() * steps).round().to(torch.int8)
    return base64.b64encode(powers.numpy().tobytes()).decode()


def _unpacked(powers: str, steps: int) -> torch.Tensor:
    stored = torch.frombuffer(bytearray(base64.b64decode(powers, validate=True)), dtype=torch.int8)
    if bool((stored.short().abs() > LARGEST_POWER * steps).any()):
        raise ValueError(f"scales reach beyond 2^{LARGEST_POWER}")
    return scales_on_grid(stored, steps)


def _expert_pairs(scalable: ScalableInput) -> list[tuple[str, ...]]:
    """Gate and up projection of each quantized routed expert behind a norm, by expert."""
    experts: dict[str, tuple[str, ...]] = {}
    for module in scalable.quantized:
        owner, _, leaf = module.rpartition(".")
        if ".experts." in module and leaf != "down_proj":
            experts[owner] = (*experts.get(owner, ()), module)
    return list(experts.values())
