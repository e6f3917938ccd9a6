"""How long a run is said to take: the layer that was measured, and what time grows with."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfbyte.commands.tables import plan_record, plan_summary
from halfbyte.core import Placement, Plan, Settings
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.quantize.duration import (
    DISK,
    STATE_INTERVAL,
    estimate_duration,
    layer_seconds,
)
from halfbyte.quantize.memory import hidden_bytes, state_bytes
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe
from halfbyte.testing.glm52 import write_glm52
from halfbyte.testing.tiny import write_tiny

H200 = Settings(device="cuda:0", dtype="bfloat16", samples=512, sequence_length=2048)
SPARSE = 10
"""Unit of GLM-5.2 that is a layer of 256 experts."""


@pytest.fixture(scope="module")
def glm52(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = write_glm52(tmp_path_factory.mktemp("glm") / "GLM-5.2-FP8")
    return make_plan(open_checkpoint(path), load_recipe("glm-5"), H200)


def layer(plan: Plan, **changes: Any) -> dict[str, float]:
    settings = replace(plan.settings, **changes)
    return layer_seconds(plan.units[SPARSE].tensors, settings, plan.checkpoint.config)


def test_the_layer_that_was_measured(glm52: Plan) -> None:
    """docs/results.md, one full-size layer on an H200."""
    phases = layer(glm52)
    assert sum(phases.values()) == pytest.approx(7.5, rel=0.1)
    assert phases["attention and router"] == pytest.approx(1.31, rel=0.1)
    assert phases["Hessians"] == pytest.approx(1.95, rel=0.1)
    assert phases["experts forward"] == pytest.approx(1.20, rel=0.1)
    # Both solves, what reading costs beyond reading ahead, packing and handing over.
    rest = phases["solve"] + phases["weights"]
    assert rest == pytest.approx(1.77 + 0.83 + 0.37 + 0.21, rel=0.1)


def test_twice_the_tokens_take_twice_the_forward_and_the_same_solve(glm52: Plan) -> None:
    once, twice = layer(glm52), layer(glm52, samples=1024)
    for phase in ("attention and router", "experts forward"):
        assert twice[phase] == pytest.approx(2 * once[phase])
    # Not twice the Hessians: the sample for the layer's mean stays as it is.
    assert 1.75 * once["Hessians"] < twice["Hessians"] < 1.9 * once["Hessians"]
    for phase in ("solve", "weights"):
        assert twice[phase] == once[phase]


def test_longer_windows_add_attention_and_the_indexer(glm52: Plan) -> None:
    short, long = layer(glm52), layer(glm52, samples=256, sequence_length=4096)
    assert long["attention and router"] > 1.2 * short["attention and router"]
    assert long["experts forward"] == pytest.approx(short["experts forward"])


def test_each_choice_costs_what_it_adds(glm52: Plan) -> None:
    phases = layer(glm52)
    assert layer(glm52, refine=0)["solve"] == pytest.approx(phases["solve"] / 3)
    assert layer(glm52, engine="llmcompressor")["solve"] > 5 * phases["solve"]
    assert layer(glm52, expert_hessian="all")["Hessians"] < 0.3 * phases["Hessians"]
    assert layer(glm52, expert_hessian="routed")["Hessians"] < phases["Hessians"]
    awq = layer(glm52, method="awq")
    assert "solve" not in awq
    assert awq["scale inputs"] > awq["weights"]
    assert layer(glm52, dtype="float32")["Hessians"] > 5 * phases["Hessians"]


def test_plain_linears_cost_a_pass_and_their_second_moments(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path / "tiny"))
    found = []
    for recipe in ("glm-5", "experts-and-dense"):
        plan = make_plan(checkpoint, load_recipe(recipe), Settings())
        found.append(layer_seconds(plan.units[2].tensors, plan.settings, checkpoint.config))
    experts, every = found
    assert every["attention and router"] == pytest.approx(2 * experts["attention and router"])
    assert every["Hessians"] > experts["Hessians"]
    assert every["solve"] > experts["solve"]
    assert every["experts forward"] == experts["experts forward"]


def test_a_data_free_run_only_rounds(glm52: Plan) -> None:
    plan = replace(glm52, settings=replace(H200, method="rtn"))
    found = estimate_duration(plan)
    assert set(found.detail) == {"start", "weights"}
    assert found.disk == pytest.approx((plan.checkpoint.nbytes + plan.bytes_out) / DISK)
    assert found.seconds == max(found.compute, found.disk)


def test_workers_share_the_computing_and_not_the_disk(glm52: Plan) -> None:
    one, eight = estimate_duration(glm52), estimate_duration(glm52, workers=8)
    start = one.detail["start"]
    assert eight.detail["start"] == start
    assert eight.compute - start == pytest.approx((one.compute - start) / 8)
    assert eight.disk == pytest.approx(one.disk)
    # 75 sparse layers and the MTP layer of 7.5 s.
    assert one.compute == pytest.approx(76 * 7.5, rel=0.1)


def test_the_disk_takes_states_that_are_stored_and_those_without_room(glm52: Plan) -> None:
    model = glm52.checkpoint.config
    moved = (glm52.checkpoint.nbytes + glm52.bytes_out) / DISK
    stored = 79 * state_bytes(H200, model) / DISK
    assert stored > moved / STATE_INTERVAL
    few = replace(glm52, settings=replace(H200, samples=8))
    assert estimate_duration(few).disk == pytest.approx(moved + stored / 64)
    hidden = 79 * hidden_bytes(H200, model) / DISK
    places: list[tuple[Any, Any, float]] = [
        ("device", "device", moved),
        ("host", "host", moved),
        ("disk", "device", moved + 5 * hidden),
        ("disk", "disk", moved + 5 * hidden + (3 + 2 * 8) * hidden),
    ]
    for states, inputs, expected in places:
        memory = replace(glm52.memory, placement=Placement(1, states, inputs))
        found = estimate_duration(replace(glm52, memory=memory)).disk
        assert found == pytest.approx(expected + min(stored, expected / STATE_INTERVAL))


def test_the_plan_says_so(glm52: Plan) -> None:
    found = estimate_duration(glm52, workers=2)
    line = plan_summary(glm52, found)[-1]
    assert line.startswith("time         about 22 min ")
    assert "at the speed of 2 H200s" in line
    assert line.endswith("s for the disk at 1 GB/s")
    record = plan_record(glm52, found, serving={})["duration"]
    assert record["seconds"] == found.disk > found.compute == record["compute"]


def test_the_estimate_never_imports_torch() -> None:
    code = (
        "import sys, halfbyte.quantize.duration\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")
