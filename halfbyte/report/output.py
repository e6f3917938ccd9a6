"""What a finished output folder tells about itself: the run's report, its config, its verdict.

The folder may come from anybody, so every file is bounded and every value that is shown is checked
for its type here. Text stays what it is; who prints it escapes it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from halfbyte.core import Origin, RunReport, UnitTime
from halfbyte.errors import CheckpointError, EvaluationError
from halfbyte.evals.gate import GATE_SCHEMA
from halfbyte.evals.record import decode, encode
from halfbyte.formats.config import config_count, text_config
from halfbyte.formats.files import write_atomic
from halfbyte.formats.folder import CONFIG_FILE, GATE_FILE, REPORT_FILE, RUN_FILE
from halfbyte.formats.servers import parallel_gpus

MAX_FILE_BYTES = 512 << 20
"""Of one JSON file; the report on GLM-5.2's 57,600 linears takes 30 MB."""


REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""What becomes part of a link."""
LARGEST = 1e30
"""Numbers beyond it stand for nothing, and some arithmetic does not survive them."""


@dataclass(frozen=True)
class Change:
    """How much better a score became, in points, and its confidence limits."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class GateRow:
    """One metric of one task of a verdict."""

    task: str
    metric: str
    decides: bool
    verdict: str | None
    count: int
    baseline: float
    """Sum of the item values, as of `candidate`."""
    candidate: float
    lost: int
    won: int
    change: Change


@dataclass(frozen=True)
class Gate:
    """A verdict as `quantize gate -o` stores it, as far as it is shown."""

    verdict: str
    candidate: str
    """Fingerprint of the checkpoint that was judged."""
    reasons: tuple[str, ...]
    remarks: tuple[str, ...]
    """What to know beside it, whatever the verdict is."""
    policy: str
    description: str
    paired: bool
    margin: float
    """Points that the mean of all tasks may drop by; under a plain rule each task."""
    task_margin: float
    confidence: float
    """Of each limit by itself."""
    mean: Change | None
    rows: tuple[GateRow, ...]


@dataclass(frozen=True)
class Planned:
    """What the plan of a run foretold."""

    host: int
    """Peak bytes in each process, as of `gpu`."""
    gpu: int
    seconds: float
    ranks: int


RUN_SCHEMA = 1


@dataclass(frozen=True)
class RunTimes:
    """What a run took, which its report does not hold, since it differs from run to run."""

    seconds: float
    """Of the last start of the run until its end."""
    host: int
    """Peak resident bytes of the process that took most."""
    planned: Planned
    units: tuple[UnitTime, ...]
    schema_version: int = RUN_SCHEMA

    @classmethod
    def of(cls, report: RunReport, planned: Planned) -> RunTimes:
        """What a run returned, beside its plan."""
        return cls(report.seconds, report.peak_bytes, planned, report.times)

    @property
    def gpu(self) -> int:
        """Peak bytes on the GPU of the first process; 0 on a CPU."""
        return max((unit.gpu for unit in self.units), default=0)

    def phases(self) -> dict[str, float]:
        """Seconds by phase over all units, the longest first, with what is in none as "other"."""
        total: dict[str, float] = {}
        for unit in self.units:
            for name, seconds in unit.phases.items():
                total[name] = total.get(name, 0.0) + seconds
        if not total:
            return {}
        total["other"] = max(0.0, sum(unit.seconds for unit in self.units) - sum(total.values()))
        return dict(sorted(total.items(), key=lambda item: -item[1]))


def write_run(folder: Path, times: RunTimes) -> None:
    """Store what a run took beside its output. Raises OSError."""
    write_atomic(folder / RUN_FILE, json.dumps(encode(times)).encode() + b"\n")


@dataclass(frozen=True)
class Output:
    """A finished output folder."""

    name: str
    report: RunReport
    config: Mapping[str, Any]
    gate: Gate | None = None
    times: RunTimes | None = None

    @property
    def mtp_layers(self) -> int:
        """Layers that predict further tokens, which servers use on request."""
        return config_count(text_config(self.config), "num_nextn_predict_layers")

    def parallel(self) -> int:
        """GPUs that a tensor-parallel server can divide the model over, 8 at most."""
        group = max((_group(rule.scheme) for rule in self.report.rules), default=1)
        return parallel_gpus(self.config, group)

    def per_gpu(self, gpus: int) -> tuple[int, int]:
        """Bytes of weights on each GPU of a tensor-parallel server, of the source and of this."""
        report = self.report
        sizes = (report.bytes_in, report.whole_in), (report.bytes_out, report.whole_out)
        before, after = (whole + math.ceil((size - whole) / gpus) for size, whole in sizes)
        return before, after


def read_output(folder: Path, gate: Path | None = None) -> Output:
    """What `folder` holds, with the verdict in `gate`, or else in its gate.json if there is one.

    Raises CheckpointError when it is no finished output of a run, EvaluationError for a verdict
    that cannot be read.
    """
    record = _object(folder / REPORT_FILE)
    try:
        report = RunReport.from_json(record, output=str(folder))
        _check(report)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / REPORT_FILE} cannot be read: {error}",
            hint="quantize the checkpoint again with this version",
        ) from error
    config = _object(folder / CONFIG_FILE)
    verdict = gate or (folder / GATE_FILE)
    found = read_gate(verdict) if gate is not None or verdict.exists() else None
    return Output(folder.absolute().name, report, config, found, _times(folder / RUN_FILE))


def _times(path: Path) -> RunTimes | None:
    """None without the file, as in an output that was made by a function call."""
    if not path.exists():
        return None
    try:
        times = decode(RunTimes, _object(path))
        for unit in times.units:
            for number in (unit.seconds, unit.host, unit.gpu, *unit.phases.values()):
                _number(number)
        for number in (times.seconds, times.host, *asdict(times.planned).values()):
            _number(number)
    except (EvaluationError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", hint=f"remove it: rm {path}"
        ) from error
    return times


def read_gate(path: Path) -> Gate:
    """A verdict that `quantize gate -o` stored. Raises EvaluationError for anything else."""
    try:
        return _gate(_object(path))
    except (CheckpointError, ValueError, TypeError, KeyError) as error:
        raise EvaluationError(
            f"{path} is not a verdict: {error}",
            hint=f"quantize gate fp8.json int4.json -o {path}",
        ) from error


def _gate(record: Mapping[str, Any]) -> Gate:
    if record.get("schema_version") != GATE_SCHEMA:
        found = record.get("schema_version")
        raise ValueError(f"schema_version is {found!r:.40}, this version reads {GATE_SCHEMA}")
    policy = record["policy"]
    mean = record["mean_change_points"]
    return Gate(
        verdict=_text(record["verdict"]),
        candidate=_text(record["candidate"]),
        reasons=tuple(map(_text, record["reasons"])),
        remarks=tuple(map(_text, record["remarks"])),
        policy=_text(policy["name"]),
        description=_text(policy["description"]),
        paired=policy["rule"] == "paired",
        margin=_number(policy["margin"]),
        task_margin=_number(policy["task_margin"]),
        confidence=_number(policy["confidence"]),
        mean=None if mean is None else _change(mean),
        rows=tuple(_gate_row(row) for row in record["rows"]),
    )


def _gate_row(row: Mapping[str, Any]) -> GateRow:
    return GateRow(
        task=_text(row["task"]),
        metric=_text(row["metric"]),
        decides=row["decides"] is True,
        verdict=None if row["verdict"] is None else _text(row["verdict"]),
        count=max(1, int(_number(row["count"]))),
        baseline=_number(row["baseline"]),
        candidate=_number(row["candidate"]),
        lost=int(_number(row["lost"])),
        won=int(_number(row["won"])),
        change=_change(row["change_points"]),
    )


def _change(record: Mapping[str, Any]) -> Change:
    return Change(*(_number(record[name]) for name in ("estimate", "low", "high")))


def _check(report: RunReport) -> None:
    """Raises ValueError for a report whose values have other types than they should."""
    for number in (report.bytes_in, report.bytes_out, report.whole_in, report.whole_out):
        _number(number)
    for text in (*report.versions.values(), *report.warnings, report.fingerprint, report.source):
        _text(text)
    _text(report.recipe["name"])
    _fields(report.settings, {"threads", "calibration_sha256"})
    origin = [getattr(report.origin, f.name) for f in fields(Origin) if f.name != "language"]
    for value in (*origin, *report.origin.language):
        if value is not None:
            _text(value)
    if report.origin.repo is not None and not REPOSITORY.fullmatch(report.origin.repo):
        raise ValueError(f"{report.origin.repo!r:.80} is not a repository")
    for rule in report.rules:
        _fields(rule, {"scheme"})
    for linear in report.linears:
        _fields(linear, {"fallback"})
    for scaled in report.scaled:
        _fields(scaled, {"exponent"})


_TEXT = {
    "name", "scheme", "rung", "fallback",
    "pattern", "action", "reason",
    "method", "engine", "scale_search", "expert_hessian", "dtype", "device", "calibration_sha256",
    "powers",
}  # fmt: skip


def _fields(value: Any, optional: set[str]) -> None:
    for field in fields(value):
        found = getattr(value, field.name)
        if found is None and field.name in optional:
            continue
        (_text if field.name in _TEXT else _number)(found)


def _object(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path} has {size:,} bytes, {MAX_FILE_BYTES:,} are the limit")
        parsed = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}",
            hint="name the finished output of a run; `quantize SOURCE --to int4 -o DIR` makes one",
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return parsed


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is not text")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise ValueError(f"{value!r:.40} is not a finite number below {LARGEST:g}")
    return value


def _group(scheme: str | None) -> int:
    """Columns that share a scale: of "INT4 g32" 32; 1 where it does not matter."""
    size = (scheme or "").rpartition(" g")[2]
    return int(size) if size.isdecimal() else 1
