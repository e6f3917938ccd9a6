"""Whether a checkpoint is what a row of the table claims: the same linears, really calibrated."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cost import Cost
from halfbyte.core import Checkpoint, Settings
from halfbyte.formats import int4
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.config import config_count, text_config
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import layer_index, logical_weights
from halfbyte.models import recipe_for
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe

ROUNDED_BELOW = 0.03
"""Share of moved codes below which a linear counts as plainly rounded. Rounding BF16 weights where
ours were float32 moves about one code in a hundred, by a tie; methods that calibrate move most."""


class BenchmarkError(Exception):
    """A row that must not be compared with the others, and why."""


@dataclass(frozen=True)
class Codes:
    """The INT4 codes of a checkpoint beside plain rounding of its source by the same scales."""

    linears: int
    moved: float
    """Median over linears of the share of codes that are not the nearest."""
    rounded: int
    """Linears that are plainly rounded, `ROUNDED_BELOW`."""


def expected_linears(source: Path) -> frozenset[str]:
    """Weights that the default recipe quantizes, those of MTP layers left out.

    Peers lose the MTP layers, and text metrics do not use them.
    """
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, load_recipe(recipe_for(checkpoint)), Settings(method="rtn"))
    return _without_mtp({t.name for t in plan.tensors if t.action == "quantize"}, checkpoint)


def check_codes(folder: Path, source: Path, expected: frozenset[str], group_size: int) -> Codes:
    """Raises BenchmarkError unless exactly the `expected` weights are INT4 in such groups."""
    checkpoint, origin = open_checkpoint(folder), open_checkpoint(source)
    weights, originals = logical_weights(checkpoint), logical_weights(origin)
    packed = {name for name, weight in weights.items() if weight.encoding == "int4"}
    found = _without_mtp(packed, checkpoint)
    if odd := sorted(found ^ expected):
        where = "only in the checkpoint" if odd[0] in found else "not INT4 in the checkpoint"
        raise BenchmarkError(
            f"{folder}: {len(found)} INT4 linears, {len(expected)} expected; {odd[0]} is {where}"
        )
    moved = []
    with ShardReader(checkpoint) as reader, ShardReader(origin) as original_reader:
        for name in sorted(found):
            weight = weights[name]
            assert weight.scheme is not None
            if weight.scheme.group_size != group_size:
                raise BenchmarkError(f"{name} is {weight.scheme}, expected groups of {group_size}")
            parts = {f"weight_{key}": reader.read(part) for key, part in weight.parts.items()}
            codes, scales = int4.unpack(parts, weight.scheme)
            original = original_reader.read_weight(originals[name])
            by_group = original.unflatten(-1, (scales.shape[-1], -1))
            nearest = (by_group / scales.float().unsqueeze(-1)).round_()
            nearest.clamp_(weight.scheme.code_min, weight.scheme.code_max)
            moved.append(float((nearest.flatten(-2) != codes).float().mean()))
    rounded = sum(share < ROUNDED_BELOW for share in moved)
    return Codes(len(found), statistics.median(moved), rounded)


def check_calibration(cost: Cost, codes: Codes, tokens_sha256: str) -> None:
    """Raises BenchmarkError for a calibrated row on other text, or that mostly rounded."""
    if cost.tokens_sha256 != tokens_sha256:
        raise BenchmarkError(
            f"calibrated on tokens {cost.tokens_sha256}, the others on {tokens_sha256}"
        )
    if cost.solved is not None and cost.solved < codes.linears:
        raise BenchmarkError(f"{cost.solved} of {codes.linears} linears report a loss")
    if 2 * codes.rounded > codes.linears:
        raise BenchmarkError(
            f"{codes.rounded} of {codes.linears} linears are plainly rounded: not calibrated"
        )


def _without_mtp(names: set[str], checkpoint: Checkpoint) -> frozenset[str]:
    layers = config_count(text_config(checkpoint.config), "num_hidden_layers")
    return frozenset(name for name in names if (layer_index(name) or 0) < layers)
