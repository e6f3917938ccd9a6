"""Several ranks give the bytes of one: whole runs on the CPU, started as a user starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.ranks import Ranks
from halfbyte.testing.tiny import write_tiny

SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
import halfbyte.calibration.runner as runner
runner.BATCH_TOKENS, runner.EXPERT_TOKENS = 32, 64  # so that every rank gets some sequences
from halfbyte.core import Placement, Settings
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.quantize import pipeline
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe
from halfbyte.ranks import joined
if __import__("os").environ.get("RANK", "0") == "0":  # the first decides for all
    pipeline.state_pays = lambda last, now: last is None
source, out, recipe, method, length = sys.argv[1:]
settings = Settings(method=method, samples=14, sequence_length=int(length), threads=1)
tokens = torch.arange(14 * int(length)).reshape(14, -1) % 50 + 10
plan = make_plan(open_checkpoint(source), load_recipe(recipe), settings)
place = "disk" if out.endswith("3") else "device"
plan = replace(plan, memory=replace(plan.memory, placement=Placement(5, place, place)))
with joined("cpu") as ranks:
    if ranks.first:
        pipeline.run(plan, Path(out), tokens=tokens, resume=True, ranks=ranks)
    else:
        pipeline.follow(plan, Path(out), tokens=tokens, ranks=ranks)
"""


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run(count: int, *arguments: str) -> None:
    launch = [] if count == 1 else [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)
    ]  # fmt: skip
    script = Path(arguments[1]).with_suffix(".py")
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *launch, str(script), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("recipe", "method", "length"),
    [("glm-5", "gptq", 16), ("experts-and-dense", "awq+gptq", 24)],
    ids=["experts", "plain linears, AWQ, sparse attention"],
)
def test_ranks_give_the_bytes_of_one(tmp_path: Path, recipe: str, method: str, length: int) -> None:
    source = write_tiny(tmp_path / "source", experts=5)
    for count in (1, 2, 3):
        run(count, str(source), str(tmp_path / f"out{count}"), recipe, method, str(length))
    alone = files(tmp_path / "out1")
    assert "config.json" in alone
    assert files(tmp_path / "out2") == alone
    assert files(tmp_path / "out3") == alone


@pytest.mark.parametrize(("count", "total"), [(1, 5), (3, 5), (4, 3), (2, 0)])
def test_shares_hold_everything_once_in_order(count: int, total: int) -> None:
    shares = Ranks(0, count).shares(total)
    assert [item for share in shares for item in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
