"""Decode times as tables, lines and a JSON record; pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from halfbyte.console import Column, Table
from halfbyte.core import Checkpoint
from halfbyte.kernels.decode_time import (
    LAYER_FORMATS,
    LEFT_OUT,
    Experts,
    LayerFormat,
    LayerTime,
    Timing,
)

NAMES: Mapping[LayerFormat, str] = {
    "fp8": "FP8",
    "int4": "INT4, rest BF16",
    "int4-fp8": "INT4, rest FP8",
}
SLOWEST = 2
"""Parts that are named beside a layer."""


def record(
    checkpoint: Checkpoint, device: str, group_size: int | None, times: Sequence[LayerTime]
) -> dict[str, Any]:
    """All times as JSON; microseconds, and percent of speed."""
    return {
        "source": checkpoint.origin,
        "model_type": checkpoint.model_type,
        "device": device,
        "group_size": group_size or "channel",
        "bytes_per_second": times[0].bandwidth,
        "left_out": list(LEFT_OUT),
        "layers": [_layer_record(time) for time in times],
    }


def _layer_record(time: LayerTime) -> dict[str, Any]:
    return {
        "tensor_parallel": time.ranks,
        "batch": time.batch,
        "active_experts": time.active,
        "us": {layer: time.us(layer) for layer in LAYER_FORMATS},
        "fp8_bound_us": time.bound_us,
        "gain_percent": {layer: time.gain(layer) for layer in LAYER_FORMATS},
        "gain_over_bound_percent": {layer: time.gain_over_bound(layer) for layer in LAYER_FORMATS},
        "parts": [
            {
                **asdict(part.product),
                "timings": [asdict(timing) for timing in part.timings],
                "notes": list(part.notes),
            }
            for part in time.parts
        ],
    }


def summary(
    checkpoint: Checkpoint, device: str, group_size: int | None, times: Sequence[LayerTime]
) -> list[str]:
    """The lines above the table: what was measured, where."""
    groups = f"groups of {group_size}" if group_size else "one group to a row"
    return [
        f"source  {checkpoint.origin} ({checkpoint.model_type}); INT4 in {groups}",
        f"device  {device}, which reads memory at {times[0].bandwidth / 1e12:.2f} TB/s",
    ]


def layer_table(times: Sequence[LayerTime]) -> Table:
    """A row for each layer and way to store its weights."""
    return Table(
        columns=(
            Column("TP", number=True),
            Column("batch", number=True),
            Column("experts", number=True),
            Column("weights"),
            Column("us", number=True),
            Column("over FP8", number=True),
            Column("over ideal FP8", number=True),
            Column("slowest"),
        ),
        rows=tuple(
            (
                *_place(time, first=layer == "fp8"),
                NAMES[layer],
                f"{time.us(layer):.1f}",
                "" if layer == "fp8" else f"{time.gain(layer):+.0f} %",
                f"{time.gain_over_bound(layer):+.0f} %",
                _slowest(time, layer),
            )
            for time in times
            for layer in LAYER_FORMATS
        ),
    )


def _place(time: LayerTime, *, first: bool) -> tuple[str, str, str]:
    return (str(time.ranks), str(time.batch), f"{time.active:.1f}") if first else ("", "", "")


def parts_table(times: Sequence[LayerTime]) -> Table:
    """A row for each product: what it takes in each format, and by which kernel."""
    return Table(
        columns=(
            Column("TP", number=True),
            Column("batch", number=True),
            Column("product"),
            Column("format"),
            Column("kernel"),
            Column("us", number=True),
        ),
        rows=tuple(
            (str(time.ranks), str(time.batch), part.product.name, *_timing(timing))
            for time in times
            for part in time.parts
            for timing in part.timings
        ),
    )


def _timing(timing: Timing) -> tuple[str, str, str]:
    kernel = timing.kernel + (", launched early" if timing.overlapped else "")
    return timing.format.upper(), kernel, f"{timing.us:.1f}"


def notes(times: Sequence[LayerTime]) -> list[str]:
    """The lines below the table: how to read the figures, and what is not in them."""
    said = {note: None for time in times for part in time.parts for note in part.notes}
    return [
        *(f"routed experts in FP8 by {kernel}: {where}" for kernel, where in _kernels(times)),
        *said,
        "ideal FP8: its bytes at the speed at which this GPU reads memory",
        f"not in it: {', '.join(LEFT_OUT)}",
    ]


def _kernels(times: Sequence[LayerTime]) -> list[tuple[str, str]]:
    """Whose FP8 experts were the fastest, at which batches."""
    found: dict[str, dict[int, list[str]]] = {}
    for time in times:
        for part in time.parts:
            if isinstance(part.product, Experts):
                batches = found.setdefault(part.fastest("fp8").kernel, {})
                batches.setdefault(time.ranks, []).append(str(time.batch))
    return [
        (kernel, "; ".join(f"TP {ranks}, batch {', '.join(b)}" for ranks, b in by_ranks.items()))
        for kernel, by_ranks in found.items()
    ]


def _slowest(time: LayerTime, layer: LayerFormat) -> str:
    """The parts that take longest, with their shares."""
    parts = sorted(time.parts, key=lambda part: -part.in_layer(layer).us)[:SLOWEST]
    return ", ".join(
        f"{part.product.name} {100 * part.in_layer(layer).us / time.us(layer):.0f} %"
        for part in parts
    )
