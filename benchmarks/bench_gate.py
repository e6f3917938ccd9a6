"""What the gate says of checkpoints that are known to be good, bad, and worse by degrees.

    python -m benchmarks.bench_gate SMALL NANO --tasks TASKS --calibration calibration.jsonl

Of SMALL: itself, our INT4 with the defaults, and FP8 copies whose experts of one layer are scaled
by 1.05, 1.2 and 1.5, and swapped with each other. Of NANO: every linear rounded to INT4 in groups
of 128. All are evaluated on the same questions as their source. Prints a line of JSON for each.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.bf16 import write_bf16
from halfbyte.core import Scheme
from halfbyte.evals.gate import gate
from halfbyte.evals.harness import run_tasks
from halfbyte.evals.policy import NAMES, load_policy
from halfbyte.evals.report import EvalReport, checkpoint_fingerprint
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.kernels.reference import dequantize_int4
from halfbyte.quantize.rtn import round_to_nearest
from halfbyte.quantize.scales import group_scales

TASKS = ("glm_gsm_like", "glm_arc_like", "glm_mmlu_like", "glm_recall", "glm_tool_call")
KEPT = re.compile(r"\.indexer\.|\.mlp\.gate\.|embed_tokens|lm_head|eh_proj|shared_head")
"""What the makers of the models left alone when they rounded all linears."""

Change = Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("small", type=Path)
    parser.add_argument("nano", type=Path)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--task", action="append", help="one of them; may be repeated [all]")
    parser.add_argument("--limit", type=int, help="documents of each task [all]")
    parser.add_argument("--samples", type=int, default=128, help="of 512 tokens, for SMALL's INT4")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--layer", type=int, default=4, help="of SMALL, whose experts are damaged")
    parser.add_argument("--work", type=Path, default=Path("build/bench-gate"))
    parser.add_argument("--json", type=Path, default=Path("build/bench-gate/results.jsonl"))
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)

    def evaluated(folder: Path) -> EvalReport:
        path = work / f"{folder.name}.json"
        if not path.exists():
            results = run_tasks(
                folder,
                arguments.tasks,
                arguments.task or TASKS,
                limit=arguments.limit,
                batch_size=arguments.batch_size,
                device=arguments.device,
            )
            made = checkpoint_fingerprint(open_checkpoint(folder))
            EvalReport(folder.name, made, tasks=results).write(path)
        return EvalReport.read(path)

    small, nano = evaluated(arguments.small), evaluated(arguments.nano)
    judged = [(small, small, "small itself")]

    int4 = work / "small-int4"
    quantize = [sys.executable, "-m", "halfbyte", "run", str(arguments.small), "--to", "int4"]
    quantize += ["--calibration", str(arguments.calibration), "--sequence-length", "512"]
    quantize += ["--samples", str(arguments.samples), "--device", arguments.device, "-o", str(int4)]
    subprocess.run([*quantize, "--resume", "-q"], check=True)
    judged.append((small, evaluated(int4), "small, GPTQ g32"))

    rounded = work / "nano-rounded"
    if not rounded.exists():
        write_rounded(arguments.nano, rounded)
    judged.append((nano, evaluated(rounded), "nano, all linears rounded, g128"))

    experts = f".layers.{arguments.layer}.mlp.experts."
    for factor in (1.05, 1.2, 1.5):
        folder = work / f"small-scaled-{factor}"
        copy(arguments.small, folder, scaled(experts, factor))
        name = f"small, experts of layer {arguments.layer} times {factor}"
        judged.append((small, evaluated(folder), name))
    folder = work / "small-swapped"
    copy(arguments.small, folder, swapped(experts, experts_of(arguments.small)))
    judged.append((small, evaluated(folder), f"small, experts of layer {arguments.layer} swapped"))

    with arguments.json.open("w") as file:
        for baseline, candidate, name in judged:
            line = json.dumps(row(baseline, candidate, name))
            print(line, flush=True)
            file.write(line + "\n")


def row(baseline: EvalReport, candidate: EvalReport, name: str) -> dict[str, object]:
    verdicts = {policy: gate(baseline, candidate, load_policy(policy)) for policy in NAMES}
    default = verdicts["default"].to_json()
    return {
        "candidate": name,
        "verdicts": {policy: verdict.verdict for policy, verdict in verdicts.items()},
        "mean_change_points": default["mean_change_points"],
        "tasks": {
            r["task"]: [r["count"], r["baseline"], r["candidate"], r["lost"], r["won"]]
            for r in default["rows"]
            if r["decides"]
        },
        "reasons": default["reasons"],
        "remarks": default["remarks"],
    }


def write_rounded(source: Path, output: Path) -> None:
    """A BF16 checkpoint whose linears hold what INT4 codes and scales would give."""
    write_bf16(source, output)
    path, scheme = output / "model.safetensors", Scheme(group_size=128)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and not KEPT.search(name):
            weight = tensor.float()
            scales = group_scales(weight[None], scheme, "minmax", signed=False)[0]
            codes = round_to_nearest(weight, scales, scheme)
            tensors[name] = dequantize_int4(codes, scales, torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})


def copy(source: Path, output: Path, change: Change) -> None:
    """A copy of a checkpoint with some tensors changed or under another name."""
    if output.exists():
        return
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    index_path = partial / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    for path in sorted(partial.glob("*.safetensors")):
        changed = dict(change(name, tensor) for name, tensor in load_file(path).items())
        save_file(changed, path, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(changed, path.name)
    index_path.write_text(json.dumps(index))
    partial.rename(output)


def scaled(experts: str, factor: float) -> Change:
    """Makes the weights of some experts larger, by their scales."""

    def change(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        hit = experts in name and name.endswith("weight_scale_inv")
        return name, tensor * factor if hit else tensor

    return change


def swapped(experts: str, count: int) -> Change:
    """Gives every expert the place of the next."""

    def change(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        before, found, behind = name.partition(experts)
        if not found:
            return name, tensor
        number, _, rest = behind.partition(".")
        return f"{before}{experts}{(int(number) + 1) % count}.{rest}", tensor

    return change


def experts_of(folder: Path) -> int:
    return int(open_checkpoint(folder).config["n_routed_experts"])


if __name__ == "__main__":
    main()
