"""Whole runs on a GPU: skipped without one. What they end in is compared with runs on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.core import Placement, Plan, RunReport, Settings
from halfbyte.formats.budgets import COPYING
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.shards import Checks, Request, ShardReader
from halfbyte.formats.weights import logical_weights
from halfbyte.kernels import w4a16
from halfbyte.kernels.reference import unpack_int4
from halfbyte.quantize import pipeline
from halfbyte.quantize.kernel_check import KernelRequest
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe
from halfbyte.quantize.verify import verify
from halfbyte.testing.tiny import write_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

GPU = Settings(samples=64, sequence_length=48, device="cuda:0", dtype="float32")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "tiny"
    return write_tiny(folder, layers=6, experts=6, hidden=256, moe_intermediate=192)


def plan_of(source: Path, settings: Settings) -> Plan:
    return make_plan(open_checkpoint(source), load_recipe("glm-5"), settings)


def run(plan: Plan, out: Path) -> RunReport:
    settings = plan.settings
    generator = torch.Generator().manual_seed(5)
    shape = (settings.samples, settings.sequence_length)
    tokens = torch.randint(10, 300, shape, generator=generator)
    return pipeline.run(plan, out, tokens=None if settings.method == "rtn" else tokens)


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def test_rounding_ends_where_the_cpu_does(source: Path, tmp_path: Path) -> None:
    """But for the sign of some scales: a largest weight of just 7.5 steps loses half a step as 7
    and as -8, and which is less is decided by the last bit."""
    errors, made = [], []
    for device in ("cuda:0", "cpu"):
        report = run(plan_of(source, replace(GPU, method="rtn", device=device)), tmp_path / device)
        errors.append(sum(linear.weight_error for linear in report.linears))
        made.append(stored(tmp_path / device))
    ours, theirs = made
    assert ours.keys() == theirs.keys()
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)
    turned, groups = 0, 0
    for name, tensor in ours.items():
        if name.endswith(".weight_scale"):
            scales, others = tensor.float(), theirs[name].float()
            packed = name.replace(".weight_scale", ".weight_packed")
            codes, other_codes = (
                unpack_int4(of[packed], 8 * of[packed].shape[1]).float().unflatten(1, (-1, 32))
                for of in made
            )
            same = scales == others
            assert bool((scales.abs() == others.abs()).all()), name
            assert bool((codes == other_codes)[same].all()), name
            turned, groups = turned + int((~same).sum()), groups + same.numel()
        elif not name.endswith(".weight_packed"):
            assert bool((tensor.view(torch.uint8) == theirs[name].view(torch.uint8)).all()), name
    assert turned < 0.01 * groups


@pytest.mark.parametrize("method", ["gptq", "awq+gptq", "awq"])
def test_errors_are_those_of_the_cpu(source: Path, tmp_path: Path, method: str) -> None:
    """Not the codes: what TF32 decides differently close to a tie changes all that follows it."""
    errors = []
    for device in ("cuda:0", "cpu"):
        report = run(plan_of(source, replace(GPU, method=method, device=device)), tmp_path / device)
        errors.append([linear.error for linear in report.linears])
    assert verify(tmp_path / "cuda:0", source).mismatches == ()
    assert errors[0] == pytest.approx(errors[1], rel=0.1)
    assert sum(errors[0]) == pytest.approx(sum(errors[1]), rel=0.01)


@pytest.mark.parametrize("method", ["gptq", "awq+gptq"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_byte_depends_on_where_data_waits(
    source: Path, tmp_path: Path, method: str, dtype: str
) -> None:
    plan = plan_of(source, replace(GPU, method=method, dtype=dtype))
    run(plan, tmp_path / "as planned")
    for number, placement in enumerate(
        (
            Placement(6),
            Placement(1),
            Placement(4, "host", "device", True),
            Placement(5, "host", "host", True),
            Placement(6, "disk", "disk", True),
        ),
        start=1,
    ):
        memory = replace(plan.memory, placement=placement)
        run(replace(plan, memory=memory), tmp_path / str(number))
        assert weights(tmp_path / str(number)) == weights(tmp_path / "as planned")


def test_kernels_are_checked_on_what_they_read(source: Path, tmp_path: Path) -> None:
    """Of `source` the 192 columns of down are not whole blocks of the kernels."""
    wide = write_tiny(tmp_path / "wide", layers=3, hidden=256, moe_intermediate=256)
    for folder in (wide, source):
        run(plan_of(folder, replace(GPU, method="rtn")), tmp_path / f"{folder.name}-INT4")
        tokens = torch.randint(10, 300, (8, 48), generator=torch.Generator().manual_seed(6))
        for request in (KernelRequest("cuda:0"), KernelRequest("cuda:0", tokens)):
            result = verify(tmp_path / f"{folder.name}-INT4", folder, kernels=request)
            assert result.mismatches == ()
            assert result.kernels is not None
            assert result.kernels.engine.startswith("CUDA kernels on ")
            assert {check.by_kernel for check in result.kernels.linears} == {True}
            assert {check.by_kernel for check in result.kernels.experts} == {True}


def test_a_wrong_kernel_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny(tmp_path / "wide", layers=3, hidden=256, moe_intermediate=256)
    run(plan_of(source, replace(GPU, method="rtn")), tmp_path / "INT4")
    made = w4a16.linear

    def unwritten(x: torch.Tensor, weight: w4a16.Weight) -> torch.Tensor:
        y = torch.empty(len(x), weight.rows, dtype=x.dtype, device=x.device)
        y[:, 1:] = made(x, weight)[:, 1:]
        return y

    monkeypatch.setattr(w4a16, "linear", unwritten)
    found = verify(tmp_path / "INT4", kernels=KernelRequest("cuda:0")).mismatches
    assert {m.kind for m in found} == {"kernel"}
    assert all("row 0 is nan" in m.message for m in found)


def test_page_locked_memory_is_bounded_while_a_gpu_is_busy(tmp_path: Path) -> None:
    weights = {f"{n}.weight": torch.full((2048, 2048), n, dtype=torch.bfloat16) for n in range(64)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "glm_moe_dsa"}')
    checkpoint, budget, checks = open_checkpoint(tmp_path), 64 << 20, Checks()
    stored = logical_weights(checkpoint).values()
    order = [Request(weight.parts["weight"]) for weight in stored]
    torch._C._host_emptyCache()
    before = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    with ShardReader(checkpoint) as reader, reader.read_ahead(order, "cuda:0", budget):
        torch.cuda._sleep(1_000_000_000)  # half a second, in which no copy can begin
        read = [reader.read_weight(weight, torch.bfloat16, "cuda:0", checks) for weight in stored]
    checks.settle()
    used = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    assert budget < used <= budget + COPYING + (16 << 20)
    for weight, tensor in zip(stored, read, strict=True):
        assert (tensor == int(weight.name.split(".")[0])).all()


def test_kill_dash_nine_and_resume(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": f"line {n} of {n * n} " * 9}) + "\n" for n in range(99))
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def command(out: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "halfbyte", "run", str(source), "--to", "int4", "-o", str(out)),
            *("--calibration", str(text), "--samples", "16", "--sequence-length", "64", "-q"),
            *("--device", "cuda", "--resume"),
        ]

    subprocess.run(command(whole), check=True)
    journal = broken / ".halfbyte" / "journal.jsonl"
    for lines in (2, 5):
        process = subprocess.Popen(command(broken))
        while process.poll() is None:
            if journal.exists() and journal.read_bytes().count(b"\n") >= lines:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(0.001)
        assert process.returncode == -signal.SIGKILL
    subprocess.run(command(broken), check=True)
    assert weights(broken) == weights(whole)
