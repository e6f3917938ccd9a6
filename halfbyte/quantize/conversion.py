"""What needs no calibration: copying, dequantizing, and plain rounding."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from halfbyte.calibration.families import is_routed_expert
from halfbyte.core import LinearReport, QuantizedWeight, Settings, TensorPlan, Unit
from halfbyte.formats import int4
from halfbyte.formats.shards import TORCH_DTYPES, Checks, Request, ShardReader, row_slices
from halfbyte.formats.writer import CheckpointWriter
from halfbyte.quantize.experts import EXPERT_STACKS, solving_order
from halfbyte.quantize.memory import BATCH_ELEMENTS
from halfbyte.quantize.smoothing import Smoothing
from halfbyte.quantize.solver import report_of, solve
from halfbyte.ranks import Ranks


def convert(
    tensors: Sequence[TensorPlan],
    settings: Settings,
    reader: ShardReader,
    writer: CheckpointWriter,
    smoothing: Smoothing,
) -> list[LinearReport]:
    """Carry out decisions of the plan, in their order; linears that were quantized are reported.

    `smoothing` has the scales of the layer's inputs, and changes the tensors that take part.
    Raises CheckpointError for values that are not finite, even in a copy.
    """
    reports = []
    for batch in _batches(tensors, BATCH_ELEMENTS[settings.device.partition(":")[0]]):
        tensor = batch[0]
        if tensor.action == "quantize":
            reports += _quantize(batch, settings, reader, writer)
        elif tensor.action == "dequantize":
            if smoothing.touches(tensor.name):
                # Rounded once: to what BF16 holds of the scaled weight.
                weight = reader.read_weight(tensor.source, torch.float32, settings.device)
                weight = smoothing.apply(tensor.name, weight).bfloat16()
            else:
                weight = reader.read_weight(tensor.source, torch.bfloat16, settings.device)
            writer.write(tensor.outputs[0].name, weight)
        elif tensor.action == "copy":
            _copy(tensor, reader, writer, smoothing)
    return reports


def read_order(
    units: Iterable[Unit],
    *,
    experts_at_once: int | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008
) -> Iterator[Request]:
    """What a rank of a run over these units will read, in that order or nearly so.

    `experts_at_once` are the routed experts that a calibrated run solves as one batch.
    """
    for unit in units:
        if experts_at_once is None or unit.kind not in ("layer", "mtp"):
            yield from _conversion_requests(unit.tensors)
            continue
        # First the plain weights of the layer, then those of them that are quantized once more,
        # then the experts, and at last what is only converted.
        experts = _experts_as_solved(unit, experts_at_once, ranks)
        plain = [t for t in unit.tensors if not is_routed_expert(t.module)]
        for tensor in (*plain, *(t for t in plain if t.action == "quantize"), *experts):
            yield from map(Request, tensor.source.parts.values())
        if ranks.first:
            yield from _conversion_requests([t for t in unit.tensors if t.action != "quantize"])


def _experts_as_solved(unit: Unit, at_once: int, ranks: Ranks) -> Iterator[TensorPlan]:
    """The linears of a rank's routed experts of a layer, as `LayerExperts` asks for them."""
    linears: dict[int, dict[str, TensorPlan]] = defaultdict(dict)
    for tensor in unit.tensors:
        if is_routed_expert(tensor.module):
            owner, _, leaf = tensor.module.rpartition(".")
            linears[int(owner.rpartition(".")[2])][leaf] = tensor
    experts = [linears[number] for number in sorted(linears)]
    for chunks in solving_order(ranks.shares(len(experts))[ranks.rank], at_once):
        for leaves in EXPERT_STACKS.values():
            for expert in itertools.chain(*chunks):
                yield from (experts[expert][leaf] for leaf in leaves if leaf in experts[expert])


def _conversion_requests(tensors: Iterable[TensorPlan]) -> Iterator[Request]:
    """What `convert` reads."""
    for tensor in tensors:
        for part in tensor.source.parts.values():
            if tensor.action == "copy":
                yield from (Request(part, rows) for rows in row_slices(part))
            elif tensor.action != "drop":
                yield Request(part)


def _batches(tensors: Sequence[TensorPlan], elements: int) -> Iterator[list[TensorPlan]]:
    """Neighbours that are quantized together, up to so many elements; all others by themselves."""
    batch: list[TensorPlan] = []
    filled = 0
    for tensor in tensors:
        size = math.prod(tensor.source.shape)
        joins = tensor.action == batch[0].action == "quantize" if batch else False
        if batch and not (joins and filled + size <= elements):
            yield batch
            batch, filled = [], 0
        batch.append(tensor)
        filled += size
    if batch:
        yield batch


def _quantize(
    batch: Sequence[TensorPlan],
    settings: Settings,
    reader: ShardReader,
    writer: CheckpointWriter,
) -> list[LinearReport]:
    """Round linears, those of one shape and scheme at once: small ones leave a GPU idle."""
    checks = Checks()
    weights = [reader.read_weight(t.source, torch.float32, settings.device, checks) for t in batch]
    checks.settle()
    alike = defaultdict(list)
    for number, tensor in enumerate(batch):
        alike[tensor.source.shape, tensor.scheme].append(number)
    solutions: dict[int, tuple[QuantizedWeight, torch.Tensor]] = {}
    for (_, scheme), numbers in alike.items():
        assert scheme is not None
        stack = [weights[number] for number in numbers]
        # A batch of one need not be copied.
        together = torch.stack(stack) if len(stack) > 1 else stack[0][None]
        solved = solve(together, scheme, None, settings)
        packed = int4.pack(solved.codes)
        for number, (linear,), own in zip(numbers, solved.linears, packed, strict=True):
            solutions[number] = linear, own
    reports = []
    for number, tensor in enumerate(batch):
        linear, packed = solutions[number]
        write_int4(writer, [(tensor, packed, linear.scales)])
        reports.append(report_of(tensor, linear, None))
    return reports


def _copy(
    tensor: TensorPlan, reader: ShardReader, writer: CheckpointWriter, smoothing: Smoothing
) -> None:
    """Copy the parts of a tensor, in slices, so that memory never holds an embedding; what takes
    part in scaling (a norm, a router) is small and changed as a whole."""
    if smoothing.touches(tensor.name):
        weight = reader.read_weight(tensor.source)
        scaled = smoothing.apply(tensor.name, weight)
        [output] = tensor.outputs
        writer.write(output.name, scaled.to(TORCH_DTYPES[output.dtype]))
        return
    for part, output in zip(tensor.source.parts.values(), tensor.outputs, strict=True):
        for rows in row_slices(part):
            stored = reader.read(part, rows)
            if stored.is_floating_point():
                # torch has no comparisons of FP8 numbers.
                values = stored if stored.element_size() > 1 else stored.bfloat16()
                checks = Checks()
                checks.add(part, values, first_row=rows[0] if rows else 0)
                checks.settle()
            writer.write(output.name, stored, rows)


def write_int4(
    writer: CheckpointWriter, linears: Iterable[tuple[TensorPlan, torch.Tensor, torch.Tensor]]
) -> None:
    """Write the tensors of quantized linears, of packed codes int32 [N, K/8] and scales each."""
    tensors: dict[str, torch.Tensor] = {}
    for plan, packed, scales in linears:
        tensors |= int4.stored(plan.name, packed, scales)
    writer.write_together(tensors)
