"""How fast a data-free run streams a checkpoint, against `cp` of the same bytes on the same disk.

    python benchmarks/bench_stream.py --folder /disk/bench --gigabytes 8 --device cuda

Makes a synthetic FP8 checkpoint of GLM-5.2's layer shapes in the folder, once, and then takes
turns: `cp` of the checkpoint with fsync, `quantize run --method rtn` of it as a process of its own.
The page cache is emptied of the files before each pass (posix_fadvise, so no privileges are
needed). Prints a table and one JSON line. The folder needs room for the checkpoint, and a copy or
the output.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from halfbyte.testing.architectures import TensorSpec, tensor_specs
from halfbyte.testing.glm52 import BLOCK, glm52_config
from halfbyte.testing.tiny import FP8_MAX, write_safetensors

VOCABULARY = 8192
"""The real one would be 4 GB of copies, half of a small checkpoint and 0.5 % of GLM-5.2."""
LAYER_BYTES = 4_000_000_000
"""A layer of GLM-5.2 has 9.9 GB; smaller ones commit more often."""
DEVIATION = 0.02
"""Standard deviation of the weights."""


def config_of(gigabytes: float) -> dict[str, Any]:
    """GLM-5.2's config with fewer layers and experts: one dense layer, then sparse ones."""
    sparse = max(1, round(gigabytes * 1e9 / LAYER_BYTES))
    config = glm52_config() | {
        "num_hidden_layers": 1 + sparse,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "vocab_size": VOCABULARY,
        "mlp_layer_types": ["dense"] + ["sparse"] * sparse,
        "indexer_types": ["full"] + ["shared"] * sparse,
    }
    config["quantization_config"] |= {"modules_to_not_convert": ["lm_head"]}
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    fixed = sum(map(_nbytes, tensor_specs(config | {"n_routed_experts": 0})))
    experts = round((gigabytes * 1e9 - fixed) / sparse / (3 * hidden * inner))
    return config | {"n_routed_experts": max(8, experts)}


def write_checkpoint(folder: Path, config: dict[str, Any], shards: int) -> None:
    """Random weights, with scales as a real checkpoint has them; `config.json` comes last."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    specs = list(tensor_specs(config))
    total, done = sum(map(_nbytes, specs)), 0
    groups: list[list[TensorSpec]] = [[] for _ in range(shards)]
    for spec in specs:
        groups[min(done * shards // total, shards - 1)].append(spec)
        done += _nbytes(spec)
    generator = torch.Generator().manual_seed(0)
    # Drawing billions of numbers takes minutes: tensors are windows of one pool.
    noise = torch.randn(1 << 26, generator=generator)
    pools = {
        "linear": (noise * (FP8_MAX / 5)).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn),
        "other": noise.mul_(DEVIATION).bfloat16(),
    }
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        tensors = dict(part for spec in group for part in _tensors(spec, pools, generator))
        write_safetensors(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _tensors(
    spec: TensorSpec, pools: dict[str, torch.Tensor], generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stored tensors of one weight."""
    name, shape, kind = spec
    pool = pools["linear" if kind == "linear" else "other"]
    count = math.prod(shape)
    start = int(torch.randint(1 << 20, (1,), generator=generator))
    values = pool[start:].repeat(-(-count // (len(pool) - start)))[:count].view(shape)
    if kind == "correction":
        yield name, values.float()
    elif kind != "linear":
        yield name, values
    else:
        yield name, values
        grid = torch.randn([-(-n // BLOCK) for n in shape], generator=generator)
        yield f"{name}_scale_inv", grid.mul_(0.1).exp_().mul_(5 * DEVIATION / FP8_MAX)


def _nbytes(spec: TensorSpec) -> int:
    _, shape, kind = spec
    size = {"linear": 1, "correction": 4}.get(kind, 2)
    scales = 4 * math.prod(-(-n // BLOCK) for n in shape) if kind == "linear" else 0
    return size * math.prod(shape) + scales


def forget(folder: Path) -> None:
    """Write what is dirty in a folder's files and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def copy(source: Path, target: Path) -> float:
    """Seconds of `cp` until all bytes are on the disk."""
    shutil.rmtree(target, ignore_errors=True)
    forget(source)
    started = time.perf_counter()
    # A reflink would copy nothing.
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for path in target.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def quantize(source: Path, target: Path, device: str) -> tuple[float, float, dict[str, Any]]:
    """Seconds of a whole process, start of Python included, by the clock and of CPU; and what it
    says of the run."""
    shutil.rmtree(target, ignore_errors=True)
    forget(source)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "halfbyte", "run", str(source), "-o", str(target)]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--method", "rtn", "--device", device, "--json"],
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    work = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    shutil.rmtree(target)
    return seconds, work, json.loads(done.stdout)


def hardware(device: str) -> dict[str, str]:
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    found = {"cpu": cpu, "cores": str(len(os.sched_getaffinity(0)))}
    if device != "cpu" and torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the JSON line to this file")
    options = parser.parse_args()
    source = options.folder / f"glm-{options.gigabytes:g}gb-{options.shards}"
    if not (source / "config.json").exists():
        write_checkpoint(source, config_of(options.gigabytes), options.shards)
    nbytes = sum(path.stat().st_size for path in source.iterdir())
    copies, runs, inside, work, peak = [], [], [], [], 0
    for _ in range(options.repeat):
        copies.append(copy(source, options.folder / "copy"))
        seconds, busy, report = quantize(source, options.folder / "out", options.device)
        work.append(busy)
        runs.append(seconds)
        inside.append(report["seconds"])
        peak = max(peak, report["peak_bytes"])
    cp, run = statistics.median(copies), statistics.median(runs)
    record = {
        "hardware": hardware(options.device),
        "versions": {"python": platform.python_version(), **report["versions"]},
        "device": report["settings"]["device"],
        "bytes_in": nbytes,
        "bytes_out": report["bytes_out"],
        "shards": options.shards,
        "cp_seconds": [round(s, 2) for s in copies],
        "run_seconds": [round(s, 2) for s in runs],
        "run_seconds_without_start": [round(s, 2) for s in inside],
        "run_cpu_seconds": [round(s, 2) for s in work],
        "cp_gb_per_s": round(nbytes / cp / 1e9, 3),
        "run_gb_per_s": round(nbytes / run / 1e9, 3),
        "ratio": round(run / cp, 3),
        "peak_host_bytes": peak,
    }
    print(f"{'':24}{'median s':>10}{'GB/s':>8}")
    print(f"{'cp, fsync':24}{cp:10.2f}{record['cp_gb_per_s']:8.3f}")
    print(f"{'quantize run, rtn':24}{run:10.2f}{record['run_gb_per_s']:8.3f}")
    print(f"{'  without its start':24}{statistics.median(inside):10.2f}")
    print(
        f"{nbytes / 1e9:.2f} GB in {options.shards} shards; ratio {run / cp:.2f}; "
        f"{statistics.median(work):.1f} s of CPU; peak resident memory {peak / 2**30:.2f} GiB"
    )
    line = json.dumps(record)
    print(line)
    if options.json:
        options.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
