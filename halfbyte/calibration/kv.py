"""What a model puts into its KV cache, measured in one pass over its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from halfbyte.calibration.architecture import Architecture
from halfbyte.calibration.mtp import mtp_input
from halfbyte.calibration.runner import LayerRunner
from halfbyte.core import Checkpoint
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import layer_index, logical_weights
from halfbyte.kvcache.layout import TILE, Latent, read_attention
from halfbyte.kvcache.ranges import (
    BINS,
    LOWEST,
    KvRanges,
    LayerRange,
    Name,
    PartRange,
    percentile,
)
from halfbyte.kvcache.rows import LARGEST, SMALLEST_NORMAL, power_of_two_scales, to_e4m3
from halfbyte.progress import Progress

_LATENT: tuple[Name, Name] = ("latent", "rope")
_BY_HEAD: tuple[Name, Name] = ("key", "value")


class PartSums:
    """Sums over the values of one part of a layer's cache, each head by itself."""

    def __init__(self, heads: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(heads, BINS, dtype=torch.int64, device=device)
        self._tallies = torch.zeros(4, heads, dtype=torch.int64, device=device)
        """Values, values between 0 and 2^-6, above 448, and not finite."""
        self._energies = torch.zeros(3, heads, dtype=torch.float64, device=device)
        """Squares, squared errors at scale 1.0, and with scales of the row."""
        self._amax = torch.zeros(heads, device=device)

    def add(self, values: torch.Tensor) -> None:
        """Count values [sequences, heads, length, size]."""
        heads = values.shape[1]
        by_head = values.float().transpose(0, 1).flatten(1, 2)
        finite = by_head.isfinite()
        rows = torch.where(finite, by_head, 0.0)
        sizes = rows.abs().flatten(1)
        self._amax = torch.maximum(self._amax, sizes.amax(1))
        # frexp's exponent is one more than that of the octave; that of 0 is 0.
        octave = torch.where(sizes > 0, torch.frexp(sizes).exponent - 1, LOWEST)
        place = (octave - LOWEST).clamp(0, BINS - 1) + BINS * torch.arange(
            heads, device=sizes.device
        ).unsqueeze(1)
        place = place[finite.flatten(1)]
        self.counts += torch.bincount(place, minlength=heads * BINS).view(heads, BINS)
        self._tallies += torch.stack(
            [
                torch.full_like(self._tallies[0], sizes.shape[1]),
                ((sizes > 0) & (sizes < SMALLEST_NORMAL)).sum(1),
                (sizes > LARGEST).sum(1),
                (~finite).flatten(1).sum(1),
            ]
        )
        tiles = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % TILE)).unflatten(-1, (-1, TILE))
        scales = power_of_two_scales(tiles.abs().amax(-1, keepdim=True))
        self._energies += torch.stack(
            [
                _energy(rows),
                _energy(rows - to_e4m3(rows).float()),
                _energy(tiles - to_e4m3(tiles / scales).float() * scales),
            ]
        )

    def ranges(self, part: Name) -> list[PartRange]:
        """What the sums say, a range to each head."""
        found = []
        for head, histogram in enumerate(self.counts.tolist()):
            count, subnormal, above, nonfinite = self._tallies[:, head].tolist()
            signal, noise, own_noise = self._energies[:, head].tolist()
            amax = self._amax[head].item()
            found.append(
                PartRange(
                    part=part,
                    head=head,
                    count=count,
                    amax=amax,
                    p99_9=percentile(histogram, 0.999, amax),
                    p99_99=percentile(histogram, 0.9999, amax),
                    subnormal=subnormal / count if count else 0.0,
                    above=above / count if count else 0.0,
                    nonfinite=nonfinite,
                    histogram=tuple(histogram),
                    decibels=_decibels(signal, noise),
                    own_decibels=_decibels(signal, own_noise),
                )
            )
        return found


EXACT = 200.0
"""Decibels that stand for no noise at all, or for no signal either."""


def _decibels(signal: float, noise: float) -> float:
    if not signal or not noise:
        return EXACT
    return min(EXACT, 10 * math.log10(signal / noise))


def _energy(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares of each head [heads, ...], float64."""
    return values.double().square().flatten(1).sum(1)


@torch.no_grad()
def measure_ranges(
    checkpoint: Checkpoint,
    windows: Sequence[torch.Tensor],
    *,
    device: str,
    dtype: str,
    progress: Progress,
) -> KvRanges:
    """Ranges of every layer, MTP layers included, while the model reads `windows`: int64
    [sequences, length] each, of any length. Memory is that of their hidden states and one layer.

    Raises UnsupportedModelError for a model that cannot be run layer by layer, or whose cache is
    not known, and what reading and running a checkpoint raise.
    """
    attention, architecture = read_attention(checkpoint.config), Architecture.of(checkpoint)
    latent = isinstance(attention.rows, Latent)
    names = _LATENT if latent else _BY_HEAD
    stored = max((layer_index(name) or 0 for name in checkpoint.tensors), default=0) + 1
    found = []
    with ShardReader(checkpoint) as reader:
        runner = LayerRunner(
            architecture,
            logical_weights(checkpoint),
            reader,
            device=device,
            dtype=getattr(torch, dtype),
        )
        progress.start(f"ranges of {checkpoint.path.name}", stored, "layers")
        states = [runner.embed(tokens) for tokens in windows]
        for index in range(stored):
            if (depth := index - architecture.layers) >= 0:
                pairs = zip(states, windows, strict=True)
                states = [mtp_input(runner, index, s, tokens, depth) for s, tokens in pairs]
            sums: dict[Name, PartSums] = {}

            def see(
                first: torch.Tensor, second: torch.Tensor, sums: dict[Name, PartSums] = sums
            ) -> tuple[torch.Tensor, torch.Tensor]:
                for name, values in zip(names, (first, second), strict=True):
                    if name not in sums:
                        sums[name] = PartSums(values.shape[1], values.device)
                    sums[name].add(values)
                return first, second

            runner.advance(index, *states, cache=see)
            parts = tuple(part for name in names for part in sums[name].ranges(name))
            found.append(LayerRange(index, parts))
            progress.advance(1)
    shapes = tuple((int(tokens.shape[0]), int(tokens.shape[1])) for tokens in windows)
    return KvRanges(
        source=checkpoint.origin,
        attention=attention,
        tokens=sum(count * length for count, length in shapes),
        windows=shapes,
        dtype=dtype,
        layers=tuple(found),
    )
