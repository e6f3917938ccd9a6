"""Every tensor is written once, every shard by one rank, and ranks have much the same to do."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from halfbyte.core import Plan, Settings
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe
from halfbyte.quantize.shares import shares
from halfbyte.testing.tiny import write_tiny


def plan_of(source: Path, method: str, max_shard_bytes: int) -> Plan:
    settings, recipe = Settings(method=method), load_recipe("glm-5")  # type: ignore[arg-type]
    checkpoint = open_checkpoint(source)
    return make_plan(checkpoint, recipe, settings, max_shard_bytes=max_shard_bytes)


@pytest.mark.parametrize("max_shard_bytes", [2_000, 40_000, 200_000, 10_000_000])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 500])
def test_shards_are_dealt(tiny: Path, max_shard_bytes: int, count: int) -> None:
    plan = plan_of(tiny, "rtn", max_shard_bytes)
    whole = plan_of(tiny, "gptq", max_shard_bytes)
    assert plan.tensors == whole.tensors
    names = [unit.name for unit in plan.units]
    assert len(set(names)) == len(names) >= len(whole.units)

    dealt = shares(plan, count)
    assert len(dealt) == count
    assert sorted((u.name for units in dealt for u in units), key=names.index) == names
    shard_of = {name: shard.file for shard in plan.shards for name in shard.offsets}
    writers: dict[str, set[int]] = {}
    written = [0] * count
    for rank, units in enumerate(dealt):
        assert [names.index(u.name) for u in units] == sorted(names.index(u.name) for u in units)
        for output in (o for u in units for t in u.tensors for o in t.outputs):
            writers.setdefault(shard_of[output.name], set()).add(rank)
            written[rank] += output.nbytes
    assert all(len(ranks) == 1 for ranks in writers.values())
    if max_shard_bytes == 40_000 and count < 8:
        assert min(written) > 0.7 * max(written)


def test_units_end_where_shards_do(tiny: Path) -> None:
    """And nowhere else: a unit is as large as it can be."""
    plan = plan_of(tiny, "rtn", 200_000)
    shard_of = {name: shard.file for shard in plan.shards for name in shard.offsets}
    cuts = 0
    for before, after in pairwise((unit, tensor) for unit in plan.units for tensor in unit.tensors):
        (unit, left), (next_unit, right) = before, after
        cut = unit is not next_unit
        if unit.index == next_unit.index and unit.kind == next_unit.kind:
            assert cut == (shard_of[left.outputs[-1].name] != shard_of[right.outputs[0].name])
            cuts += cut
    assert cuts > 5
    layers = [f"layers.{i}" for i in range(5)]
    whole = plan_of(tiny, "rtn", 10_000_000)
    assert [unit.name for unit in whole.units] == ["embedding", *layers, "head"]


def test_one_scale_in_the_next_shard_keeps_shards_together(tmp_path: Path) -> None:
    """Five experts leave the first shape of a layer, in I64, where no I64 may be."""
    plan = plan_of(write_tiny(tmp_path / "odd", experts=5), "rtn", 10_000_000)
    assert len(plan.shards) > 3
    assert sum(map(bool, shares(plan, 3))) == 1


def test_the_first_rank_writes_what_is_calibrated(tiny: Path) -> None:
    plan = plan_of(tiny, "gptq", 200_000)
    assert shares(plan, 3) == [plan.units, (), ()]
