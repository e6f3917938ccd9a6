"""Holds stored weights against their source, one tensor at a time.

Each function returns what is wrong with one weight as a sentence with the expected and the found
value, or None. Memory is that of one weight; plain tensors are compared in slices of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from halfbyte.core import LinearReport, StoredWeight, TensorInfo
from halfbyte.errors import CheckpointError
from halfbyte.formats import int4
from halfbyte.formats.shards import TORCH_DTYPES, ShardReader, row_slices
from halfbyte.quantize.locate import Excess, locate

SLICE_BYTES = 64 << 20
HALF_STEP = 0.5 + 1e-4
"""Half a step between codes, and the float32 error of dividing by the scale."""
LARGEST_SCALE = 1 / 3
"""Of a group's largest weight, which needs a seventh; refinement moves scales, but not that far."""
NOISE_FACTOR = 5.0
"""GPTQ moves weights on purpose, but not further than this many times the rounding noise. On
trained models it is 1.0 to 1.8 times; codes of another weight are at 9 and more."""
ERROR_TOLERANCE = 6e-9
"""Relative; a report has nine digits. Errors and their squares are the same float32 numbers on all
devices, since a code times a scale is exact, and their sums are float64."""
SCALED_ERROR_TOLERANCE = 1e-3
"""The same of a weight whose inputs were scaled: devices differ in the last bits of a power."""


def weight_fault(weight: StoredWeight, reader: ShardReader) -> str | None:
    """What is wrong with a stored weight by itself: values that no weight or scale can have."""
    try:
        if weight.encoding == "int4":
            shape = reader.read(weight.parts["shape"]).tolist()
            if shape != list(weight.shape):
                return f"weight_shape says {shape}, weight_packed holds {list(weight.shape)}"
        for key in ("weight", "scale"):
            if (part := weight.parts.get(key)) is None or not _is_float(part):
                continue
            for rows in row_slices(part, SLICE_BYTES):
                values = reader.read(part, rows).float()
                good = torch.isfinite(values)
                if key == "scale":
                    # A negative scale turns a group of INT4 around; of FP8 it is damage.
                    good &= values != 0 if weight.encoding == "int4" else values > 0
                if not bool(good.all()):
                    bad = float(values[~good][0])
                    return f"{part.name} holds {bad}; expected {_expectation(key, weight)}"
    except CheckpointError as error:
        return str(error)
    return None


def difference(
    source: StoredWeight,
    source_reader: ShardReader,
    output: StoredWeight,
    output_reader: ShardReader,
    report: LinearReport | None,
    *,
    rounded: bool,
    scaled: Callable[[torch.Tensor], torch.Tensor] | None = None,
    located: bool = True,
) -> str | None:
    """How an output weight differs from what its source allows.

    Copies must be equal bit for bit, dequantized weights equal to the decoded source in BF16.
    `rounded` INT4 weights must be the nearest codes; others may have moved, within bounds.
    `scaled` is what the run has done to the decoded source, float32, before all that. `located` has
    the likeliest place of a change searched, which takes longer than the comparison.
    """
    if source.shape != output.shape:
        return f"has shape {list(output.shape)}, its source {list(source.shape)}"
    try:
        if output.encoding == source.encoding and scaled is None:
            return _copy_difference(source, source_reader, output, output_reader)
        if output.encoding == "plain":
            found = output_reader.read(output.parts["weight"])
            expected = source_reader.read_weight(source)
            if scaled is not None:
                expected = scaled(expected)
            return _tensor_difference(expected.to(_plain_dtype(source)), found)
        if scaled is not None and output.encoding == source.encoding == "fp8":
            expected, found = source_reader.read_weight(source), output_reader.read_weight(output)
            return _tensor_difference(scaled(expected), found)
        if output.encoding == "int4":
            weight = source_reader.read_weight(source, torch.float32)
            if scaled is not None:
                weight = scaled(weight)
            tolerance = ERROR_TOLERANCE if scaled is None else SCALED_ERROR_TOLERANCE
            return _int4_difference(
                weight,
                output,
                output_reader,
                report,
                rounded=rounded,
                tolerance=tolerance,
                located=located,
            )
    except CheckpointError as error:
        return str(error)
    return f"is stored as {output.encoding}, its source as {source.encoding}"


def _plain_dtype(source: StoredWeight) -> torch.dtype:
    """In which a weight is written that is not quantized."""
    return (
        TORCH_DTYPES[source.parts["weight"].dtype] if source.encoding == "plain" else torch.bfloat16
    )


def _copy_difference(
    source: StoredWeight,
    source_reader: ShardReader,
    output: StoredWeight,
    output_reader: ShardReader,
) -> str | None:
    for key, part in source.parts.items():
        copy = output.parts[key]
        if (part.dtype, part.shape) != (copy.dtype, copy.shape):
            return (
                f"{copy.name} is {copy.dtype} {list(copy.shape)}, "
                f"expected {part.dtype} {list(part.shape)}"
            )
        for rows in row_slices(part, SLICE_BYTES):
            fault = _tensor_difference(
                source_reader.read(part, rows), output_reader.read(copy, rows), rows
            )
            if fault is not None:
                return fault
    return None


def _tensor_difference(
    expected: torch.Tensor, found: torch.Tensor, rows: tuple[int, int] | None = None
) -> str | None:
    """The first element whose bits differ."""
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        wanted = f"{expected.dtype} {list(expected.shape)}"
        return f"is {found.dtype} {list(found.shape)}, expected {wanted}"
    unequal = (_bits(expected) != _bits(found)).view(-1, expected.element_size()).any(1)
    if not bool(unequal.any()):
        return None
    flat = int(unequal.nonzero()[0])
    where = [int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape)]
    if rows is not None:
        where[0] += rows[0]
    got, want = (float(t.reshape(-1)[flat].float()) for t in (found, expected))
    count = int(unequal.sum())
    return f"{count} values differ, first at {where}: {got:.6g}, expected {want:.6g}"


def _int4_difference(
    weight: torch.Tensor,
    output: StoredWeight,
    reader: ShardReader,
    report: LinearReport | None,
    *,
    rounded: bool,
    tolerance: float,
    located: bool,
) -> str | None:
    scheme = output.scheme
    assert scheme is not None
    parts = {f"weight_{key}": reader.read(info) for key, info in output.parts.items()}
    codes, stored_scales = int4.unpack(parts, scheme)
    groups = stored_scales.shape[1]
    grouped = weight.unflatten(1, (groups, -1))
    scales = stored_scales.float().unsqueeze(2)
    steps = codes.unflatten(1, (groups, -1)).float()
    largest = grouped.abs().amax(2)
    # A group of zeros has the smallest normal number as its scale, which says nothing.
    too_large = (scales.squeeze(2).abs() > LARGEST_SCALE * largest) & (largest > 0)
    if bool(too_large.any()):
        row, group = (int(i) for i in too_large.nonzero()[0])
        return (
            f"scale [{row}, {group}] is {float(scales[row, group, 0]):.4g}, but the largest weight "
            f"of its group, {float(largest[row, group]):.4g}, asks for about a seventh of that"
        )
    energy = _energy(weight)
    error = _energy((steps * scales).sub_(grouped))

    def place() -> str:
        if not located:
            return ""
        excess = None
        if report is not None:
            reported = report.weight_error * energy
            slack = tolerance * reported + 1e-6 * abs(error - reported)
            excess = Excess(error - reported, slack)
        found = locate(weight, codes, stored_scales, scheme, excess)
        return f"; {found}" if found is not None else ""

    if rounded:
        exact = (grouped / scales).clamp(scheme.code_min, scheme.code_max)
        off = ((steps - exact).abs() > HALF_STEP).flatten(1)
        if bool(off.any()):
            row, column = (int(i) for i in off.nonzero()[0])
            return (
                f"{int(off.sum())} codes are not the nearest, first at {[row, column]}: "
                f"{int(codes[row, column])} for {float(exact.flatten(1)[row, column]):.3f}{place()}"
            )
    noise = _energy(scales.expand_as(grouped)) / 12  # the variance of a uniform step
    if error > NOISE_FACTOR**2 * noise:
        return (
            f"weights are off by {math.sqrt(error / energy):.3f} of their norm, expected at most "
            f"{NOISE_FACTOR:g} times the rounding noise of {math.sqrt(noise / energy):.3f}"
        )
    if report is not None and energy > 0:
        found = error / energy
        if not math.isclose(found, report.weight_error, rel_tol=tolerance, abs_tol=1e-12):
            said = report.weight_error
            return f"has relative error {found:.9g}, the report says {said:.9g}{place()}"
    return None


def _energy(values: torch.Tensor) -> float:
    return float(values.square().sum(dtype=torch.float64))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)


def _is_float(info: TensorInfo) -> bool:
    return info.dtype.startswith(("F", "BF"))


def _expectation(key: str, weight: StoredWeight) -> str:
    if key == "weight":
        return "a finite number"
    return f"a {'nonzero' if weight.encoding == 'int4' else 'positive'} finite number"
