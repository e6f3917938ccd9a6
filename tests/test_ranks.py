"""Several ranks give the bytes of one: whole runs on the CPU."""

from __future__ import annotations

import json
import multiprocessing
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from halfbyte.core import Plan, Settings
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.quantize import pipeline
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe
from halfbyte.quantize.shares import shares
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


DATA_FREE = """
import errno, os, signal, sys, time
import torch
import halfbyte.formats.journal as journal
from halfbyte.quantize import pipeline
from halfbyte.ranks import joined

def append(path, record, original=journal._append):
    global line
    line -= 1
    if not line and fate == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if not line and fate == "stuck":
        time.sleep(1000)
    if not line and fate == "full disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    original(path, record)
    with open(out.with_suffix(".units"), "a") as log:
        log.writelines(unit["unit"] + "\\n" for unit in record.get("units", ()))

os.environ |= environment
torch.set_num_threads(1)
journal._append = append
try:
    with joined("cpu", tensors=False) as ranks:
        if ranks.first:
            pipeline.run(plan, out, resume=True, ranks=ranks)
        else:
            pipeline.follow(plan, out, ranks=ranks)
except Exception as error:
    out.with_suffix("." + environment["RANK"]).write_text(f"{type(error).__name__}: {error}")
    sys.exit(1)
"""
"""A rank of a data-free run. Its `fate` comes over it where it would write its `line`th line."""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["halfbyte.quantize.pipeline", "halfbyte.quantize.conversion"])


def start(plan: Plan, out: Path, fates: Sequence[tuple[str, int]]) -> list[Any]:
    """Ranks of a data-free run, one for each fate, as `torchrun` starts them, but in a moment."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank, (fate, line) in enumerate(fates):
        environment = {
            "WORLD_SIZE": str(len(fates)),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        names = {"plan": plan, "out": out, "environment": environment, "fate": fate, "line": line}
        ranks.append(FORKS.Process(target=exec, args=(DATA_FREE, names)))
        ranks[-1].start()
    return ranks


def exit_codes(ranks: list[Any]) -> list[int | None]:
    """When all have ended, which they do without help."""
    for rank in ranks:
        rank.join(60)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


WELL = ("well", 0)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    source = write_tiny(tmp_path_factory.mktemp("ranks") / "source", layers=6)
    settings, recipe = Settings(method="rtn"), load_recipe("glm-5")
    return make_plan(open_checkpoint(source), recipe, settings, max_shard_bytes=200_000)


@pytest.fixture(scope="module")
def alone(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run in one process."""
    folder = tmp_path_factory.mktemp("ranks") / "alone"
    pipeline.run(plan, folder)
    return files(folder)


@pytest.mark.parametrize("count", [2, 3, 15])
def test_ranks_write_their_own_shards(
    plan: Plan, alone: dict[str, bytes], tmp_path: Path, count: int
) -> None:
    assert all(shares(plan, count)) == (count < 15)
    assert exit_codes(start(plan, tmp_path / "out", [WELL] * count)) == [0] * count
    assert files(tmp_path / "out") == alone


@pytest.mark.parametrize(("first", "second", "third"), [(2, 3, 1), (3, 1, 2), (1, 2, 3)])
def test_a_killed_run_goes_on_with_any_number_of_ranks(
    plan: Plan, alone: dict[str, bytes], tmp_path: Path, first: int, second: int, third: int
) -> None:
    """In the first run one rank is killed, in the second all of them."""
    out = tmp_path / "out"
    codes = exit_codes(start(plan, out, [WELL] * (first - 1) + [("killed", 3)]))
    assert codes == [1] * (first - 1) + [-signal.SIGKILL]
    before = len(committed(out))
    ranks = start(plan, out, [("stuck", 2)] * second)
    while len(committed(out)) < before + second and all(rank.is_alive() for rank in ranks):
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
    assert exit_codes(ranks) == [-signal.SIGKILL] * second
    assert not (out / "config.json").exists()
    done = committed(out)
    assert len(done) == before + second < len(plan.units)
    out.with_suffix(".units").unlink()
    assert exit_codes(start(plan, out, [WELL] * third)) == [0] * third
    assert files(out) == alone
    again = out.with_suffix(".units").read_text().split("\n")[:-1]
    assert sorted(done + again) == sorted(unit.name for unit in plan.units)


def test_a_rank_that_fails_ends_the_run(
    plan: Plan, alone: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert exit_codes(start(plan, out, [WELL, ("full disk", 2), WELL])) == [1, 1, 1]
    errors = [out.with_suffix(f".{rank}").read_text() for rank in range(3)]
    assert errors[1] == f"OutputError: writing to {out} failed: No space left on device"
    for rank in (0, 2):
        assert errors[rank].startswith("RankError: another process of the run has ended")
    pipeline.run(plan, out, resume=True)
    assert files(out) == alone


def test_the_command_line_under_torchrun(tmp_path: Path, tiny: Path) -> None:
    """One rank speaks, the others only work."""
    script = tmp_path / "small_shards.py"
    script.write_text(
        "import sys\n"
        "from halfbyte.cli import main\n"
        "from halfbyte.quantize.plan import make_plan\n"
        "make_plan.__kwdefaults__['max_shard_bytes'] = 200_000\n"
        "sys.exit(main())\n"
    )
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    reports = []
    for name, before in (("alone", ()), ("shared", launch)):
        command = [sys.executable, *before, str(script), "run", str(tiny), "-o"]
        command += [str(tmp_path / name), "--method", "rtn", "--device", "cpu", "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        report = json.loads(done.stdout)
        for volatile in ("output", "seconds", "peak_bytes"):
            del report[volatile]
        reports.append(report)
    assert reports[0] == reports[1]
    # What a run took differs, and so does the card of a folder of another name.
    about = {"README.md", "halfbyte_run.json"}
    made = [files(tmp_path / name) for name in ("alone", "shared")]
    assert all(about <= set(found) for found in made)
    assert len({str({n: f for n, f in found.items() if n not in about}) for found in made}) == 1


def committed(out: Path) -> list[str]:
    """Names of the units in the journal."""
    path = out / ".halfbyte" / "journal.jsonl"
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    records = (json.loads(line.partition(" ")[2]) for line in lines)
    return [unit["unit"] for record in records for unit in record["units"]]


@pytest.mark.parametrize(("count", "total"), [(1, 5), (3, 5), (4, 3), (2, 0)])
def test_shares_hold_everything_once_in_order(count: int, total: int) -> None:
    shares = Ranks(0, count).shares(total)
    assert [item for share in shares for item in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
