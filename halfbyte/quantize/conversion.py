"""What needs no calibration: copying, dequantizing, and plain rounding, one tensor at a time."""

from __future__ import annotations

import torch

from halfbyte.core import LinearReport, QuantizedWeight, Settings, TensorPlan
from halfbyte.formats import int4
from halfbyte.formats.shards import ShardReader, require_finite
from halfbyte.formats.writer import CheckpointWriter
from halfbyte.quantize.calibrated import report_of
from halfbyte.quantize.smoothing import Smoothing
from halfbyte.quantize.solver import solve


def convert(
    tensor: TensorPlan,
    settings: Settings,
    reader: ShardReader,
    writer: CheckpointWriter,
    smoothing: Smoothing,
) -> list[LinearReport]:
    """Carry out one decision of the plan; a linear that was quantized is reported.

    `smoothing` has the scales of the layer's inputs, and changes the tensors that take part.
    Raises CheckpointError for values that are not finite, even in a copy.
    """
    if tensor.action == "dequantize":
        # Rounded once: to what BF16 holds of the scaled weight.
        weight = smoothing.apply(tensor.name, reader.read_weight(tensor.source))
        writer.write(tensor.outputs[0].name, weight.to(torch.bfloat16))
    elif tensor.action == "copy":
        for part, output in zip(tensor.source.parts.values(), tensor.outputs, strict=True):
            stored = reader.read(part)
            if stored.is_floating_point():
                # torch has no comparisons of FP8 numbers.
                require_finite(part, stored if stored.element_size() > 1 else stored.bfloat16())
            writer.write(output.name, smoothing.apply(tensor.name, stored))
    elif tensor.action == "quantize":
        assert tensor.scheme is not None
        weight = reader.read_weight(tensor.source, torch.float32, settings.device)
        solved = solve(weight[None], tensor.scheme, None, settings)
        quantized, rtn_error = solved.rows(0, 0, weight.shape[0])
        write_int4(writer, tensor, quantized)
        return [report_of(tensor, weight, quantized, rtn_error, None)]
    return []


def write_int4(writer: CheckpointWriter, tensor: TensorPlan, quantized: QuantizedWeight) -> None:
    """Pack a quantized linear and write its tensors."""
    for name, packed in int4.pack(tensor.name, quantized, tensor.source.shape).items():
        writer.write(name, packed)
