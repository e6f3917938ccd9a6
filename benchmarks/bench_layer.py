"""MoE layers of GLM-5.2 at full size through the calibrated pipeline: each phase, peak memory.

    python benchmarks/bench_layer.py FOLDER --device cuda
    torchrun --nproc-per-node 2 benchmarks/bench_layer.py FOLDER --device cuda

writes a checkpoint of random weights into FOLDER (10 GB a layer, once) and runs the whole of
`quantize run` on it: attention and router forward, Hessians, solve, write, experts forward. The
time of a layer is what it takes until its last tensor is handed to the writer, which is when the
next one begins; with `--layers 2` the second also meets what the first left to write, and a run
may store the state for `--resume` between them. The total ends with the last byte on the disk. A
first run compiles the kernels and warms up; the second gives the times; in a third one the GPU
comes to rest around every phase, to time it: these are of all layers. Prints a table and one line
of JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from halfbyte.core import MemoryBudget, RunReport, Settings
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.progress import SilentProgress
from halfbyte.quantize import pipeline
from halfbyte.quantize.phases import Phases
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe
from halfbyte.ranks import Ranks, joined, local_device
from halfbyte.testing import glm52

VOCABULARY = 8192
SHARD_BYTES = 1_200_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--method", default=Settings().method)
    parser.add_argument("--refine", type=int, default=Settings().refine)
    parser.add_argument("--experts", type=int, default=256, help="fewer for a quick look")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--output", type=Path, help="where to write [FOLDER/output]")
    parser.add_argument("--max-gpu-gib", type=float)
    parser.add_argument("--runs", default="warm-up,total,phases")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = local_device(arguments.device)
    with joined(device) as ranks:
        result = bench(arguments, device, ranks)
    if ranks.first:
        for name in result.get("phases by rank", [{}])[0]:
            of_ranks = (f"{phases.get(name, 0):8.3f}" for phases in result["phases by rank"])
            print(f"{name:24} {' '.join(of_ranks)} s")
        for name in arguments.runs.split(","):
            layers = " ".join(f"{seconds:8.3f}" for seconds in result[f"{name} layers"])
            print(f"{name + ', its layers':24} {layers} s")
        if arguments.json:
            arguments.json.write_text(json.dumps(result))
        print(json.dumps(result))


def bench(arguments: argparse.Namespace, device: str, ranks: Ranks) -> dict[str, Any]:
    """What this rank measured; the first one has all of it."""
    source = arguments.folder / f"source-{arguments.experts}-{arguments.layers}"
    if ranks.first and not (source / "config.json").exists():
        write_layers(source, arguments.experts, arguments.layers, device)
    ranks.everyone(None)  # the others wait for the checkpoint
    settings = Settings(
        samples=arguments.samples,
        sequence_length=arguments.sequence_length,
        device=device,
        dtype=arguments.dtype,
        method=arguments.method,
        refine=arguments.refine,
    )
    generator = torch.Generator().manual_seed(0)
    shape = (settings.samples, settings.sequence_length)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    limit = arguments.max_gpu_gib
    budget = MemoryBudget(None if limit is None else int(limit * 2**30))
    plan = make_plan(
        open_checkpoint(source), load_recipe("glm-5"), settings, budget, ranks=ranks.count
    )
    result: dict[str, Any] = {
        "ranks": ranks.count,
        "plan_gpu_bytes": plan.memory.gpu,
        "plan_host_bytes": plan.memory.host,
        "experts_at_once": plan.memory.placement.experts_at_once,
    }
    output = arguments.output or arguments.folder / "output"
    report: RunReport | None = None
    for name in arguments.runs.split(","):
        phases = Phases(on=name == "phases")
        if ranks.first:
            shutil.rmtree(output, ignore_errors=True)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        ranks.everyone(None)
        started = time.perf_counter()
        if not ranks.first:
            pipeline.follow(plan, output, tokens=tokens, phases=phases, ranks=ranks)
            ranks.everyone(phases.seconds)
            continue
        units = Units()
        report = pipeline.run(
            plan, output, tokens=tokens, phases=phases, progress=units, ranks=ranks
        )
        result[name] = time.perf_counter() - started
        seconds = ranks.everyone(phases.seconds)
        if phases.on:
            result["phases by rank"] = seconds
        # Behind the embedding, until the head.
        ends = units.times[1 : arguments.layers + 2]
        result[f"{name} layers"] = [after - before for before, after in pairwise(ends)]
    gpu = 0 if device == "cpu" else torch.cuda.max_memory_allocated()
    result["peak_gpu_bytes"] = max(ranks.everyone(gpu))
    result["peak_host_bytes"] = max(ranks.everyone(pipeline.peak_host_bytes()))
    if report is not None:
        linears = report.linears
        result["error"] = sum(linear.error for linear in linears) / len(linears)
        result["rtn_error"] = sum(linear.rtn_error for linear in linears) / len(linears)
        result["shards"] = dict(report.shards)
    hardware = platform.processor() if device == "cpu" else torch.cuda.get_device_name()
    return result | {"hardware": hardware, "torch": torch.__version__}


class Units(SilentProgress):
    """Notes when work began and when each unit was computed and handed to the writer."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def start(self, task: str, total: int, unit: str) -> None:
        self.times.append(time.perf_counter())

    def advance(self, amount: int) -> None:
        self.times.append(time.perf_counter())


def write_layers(folder: Path, experts: int, layers: int, device: str) -> None:
    """A checkpoint of sparse layers in GLM-5.2's shapes, random weights in block FP8."""
    folder.mkdir(parents=True, exist_ok=True)
    config = glm52.glm52_config() | {
        "num_hidden_layers": layers,
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse"] * layers,
        "indexer_types": ["full"] * layers,
        "num_nextn_predict_layers": 0,
        "n_routed_experts": experts,
        "vocab_size": VOCABULARY,
    }
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
    generator = torch.Generator(device=device).manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    count = 0

    def flush() -> None:
        nonlocal shard, count
        count += 1
        file = f"model-{count:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(shard, file))
        shard = {}

    total = 0
    for name, dtype, rows in _tensors(experts, layers):
        if name.endswith("_scale_inv"):
            continue
        values = torch.randn(rows, generator=generator, device=device)
        if name.endswith("norm.weight"):
            shard[name] = (1 + 0.2 * values).bfloat16().cpu()
        elif dtype == "F8_E4M3":
            weight, scale = _block_fp8(values * rows[1] ** -0.5)
            shard[name], shard[name + "_scale_inv"] = weight.cpu(), scale.cpu()
        else:
            values *= rows[-1] ** -0.5 if len(rows) > 1 else 0.01
            shard[name] = values.to(torch.float32 if dtype == "F32" else torch.bfloat16).cpu()
        if sum(t.nbytes for t in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    total = sum((folder / file).stat().st_size for file in set(names.values()))
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


def _tensors(experts: int, layers: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of every tensor: each layer is the real table's layer 6."""
    table = []
    for tensor in glm52.tensor_table():
        shape, name = tensor.shape, tensor.name
        if name.startswith("model.layers.") and not name.startswith("model.layers.6."):
            continue
        if ".experts." in name and int(name.split(".experts.")[1].split(".")[0]) >= experts:
            continue
        if ".mlp.gate." in name:
            shape = (experts, *shape[1:])
        if shape[0] == glm52.VOCABULARY:
            shape = (VOCABULARY, *shape[1:])
        of_layers = name.startswith("model.layers.")
        for layer in range(layers if of_layers else 1):
            own = name.replace("model.layers.6.", f"model.layers.{layer}.")
            table.append((own, tensor.dtype, shape))
    return table


def _block_fp8(weight: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    grid = (-(-rows // block), -(-columns // block))
    padded = weight.new_zeros(grid[0] * block, grid[1] * block)
    padded[:rows, :columns] = weight
    blocks = padded.view(grid[0], block, grid[1], block)
    scale = blocks.abs().amax((1, 3)) / 448
    quantized = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return quantized.view(padded.shape)[:rows, :columns].contiguous(), scale


if __name__ == "__main__":
    main()
