"""What values a model caches, and whether an FP8 cache can hold them. No torch.

e4m3 rounds every number from 2^-6 to 448 to within a sixteenth of itself, so where in that range a
model's values lie makes no difference. What matters is what lies outside: above 448 they are cut
off, below 2^-6 they lose a bit with each halving.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from halfbyte.kvcache.layout import Attention, ByHead, Latent

BINS = 64
LOWEST = -40
"""A histogram's bins are octaves: bin i holds magnitudes from 2^(LOWEST + i) up to twice that; the
first also those below it, zero among them, the last those above."""

E4M3_LARGEST = 448.0
MARGIN = 2.0
"""How many times the largest value that was seen other text may reach: one octave of fourteen."""
MOST_LOST = 3.0
"""Decibels of the ratio of signal to noise that scale 1.0 may cost: twice the noise."""

Name = Literal["latent", "rope", "key", "value"]
_SHARED = ("latent", "rope")


@dataclass(frozen=True, slots=True)
class PartRange:
    """The cached values of one head of a layer: of its keys or values, or of the latent or RoPE
    part of its row, which all heads share."""

    part: Name
    head: int
    count: int
    amax: float
    """Largest finite magnitude."""
    p99_9: float
    """Magnitude that 99.9 % do not exceed, by the histogram: a bound, at most twice as large."""
    p99_99: float
    subnormal: float
    """Share of values between 0 and 2^-6."""
    above: float
    """Share of values above 448."""
    nonfinite: int
    histogram: tuple[int, ...]
    """Of finite values; to be added up over parts of a text."""
    decibels: float
    """Signal to noise of rounding to e4m3 at scale 1.0."""
    own_decibels: float
    """The same when every row has power-of-two scales of its own, one to 128 values."""

    @property
    def reason(self) -> str | None:
        """Why a cache without scales would not hold these values; None if it would."""
        if self.nonfinite:
            return f"{self.nonfinite:,} of {self.count:,} values are NaN or infinite"
        if self.above:
            return f"{self.above:.2%} of values are above 448, the largest is {self.amax:.4g}"
        if self.amax * MARGIN > E4M3_LARGEST:
            return f"the largest value is {self.amax:.4g}, which leaves less than half of 448"
        if (lost := self.own_decibels - self.decibels) > MOST_LOST:
            return (
                f"{self.subnormal:.2%} of values are below 2^-6, which costs {lost:.1f} dB of"
                f" {self.own_decibels:.1f}"
            )
        return None


@dataclass(frozen=True, slots=True)
class LayerRange:
    """What one layer caches."""

    layer: int
    parts: tuple[PartRange, ...]

    def amax(self, part: Name) -> float:
        """Largest magnitude in any head."""
        return max((found.amax for found in self.parts if found.part == part), default=0.0)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a cache without scales would not hold this layer's values; empty if it would."""
        return tuple(
            f"{part.part if part.part in _SHARED else f'{part.part} of head {part.head}'}: {reason}"
            for part in self.parts
            if (reason := part.reason) is not None
        )

    @property
    def safe(self) -> bool:
        """At scale 1.0."""
        return not self.reasons

    @property
    def fold(self) -> int:
        """The exponent k for which latents times 2^-k are safe at scale 1.0; 0 where they are so as
        they are, and for layers without a latent."""
        latents = [part for part in self.parts if part.part == "latent" and part.reason]
        amax = max((part.amax for part in latents), default=0.0)
        return octaves_above(amax) if amax else 0

    def scale(self, part: Name) -> float:
        """`k_scale` of keys or `v_scale` of values: the smallest power of two at which they could
        be `MARGIN` times as large. A power of two, since SGLang divides by it in BF16 and that is
        exact then."""
        largest = self.amax(part)
        return math.ldexp(1.0, octaves_above(largest)) if largest else 1.0


def octaves_above(amax: float) -> int:
    """The smallest k for which `amax` times `MARGIN` and 2^-k is at most 448."""
    mantissa, exponent = math.frexp(amax * MARGIN / E4M3_LARGEST)
    return exponent - (mantissa == 0.5)


def percentile(histogram: Sequence[int], share: float, amax: float) -> float:
    """A magnitude that `share` of the values do not exceed: the upper end of the bin in which that
    value lies, or `amax` when that is less."""
    wanted, seen = math.ceil(share * sum(histogram)), 0
    for number, count in enumerate(histogram[:-1]):
        seen += count
        if seen >= wanted:
            return min(amax, math.ldexp(1.0, LOWEST + number + 1))
    return amax


@dataclass(frozen=True, slots=True)
class KvRanges:
    """What a model caches while it reads a text, layer by layer."""

    source: str
    attention: Attention
    tokens: int
    windows: tuple[tuple[int, int], ...]
    """Sequences and their length."""
    dtype: str
    """Of the computation."""
    layers: tuple[LayerRange, ...]

    @property
    def unsafe(self) -> tuple[LayerRange, ...]:
        """Layers whose values a cache without scales would not hold."""
        return tuple(layer for layer in self.layers if not layer.safe)

    @property
    def nonfinite(self) -> int:
        """Values that are NaN or infinite, which no cache holds."""
        return sum(part.nonfinite for layer in self.layers for part in layer.parts)

    @property
    def self_scaling(self) -> bool:
        """Whether rows of `fp8` have scales of their own (`kvcache.rows`)."""
        return isinstance(self.attention.rows, Latent) and self.attention.rows.sparse

    @property
    def by_head(self) -> bool:
        """Whether there are keys and values, for which servers read scales from the checkpoint."""
        return isinstance(self.attention.rows, ByHead)
