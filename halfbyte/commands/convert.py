"""`quantize run` and `quantize plan`."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halfbyte.commands.options import (
    Affinity,
    Device,
    Dtype,
    EngineName,
    ExpertHessianName,
    GroupSize,
    GroupSizeName,
    Json,
    MaxGpuMemory,
    MaxHostMemory,
    MethodName,
    Quiet,
    RecipeName,
    Refine,
    RowFeedback,
    Samples,
    ScaleSearchName,
    Seed,
    SequenceLength,
    SignedScales,
    Source,
    Verbose,
    open_console,
)
from halfbyte.console import render, resumable
from halfbyte.env import torchrun
from halfbyte.errors import UsageError

if TYPE_CHECKING:
    from halfbyte.console import Console
    from halfbyte.core import Checkpoint, MemoryBudget, Plan, Settings
    from halfbyte.quantize.duration import Duration


def run(
    source: Source,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Folder to write. [default: SOURCE's name + -INT4]"),
    ] = None,
    to: Annotated[Literal["int4"], typer.Option("--to", help="Number format of weights.")] = "int4",
    recipe: RecipeName = None,
    method: MethodName = "gptq",
    engine: EngineName = "halfbyte",
    group_size: GroupSize = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration", help="Text for gptq and awq: .jsonl with a `text` each, or .txt."
        ),
    ] = None,
    samples: Samples = 256,
    sequence_length: SequenceLength = 2048,
    refine: Refine = 2,
    row_feedback: RowFeedback = True,
    expert_hessian: ExpertHessianName = "blend",
    affinity: Affinity = False,
    scale_search: ScaleSearchName = "mse",
    signed_scales: SignedScales = True,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_gpu_memory: MaxGpuMemory = None,
    max_host_memory: MaxHostMemory = None,
    seed: Seed = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run in the output folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in the output folder.")
    ] = False,
    keep_source: Annotated[
        bool,
        typer.Option(
            "--keep-source/--no-keep-source",
            help="Keep downloaded shards in the cache of huggingface_hub; else at most three lie in"
            " the output folder while they are needed.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and write nothing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Quantize a checkpoint. What `quantize SOURCE` runs.

    In several processes, each with a GPU of its own if there are any:
    torchrun --nproc-per-node 8 -m halfbyte run SOURCE --to int4 ...
    """
    from halfbyte.core import MemoryBudget
    from halfbyte.formats.pagecache import page_cache_filling
    from halfbyte.formats.source import open_source

    console = _open_console(json, quiet, verbose)
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    if not dry_run:
        _require_text(method, calibration, f"quantize {shlex.quote(source)} --to {to}")
    launch = torchrun()
    checkpoint = open_source(source)
    local = checkpoint.repository is None
    if launch is not None and not local and not keep_source and not dry_run:
        raise UsageError(
            f"{launch.count} processes would each download {source}",
            hint="let them share the downloads with --keep-source",
        )
    one = launch is None or launch.local_rank == 0  # of a machine's processes
    with page_cache_filling(checkpoint) if one and local and not dry_run else nullcontext():
        settings = _settings(
            device,
            dtype,
            planning=dry_run,
            method=method,
            engine=engine,
            samples=samples,
            sequence_length=sequence_length,
            refine=refine,
            row_feedback=row_feedback,
            expert_hessian=expert_hessian,
            affinity=affinity,
            scale_search=scale_search,
            signed_scales=signed_scales,
            seed=seed,
        )
        budget = MemoryBudget(max_gpu_memory, max_host_memory)
        if dry_run:
            _show_plan(console, _plan(checkpoint, recipe, group_size, settings, budget))
            return
        from halfbyte.calibration.data import token_windows
        from halfbyte.commands import tables
        from halfbyte.quantize import pipeline
        from halfbyte.ranks import joined, local_device
        from halfbyte.report.card import write_card
        from halfbyte.report.output import Planned, RunTimes, read_output, write_run

        settings = replace(settings, device=local_device(settings.device))
        # The plan comes first: it refuses in seconds what tokenizing a long text would only delay.
        plan = _plan(checkpoint, recipe, group_size, settings, budget)
        tokens = None
        if calibration is not None:
            tokens = token_windows(calibration, checkpoint.path, samples, sequence_length, seed)
    for line in tables.plan_summary(plan, _duration(plan)):
        console.note(line)
    console.detail(render(tables.plan_table(plan)))
    for warning in plan.warnings:
        console.warning(warning)
    output = output or default_output(_typed_name(checkpoint))
    with joined(plan.settings.device, tensors=tokens is not None) as ranks:
        if not ranks.first:
            pipeline.follow(plan, output, tokens=tokens, ranks=ranks)
            return
        with resumable(output), console.working() as progress:
            report = pipeline.run(
                plan,
                output,
                tokens=tokens,
                resume=resume,
                overwrite=overwrite,
                progress=progress,
                ranks=ranks,
                keep_source=keep_source,
            )
    if not report.already_finished:
        planned = Planned(plan.memory.host, plan.memory.gpu, _duration(plan).seconds, ranks.count)
        write_run(output, RunTimes.of(report, planned))
    write_card(output, read_output(output), replace=not report.already_finished)
    for line in tables.run_summary(report):
        console.line(line)
    console.result(tables.run_record(report), quiet=str(output))


def plan(
    source: Source,
    recipe: RecipeName = None,
    method: MethodName = "gptq",
    engine: EngineName = "halfbyte",
    group_size: GroupSize = None,
    samples: Samples = 256,
    sequence_length: SequenceLength = 2048,
    refine: Refine = 2,
    row_feedback: RowFeedback = True,
    expert_hessian: ExpertHessianName = "blend",
    affinity: Affinity = False,
    scale_search: ScaleSearchName = "mse",
    signed_scales: SignedScales = True,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_gpu_memory: MaxGpuMemory = None,
    max_host_memory: MaxHostMemory = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what a run would do, reading nothing but headers."""
    from halfbyte.core import MemoryBudget
    from halfbyte.formats.source import open_source

    settings = _settings(
        device,
        dtype,
        planning=True,
        method=method,
        engine=engine,
        samples=samples,
        sequence_length=sequence_length,
        refine=refine,
        row_feedback=row_feedback,
        expert_hessian=expert_hessian,
        affinity=affinity,
        scale_search=scale_search,
        signed_scales=signed_scales,
    )
    console = _open_console(json, quiet, verbose)
    budget = MemoryBudget(max_gpu_memory, max_host_memory)
    checkpoint = open_source(source)
    _show_plan(console, _plan(checkpoint, recipe, group_size, settings, budget))


def _open_console(json: bool, quiet: bool, verbose: bool) -> Console:
    """The console of a command that every rank runs: one of them speaks."""
    launch = torchrun()
    if launch is not None and launch.rank:
        return open_console(json=False, quiet=True)
    return open_console(json, quiet, verbose)


def default_output(source: Path) -> Path:
    """Where a run writes when it is not told: `models/GLM-5.2-FP8` -> `GLM-5.2-INT4`, here."""
    typed = os.path.basename(os.path.abspath(source))  # links keep the name the user knows
    name = re.sub(r"[-_.](fp8|bf16|fp16)$", "", typed, flags=re.IGNORECASE)
    output = Path(f"{name}-INT4")
    # From inside the source, beside it.
    inside = source.resolve() in (Path.cwd(), *Path.cwd().parents)
    return source.resolve().parent / output if inside else output


def _typed_name(checkpoint: Checkpoint) -> Path:
    """The folder, or the one that a download of the repository would make here."""
    repository = checkpoint.repository
    return checkpoint.path if repository is None else Path(repository.name.split("/")[1])


def _require_text(method: str, calibration: Path | None, command: str) -> None:
    if method != "rtn" and calibration is None:
        raise UsageError(
            f"--method {method} needs text to calibrate on",
            hint=f"{command} --calibration text.jsonl, or without data: {command} --method rtn",
        )
    if method == "rtn" and calibration is not None:
        raise UsageError("--method rtn uses no text", hint="drop --calibration or --method rtn")


def _settings(device: str, dtype: str, *, planning: bool, **choices: Any) -> Settings:
    """The settings of a run; `planning` asks for a device without importing torch."""
    from halfbyte.core import Settings
    from halfbyte.devices import cpu_threads, expected_device, resolve_device, resolve_dtype

    if choices["engine"] == "llmcompressor" and choices["method"] in ("rtn", "awq"):
        raise UsageError(
            "--engine llmcompressor solves gptq only",
            hint="drop --method rtn" if choices["method"] == "rtn" else "--method awq+gptq",
        )
    device = expected_device(device) if planning else resolve_device(device)
    return Settings(
        **choices,
        dtype=resolve_dtype(dtype, device),
        device=device,
        threads=None if planning or choices["method"] == "rtn" else cpu_threads(device),
    )


def _plan(
    checkpoint: Checkpoint,
    recipe: str | None,
    group_size: GroupSizeName | None,
    settings: Settings,
    budget: MemoryBudget,
) -> Plan:
    from halfbyte.models import recipe_for
    from halfbyte.quantize.plan import make_plan
    from halfbyte.quantize.recipe import load_recipe

    name = recipe or recipe_for(checkpoint)
    chosen = load_recipe(name, group_size=_columns(group_size))
    launch = torchrun()
    return make_plan(checkpoint, chosen, settings, budget, ranks=launch.count if launch else 1)


def _columns(group_size: GroupSizeName | None) -> int | Literal["channel"] | None:
    return group_size if group_size is None or group_size == "channel" else int(group_size)


def _show_plan(console: Console, plan: Plan) -> None:
    from halfbyte.commands import capacity_tables, tables

    duration = _duration(plan)
    output = default_output(_typed_name(plan.checkpoint)).name
    serving = capacity_tables.Serving.of(plan, output)
    for line in tables.plan_summary(plan, duration):
        console.line(line)
    console.line()
    console.table(tables.plan_table(plan))
    console.line()
    for line in capacity_tables.serving_lines(serving):
        console.line(line)
    if console.verbose:
        console.line()
        console.table(tables.memory_table(plan))
    for warning in plan.warnings:
        console.warning(warning)
    record = tables.plan_record(plan, duration, capacity_tables.serving_record(serving))
    console.result(record)


def _duration(plan: Plan) -> Duration:
    """Of a run by the GPUs of `torchrun`, or by the cores that this process may use."""
    from halfbyte.quantize.duration import estimate_duration

    launch = torchrun()
    workers = 1 if launch is None else launch.count
    if plan.settings.device == "cpu":
        # torchrun gives each process one thread, unless told otherwise.
        cores = len(os.sched_getaffinity(0)) if launch is None else 1
        workers *= plan.settings.threads or cores
    return estimate_duration(plan, workers=workers)
