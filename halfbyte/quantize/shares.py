"""Who writes what, when ranks share a run: pure functions of the plan.

A shard has one writer, which hashes it as it grows, and a tensor is worked on once. So what is
dealt out are chains: neighbours that have a shard in common, in general one shard's worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from halfbyte.core import OutputTensor, Plan, ShardLayout, Unit
from halfbyte.quantize.memory import calibrates

T = TypeVar("T")


def cut_at_shards(units: Sequence[Unit], shards: Sequence[ShardLayout]) -> tuple[Unit, ...]:
    """The same tensors in units that end where a shard does, unless a tensor lies in two.

    How many ranks there are makes no difference, so neither does it to what is rounded together
    or to what a resumed run finds finished.
    """
    shard_of = _shard_of(shards)
    cut: list[Unit] = []
    for unit in units:
        parts = _chains(unit.tensors, lambda tensor: tensor.outputs, shard_of)
        for number, tensors in enumerate(parts, 1):
            name = unit.name if len(parts) == 1 else f"{unit.name} part {number}"
            cut.append(replace(unit, name=name, tensors=tuple(tensors)))
    return tuple(cut)


def shares(plan: Plan, count: int) -> list[tuple[Unit, ...]]:
    """The units that each of `count` ranks writes, in the order of the plan.

    In data-free runs each chain goes to the rank with the fewest bytes so far; since chains are
    much alike, ranks advance through the plan side by side, and what an interrupted run has left
    is dealt as evenly to any other number of ranks. In calibrated runs the first rank writes all.
    """
    dealt: list[list[Unit]] = [[] for _ in range(count)]
    if calibrates(plan.settings):
        dealt[0] += plan.units
    else:
        load = [0] * count
        for chain in _chains(plan.units, _outputs, _shard_of(plan.shards)):
            rank = load.index(min(load))
            dealt[rank] += chain
            load[rank] += sum(_bytes(unit) for unit in chain)
    return [tuple(units) for units in dealt]


def _chains(
    items: Sequence[T],
    outputs: Callable[[T], Sequence[OutputTensor]],
    shard_of: Mapping[str, str],
) -> list[list[T]]:
    """Neighbours of which each begins in the shard that the one before it ends in; what has no
    output goes with those before it."""
    chains: list[list[T]] = []
    last = None
    for item in items:
        files = [shard_of[output.name] for output in outputs(item)]
        if not chains or (files and last not in (None, files[0])):
            chains.append([])
        chains[-1].append(item)
        last = files[-1] if files else last
    return chains


def _outputs(unit: Unit) -> list[OutputTensor]:
    return [output for tensor in unit.tensors for output in tensor.outputs]


def _bytes(unit: Unit) -> int:
    """Read and written."""
    read = sum(tensor.source.nbytes for tensor in unit.tensors if tensor.outputs)
    return read + sum(output.nbytes for output in _outputs(unit))


def _shard_of(shards: Sequence[ShardLayout]) -> dict[str, str]:
    """Output tensor -> its shard's file."""
    return {name: shard.file for shard in shards for name in shard.offsets}
