"""The linears of a run by layer, expert and kind, and what they have in common."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from halfbyte.core import LinearReport

_NAME = re.compile(r"(?:.*\.)?layers\.(\d{1,6})\.(.*)")
_EXPERT = re.compile(r"(.*\.)?experts\.(\d{1,6})\.(.*)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a linear is."""

    layer: int | None
    expert: int | None
    """Number of the routed expert that it belongs to."""
    kind: str
    """What it is: "experts gate_proj", "self_attn o_proj"."""


def place_of(name: str) -> Place:
    """`model.layers.3.mlp.experts.7.up_proj` is the up projection of expert 7 of layer 3."""
    found = _NAME.fullmatch(name)
    layer, inner = (int(found[1]), found[2]) if found else (None, name)
    if expert := _EXPERT.fullmatch(inner):
        return Place(layer, int(expert[2]), f"experts {expert[3]}")
    owner, _, leaf = inner.rpartition(".")
    return Place(layer, None, f"{owner.removeprefix('mlp.')} {leaf}".strip())


@dataclass(frozen=True, slots=True)
class KindSummary:
    """Errors of all linears of one kind; shares of the output's energy, see `LinearReport`."""

    kind: str
    count: int
    median: float
    rounding: float
    """Median of plain rounding."""
    worst: float
    worst_name: str
    fallbacks: int


def by_kind(linears: Iterable[LinearReport]) -> dict[str, list[LinearReport]]:
    """Linears by kind, kinds in the order they first appear in."""
    kinds: dict[str, list[LinearReport]] = {}
    for linear in linears:
        kinds.setdefault(place_of(linear.name).kind, []).append(linear)
    return kinds


def kind_summaries(linears: Iterable[LinearReport]) -> list[KindSummary]:
    """A summary for each kind of linear."""
    summaries = []
    for kind, members in by_kind(linears).items():
        worst = max(members, key=lambda linear: linear.error)
        summaries.append(
            KindSummary(
                kind=kind,
                count=len(members),
                median=median([linear.error for linear in members]),
                rounding=median([linear.rtn_error for linear in members]),
                worst=worst.error,
                worst_name=worst.name,
                fallbacks=sum(linear.fallback is not None for linear in members),
            )
        )
    return summaries


def expert_tokens(linears: Iterable[LinearReport]) -> dict[tuple[int, int], int]:
    """(Layer, expert) -> calibration tokens that the router sent there."""
    tokens: dict[tuple[int, int], int] = {}
    for linear in linears:
        place = place_of(linear.name)
        if place.layer is not None and place.expert is not None:
            key = place.layer, place.expert
            tokens[key] = max(tokens.get(key, 0), linear.tokens)
    return tokens


def counted(values: Iterable[str]) -> Mapping[str, int]:
    """How often each value occurs, the most frequent first."""
    return dict(Counter(values).most_common())


def median(values: Sequence[float]) -> float:
    """The middle one of some values, of two the lower."""
    return quantile(values, 0.5)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
