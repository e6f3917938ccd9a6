"""Checks a finished checkpoint: nothing missing, nothing extra, and every value what it should be.

The folder is opened as a server would, its linears are held against what vLLM and SGLang would
read from its config, and its shards against the hashes of the run. With the source at hand the plan
is made again from the recipe in the run's report, and every tensor is compared. If asked for, every
INT4 linear also goes through the product that serves it.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from halfbyte.core import Checkpoint, Plan, RunReport, StoredWeight
from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.config import (
    config_count,
    is_linear,
    storage_of,
    text_config,
    without_equal_experts,
    without_quantization,
)
from halfbyte.formats.files import CHUNK
from halfbyte.formats.folder import INDEX_FILE, REPORT_FILE, WORK_FOLDER
from halfbyte.formats.loaders import check_loaders
from halfbyte.formats.weights import layer_index, logical_weights, quantization_config
from halfbyte.kvcache.fold import exponent_of, folds_between
from halfbyte.kvcache.scales import SCHEME, is_cache_scale, read_scales
from halfbyte.progress import Progress, SilentProgress
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.readers import scalable_inputs
from halfbyte.quantize.recipe import recipe_from_dict

if TYPE_CHECKING:
    import torch

    from halfbyte.formats.shards import ShardReader
    from halfbyte.quantize.kernel_check import KernelRequest, KernelResult
    from halfbyte.quantize.smoothing import Smoothing


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One thing that is not as it should be."""

    kind: str
    """What was checked: "folder", "report", "loader", "mtp", "hash", "plan", "value", "config",
    "kernel" or "output"."""
    name: str
    """The file, tensor or server it is about."""
    message: str
    """What was found and what was expected."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}: {self.message}"


@dataclass(frozen=True)
class VerifyResult:
    """What was looked at, and everything that was found."""

    shards: int
    tensors: int
    """Stored tensors of the folder."""
    quantized: int
    """INT4 linears among them."""
    compared: int
    """Logical weights whose values were compared with a source."""
    mismatches: tuple[Mismatch, ...]
    notes: tuple[str, ...] = ()
    """What could not be checked, and why."""
    kernels: KernelResult | None = None
    """The products of its INT4 linears, if they were asked for."""


LOCATED = 16
"""Faulty linears whose likeliest place is searched. With more, the fault is in no single place."""

_WITHOUT_REPORT = (
    f"there is no readable {REPORT_FILE}: hashes, plan and the exact error of each weight were not "
    "checked, only that weights are near their source if one was given"
)


def verify(
    folder: Path,
    source: Path | None = None,
    *,
    kernels: KernelRequest | None = None,
    progress: Progress | None = None,
) -> VerifyResult:
    """Check the checkpoint in `folder`, against the checkpoint it was made from if that is given.

    Holds one weight at a time, and reads the folder up to three times: for its hashes, for values
    that no weight can have, and for the comparison. Whatever is wrong with `folder` is a
    mismatch; raises `CheckpointError` only when `source` cannot be opened. With `kernels` it reads
    the folder once more, holds a layer, and raises what `check_kernels` does.
    """
    progress = progress or SilentProgress()
    mismatches = list(_stray_files(folder))
    try:
        checkpoint = open_checkpoint(folder)
        weights = logical_weights(checkpoint)
        mismatches += [*_total_size(checkpoint), *_loaders(checkpoint, weights)]
        mismatches += _mtp(checkpoint, weights)
    except CheckpointError as error:
        mismatches.append(Mismatch("folder", folder.name, str(error)))
        return VerifyResult(0, 0, 0, 0, tuple(mismatches))
    if kernels is not None:  # before hours of reading
        from halfbyte.quantize.kernel_check import check_request

        check_request(checkpoint, weights, kernels)
    report = _read_report(folder, mismatches)
    if report is not None:
        mismatches += _hashes(checkpoint, report, progress)
    mismatches += [*_cache_scales(checkpoint), *_values(checkpoint, weights, progress)]
    notes = [] if report is not None else [_WITHOUT_REPORT]
    original = None
    if source is not None:
        original = _original(open_checkpoint(source), checkpoint, report)
        if original.folds:
            notes.append(
                f"{len(original.folds)} latents are folded, which leaves the model the same"
            )
        mismatches += _against_source(original, checkpoint, weights, report, progress)
    products = None
    if kernels is not None:
        products, faults, left_out = _kernels(
            kernels, original, checkpoint, weights, report, progress
        )
        mismatches += faults
        notes += left_out
    progress.finish()
    quantized = sum(weight.encoding == "int4" for weight in weights.values())
    if not quantized:
        notes.append("no weight in it is INT4")
    return VerifyResult(
        shards=len(checkpoint.shards),
        tensors=len(checkpoint.tensors),
        quantized=quantized,
        compared=len(weights) if source is not None else 0,
        mismatches=tuple(mismatches),
        notes=tuple(notes),
        kernels=products,
    )


def _stray_files(folder: Path) -> Iterator[Mismatch]:
    """Weights beside the index, and the remains of a run that did not finish."""
    if not folder.is_dir():
        return
    if (folder / WORK_FOLDER).exists():
        yield Mismatch(
            "folder", WORK_FOLDER, "is there, so the run that writes this folder is unfinished"
        )
    try:
        named = set(json.loads((folder / INDEX_FILE).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # a lone model.safetensors, or what opening the folder will complain about
    for path in sorted(folder.glob("*.safetensors*")):
        if path.name not in named and path.name != INDEX_FILE:
            yield Mismatch("folder", path.name, "is not named by the index")


def _read_report(folder: Path, mismatches: list[Mismatch]) -> RunReport | None:
    """The report of the run that wrote the folder; None when others wrote it."""
    path = folder / REPORT_FILE
    if not path.exists():
        return None
    try:
        return RunReport.from_json(json.loads(path.read_bytes()), output=str(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        mismatches.append(Mismatch("report", REPORT_FILE, f"cannot be read: {error!r}"))
        return None


def _total_size(checkpoint: Checkpoint) -> Iterator[Mismatch]:
    path = checkpoint.path / INDEX_FILE
    if path.exists():
        metadata = json.loads(path.read_bytes()).get("metadata")
        stated = metadata.get("total_size") if isinstance(metadata, dict) else None
        if stated is not None and stated != checkpoint.nbytes:
            message = f"total_size is {stated}, the tensors take {checkpoint.nbytes} bytes"
            yield Mismatch("folder", INDEX_FILE, message)


def _loaders(checkpoint: Checkpoint, weights: Mapping[str, StoredWeight]) -> Iterator[Mismatch]:
    modules = without_equal_experts(
        {n.removesuffix(".weight"): storage_of(w) for n, w in weights.items() if is_linear(w)}
    )
    config = quantization_config(checkpoint.config)
    if config.get("quant_method", "compressed-tensors") != "compressed-tensors":
        return  # an FP8 source: other code of the servers reads it
    for finding in check_loaders(config, modules, text_config(checkpoint.config)):
        if finding.blocking:
            yield Mismatch("loader", finding.loader, finding.message)


def _mtp(checkpoint: Checkpoint, weights: Mapping[str, StoredWeight]) -> Iterator[Mismatch]:
    """Servers read the MTP layers that the config announces from the shards."""
    model = text_config(checkpoint.config)
    first = config_count(model, "num_hidden_layers")
    present = {layer_index(name) for name in weights}
    for layer in range(first, first + config_count(model, "num_nextn_predict_layers")):
        if layer not in present:
            message = "config.json announces this MTP layer, but no tensor of it is stored"
            yield Mismatch("mtp", f"model.layers.{layer}", message)


def _hashes(checkpoint: Checkpoint, report: RunReport, progress: Progress) -> Iterator[Mismatch]:
    progress.start("hash", sum(checkpoint.shards.values()), "bytes")
    for shard in sorted(checkpoint.shards.keys() | report.shards.keys()):
        if shard not in checkpoint.shards or shard not in report.shards:
            has, lacks = ("report", "folder") if shard in report.shards else ("folder", "report")
            yield Mismatch("hash", shard, f"is in the {has} but not in the {lacks}")
            continue
        digest = hashlib.sha256()
        with (checkpoint.path / shard).open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                progress.advance(len(chunk))
        if digest.hexdigest() != report.shards[shard]:
            message = f"SHA-256 is {digest.hexdigest()}, the report says {report.shards[shard]}"
            yield Mismatch("hash", shard, message)


def _cache_scales(checkpoint: Checkpoint) -> Iterator[Mismatch]:
    """Scales of the KV cache (`quantize kv -o`) are positive numbers."""
    try:
        read_scales(checkpoint)
    except CheckpointError as error:
        yield Mismatch("value", "KV cache", str(error))


def _values(
    checkpoint: Checkpoint, weights: Mapping[str, StoredWeight], progress: Progress
) -> Iterator[Mismatch]:
    from halfbyte.formats.shards import ShardReader
    from halfbyte.quantize.compare import weight_fault

    progress.start("check values", checkpoint.nbytes, "bytes")
    with ShardReader(checkpoint) as reader:
        for name, weight in weights.items():
            if (fault := weight_fault(weight, reader)) is not None:
                yield Mismatch("value", name, fault)
            progress.advance(weight.nbytes)


@dataclass(frozen=True)
class _Original:
    """The source, and what the run did to its weights before they were rounded."""

    checkpoint: Checkpoint
    weights: Mapping[str, StoredWeight]
    plan: Plan | None = None
    """Made again from the report; None without one, or when that failed."""
    smoothings: Mapping[int | None, Smoothing] = field(default_factory=dict)
    """By layer."""
    folds: Mapping[int, int] = field(default_factory=dict)
    """Octaves by which `quantize kv --fold` has moved latents, by layer. They need no trust: a
    power of two that leaves a norm and enters its one reader leaves the model as it was."""
    faults: tuple[Mismatch, ...] = ()

    def scaling(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What scaling of inputs, or a fold, did to a decoded weight; None for what was left
        alone."""
        smoothing = self.smoothings.get(layer_index(name))
        if smoothing is not None and smoothing.touches(name):
            return partial(smoothing.apply, name)
        if exponent := exponent_of(name, self.folds):
            return partial(operator.mul, 2.0**exponent)
        return None

    def read(self, reader: ShardReader, name: str) -> torch.Tensor | None:
        """A weight as it was rounded, float32; None for one that is not there."""
        if (stored := self.weights.get(name)) is None:
            return None
        weight, scaling = reader.read_weight(stored), self.scaling(name)
        return weight if scaling is None else scaling(weight)


def _original(source: Checkpoint, output: Checkpoint, report: RunReport | None) -> _Original:
    from halfbyte.formats.shards import ShardReader

    with ShardReader(source) as before, ShardReader(output) as after:
        original = _Original(source, logical_weights(source), folds=folds_between(before, after))
    if report is None:
        return original
    try:
        plan = make_plan(source, recipe_from_dict(report.recipe), report.settings)
    except HalfbyteError as error:
        fault = Mismatch("plan", source.path.name, f"the plan cannot be made again: {error}")
        return replace(original, faults=(fault,))
    try:
        return replace(original, plan=plan, smoothings=_smoothings(plan, report))
    except ValueError as error:
        fault = Mismatch("report", REPORT_FILE, f"has scales that cannot be: {error}")
        return replace(original, plan=plan, faults=(fault,))


def _against_source(
    original: _Original,
    output: Checkpoint,
    weights: Mapping[str, StoredWeight],
    report: RunReport | None,
    progress: Progress,
) -> Iterator[Mismatch]:
    from halfbyte.formats.shards import ShardReader
    from halfbyte.quantize.compare import difference

    source, plan = original.checkpoint, original.plan
    yield from _unchanged_files(source, output)
    yield from original.faults
    dropped: set[str] = set()
    if plan is not None and report is not None:
        dropped = {t.name for t in plan.tensors if t.action == "drop"}
        yield from _unplanned(plan, output, report)
    for name in weights.keys() - original.weights.keys():
        if not is_cache_scale(name):
            yield Mismatch("plan", name, "has no source")
    linears = {linear.name: linear for linear in report.linears} if report is not None else {}
    only_rounded = report is not None and not report.settings.compensates
    progress.start("compare", source.nbytes, "bytes")
    with ShardReader(source) as source_reader, ShardReader(output) as output_reader:
        to_locate = LOCATED
        for name, stored in original.weights.items():
            progress.advance(stored.nbytes)
            if name in weights:
                linear = linears.get(name.removesuffix(".weight"))
                fallback = linear.fallback if linear is not None else None
                fault = difference(
                    stored,
                    source_reader,
                    weights[name],
                    output_reader,
                    linear,
                    rounded=(fallback or "").startswith("rtn") or only_rounded,
                    scaled=original.scaling(name),
                    located=to_locate > 0,
                )
                if fault is not None:
                    to_locate -= 1
                    yield Mismatch("value", name, fault)
            elif name not in dropped:
                yield Mismatch("plan", name, "is in the source but not in the output")


def _kernels(
    request: KernelRequest,
    original: _Original | None,
    checkpoint: Checkpoint,
    weights: Mapping[str, StoredWeight],
    report: RunReport | None,
    progress: Progress,
) -> tuple[KernelResult, list[Mismatch], tuple[str, ...]]:
    """The products, what is wrong with them, and what was left out."""
    from halfbyte.formats.shards import ShardReader
    from halfbyte.quantize.kernel_check import check_kernels

    source = original.checkpoint if original is not None else checkpoint
    with ShardReader(source) as reader:
        result, faults, notes = check_kernels(
            checkpoint,
            weights,
            request,
            progress,
            original=partial(original.read, reader) if original is not None else None,
            reports={linear.name: linear for linear in report.linears} if report else None,
        )
    return result, [Mismatch(*fault) for fault in faults], notes


def _smoothings(plan: Plan, report: RunReport) -> dict[int | None, Smoothing]:
    """The scales of each layer's inputs as the report has them; none for methods without.

    They need no trust. Which tensors they change follows from the plan, and scales that divide a
    source and multiply all its readers leave the model as it was, whatever they are.
    """
    from halfbyte.quantize.smoothing import Smoothing

    if not plan.settings.scales_inputs:
        return {}
    reported = {scaled.name: scaled for scaled in report.scaled}
    layers = (unit for unit in plan.units if unit.kind in ("layer", "mtp"))
    return {u.index: Smoothing.of_report(scalable_inputs(u)[0], reported) for u in layers}


def _unchanged_files(source: Checkpoint, output: Checkpoint) -> Iterator[Mismatch]:
    """Side files are copies, and so is config.json but for `quantization_config`."""
    before, after = (without_quantization(c.config) for c in (source, output))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            message = f"{key} is {after.get(key)!r:.80}, in the source {before.get(key)!r:.80}"
            yield Mismatch("config", "config.json", message)
    for name in source.side_files:
        copy = output.path / name
        if not copy.is_file() or copy.read_bytes() != (source.path / name).read_bytes():
            yield Mismatch("folder", name, "is not the file of the source")


def _unplanned(plan: Plan, output: Checkpoint, report: RunReport) -> Iterator[Mismatch]:
    """Differences between the plan, made again, and the headers of the output, to which scales of
    the KV cache may have been added."""
    if plan.checkpoint.fingerprint != report.source:
        yield Mismatch(
            "report", REPORT_FILE, f"is of another source than {plan.checkpoint.path.name}"
        )
    planned = {o.name: (o.dtype, o.shape) for t in plan.tensors for o in t.outputs}
    stored = {t.name: (t.dtype, t.shape) for t in output.tensors.values()}
    config = dict(quantization_config(output.config))
    if scales := set(filter(is_cache_scale, stored.keys() - planned.keys())):
        stored = {name: found for name, found in stored.items() if name not in scales}
        if config.get("kv_cache_scheme") == SCHEME:
            config["kv_cache_scheme"] = (plan.quantization_config or {}).get("kv_cache_scheme")
    for name in sorted(planned.keys() | stored.keys()):
        expected, found = _shown(planned.get(name)), _shown(stored.get(name))
        if expected != found:
            yield Mismatch("plan", name, f"is {found}, planned {expected}")
    if config != (plan.quantization_config or {}):
        message = "quantization_config is not the planned one"
        yield Mismatch("config", "config.json", message)


def _shown(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
