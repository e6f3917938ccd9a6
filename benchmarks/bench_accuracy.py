"""One table over quantizers: the same text, the same linears, the same evaluator.

    python -m benchmarks.bench_accuracy FP8 --calibration calibration.jsonl --text heldout.jsonl

Each row is quantized in a process of its own, checked (`benchmarks.checks`) and measured by
`quantize eval` in float32 against the FP8 source. A finished row is appended to --results at once
and never made again, so the same command goes on where it stopped. What it does not notice is a
change of the code: measure that with new --results and --work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checks import (
    BenchmarkError,
    check_calibration,
    check_codes,
    expected_linears,
)
from benchmarks.cost import Cost
from halfbyte.core import fingerprint
from halfbyte.errors import HalfbyteError

REPOSITORY = Path(__file__).resolve().parents[1]
OURS = "benchmarks.ours"
ONESHOT = "benchmarks.peers.oneshot"
WORK = Path("build/bench-accuracy")
QUANTIZING = threading.Lock()
"""Rows are quantized one by one, so that the minutes of each are its own."""
LOG_LINES = 15
"""Of a failed process that are shown; the whole log lies in the row's folder."""


@dataclass(frozen=True)
class Row:
    """A quantizer: the module that runs it and the flags that make it what it is."""

    module: str
    flags: str = ""
    calibrated: bool = True

    @property
    def is_peer(self) -> bool:
        return self.module != OURS


BASELINE = "fp8"
ROWS: Mapping[str, Row] = {
    "rtn": Row(OURS, "--method rtn", calibrated=False),
    # As in the textbook; with these choices llm-compressor's `llmc-gptq-routed` does the same.
    "gptq-plain": Row(
        OURS,
        "--scale-search minmax --refine 0 --positive-scales --expert-hessian routed"
        " --no-row-feedback",
    ),
    "gptq": Row(OURS),
    "awq": Row(OURS, "--method awq"),
    "awq+gptq": Row(OURS, "--method awq+gptq"),
    "llmc-gptq": Row(ONESHOT, "--method gptq --experts all"),
    "llmc-gptq-routed": Row(ONESHOT, "--method gptq --experts routed"),
    "llmc-gptq-mse": Row(ONESHOT, "--method gptq --experts all --observer memoryless_mse"),
    "llmc-gptq-mse-routed": Row(
        ONESHOT, "--method gptq --experts routed --observer memoryless_mse"
    ),
    # AWQ runs its 20 trials window by window: in batches it takes a fraction of the time.
    "llmc-awq": Row(ONESHOT, "--method awq --experts all --windows-per-batch 16"),
    "llmc-awq-routed": Row(ONESHOT, "--method awq --experts routed --windows-per-batch 16"),
    "llmc-awq-up-down": Row(
        ONESHOT, "--method awq --experts routed --mappings up-down --windows-per-batch 16"
    ),
    "autoround": Row(ONESHOT, "--method autoround --experts routed --iterations 200"),
}
"""Name -> how it is made. A new row is a line here. What flags do not say is the tool's default."""


@dataclass(frozen=True)
class Job:
    """A row for one group size; the baseline has none."""

    name: str
    group_size: int | None

    def __str__(self) -> str:
        return self.name if self.group_size is None else f"{self.name}-g{self.group_size}"


@dataclass(frozen=True)
class Bench:
    """Where everything is, and how it is measured."""

    source: Path
    calibration: Path
    text: Path
    tasks: Path | None
    task: tuple[str, ...]
    limit: int | None
    samples: int
    sequence_length: int
    max_windows: int | None
    device: str
    work: Path
    results: Path

    def setup(self) -> dict[str, Any]:
        """What results must share to stand in one table."""
        from halfbyte.calibration.data import text_sha256, token_windows
        from halfbyte.evals.report import checkpoint_fingerprint
        from halfbyte.formats.checkpoint import open_checkpoint

        tokens = token_windows(
            self.calibration, self.source, self.samples, self.sequence_length, seed=0
        )
        return {
            "source": checkpoint_fingerprint(open_checkpoint(self.source)),
            "tokens_sha256": text_sha256(tokens),
            "text": self.text.name,
            "sequence_length": self.sequence_length,
            "max_windows": self.max_windows,
            "tasks": None if self.tasks is None else [*self.task, self.limit],
            "device": self.device,
        }

    def folder(self, job: Job, setup: Mapping[str, Any]) -> Path:
        """Of a row's checkpoint: another one when anything that decides its bytes differs."""
        decides = {key: setup[key] for key in ("source", "tokens_sha256", "device")}
        made_of = fingerprint({"flags": flags_of(job.name), **decides})
        return self.work / f"{job}-{made_of[:8]}"


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    bench = Bench(
        source=options.source.resolve(),
        calibration=options.calibration.resolve(),
        text=options.text.resolve(),
        tasks=options.tasks and options.tasks.resolve(),
        task=tuple(options.task),
        limit=options.limit,
        samples=options.samples,
        sequence_length=options.sequence_length,
        max_windows=options.max_windows,
        device=options.device,
        work=options.work.resolve(),
        results=options.results.resolve(),
    )
    deadline = None if options.time_limit is None else time.monotonic() + options.time_limit
    sizes = [int(size) for size in options.group_sizes.split(",")]
    names = options.rows.split(",") if options.rows else [BASELINE, *ROWS]
    setup = bench.setup()
    bench.results.parent.mkdir(parents=True, exist_ok=True)
    results = threading.Lock()

    def work(job: Job) -> bool:
        """Whether a row is in the results, or there is no time for it."""
        with results:
            done = read_results(bench.results, setup)
        if str(job) in done:
            return True
        left = None if deadline is None else deadline - time.monotonic()
        expected = expected_seconds(job, done)
        if left is not None and expected > left:
            _say(f"no time for {job}: it takes about {expected:.0f} s, {left:.0f} s are left")
            return True
        _say(f"{job} ...")
        try:
            record = run_job(bench, job, setup, left)
        except subprocess.TimeoutExpired:
            _say(f"stopped in {job}: the time limit is over; what it had finished is kept")
            return True
        except (BenchmarkError, HalfbyteError, subprocess.CalledProcessError) as error:
            _say(f"{job} FAILED: {error}")
            return False
        with results, bench.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if not options.keep:
            shutil.rmtree(bench.folder(job, setup))
        return True

    with ThreadPoolExecutor(options.rows_at_once) as pool:
        failed = list(pool.map(work, _jobs(names, sizes))).count(False)
    print("\n".join(table(read_results(bench.results, setup))))
    return 1 if failed else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("source", type=Path, help="FP8 checkpoint")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--tasks", type=Path, help="folder of lm-eval tasks")
    parser.add_argument("--task", action="append", default=[], help="of that folder [all]")
    parser.add_argument("--limit", type=int, help="questions per task [all]")
    parser.add_argument("--rows", help=f"comma-separated: {BASELINE}, {', '.join(ROWS)} [all]")
    parser.add_argument("--group-sizes", default="32,128")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--max-windows", type=int, help="of the held-out text [all]")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--work", type=Path, default=WORK, help="for checkpoints")
    parser.add_argument("--results", type=Path, default=WORK.with_suffix(".jsonl"))
    parser.add_argument("--time-limit", type=float, help="seconds")
    parser.add_argument(
        "--rows-at-once",
        type=int,
        default=1,
        help="evaluate so many beside each other; they are quantized one by one all the same",
    )
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    options = parser.parse_args(argv)
    if unknown := set((options.rows or BASELINE).split(",")) - {BASELINE, *ROWS}:
        parser.error(f"no row {', '.join(sorted(unknown))}")
    return options


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the docstring."""


def _jobs(names: Sequence[str], group_sizes: Sequence[int]) -> Iterator[Job]:
    for name in names:
        if name == BASELINE:
            yield Job(name, None)
        else:
            yield from (Job(name, size) for size in group_sizes)


def run_job(
    bench: Bench, job: Job, setup: Mapping[str, Any], limit: float | None = None
) -> dict[str, Any]:
    """Quantize, check and measure one row; its line of the results.

    A checkpoint that an earlier run left finished in the work folder is not made again. Raises
    BenchmarkError when it may not be compared, HalfbyteError when it cannot be read,
    CalledProcessError when a process fails, TimeoutExpired when it all takes longer than `limit`
    seconds.
    """
    started = time.monotonic()
    end = None if limit is None else started + limit

    def left() -> float | None:
        return None if end is None else end - time.monotonic()

    folder = bench.folder(job, setup)
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"row": str(job), "setup": dict(setup), "flags": flags_of(job.name)}
    checkpoint = bench.source
    if job.group_size is not None:
        row = ROWS[job.name]
        checkpoint = folder / "checkpoint"
        if not (folder / "cost.json").exists():
            shutil.rmtree(checkpoint, ignore_errors=True)
            waiting = time.monotonic()
            with QUANTIZING:
                started += time.monotonic() - waiting
                _quantize(bench, row, job.group_size, folder, left)
        cost = Cost.read(folder / "cost.json")
        codes = check_codes(
            checkpoint, bench.source, expected_linears(bench.source), job.group_size
        )
        if row.calibrated:
            check_calibration(cost, codes, setup["tokens_sha256"])
        record |= {"cost": asdict(cost), "codes": asdict(codes)}
    record |= _evaluate(bench, checkpoint, folder, left)
    record["row_seconds"] = time.monotonic() - started
    return record


def _quantize(
    bench: Bench, row: Row, group_size: int, folder: Path, left: Callable[[], float | None]
) -> None:
    source = bench.source
    if row.is_peer:
        source = bench.work / "bf16"
        if not (source / "config.json").exists():
            from benchmarks.bf16 import write_bf16

            write_bf16(bench.source, source)
    command = [sys.executable, "-m", row.module, str(folder / "cost.json"), str(source)]
    command += ["-o", str(folder / "checkpoint"), "--group-size", str(group_size)]
    command += ["--device", bench.device, *row.flags.split()]
    if row.calibrated:
        command += ["--calibration", str(bench.calibration), "--samples", str(bench.samples)]
        command += ["--sequence-length", str(bench.sequence_length)]
    _run(command, bench.device, folder / "quantize.log", left())


def _evaluate(
    bench: Bench, checkpoint: Path, folder: Path, left: Callable[[], float | None]
) -> dict[str, Any]:
    """Text metrics, and the score of each metric of each task."""
    output = folder / "evaluation.json"
    command = [sys.executable, "-m", "halfbyte", "eval", str(checkpoint), "-o", str(output)]
    command += ["--text", str(bench.text), "--sequence-length", str(bench.sequence_length)]
    # BF16 rounds activations by more than GPTQ's gain over rounding.
    command += ["--device", bench.device, "--dtype", "float32", "--quiet"]
    if checkpoint != bench.source:
        command += ["--baseline", str(bench.source)]
    if bench.max_windows is not None:
        command += ["--max-windows", str(bench.max_windows)]
    if bench.tasks is not None:
        command += ["--tasks", str(bench.tasks), "--batch-size", "32"]
        command += [word for task in bench.task for word in ("--task", task)]
        command += [] if bench.limit is None else ["--limit", str(bench.limit)]
    _run(command, bench.device, folder / "evaluate.log", left())
    record = json.loads(output.read_text())
    scores: dict[str, float] = {}
    for task in (record["tasks"] or {"tasks": []})["tasks"]:
        for metric in task["metrics"]:  # of several answer filters the first one counts
            scores.setdefault(f"{task['name']} {metric['metric']}", metric["mean"])
    return {"text": record["text"], "tasks": scores}


def _run(command: Sequence[str], device: str, log: Path, limit: float | None) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    path = [str(REPOSITORY), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    if code:
        for line in log.read_text().splitlines()[-LOG_LINES:]:
            _say(f"    {line[-300:]}")
        raise subprocess.CalledProcessError(code, command)


def expected_seconds(job: Job, done: Mapping[str, Mapping[str, Any]]) -> float:
    """How long a row will take, by those that are done: itself with other groups, or its kind."""

    def is_peer(name: str) -> bool:
        return name in ROWS and ROWS[name].is_peer

    seconds = [(row_name(key), float(record["row_seconds"])) for key, record in done.items()]
    same = [s for name, s in seconds if name == job.name]
    kind = [s for name, s in seconds if is_peer(name) == is_peer(job.name)]
    return max(same or kind, default=0.0)


def read_results(path: Path, setup: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Finished rows of this setup and with today's flags, by name; the last line of each counts."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        record["row"]: record
        for record in records
        if record["setup"] == dict(setup) and record["flags"] == flags_of(row_name(record["row"]))
    }


def row_name(key: str) -> str:
    """`gptq-g32` -> `gptq`."""
    return key.rpartition("-g")[0] or key


def flags_of(name: str) -> str | None:
    """The flags of a row; None for the baseline, and for a row that is gone."""
    return ROWS[name].flags if name in ROWS else None


def table(done: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The results as a Markdown table, in the order of `ROWS`, group sizes apart."""
    tasks = list(dict.fromkeys(task for record in done.values() for task in record["tasks"]))
    columns = ["row", "mean KL", "99 % KL", "top-1 %", "perplexity", *tasks]
    columns += ["minutes", "host GiB", "GPU GiB", "moved %", "rounded", "fell back"]
    lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    order = list(dict.fromkeys(str(job) for job in _jobs([BASELINE], [])))
    sizes = sorted({r["row"].rpartition("-g")[2] for r in done.values()} - {BASELINE}, key=int)
    order += [f"{name}-g{size}" for size in sizes for name in ROWS]
    for key in (key for key in order if key in done):
        lines.append(f"| {' | '.join(_cells(done[key], tasks))} |")
    return lines


def _cells(record: Mapping[str, Any], tasks: Sequence[str]) -> Iterator[str]:
    text = record["text"]
    divergence = text["divergence"]
    yield record["row"]
    if divergence is None:
        yield from ("", "", "")
    else:
        yield f"{divergence['mean_kl']:.5f}"
        yield f"{divergence['p99_kl']:.4f}"
        yield f"{100 * divergence['top1_agreement']:.2f}"
    yield f"{text['perplexity']:.4f}"
    for task in tasks:
        yield f"{100 * record['tasks'][task]:.2f}" if task in record["tasks"] else ""
    if "cost" not in record:
        yield from ("",) * 6
        return
    cost, codes = record["cost"], record["codes"]
    yield f"{cost['seconds'] / 60:.2f}"
    yield f"{cost['peak_host_bytes'] / 2**30:.2f}"
    yield "" if cost["peak_gpu_bytes"] is None else f"{cost['peak_gpu_bytes'] / 2**30:.2f}"
    yield f"{100 * codes['moved']:.1f}"
    yield f"{codes['rounded']} of {codes['linears']}"
    yield ", ".join(f"{what} {count}" for what, count in cost["fallbacks"].items()) or "0"


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
