"""The commands that make, serve and judge an output, as somebody would type them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import fields

from halfbyte.core import RunReport, Settings
from halfbyte.quantize.recipe import load_recipe, recipe_names, recipe_to_dict
from halfbyte.report.output import Output

VALUES: Mapping[str, str] = {
    "engine": "--engine",
    "samples": "--samples",
    "sequence_length": "--sequence-length",
    "refine": "--refine",
    "expert_hessian": "--expert-hessian",
    "scale_search": "--scale-search",
    "seed": "--seed",
}
"""Field of the settings -> the option that sets it."""
SWITCHES: Mapping[str, str] = {
    "row_feedback": "--no-row-feedback",
    "affinity": "--affinity",
    "signed_scales": "--positive-scales",
}
"""Field of the settings -> the option that turns its default around."""


def quantize_command(report: RunReport, output: str) -> str:
    """What makes this output again; with the same text, versions and kind of device its bytes."""
    settings, defaults = report.settings, Settings()
    words = ["quantize", report.origin.name, "--to", "int4", "--method", settings.method]
    words += _recipe(report)
    if settings.method != "rtn":
        words += ["--calibration", "text.jsonl"]
    for field in fields(Settings):
        name, value = field.name, getattr(settings, field.name)
        if settings.method == "rtn" and name not in ("scale_search", "signed_scales"):
            continue
        if name in SWITCHES and value != getattr(defaults, name):
            words.append(SWITCHES[name])
        elif name in ("samples", "sequence_length") or (
            name in VALUES and value != getattr(defaults, name)
        ):
            words += [VALUES[name], str(value)]
    words += ["--device", settings.device.partition(":")[0], "--dtype", settings.dtype]
    line = shlex.join([*words, "-o", output])
    return line if settings.threads is None else f"OMP_NUM_THREADS={settings.threads} {line}"


def _recipe(report: RunReport) -> list[str]:
    """Options for the recipe; one that is not built in is a file of its reader."""
    name = str(report.recipe["name"])
    if name not in recipe_names():
        return ["--recipe", f"{name}.yaml"]
    for size in (None, 32, 64, 128, "channel"):
        if recipe_to_dict(load_recipe(name, size)) == report.recipe:
            group = [] if size is None else ["--group-size", str(size)]
            return ["--recipe", name, *group]
    return ["--recipe", f"{name}.yaml"]


def download_command(report: RunReport) -> str | None:
    """What fetches the source; None when nobody knows where it came from."""
    origin = report.origin
    if origin.repo is None:
        return None
    words = ["hf", "download", origin.repo]
    if origin.revision is not None:
        words += ["--revision", origin.revision]
    return shlex.join([*words, "--local-dir", origin.name])


def vllm_command(output: Output, *, mtp: bool = False) -> str:
    """vLLM's own command for this folder."""
    words = ["vllm", "serve", output.name]
    if (gpus := output.parallel()) > 1:
        words += ["--tensor-parallel-size", str(gpus)]
    if mtp:
        words += ["--speculative-config.method", "mtp"]
        words += ["--speculative-config.num_speculative_tokens", "1"]
    return shlex.join(words)


def sglang_command(output: Output, *, mtp: bool = False) -> str:
    """SGLang's own command for this folder."""
    words = ["python", "-m", "sglang.launch_server", "--model-path", output.name]
    if (gpus := output.parallel()) > 1:
        words += ["--tp-size", str(gpus)]
    if mtp:
        words += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"]
        words += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"]
    return shlex.join(words)


def evaluate_commands(output: Output) -> tuple[str, str, str]:
    """What measures source and output on tasks and judges, with a verdict for card and page."""
    source, name = shlex.quote(output.report.origin.name), shlex.quote(output.name)
    return (
        f"quantize eval {source} --tasks tasks -o fp8.json",
        f"quantize eval {name} --tasks tasks --text heldout.jsonl --baseline {source} -o int4.json",
        "quantize gate fp8.json int4.json -o gate.json",
    )
