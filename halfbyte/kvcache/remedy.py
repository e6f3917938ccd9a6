"""A checkpoint with what its ranges say it needs for an FP8 cache."""

from __future__ import annotations

import shlex
from pathlib import Path

import torch

from halfbyte.core import Checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.formats.edition import require_edition, write_edition
from halfbyte.formats.weights import layer_index
from halfbyte.kvcache.fold import folded
from halfbyte.kvcache.layout import ByHead, read_attention
from halfbyte.kvcache.ranges import KvRanges, Name
from halfbyte.kvcache.scales import is_cache_scale, scale_tensor, with_scheme
from halfbyte.progress import Progress

SCALES_SHARD = "model-kv-scales.safetensors"


def remedied(checkpoint: Checkpoint, ranges: KvRanges, folder: Path, progress: Progress) -> int:
    """Write `checkpoint` to `folder` with what `ranges` say it needs for an FP8 cache: scales of
    keys and values, or latents folded into range. The number of tensors that are new or changed;
    with 0, which is when no latent needs it, nothing is written.

    Raises CheckpointError for values that are NaN or infinite, for latents that cannot be folded
    exactly, and what `require_remediable` and `write_edition` raise.
    """
    if ranges.nonfinite:
        raise CheckpointError(
            f"{ranges.nonfinite:,} cached values are NaN or infinite, which no scale makes finite:"
            " nothing is written",
            hint=shlex.join(["quantize", "verify", str(checkpoint.path)]),
        )
    require_remediable(checkpoint, folder)
    if not ranges.by_head:
        changed = folded(checkpoint, {layer.layer: layer.fold for layer in ranges.layers})
        if changed:
            write_edition(
                checkpoint, folder, replaced=changed, config=checkpoint.config, progress=progress
            )
        return len(changed)
    prefixes = {layer: prefix for prefix, layer in map(_layer_prefix, checkpoint.tensors)}
    parts: tuple[Name, Name] = ("key", "value")
    added = {
        scale_tensor(prefixes[layer.layer], part): torch.tensor([layer.scale(part)])
        for layer in ranges.layers
        for part in parts
    }
    write_edition(
        checkpoint,
        folder,
        added={SCALES_SHARD: added},
        config=with_scheme(checkpoint.config),
        progress=progress,
    )
    return len(added)


def require_remediable(checkpoint: Checkpoint, folder: Path) -> None:
    """Raises CheckpointError for a checkpoint that has scales already, or to which servers read
    none, and what `require_edition` raises."""
    if present := next(filter(is_cache_scale, checkpoint.tensors), None):
        raise CheckpointError(
            f"{checkpoint.path} has scales of a KV cache already: {present}",
            hint="take the checkpoint that it was made of",
        )
    if isinstance(read_attention(checkpoint.config).rows, ByHead):
        with_scheme(checkpoint.config)
    require_edition(checkpoint, folder)


def _layer_prefix(name: str) -> tuple[str, int | None]:
    """What precedes the names of a layer's tensors, and its number, by one of them."""
    layer = layer_index(name)
    before, found, _ = name.partition(f"layers.{layer}.")
    return before + found, layer
