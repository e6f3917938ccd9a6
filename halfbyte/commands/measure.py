"""Commands that measure: `eval`, `gate`, `demo`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from halfbyte.commands.options import (
    Device,
    Dtype,
    Json,
    Quiet,
    SequenceLength,
    Verbose,
    open_console,
)
from halfbyte.console import resumable
from halfbyte.errors import UsageError

if TYPE_CHECKING:
    from halfbyte.evals.endpoint import Endpoint
    from halfbyte.evals.engines import Backend
    from halfbyte.kvcache.layout import Kv

BackendName = Literal["hf", "vllm", "sglang"]
Api = Literal["openai", "sglang"]


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="The checkpoint to measure.")],
    text: Annotated[
        Path | None, typer.Option("--text", help="Measure the prediction of this .jsonl or .txt.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", help="Checkpoint to measure divergence from.")
    ] = None,
    sequence_length: SequenceLength = 2048,
    max_windows: Annotated[
        int | None, typer.Option("--max-windows", min=1, help="Windows of text. [default: all]")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            metavar="DIR|NAME",
            help="Folder of lm-eval tasks, whose code is run; or article, a set of lm-eval's own.",
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="Score this task; may be repeated. [default: all]"),
    ] = None,
    tool_calls: Annotated[
        Path | None,
        typer.Option(
            "--tool-calls",
            metavar="FILE|DIR",
            help="Score the calls that are made for these questions: .jsonl, or files of BFCL.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Questions per task. [default: all]")
    ] = None,
    backend: Annotated[
        BackendName | None,
        typer.Option(
            "--backend", help="What answers the tasks: transformers, vLLM or SGLang. [default: hf]"
        ),
    ] = None,
    backend_argument: Annotated[
        list[str] | None,
        typer.Option(
            "--backend-arg",
            metavar="NAME=VALUE",
            help="Argument of vllm or sglang, as tensor_parallel_size=8; may be repeated.",
        ),
    ] = None,
    kv_cache: Annotated[
        Literal["bf16", "fp8", "fp8-raw"] | None,
        typer.Option(
            "--kv-cache",
            help="Format of the KV cache. In this process rows are rounded as servers store them."
            " [default: as computed]",
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint", metavar="URL", help="Ask a running server that serves this checkpoint."
        ),
    ] = None,
    api: Annotated[
        Api | None, typer.Option("--api", help="What it speaks. [default: asks it]")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Name of the model there, if it has several.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            min=1,
            help="Questions at once. [default: 16; 512 for vllm and sglang]",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            "--max-length",
            min=2,
            help="Tokens of prompt and answer together. [default: the model's limit]",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            min=1,
            help="Tokens of an answer, where the task does not say."
            " [default: 256, article 2048, tool calls 512]",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Save the evaluation, for `gate`; answers as they come beside it.",
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store",
            metavar="DIR",
            help="Keep the evaluation in this folder, and take it from there when just the same was"
            " evaluated before.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Use no answers of a run that was interrupted.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure perplexity, divergence from a baseline, task scores and tool calls.

    What was answered before an interruption is not asked again when the same command is repeated.
    """
    from halfbyte.commands import scores
    from halfbyte.devices import resolve_device, resolve_dtype

    console = open_console(json, quiet, verbose)
    if text is None and tasks is None and tool_calls is None:
        raise UsageError(
            "nothing to measure",
            hint="add --text heldout.jsonl, --tasks FOLDER, --tool-calls FILE, or several of them",
        )
    if baseline is not None and text is None:
        raise UsageError("--baseline measures divergence on a text", hint="add --text")
    if task and tasks is None:
        raise UsageError("--task names a task of a folder", hint="add --tasks FOLDER")
    if fresh and output is None:
        raise UsageError("--fresh: answers are only kept beside a report", hint="add -o FILE")
    if output is not None and output.is_dir():
        raise UsageError(f"-o {output} is a folder", hint="name a file: -o evaluation.json")
    elsewhere = _engine(backend, backend_argument, endpoint, api, model, kv_cache)
    if tasks is None and tool_calls is None and max_new_tokens is not None:
        raise UsageError("there are no tasks to answer", hint="add --tasks FOLDER")
    if elsewhere is not None and tasks is None and tool_calls is None:
        raise UsageError("there are no tasks to answer", hint="add --tasks FOLDER")
    if elsewhere is not None and tool_calls is not None and (endpoint is None or tasks is not None):
        raise UsageError(
            "--tool-calls are asked in this process or, by themselves, of a server",
            hint="measure them by a command of their own: with --endpoint, or without --backend",
        )
    if elsewhere is not None and text is None and device != "auto":
        raise UsageError(
            "--device is where transformers computes",
            hint="leave it out; vLLM and SGLang use the GPUs of CUDA_VISIBLE_DEVICES",
        )
    if endpoint is not None and kv_cache is not None:
        raise UsageError(
            "--kv-cache: a server has the cache it was started with", hint="leave it out"
        )
    if endpoint is not None and text is None and dtype != "auto":
        raise UsageError("--dtype: a server computes as it was started", hint="leave it out")
    from halfbyte.evals import engines, kept, suites
    from halfbyte.evals.evaluation import Evaluation
    from halfbyte.evals.store import BaselineStore

    compute: str = dtype
    # An engine with an "auto" of its own may need the GPU as it is, without a context of ours.
    if elsewhere is None or text is not None:
        device = resolve_device(device)
        compute = resolve_dtype(dtype, device)
    source: Path | suites.Suite | None = None
    if tasks is not None:
        source = suites.load_suite(tasks) if tasks in suites.NAMES else Path(tasks)
    asked = Evaluation(
        checkpoint=checkpoint,
        text=text,
        baseline=baseline,
        sequence_length=sequence_length,
        max_windows=max_windows,
        tasks=source,
        names=tuple(task or ()),
        tool_calls=tool_calls,
        engine=elsewhere or engines.Backend(kv_cache=kv_cache),
        limit=limit,
        batch_size=batch_size,
        max_length=max_length,
        max_new_tokens=max_new_tokens,
        device=device,
        dtype=compute,
        engine_dtype=dtype if elsewhere else compute,
    )
    keeps = tasks is not None or endpoint is not None
    answers = kept.kept_path(output) if output is not None and keeps else None
    if fresh and answers is not None:
        answers.unlink(missing_ok=True)
    report = None
    if store is not None:
        baselines, identity = BaselineStore(store), asked.identity()
        report = baselines.find(identity)
        if report is not None:
            console.note(f"{store}: just this was evaluated before")
        elif nearest := baselines.near(identity):
            console.note(f"{store}: not used, since another evaluation, {nearest}")
    if report is None:
        keeping = nullcontext() if answers is None else resumable(answers, ["--fresh"], [])
        with keeping, console.working() as progress:
            report = asked.run(answers, progress)
        if store is not None:
            baselines.add(identity, report)
    if output is not None:
        report.write(output)
    if answers is not None:
        answers.unlink(missing_ok=True)
    for table in scores.evaluation_tables(report):
        console.table(table)
    console.result(report.to_json(), quiet=str(output or ""))


def _engine(
    backend: BackendName | None,
    arguments: list[str] | None,
    endpoint: str | None,
    api: Api | None,
    model: str | None,
    kv_cache: Kv | None,
) -> Backend | Endpoint | None:
    """What answers instead of transformers in this process; None if nothing does."""
    from halfbyte.evals.client import server_root
    from halfbyte.evals.endpoint import Endpoint
    from halfbyte.evals.engines import Backend, parse_arguments

    if endpoint is not None and (backend is not None or arguments):
        raise UsageError(
            "--endpoint asks a server, --backend computes in this process", hint="use one of them"
        )
    if endpoint is None and (api is not None or model is not None):
        raise UsageError(
            "--api and --model are about a server", hint="add --endpoint http://HOST:PORT"
        )
    if endpoint is not None:
        server_root(endpoint)
        return Endpoint(endpoint, api, model)
    if backend in (None, "hf"):
        if arguments:
            raise UsageError(
                "--backend-arg is for vLLM and SGLang", hint="add --backend vllm or sglang"
            )
        return None
    return Backend(backend, parse_arguments(arguments or []), kv_cache)


def gate(
    baseline: Annotated[
        Path,
        typer.Argument(
            metavar="BASELINE", help="Evaluation of the source, or a --store that has it."
        ),
    ],
    candidate: Annotated[
        Path, typer.Argument(metavar="CANDIDATE", help="Evaluation of the quantized checkpoint.")
    ],
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME|FILE",
            help="default (paired statistics), article (plain differences), or a YAML file.",
        ),
    ] = "default",
    margin: Annotated[
        float | None,
        typer.Option("--margin", help="Points to allow instead of the policy's own."),
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(
            "--again", help="A second evaluation of the source: shows what chance alone does."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Save the verdict here, as JSON.")
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option("--junit", help="Save it as JUnit XML, a test case for each task."),
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            "--summary", help="Append it as Markdown, for example to $GITHUB_STEP_SUMMARY."
        ),
    ] = None,
    flips: Annotated[
        Path | None,
        typer.Option("--flips", help="Save the items answered differently, one a line, as JSON."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Judge whether accuracy held, from two saved evaluations."""
    from json import dumps

    from halfbyte.commands import scores
    from halfbyte.evals import outputs
    from halfbyte.evals.gate import gate as judge
    from halfbyte.evals.policy import load_policy
    from halfbyte.evals.report import EvalReport
    from halfbyte.evals.store import read_baseline
    from halfbyte.formats.files import write_atomic

    console = open_console(json, quiet)
    rule = load_policy(policy, margin)
    judged = EvalReport.read(candidate)
    reports = read_baseline(baseline, judged), judged
    verdict = judge(*reports, rule, None if again is None else EvalReport.read(again))
    if output is not None:
        write_atomic(output, dumps(verdict.to_json(), indent=2).encode() + b"\n")
    if junit is not None:
        write_atomic(junit, outputs.junit(verdict))
    if flips is not None:
        found = outputs.flips(*reports) if verdict.rows else ()
        write_atomic(flips, "".join(dumps(flip) + "\n" for flip in found).encode())
    if summary is not None:
        with summary.open("a", encoding="utf-8") as file:
            file.write(outputs.markdown(verdict))
    if verdict.rows:
        console.table(scores.gate_table(verdict))
        console.line()
    for line in scores.gate_lines(verdict):
        console.line(line)
    console.result(verdict.to_json())
    raise typer.Exit(verdict.exit_code)


def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for all that the demo makes.")
    ] = Path("halfbyte-demo"),
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Do the whole job on the embedded model and judge the result."""
    from halfbyte.commands import scores
    from halfbyte.evals.demo import run_demo
    from halfbyte.report.demo import show_demo

    console = open_console(json, quiet, verbose)
    with console.working() as progress:
        report = run_demo(output, progress)
    page = show_demo(report)
    console.table(scores.demo_table(report))
    console.line()
    for line in scores.gate_lines(report.verdict):
        console.line(line)
    console.line(f"all of it on a page: {page}")
    console.result(scores.demo_record(report), quiet=str(output))
    raise typer.Exit(report.verdict.exit_code)
