"""The one loop: unit by unit, read, quantize, write, commit.

The loop itself only computes. What it asks for was read before, what it hands over is written
later, and both happen beside it: see `formats.readahead` and `formats.writebehind`.

A unit is the embedding, a decoder layer, or the head. Calibrated methods carry the calibration
state from layer to layer and store it beside the journal as often as it pays, so that a run that
was killed goes on behind the last stored one. Data-free methods have no state; there ranks share
the units.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from halfbyte.core import (
    Checkpoint,
    LinearReport,
    Plan,
    RunReport,
    ScaledInput,
    Settings,
    Unit,
    UnitTime,
)
from halfbyte.errors import CheckpointError, ResumeError
from halfbyte.formats.config import without_quantization
from halfbyte.formats.folder import (
    CONFIG_FILE,
    REPORT_FILE,
    SOURCE_FOLDER,
    WORK_FOLDER,
    prepare_folder,
)
from halfbyte.formats.journal import Commit, identity_difference
from halfbyte.formats.origin import read_origin
from halfbyte.formats.servers import is_divided
from halfbyte.formats.shards import Request, ShardReader
from halfbyte.formats.writer import CheckpointWriter, SavedState
from halfbyte.progress import Progress, SilentProgress
from halfbyte.quantize.duration import STATE_INTERVAL
from halfbyte.quantize.memory import calibrates
from halfbyte.quantize.phases import Phases
from halfbyte.quantize.plan import package_versions, rule_outcomes, with_calibration
from halfbyte.quantize.recipe import recipe_to_dict
from halfbyte.quantize.shares import shares
from halfbyte.ranks import Ranks
from halfbyte.units import format_bytes

if TYPE_CHECKING:
    import torch

    from halfbyte.quantize.calibrated import LayerQuantizer

WORTH_A_NOTE = 1.2
"""Downloads in relation to what is read, above which keeping the source is worth a thought."""
CHEAP_STATE = 0.5
"""Seconds below which a state is stored after every layer: less than starting a run again takes."""


def run(
    plan: Plan,
    output: Path,
    *,
    tokens: torch.Tensor | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    phases: Phases | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008
    keep_source: bool = False,
) -> RunReport:
    """Carry out a plan into the folder `output`, as the first of `ranks`; the others `follow`.

    `tokens` int64 [samples, sequence_length] are the calibration tokens, None for a data-free
    method; their hash becomes part of the plan.
    With `resume`, an interrupted run of the same plan goes on where it was, bit for bit, whatever
    the number of ranks; a finished one is reported as such. With `overwrite`, what an earlier run
    left in the folder is removed first. `phases` collects where the time goes. Shards of a
    repository lie in the folder while they are read, unless `keep_source` or several ranks want
    them in huggingface_hub's cache. Raises OutputError, ResumeError, CheckpointError, HubError,
    CalibrationError, RankError; after any of them the folder can be resumed, or nothing was
    written.
    """
    from halfbyte.quantize.conversion import read_order

    started = time.monotonic()
    progress = progress or SilentProgress()
    plan = _with_tokens(plan, tokens)
    identity = run_identity(plan)
    finished = _finished(output, plan, identity) if resume else None
    ranks.of_first(finished is not None)
    if finished is not None:
        return finished
    ahead = plan.memory.placement.streams.read_ahead
    scratch = None if keep_source or ranks.count > 1 else output / WORK_FOLDER / SOURCE_FOLDER
    with ShardReader(plan.checkpoint, scratch) as reader, _cpu_threads(plan.settings.threads):
        layers = _layer_quantizer(plan, reader, tokens, output, phases, ranks)
        prepare_folder(output, plan, resume=resume, overwrite=overwrite)
        share = shares(plan, ranks.count)[0]
        with CheckpointWriter(output, plan, identity, share) as writer:
            earlier = _earlier(plan, writer.commits)
            ranks.of_first(earlier)
            if done := len(earlier.done):
                progress.note(f"resuming: {done} of {len(plan.units)} units are finished")
            if len(share) < len(plan.units):
                progress.note(f"{ranks.count} processes write; the first of them is shown")
            if layers is not None and earlier.state is not None:
                layers.load(writer.work / earlier.state["file"], earlier.state["sha256"])
            units = earlier.left(share)
            if layers is not None and earlier.left(_calibrated(plan)):
                layers.prepare()
            at_once = None if layers is None else plan.memory.placement.experts_at_once
            order = list(read_order(units, experts_at_once=at_once, ranks=ranks))
            if plan.checkpoint.repository is not None and scratch is not None:
                _note_downloads(plan.checkpoint, order, progress)
            with reader.read_ahead(order, plan.settings.device, ahead):
                _work(plan, units, reader, writer, layers, progress)
            peaks = ranks.everyone(peak_host_bytes())  # when all have written their shares
            report = _finish(plan, identity, writer, output)
    progress.finish()
    return replace(report, seconds=time.monotonic() - started, peak_bytes=max(peaks))


def follow(
    plan: Plan,
    output: Path,
    *,
    tokens: torch.Tensor | None = None,
    phases: Phases | None = None,
    ranks: Ranks,
) -> None:
    """The part of a run that falls to another rank than the first.

    Arguments, and what is raised, as for `run`, which the first rank is in meanwhile.
    """
    from halfbyte.quantize.conversion import read_order

    plan = _with_tokens(plan, tokens)
    if ranks.of_first(None):
        return  # finished already
    ahead = plan.memory.placement.streams.read_ahead
    with ShardReader(plan.checkpoint) as reader, _cpu_threads(plan.settings.threads):
        layers = _layer_quantizer(plan, reader, tokens, output, phases, ranks)
        earlier: _Earlier = ranks.of_first(None)
        if layers is not None:
            if earlier.state is not None:
                layers.load(output / WORK_FOLDER / earlier.state["file"], earlier.state["sha256"])
            units = earlier.left(_calibrated(plan))
            if units:
                layers.prepare()
            at_once = plan.memory.placement.experts_at_once
            order = read_order(units, experts_at_once=at_once, ranks=ranks)
            with reader.read_ahead(order, plan.settings.device, ahead):
                for unit in units:
                    layers.run(unit, lambda _: None)
                    if unit is not units[-1] and ranks.of_first(None):
                        layers.tensors()  # which the first rank stores
        else:
            share, identity = shares(plan, ranks.count)[ranks.rank], run_identity(plan)
            with CheckpointWriter(output, plan, identity, share, joins=True) as writer:
                units = earlier.left(share)
                order = read_order(units)
                with reader.read_ahead(order, plan.settings.device, ahead):
                    _work(plan, units, reader, writer, None, SilentProgress())
        ranks.everyone(peak_host_bytes())


def _note_downloads(checkpoint: Checkpoint, order: Iterable[Request], progress: Progress) -> None:
    """Say so when a layer lies in more shards than there is room for, which then come again."""
    from halfbyte.formats.fetching import downloaded_bytes

    shards = [request.info.shard for request in order]
    once = sum(checkpoint.shards[shard] for shard in set(shards))
    total = downloaded_bytes(shards, checkpoint.shards)
    if total > WORTH_A_NOTE * once:
        progress.note(
            f"at least {format_bytes(total)} will be downloaded, since the tensors of a layer lie"
            f" in many shards; with --keep-source, which takes their room, {format_bytes(once)}"
        )


def _finish(
    plan: Plan, identity: Mapping[str, Any], writer: CheckpointWriter, output: Path
) -> RunReport:
    """Make the written units a model. Raises CheckpointError when the source changed meanwhile."""
    if difference := identity_difference(identity["source"], run_identity(plan)["source"]):
        raise CheckpointError(
            f"{plan.checkpoint.origin} changed while it was read: {difference}",
            hint="quantize the checkpoint as it is now: start again with --overwrite",
        )
    record_of = {commit.unit: commit.record for commit in writer.commits}
    records = [record_of[unit.name] for unit in plan.units]  # committed in any order of ranks
    linears = tuple(LinearReport(**line) for r in records for line in r["linears"])
    scaled = tuple(ScaledInput(**line) for r in records for line in r["scaled"])
    times = tuple(UnitTime(**record["time"]) for record in records)
    undivided = [tensor for tensor in plan.tensors if not is_divided(tensor.name)]
    report = RunReport(
        output=str(output),
        fingerprint=plan.fingerprint,
        settings=Settings(**identity["settings"]),
        recipe=identity["recipe"],
        source=identity["source"]["headers"],
        versions=identity["versions"],
        origin=read_origin(plan.checkpoint),
        rules=rule_outcomes(plan),
        bytes_in=plan.checkpoint.nbytes,
        bytes_out=plan.bytes_out,
        whole_in=sum(t.source.nbytes for t in undivided),
        whole_out=sum(o.nbytes for t in undivided for o in t.outputs),
        shards=writer.shard_hashes(),
        linears=linears,
        scaled=scaled,
        warnings=plan.warnings,
        times=times,
    )
    writer.finish(output_config(plan), report.to_json())
    return report


def _with_tokens(plan: Plan, tokens: torch.Tensor | None) -> Plan:
    """The plan for these tokens. Raises ValueError when they are not what it asks for."""
    from halfbyte.calibration.data import text_sha256

    settings = plan.settings
    wanted = (settings.samples, settings.sequence_length) if calibrates(settings) else None
    given = None if tokens is None else tuple(tokens.shape)
    if wanted != given:
        raise ValueError(f"the plan asks for tokens of shape {wanted}, given are {given}")
    return plan if tokens is None else with_calibration(plan, text_sha256(tokens))


@contextmanager
def _cpu_threads(count: int | None) -> Iterator[None]:
    """Let torch compute with `count` threads for a while; None changes nothing."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_identity(plan: Plan) -> dict[str, Any]:
    """All that a resumed run must share with the run it goes on from, by name.

    Shards are known by size and modification time: hashing a terabyte to find out that nothing
    changed would cost more than it saves. Those of a repository are known by its commit.
    """
    path, checkpoint = plan.checkpoint.path, plan.checkpoint
    if checkpoint.repository is not None:
        shards: dict[str, str] = {"repository": str(checkpoint.repository)}
    else:
        shards = {
            shard: f"{size} bytes modified at {(path / shard).stat().st_mtime_ns} ns"
            for shard, size in checkpoint.shards.items()
        }
    return {
        "recipe": recipe_to_dict(plan.recipe),
        "settings": plan.settings.identity(),
        "versions": package_versions(plan.settings),
        "source": {
            "headers": plan.checkpoint.fingerprint,
            "shards": shards,
            "files": {
                name: hashlib.sha256((path / name).read_bytes()).hexdigest()
                for name in checkpoint.side_files
            },
        },
        "shards": {shard.file: shard.nbytes for shard in plan.shards},
    }


def _finished(output: Path, plan: Plan, identity: Mapping[str, Any]) -> RunReport | None:
    """The report of a finished run of the same plan; None when there is no finished run.

    Raises ResumeError when the folder holds a finished run of something else.
    """
    path = output / REPORT_FILE
    if not path.exists() or not (output / CONFIG_FILE).exists():
        return None
    try:
        stored = json.loads(path.read_text())
        report = RunReport.from_json(stored, output=str(output), already_finished=True)
    except (ValueError, TypeError, KeyError) as error:
        raise ResumeError(
            f"{path} is damaged: {error}", hint="start again with --overwrite"
        ) from error
    now = {key: identity[key] for key in ("recipe", "settings", "versions")}
    now["source"] = identity["source"]["headers"]
    before = {key: stored.get(key) for key in now}
    if difference := identity_difference(before, now):
        raise ResumeError(
            f"{output} holds the finished output of another run: {difference}",
            hint="choose another folder with -o DIR, or replace it with --overwrite",
        )
    for shard in plan.shards:
        file = output / shard.file
        found = file.stat().st_size if file.exists() else 0
        if found != shard.nbytes:
            raise ResumeError(
                f"{file} has {found} bytes, {shard.nbytes} when the run was finished",
                hint="start again with --overwrite",
            )
    # A crash may have come between config.json and the removal of the work folder.
    shutil.rmtree(output / WORK_FOLDER, ignore_errors=True)
    return report


class _Earlier(NamedTuple):
    """What an interrupted run left behind."""

    done: frozenset[str]
    """Names of the finished units."""
    state: Mapping[str, str] | None
    """File and hash of the calibration state, while something is left to calibrate."""

    def left(self, units: Iterable[Unit]) -> list[Unit]:
        """Those that are not finished."""
        return [unit for unit in units if unit.name not in self.done]


def _earlier(plan: Plan, commits: Sequence[Commit]) -> _Earlier:
    stored = [c.record["state"] for c in commits if c.record["state"] is not None]
    earlier = _Earlier(frozenset(commit.unit for commit in commits), stored[-1] if stored else None)
    return earlier if earlier.left(_calibrated(plan)) else earlier._replace(state=None)


def _work(
    plan: Plan,
    units: Sequence[Unit],
    reader: ShardReader,
    writer: CheckpointWriter,
    layers: LayerQuantizer | None,
    progress: Progress,
) -> None:
    """Do units of the plan, one after the other."""
    from halfbyte.quantize.conversion import convert, write_int4
    from halfbyte.quantize.smoothing import Smoothing

    sizes = [sum(t.source.nbytes for t in unit.tensors) for unit in units]
    progress.start("quantize", sum(sizes), "bytes")
    calibrated = _calibrated(plan)
    phases = Phases() if layers is None else layers.phases
    hold = False
    clock = _Clock(phases, plan.settings.device)
    for unit, size in zip(units, sizes, strict=True):
        reports: list[LinearReport] = []
        rest, smoothing = unit.tensors, Smoothing()
        if layers is not None and unit in calibrated:
            result = layers.run(unit, partial(write_int4, writer))
            reports, smoothing = list(result.reports), result.smoothing
            more = unit is not calibrated[-1]
            saves = more and layers.ranks.of_first(state_pays(writer.saved, time.monotonic()))
            if saves:
                place = plan.units.index(unit)
                writer.save(f"state-{place}.safetensors", layers.tensors())
            hold = more and not saves
            rest = tuple(t for t in rest if t.action != "quantize")
        with phases("rest of the layer") if unit in calibrated else nullcontext():
            reports += convert(rest, plan.settings, reader, writer, smoothing)
        record = {
            "linears": [asdict(report) for report in reports],
            "scaled": [asdict(scaled) for scaled in smoothing.report()],
            "time": asdict(clock.lap(unit)),
        }
        writer.commit(unit, record, hold=hold)
        progress.advance(size)
        progress.note(_summary(unit, reports))


class _Clock:
    """Tells what each unit took."""

    def __init__(self, phases: Phases, device: str) -> None:
        self._phases, self._device = phases, device
        self._begun, self._before = time.monotonic(), dict(phases.seconds)

    def lap(self, unit: Unit) -> UnitTime:
        """Of the unit that has just been computed."""
        import torch

        begun, before = self._begun, self._before
        self._begun, self._before = time.monotonic(), dict(self._phases.seconds)
        on_gpu = self._device.startswith("cuda")
        return UnitTime(
            unit=unit.name,
            seconds=round(self._begun - begun, 6),
            host=peak_host_bytes(),
            gpu=torch.cuda.max_memory_allocated(self._device) if on_gpu else 0,
            phases={
                name: round(seconds - before.get(name, 0.0), 6)
                for name, seconds in self._before.items()
                if seconds > before.get(name, 0.0)
            },
        )


def state_pays(last: SavedState | None, now: float) -> bool:
    """Whether to store the calibration state at `now`; `last` is the one that this process stored
    before, if any."""
    if last is None:
        return True
    elapsed = now - last.begun
    cost = elapsed if last.seconds is None else last.seconds
    return cost < CHEAP_STATE or elapsed >= STATE_INTERVAL * cost


def _calibrated(plan: Plan) -> list[Unit]:
    """The layers that tokens are sent through: up to the last with something to quantize."""
    last = max(
        (i for i, u in enumerate(plan.units) if any(t.action == "quantize" for t in u.tensors)),
        default=-1,
    )
    return [unit for unit in plan.units[: last + 1] if unit.kind in ("layer", "mtp")]


def _layer_quantizer(
    plan: Plan,
    reader: ShardReader,
    tokens: torch.Tensor | None,
    output: Path,
    phases: Phases | None,
    ranks: Ranks,
) -> LayerQuantizer | None:
    """None without tokens."""
    if tokens is None:
        return None
    import torch

    from halfbyte.calibration.architecture import Architecture
    from halfbyte.calibration.runner import LayerRunner
    from halfbyte.quantize.calibrated import LayerQuantizer

    # Whatever the configuration and the tensors disagree on shows here, before anything is written.
    settings = plan.settings
    runner = LayerRunner(
        Architecture.of(plan.checkpoint),
        {t.name: t.source for t in plan.tensors},
        reader,
        device=settings.device,
        dtype=getattr(torch, settings.dtype),
        placement=plan.memory.placement,
        work=output / WORK_FOLDER,
    )
    for unit in plan.units:
        if unit.index is not None:
            runner.check_layer(unit.index)
    return LayerQuantizer(
        runner,
        settings,
        tokens,
        plan.memory.placement,
        phases=phases or Phases(on=settings.device == "cpu"),
        ranks=ranks,
    )


def _summary(unit: Unit, reports: list[LinearReport]) -> str:
    """What the reader sees of a finished unit."""
    if not reports:
        count = len(unit.tensors)
        return f"{unit.name}: {count} tensor{'s' if count > 1 else ''} written"
    error = sum(r.error for r in reports) / len(reports)
    rtn = sum(r.rtn_error for r in reports) / len(reports)
    text = f"{unit.name}: {len(reports)} linears quantized, mean error {error:.2e}"
    if rtn != error:
        text += f" (rounding alone {rtn:.2e})"
    if unseen := sum(r.rung == "all-tokens" and not r.tokens for r in reports):
        text += f", {unseen} without a token of their own"
    if fallbacks := sum(r.fallback is not None for r in reports):
        text += f", {fallbacks} fell back"
    return text


def output_config(plan: Plan) -> dict[str, Any]:
    """The source's config.json with `quantization_config` replaced, everything else as it was."""
    config = without_quantization(plan.checkpoint.config)
    if plan.quantization_config is not None:
        config["quantization_config"] = dict(plan.quantization_config)
    return config


def peak_host_bytes() -> int:
    """Largest resident size of this process so far."""
    # Not getrusage: its figure survives exec, so it may be that of the parent process.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")
