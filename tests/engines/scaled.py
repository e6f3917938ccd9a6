"""A small GLM-4.5 checkpoint with the scales that `quantize kv -o` writes for known ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.kvcache.layout import read_attention
from halfbyte.kvcache.ranges import BINS, KvRanges, LayerRange, PartRange
from halfbyte.kvcache.remedy import remedied
from halfbyte.progress import SilentProgress
from halfbyte.testing.tiny import write_tiny

LARGEST = {0: (1000.0, 3.0), 1: (0.01, 400.0)}
"""Of keys and of values, by layer."""
EXPECTED = {0: (8.0, 2.0**-6), 1: (2.0**-14, 2.0)}
"""By hand: the smallest powers of two that are at least LARGEST / 224."""


def write_scaled(work: Path) -> Path:
    source = write_tiny(
        work / "source", model_type="glm4_moe", source="ct-channel", layers=2, mtp=False
    )
    checkpoint = open_checkpoint(source)
    layers = tuple(
        LayerRange(layer, (_part("key", key), _part("value", value)))
        for layer, (key, value) in LARGEST.items()
    )
    attention = read_attention(checkpoint.config)
    ranges = KvRanges("tiny", attention, 1, ((1, 1),), "float32", layers)
    assert remedied(checkpoint, ranges, work / "scaled", SilentProgress()) == 4
    return work / "scaled"


def _part(name: Any, amax: float) -> PartRange:
    return PartRange(name, 0, 1, amax, amax, amax, 0.0, 0.0, 0, (0,) * BINS, 31.5, 31.5)
