"""Ranges of a KV cache as a table, lines and a JSON record; pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from halfbyte.console import Column, Table
from halfbyte.kvcache.layout import Latent, latent_row
from halfbyte.kvcache.ranges import KvRanges, LayerRange, Name, PartRange

REASONS_SHOWN = 8


def record(ranges: KvRanges) -> dict[str, Any]:
    """Ranges as JSON; `fold` and scales are what `-o` would write."""
    return {
        "source": ranges.source,
        "model_type": ranges.attention.model_type,
        "dtype": ranges.dtype,
        "tokens": ranges.tokens,
        "windows": [list(shape) for shape in ranges.windows],
        "safe_at_scale_1": not ranges.unsafe,
        "rows_scale_themselves": ranges.self_scaling,
        "layers": [
            {
                "layer": layer.layer,
                "safe_at_scale_1": layer.safe,
                "reasons": list(layer.reasons),
                **_remedy(ranges, layer),
                "parts": [asdict(part) for part in layer.parts],
            }
            for layer in ranges.layers
        ],
    }


def _remedy(ranges: KvRanges, layer: LayerRange) -> dict[str, Any]:
    if ranges.by_head:
        return {"k_scale": layer.scale("key"), "v_scale": layer.scale("value")}
    return {"fold": layer.fold}


def ranges_table(ranges: KvRanges) -> Table:
    """A row for each part of each layer; where it has several heads, the worst of each figure."""
    return Table(
        columns=(
            Column("layer", number=True),
            Column("values"),
            Column("largest", number=True),
            Column("99.99 %", number=True),
            Column("99.9 %", number=True),
            Column("below 2^-6", number=True),
            Column("above 448", number=True),
            Column("dB", number=True),
            Column("dB, own scales", number=True),
            Column("scale" if ranges.by_head else "at scale 1.0", number=ranges.by_head),
        ),
        rows=tuple(row for layer in ranges.layers for row in _rows(layer, scales=ranges.by_head)),
    )


def _rows(layer: LayerRange, *, scales: bool) -> Iterator[tuple[str, ...]]:
    names: list[Name] = list(dict.fromkeys(part.part for part in layer.parts))
    for name in names:
        heads = [part for part in layer.parts if part.part == name]
        many = f", {len(heads)} heads" if scales and len(heads) > 1 else ""
        safe = all(part.reason is None for part in heads)
        yield (
            str(layer.layer),
            f"{name}{many}",
            f"{max(part.amax for part in heads):.4g}",
            f"{max(part.p99_99 for part in heads):.4g}",
            f"{max(part.p99_9 for part in heads):.4g}",
            f"{max(part.subnormal for part in heads):.2%}",
            f"{max(part.above for part in heads):.2%}",
            _least(heads, "decibels"),
            _least(heads, "own_decibels"),
            f"{layer.scale(name):g}" if scales else ("safe" if safe else "unsafe"),
        )


def _least(heads: list[PartRange], figure: str) -> str:
    return f"{min(getattr(part, figure) for part in heads):.1f}"


def summary(ranges: KvRanges) -> list[str]:
    """What was read."""
    shapes = " and ".join(f"{count:,} of {length:,}" for count, length in ranges.windows)
    return [
        f"model        {ranges.source}: {ranges.attention.model_type}",
        f"text         {ranges.tokens:,} tokens, sequences {shapes}; computed in {ranges.dtype}",
    ]


def verdict(ranges: KvRanges) -> list[str]:
    """Whether an FP8 cache holds the values, and how."""
    if ranges.nonfinite:
        return [f"FP8 cache: unsafe, {ranges.nonfinite:,} values are NaN or infinite"]
    if ranges.by_head:
        return [
            "FP8 cache: safe with the scales of the last column, which servers read from the"
            " checkpoint; -o DIR writes them"
        ]
    lines = []
    rows = ranges.attention.rows
    if isinstance(rows, Latent) and rows.sparse:
        lines.append(
            f"FP8 rows of {latent_row(rows, 'fp8')} bytes (FlashMLA's): safe; tiles of the latent"
            " have scales of their own, and the RoPE part stays BF16"
        )
    where = "raw FP8 rows (TRT-LLM's, TileLang's)" if ranges.self_scaling else "FP8 rows"
    if not ranges.unsafe:
        return [*lines, f"{where}: safe at scale 1.0, without scales in the checkpoint"]
    lines.append(
        f"{where}: unsafe at scale 1.0 in {len(ranges.unsafe)} of {len(ranges.layers)} layers"
    )
    reasons = [f"- layer {each.layer}, {r}" for each in ranges.unsafe for r in each.reasons]
    lines += reasons[:REASONS_SHOWN]
    if len(reasons) > REASONS_SHOWN:
        lines.append(f"- and {len(reasons) - REASONS_SHOWN} more; --json has all")
    folds = sum(layer.fold != 0 for layer in ranges.layers)
    if folds:
        lines.append(
            f"{folds} latents can be folded into range without another effect: --fold -o DIR"
        )
    return lines
