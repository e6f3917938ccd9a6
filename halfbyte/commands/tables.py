"""Results as tables for people and as JSON records for programs; pure functions.

Every number is formatted here and nowhere else, so that two commands never print it differently.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.console import Column, Table
from halfbyte.core import Checkpoint, Plan, RunReport
from halfbyte.formats.weights import layer_index, model_order, quantization_config
from halfbyte.quantize.plan import rule_outcomes
from halfbyte.units import format_bytes, format_gib, format_seconds

if TYPE_CHECKING:
    from halfbyte.models import KnownModel
    from halfbyte.publish import Publication
    from halfbyte.quantize.duration import Duration
    from halfbyte.quantize.kernel_check import KernelResult, ProductCheck
    from halfbyte.quantize.verify import VerifyResult

# A plan.


def plan_record(plan: Plan, duration: Duration, serving: Mapping[str, Any]) -> dict[str, Any]:
    """A plan as JSON: its rules, sizes, memory, time, pools, and what config.json will say."""
    return {
        "source": plan.checkpoint.origin,
        "model_type": plan.checkpoint.model_type,
        "recipe": plan.recipe.name,
        "settings": asdict(plan.settings),
        "rules": [asdict(rule) for rule in rule_outcomes(plan)],
        "bytes_in": plan.checkpoint.nbytes,
        "bytes_out": plan.bytes_out,
        "shards": {shard.file: shard.nbytes for shard in plan.shards},
        "memory": asdict(plan.memory),
        "duration": asdict(duration),
        "disk": plan.disk,
        "serving": serving,
        "warnings": list(plan.warnings),
        "quantization_config": plan.quantization_config,
    }


def plan_table(plan: Plan) -> Table:
    """A row per rule: what it does to how many tensors and bytes, and why."""
    rules = rule_outcomes(plan)
    return Table(
        columns=(
            Column("action"),
            Column("tensors", number=True),
            Column("in", number=True),
            Column("out", number=True),
            Column("reason"),
        ),
        rows=tuple(
            (
                f"{rule.action} {rule.scheme}" if rule.scheme else rule.action,
                f"{rule.tensors:,}",
                format_bytes(rule.bytes_in),
                format_bytes(rule.bytes_out),
                rule.reason,
            )
            for rule in rules
        ),
        total=(
            "total",
            f"{sum(rule.tensors for rule in rules):,}",
            format_bytes(plan.checkpoint.nbytes),
            format_bytes(plan.bytes_out),
            f"{format_gib(plan.checkpoint.nbytes)} -> {format_gib(plan.bytes_out)}",
        ),
    )


def memory_table(plan: Plan) -> Table:
    """What the predicted peak is made of."""
    return Table(
        columns=(Column("peak memory"), Column("bytes", number=True)),
        rows=tuple((part, format_gib(size)) for part, size in plan.memory.detail.items()),
    )


def plan_summary(plan: Plan, duration: Duration) -> list[str]:
    """The lines above and below the table: what is run on what, and what it takes."""
    settings, memory = plan.settings, plan.memory
    calibration = (
        f", {settings.samples} samples of {settings.sequence_length} tokens"
        if settings.method != "rtn"
        else ""
    )
    peak = f"peak memory  host {format_gib(memory.host)}"
    if memory.gpu:
        peak += f", GPU {format_gib(memory.gpu)}"
    if memory.ranks > 1:
        peak += f" in each of {memory.ranks} processes"
    places = {
        "hidden states": memory.placement.states,
        "experts' inputs": memory.placement.inputs,
    }
    if on_disk := [what for what, place in places.items() if place == "disk"]:
        peak += f"; {' and '.join(on_disk)} on the disk"
    shards = plan.checkpoint.shards
    download = [
        f"download     {format_bytes(sum(shards.values()))} in {_plural(len(shards), 'shard')}, but"
        " for those that are in huggingface_hub's cache"
    ]
    return [
        f"source       {plan.checkpoint.origin} ({plan.checkpoint.model_type})",
        *(download if plan.checkpoint.repository is not None else ()),
        f"recipe       {plan.recipe.name}: {plan.recipe.description}",
        f"method       {settings.method} on {settings.device} in {settings.dtype}{calibration}",
        peak,
        f"disk         {format_bytes(plan.disk)} while it runs;"
        f" {format_bytes(plan.bytes_out)} in {_plural(len(plan.shards), 'shard')} when it is done",
        f"time         about {format_seconds(duration.seconds)}: {format_seconds(duration.compute)}"
        f" at the speed of {_plural(duration.workers, duration.reference)}, beside that"
        f" {format_seconds(duration.disk)} for the disk at 1 GB/s",
    ]


# A run.


def run_record(report: RunReport) -> dict[str, Any]:
    """A run as JSON, without what the report beside the weights holds at length: lines per linear,
    per scaled input, per rule and per unit, and where the source came from."""
    record = asdict(report)
    for detail in ("linears", "scaled", "rules", "origin", "times", "schema_version"):
        del record[detail]
    return {**record, **_linear_counts(report), "scaled": _scaled_counts(report)}


def run_summary(report: RunReport) -> list[str]:
    """What came out, how long it took, and how many linears left the ordinary path."""
    if report.already_finished:
        return [f"{report.output} is finished already"]
    lines = [
        f"{report.output}: {format_bytes(report.bytes_in)} -> {format_bytes(report.bytes_out)}"
        f" in {format_seconds(report.seconds)}, peak resident memory"
        f" {format_gib(report.peak_bytes)}",
    ]
    counts = _linear_counts(report)
    if scaled := _scaled_counts(report):
        lines.append(f"inputs scaled: {_listed(scaled)} of {len(report.scaled):,}")
    if report.settings.method != "rtn":
        lines.append(
            f"calibrated on: {_listed(counts['rungs'])} of {len(report.linears):,} linears"
        )
    if counts["fallbacks"]:
        lines.append(f"fell back to: {_listed(counts['fallbacks'])}")
    return lines


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{what} {count:,}" for what, count in counts.items())


def _linear_counts(report: RunReport) -> dict[str, dict[str, int]]:
    return {
        "rungs": _counts(linear.rung for linear in report.linears),
        "fallbacks": _counts(linear.fallback for linear in report.linears if linear.fallback),
    }


def _scaled_counts(report: RunReport) -> dict[str, int]:
    """Inputs that AWQ changed, by what makes them."""
    changed = (s.name.rpartition(".")[2] for s in report.scaled if s.exponent is not None)
    return _counts(changed)


def _counts(items: Iterable[str]) -> dict[str, int]:
    return dict(Counter(items).most_common())


# A checkpoint.

_NUMBER = re.compile(r"\.\d+(?=\.)")


def name_pattern(name: str) -> str:
    """A tensor name with its layer and expert numbers replaced: "model.layers.*.mlp.experts.*"."""
    return _NUMBER.sub(".*", name)


def checkpoint_record(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint as JSON: its structure, and its sizes by dtype and by name pattern."""
    dtypes: dict[str, dict[str, int]] = {}
    patterns: dict[tuple[str, str, tuple[int, ...]], dict[str, int]] = {}
    for name in sorted(checkpoint.tensors, key=model_order):
        tensor = checkpoint.tensors[name]
        for sizes in (
            dtypes.setdefault(tensor.dtype, {"tensors": 0, "bytes": 0}),
            patterns.setdefault(
                (name_pattern(name), tensor.dtype, tensor.shape), {"tensors": 0, "bytes": 0}
            ),
        ):
            sizes["tensors"] += 1
            sizes["bytes"] += tensor.nbytes
    return {
        "path": checkpoint.origin,
        "model_type": checkpoint.model_type,
        "bytes": checkpoint.nbytes,
        "tensors": len(checkpoint.tensors),
        "shards": len(checkpoint.shards),
        **_structure(checkpoint),
        "dtypes": dtypes,
        "patterns": [
            {"pattern": pattern, "dtype": dtype, "shape": list(shape), **sizes}
            for (pattern, dtype, shape), sizes in patterns.items()
        ],
        "side_files": list(checkpoint.side_files),
    }


def _structure(checkpoint: Checkpoint) -> dict[str, Any]:
    """Layers and experts that have tensors; the config only says which layers are MTP layers."""
    indices = {index for name in checkpoint.tensors if (index := layer_index(name)) is not None}
    experts = {match[1] for name in checkpoint.tensors if (match := _EXPERT.search(name))}
    declared = _text_config(checkpoint.config).get("num_hidden_layers")
    mtp = sorted(i for i in indices if isinstance(declared, int) and i >= declared)
    quantization = quantization_config(checkpoint.config)
    return {
        "layers": len(indices) - len(mtp),
        "mtp_layers": mtp,
        "experts": len(experts),
        "quant_method": quantization.get("quant_method"),
        "fp8_block": quantization.get("weight_block_size"),
    }


_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def checkpoint_tables(record: Mapping[str, Any]) -> tuple[Table, Table]:
    """Sizes by dtype, and by name pattern with dtype and shape."""
    sizes = (Column("tensors", number=True), Column("bytes", number=True))
    by_dtype = Table(
        columns=(Column("dtype"), *sizes),
        rows=tuple(
            (dtype, f"{size['tensors']:,}", format_bytes(size["bytes"]))
            for dtype, size in record["dtypes"].items()
        ),
        total=("total", f"{record['tensors']:,}", format_bytes(record["bytes"])),
    )
    by_pattern = Table(
        columns=(Column("name"), Column("dtype"), Column("shape"), *sizes),
        rows=tuple(
            (
                row["pattern"],
                row["dtype"],
                str(row["shape"]),
                f"{row['tensors']:,}",
                format_bytes(row["bytes"]),
            )
            for row in record["patterns"]
        ),
    )
    return by_dtype, by_pattern


def checkpoint_summary(record: Mapping[str, Any]) -> list[str]:
    """The lines above the tables."""
    layers = _plural(record["layers"], "layer")
    if record["mtp_layers"]:
        numbers = ", ".join(str(index) for index in record["mtp_layers"])
        layers += f" and an MTP layer at index {numbers}"
    if record["experts"]:
        layers += f", {record['experts']} routed experts"
    quantization = str(record["quant_method"] or "none")
    if isinstance(block := record["fp8_block"], list):
        quantization += f" in blocks of {' x '.join(map(str, block))}"
    return [
        f"path          {record['path']} ({record['model_type']})",
        f"size          {format_bytes(record['bytes'])} ({format_gib(record['bytes'])})"
        f" in {_plural(record['shards'], 'shard')}",
        f"structure     {layers}",
        f"quantization  {quantization}",
    ]


# A verification.


def verify_record(folder: Path, result: VerifyResult) -> dict[str, Any]:
    """A verification as JSON; `ok` is what the exit code says."""
    return {"path": str(folder), "ok": not result.mismatches, **asdict(result)}


def verify_lines(result: VerifyResult) -> list[str]:
    """Every mismatch, and how many tensors were looked at."""
    found = [f"{m.kind}: {m.name}: {m.message}" for m in result.mismatches]
    verdict = _plural(len(found), "mismatch", "mismatches") if found else "all as they should be"
    return [*found, f"{_plural(result.tensors, 'tensor')} checked: {verdict}"]


def kernel_lines(result: KernelResult) -> list[str]:
    """What made the products, of what, and what the table says."""
    return [
        f"engine  {result.engine}",
        f"inputs  {result.inputs}",
        "errors  of a layer's worst linear, relative, against float64 with the decoded weights;",
        "        the margin is what float32 sums may add to the rounding of the result",
        "",
    ]


def kernel_table(result: KernelResult) -> Table:
    """A row per layer: the worst against float64, and against the source if there is one."""
    against_source = any(check.output_error is not None for check in result.linears)
    columns = [
        Column("layer", number=True),
        Column("linears", number=True),
        Column("kernel error", number=True),
        Column("rounding alone", number=True),
        Column("margin used", number=True),
        Column("experts at once", number=True),
    ]
    if against_source:
        columns += [
            Column("from the source", number=True),
            Column("worst", number=True),
            Column("linear"),
        ]
    experts = {check.layer: check for check in result.experts}
    layers: dict[int | None, list[ProductCheck]] = {}
    for check in result.linears:
        layers.setdefault(check.layer, []).append(check)
    rows = []
    for layer, checks in layers.items():
        together = experts.get(layer)
        row = [
            "none" if layer is None else str(layer),
            f"{len(checks):,}",
            _error(_largest(check.error for check in checks)),
            _error(_largest(check.rounding for check in checks)),
            _share(_largest(check.of_allowance for check in checks)),
            "" if together is None else _share(together.of_allowance),
        ]
        if against_source:
            row += _output_errors(checks)
        rows.append(tuple(row))
    return Table(columns=tuple(columns), rows=tuple(rows))


def _output_errors(checks: Sequence[ProductCheck]) -> list[str]:
    """Mean and worst against the source, and which linear that is."""
    known = [(c.output_error, c.name) for c in checks if c.output_error is not None]
    if not known:
        return ["", "", ""]
    worst, name = max(known)
    inside = re.sub(r"^.*layers\.\d+\.", "", name)
    return [_error(sum(error for error, _ in known) / len(known)), _error(worst), inside]


def _largest(values: Iterable[float | None]) -> float | None:
    """None when one of them is."""
    known = list(values)
    return None if None in known else max(value for value in known if value is not None)


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2e}"


def _share(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1%}"


def _plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


# A publication.


def publication_record(publication: Publication) -> dict[str, Any]:
    """A publication as JSON; `commit` and `url` are null when it was a dry run."""
    return {**asdict(publication), "bytes": publication.nbytes}


def publication_table(publication: Publication) -> Table:
    """A row per file."""
    return Table(
        columns=(Column("file"), Column("bytes", number=True)),
        rows=tuple((name, f"{size:,}") for name, size in publication.files.items()),
    )


def publication_line(publication: Publication) -> str:
    """What went where, or would go."""
    files = f"{_plural(len(publication.files), 'file')}, {format_bytes(publication.nbytes)}"
    where = publication.repository + (f"@{publication.revision}" if publication.revision else "")
    seen = "private" if publication.private else "public"
    if publication.commit is None:
        return f"would publish {files} as {where} ({seen})"
    return f"published {files} as {where} ({seen}): {publication.url}"


# Models and environment.


def models_record(models: Iterable[KnownModel]) -> dict[str, Any]:
    """The alias table as JSON."""
    return {"models": [asdict(model) for model in models]}


def models_table(models: Iterable[KnownModel]) -> Table:
    """The alias table."""
    return Table(
        columns=(Column("name"), Column("repository"), Column("model type"), Column("recipe")),
        rows=tuple((m.alias, m.repo, m.model_type, m.recipe) for m in models),
    )


def environment_table(record: Mapping[str, Any]) -> Table:
    """What `environment_record` found, a row each."""
    return Table(
        columns=(Column("what"), Column("value")),
        rows=(
            ("halfbyte", record["halfbyte"]),
            ("python", record["python"]),
            ("platform", record["platform"]),
            *record["packages"].items(),
            ("CUDA of torch", record["cuda"] or "none"),
            ("GPUs", ", ".join(record["gpus"]) or "none"),
            *record["variables"].items(),
        ),
    )
