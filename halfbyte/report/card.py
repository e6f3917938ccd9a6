"""The model card of an output: what it is, how it was made, and what is known of its quality.

A pure function from what the folder tells to the text of a README.md as the Hugging Face Hub reads
it (https://huggingface.co/docs/hub/model-cards). Names that come from the source are escaped.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from halfbyte.core import Origin
from halfbyte.errors import HalfbyteError, OutputError
from halfbyte.formats.files import write_atomic
from halfbyte.formats.folder import CARD_FILE, CARD_MARK, is_our_card
from halfbyte.kvcache.advice import disaggregated
from halfbyte.report import commands
from halfbyte.report.linears import (
    counted,
    expert_tokens,
    kind_summaries,
    median,
)
from halfbyte.report.output import Change, Gate, GateRow, Output
from halfbyte.units import format_bytes, format_gib

ROWS_SHOWN = 200
"""Rows of a table at most."""

METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "awq+gptq": "AWQ and GPTQ",
    "rtn": "rounding to nearest",
}
RUNGS = {
    "routed": "on the tokens that reach them, and no others",
    "blended": "on their own tokens, topped up with others of the layer",
    "all-tokens": "on all tokens of the layer, for want of their own",
    "weights-only": "without data",
}
"""What each rung of the ladder means for the linears on it; see `calibration.inputs`."""


def write_card(folder: Path, output: Output, *, replace: bool = True) -> Path:
    """Write the card of a folder into it; without `replace` a README.md that is there stays.

    With it, raises OutputError when the folder holds a README.md that is not ours.
    """
    path = folder / CARD_FILE
    if path.exists() or path.is_symlink():
        if not replace:
            return path
        if not is_our_card(path):
            raise OutputError(
                f"{path} is not a card that halfbyte wrote, so it is not replaced",
                hint=shlex.join(["mv", str(path), f"{path}.old"]),
            )
    try:
        write_atomic(path, model_card(output).encode())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    return path


def model_card(output: Output) -> str:
    """The text of README.md, front matter included."""
    parts = [
        front_matter(output),
        f"# {escape(output.name)}\n\n{CARD_MARK}\n",
        _summary(output),
        _sizes(output),
        _tensors(output),
        _accuracy(output.gate, output),
        _errors(output),
        _coverage(output),
        _serving(output),
        _reproduction(output),
    ]
    return "\n".join(parts)


def front_matter(output: Output) -> str:
    """The card's YAML: licence and kind of model as the source has them, and what this is."""
    import yaml

    report, origin = output.report, output.report.origin
    record: dict[str, Any] = {
        "license": origin.license,
        "license_name": origin.license_name,
        "license_link": origin.license_link,
        "language": list(origin.language),
        "base_model": origin.repo,
        "base_model_revision": origin.revision if origin.repo else None,
        "base_model_relation": "quantized" if origin.repo else None,
        "library_name": origin.library_name or "transformers",
        "pipeline_tag": origin.pipeline_tag,
        "tags": ["compressed-tensors", "int4", *report.settings.method.split("+"), "halfbyte"],
    }
    known = {key: value for key, value in record.items() if value}
    text = yaml.safe_dump(known, sort_keys=False, allow_unicode=True, width=1000)
    return f"---\n{text}---\n"


def _summary(output: Output) -> str:
    report = output.report
    schemes = counted(linear.scheme for linear in report.linears)
    method = METHODS.get(report.settings.method, escape(report.settings.method))
    made = f"{len(report.linears):,} linears in {escape(', '.join(schemes))} by {method}"
    return (
        f"{_source(report.origin)}, with {made}: {format_bytes(report.bytes_in)} become"
        f" {format_bytes(report.bytes_out)}. The format is compressed-tensors `pack-quantized`."
        f" Made with halfbyte {escape(report.versions.get('halfbyte', ''))}.\n"
        f"\n{_license(report.origin)}\n"
    )


def _license(origin: Origin) -> str:
    if origin.license is None:
        return "The folder of the source names no licence; that of the source holds here too."
    name = origin.license_name or origin.license
    return f"Licence: {escape(name)}, that of the source."


def _source(origin: Origin) -> str:
    """The base model as a link, or the name of its folder."""
    revision = f" at revision {code(origin.revision)}" if origin.revision else ""
    if origin.repo is None:
        return f"{escape(origin.name)}{revision}"
    return f"[{escape(origin.repo)}](https://huggingface.co/{origin.repo}){revision}"


def _sizes(output: Output) -> str:
    report, gpus = output.report, output.parallel()
    before, after = report.bytes_in, report.bytes_out
    rows = [["all weights", format_bytes(before), format_bytes(after), _share(after, before)]]
    if gpus > 1:
        source, own = output.per_gpu(gpus)
        sizes = [format_gib(source), format_gib(own), _share(own, source)]
        rows.append([f"on each of {gpus} GPUs", *sizes])
    layers = "the MTP layer included, " if output.mtp_layers else ""
    note = (
        f"Weights alone, {layers}without what a server keeps beside them. Tensor-parallel servers"
        " divide all but norms, routers, the indexer and the first projections of latent attention."
    )
    head = ["", "source", "this model", "of it"]
    return f"## Size\n\n{table(head, rows, numbers=(1, 2, 3))}\n{note}\n"


def _tensors(output: Output) -> str:
    rules = output.report.rules
    rows = [
        [
            escape(rule.scheme or _KEPT.get(rule.action, rule.action)),
            f"{rule.tensors:,}",
            format_bytes(rule.bytes_in),
            format_bytes(rule.bytes_out),
            escape(rule.reason),
        ]
        for rule in rules[:ROWS_SHOWN]
    ]
    body = table(["stored as", "tensors", "before", "after", "why"], rows, numbers=(1, 2, 3))
    name = escape(str(output.report.recipe["name"]))
    warnings = [f"- {escape(warning)}" for warning in output.report.warnings[:ROWS_SHOWN]]
    notes = "\nWhat the plan warned of:\n\n" + "\n".join(warnings) + "\n" if warnings else ""
    return f"## What is INT4 and what is not\n\nRecipe {name}, rule by rule.\n\n{body}{notes}"


_KEPT = {"dequantize": "BF16", "copy": "as in the source", "drop": "left out"}


def _accuracy(gate: Gate | None, output: Output) -> str:
    if gate is None:
        lines = "\n".join([*commands.evaluate_commands(output), _card_command(output)])
        return (
            "## Accuracy\n\nAccuracy against the source has not been judged yet. This does it:\n\n"
            f"{block(lines)}"
        )
    decided = f"Verdict: **{escape(gate.verdict)}**, by the policy {escape(gate.policy)}"
    said = [f"{decided}{f': {escape(gate.description)}' if gate.description else ''}."]
    said.append(f"{allowance(gate)}.")
    if gate.mean is not None:
        said.append(f"Mean change in points: {points(gate.mean)}.")
    text = "## Accuracy\n\n" + " ".join(said) + "\n\n"
    if notes := [*gate.reasons, *gate.remarks][:ROWS_SHOWN]:
        text += "\n".join(f"- {escape(note)}" for note in notes) + "\n\n"
    if gate.rows:
        limits = f"{100 * (2 * gate.confidence - 1):g} % interval"
        head = ["task", "metric", "items", "source %", "INT4 %", f"points ({limits})", "lost : won"]
        rows = [_gate_row(row) for row in gate.rows[:ROWS_SHOWN]]
        text += table([*head, ""], rows, numbers=(2, 3, 4, 5, 6))
    return text


def _gate_row(row: GateRow) -> list[str]:
    scores = [f"{100 * total / row.count:.2f}" for total in (row.baseline, row.candidate)]
    verdict = escape(row.verdict or ("" if row.decides else "not judged"))
    names = [escape(row.task), escape(row.metric), f"{row.count:,}"]
    return [*names, *scores, points(row.change), f"{row.lost} : {row.won}", verdict]


def allowance(gate: Gate) -> str:
    """What the policy of a verdict allows."""
    if gate.paired:
        return f"The mean may drop by {gate.margin:g} points, a task by {gate.task_margin:g}"
    return f"A task may drop by {gate.margin:g} points"


def points(change: Change) -> str:
    """A change in points and its limits: "-0.50 (-1.72 to +0.71)"."""
    return f"{change.estimate:+.2f} ({change.low:+.2f} to {change.high:+.2f})"


def _errors(output: Output) -> str:
    report = output.report
    if not report.linears:
        return "## Error of each linear\n\nNothing was quantized.\n"
    rows = [
        [
            escape(kind.kind),
            f"{kind.count:,}",
            f"{kind.median:.2e}",
            f"{kind.rounding:.2e}",
            f"{kind.worst:.2e}",
            code(kind.worst_name),
        ]
        for kind in kind_summaries(report.linears)[:ROWS_SHOWN]
    ]
    head = ["linear", "count", "median", "by rounding alone", "worst", "where"]
    measured = (
        "Squared error of a linear's output, as a share of the output's square"
        if report.settings.method != "rtn"
        else "Squared error of a linear's weight, as a share of its square"
    )
    held = ", on calibration tokens that were held out where there were any"
    note = f"{measured}{held if report.settings.method != 'rtn' else ''}.\n"
    fallbacks = counted(linear.fallback for linear in report.linears if linear.fallback)
    if fallbacks:
        listed = "; ".join(f"{count:,} to {escape(what)}" for what, count in fallbacks.items())
        share = 100 * sum(fallbacks.values()) / len(report.linears)
        note += f"\nThe method asked for was given up in {share:.1f} % of linears: {listed}.\n"
    elif report.settings.method != "rtn":
        note += "\nNo linear fell back from the method asked for.\n"
    return f"## Error of each linear\n\n{note}\n{table(head, rows, numbers=(1, 2, 3, 4))}"


def _coverage(output: Output) -> str:
    report = output.report
    if report.settings.method == "rtn":
        return "## Calibration\n\nNone: weights were rounded without looking at data.\n"
    settings = report.settings
    lines = [
        f"{settings.samples:,} windows of {settings.sequence_length:,} tokens; SHA-256 of the token"
        f" ids {code(settings.calibration_sha256 or 'unknown')}."
    ]
    for rung, count in counted(linear.rung for linear in report.linears).items():
        lines.append(f"- {count:,} linears {RUNGS.get(rung, escape(rung))}")
    tokens = expert_tokens(report.linears)
    text = f"## Calibration\n\n{lines[0]}\n\n" + "\n".join(lines[1:]) + "\n"
    if tokens:
        counts = list(tokens.values())
        text += (
            f"\nOf {len(counts):,} routed experts the one with the fewest tokens of its own had"
            f" {min(counts):,}, the median {median(counts):,}, the one with the most"
            f" {max(counts):,}; {sum(count == 0 for count in counts):,} had none.\n"
        )
    return text


def _serving(output: Output) -> str:
    text = (
        "## Serving\n\nBoth servers find the format in config.json by themselves. Their loading"
        " rules (vLLM 0.33, SGLang 0.5.23) were applied to this checkpoint when it was planned;"
        " this card does not say that a server has run it.\n\n"
        + block(f"{commands.vllm_command(output)}\n{commands.sglang_command(output)}")
    )
    if output.mtp_layers:
        lines = (commands.vllm_command(output, mtp=True), commands.sglang_command(output, mtp=True))
        text += "\nWith the MTP layer guessing a token ahead:\n\n" + block("\n".join(lines))
    return text + _pools(output)


def _pools(output: Output) -> str:
    """Which checkpoint serves which pool where prefill and decode are apart."""
    gpus = output.parallel()
    before, after = output.per_gpu(gpus)
    source = output.report.origin.name
    try:
        apart = disaggregated(output.config, gpus, (source, before), (output.name, after))
    except HalfbyteError as error:
        return f"\nRoom for KV cache is not estimated: {escape(str(error))}.\n"
    node, cache = apart.decode.node, apart.decode.capacity
    rows = [
        [
            pool.role,
            escape(pool.capacity.weights),
            format_gib(pool.capacity.on_each),
            f"{pool.capacity.tokens:,}" if pool.capacity.fits else "does not fit",
            code(" ".join(pool.flags)),
        ]
        for pool in apart.pools
    ]
    head = ["pool", "checkpoint", "weights a GPU", "tokens of KV cache", "flags of SGLang"]
    return (
        f"\nWith prefill and decode apart, each on {node.gpus} x {node.gpu.name}:"
        f" {apart.reason}. Estimated for an FP8 cache of {cache.per_token:,} bytes a token and a"
        f" GPU, and {node.fraction:g} of free memory for weights and cache; `quantize capacity` has"
        " the assumptions, and other GPUs. vLLM takes the same `--kv-cache-dtype`. Accuracy with an"
        " FP8 cache is a question of its own.\n\n"
        f"{table(head, rows, numbers=(2, 3))}"
    )


def _reproduction(output: Output) -> str:
    report = output.report
    command = commands.quantize_command(report, output.name)
    lines = [line for line in (commands.download_command(report), command) if line]
    rows = [[escape(name), escape(version)] for name, version in sorted(report.versions.items())]
    same = "the same versions and the same kind of device"
    if report.settings.method != "rtn":
        same = f"the same text, {same}"
    return (
        f"## Making it again\n\nWith {same} the bytes are the same. halfbyte_report.json has every"
        " setting, the recipe, each linear and the hash of each shard; `quantize report` shows it."
        "\n\n"
        f"{block(chr(10).join(lines))}\n{table(['package', 'version'], rows)}"
    )


def _card_command(output: Output) -> str:
    return shlex.join(["quantize", "card", output.name, "--gate", "gate.json"])


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


# Markdown.


def escape(text: str) -> str:
    """Text in one line that is no markup, neither Markdown's nor HTML's, and ends no cell."""
    flat = "".join(c if c.isprintable() else " " for c in text)
    # Within a word an underscore is none, and names should stay legible in the source.
    markup = r"[\\`*{}\[\]<>#!|~&$@:]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
    return re.sub(markup, lambda match: f"&#{ord(match[0])};", " ".join(flat.split()))


def code(text: str) -> str:
    """Text as code, which ends no cell either."""
    return f"<code>{escape(text)}</code>"


def block(text: str) -> str:
    """A block of commands, fenced by more backticks than are in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}shell\n{text}\n{fence}\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """A table of cells that are escaped already; columns of `numbers` are set to the right."""
    right = set(numbers)
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))
