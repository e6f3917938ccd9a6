"""The page of a run: everything that its folder and its evaluations tell, in one HTML file.

The page asks nothing of the network and runs from a disk. Each section is a pure function of what
is known; one without data says which command gives it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources

from halfbyte.core import LinearReport
from halfbyte.evals.report import EvalReport
from halfbyte.report import commands
from halfbyte.report.axis import short
from halfbyte.report.card import METHODS, points
from halfbyte.report.charts import share_bar
from halfbyte.report.html import (
    ROWS_SHOWN,
    Html,
    details,
    element,
    joined,
    percent,
    section,
    table,
)
from halfbyte.report.layers import coverage, errors, scales
from halfbyte.report.linears import median
from halfbyte.report.output import Gate, Output
from halfbyte.report.quality import accuracy, divergence
from halfbyte.report.timing import run
from halfbyte.units import format_bytes, format_gib


def page(output: Output, evaluation: EvalReport | None = None) -> str:
    """The whole page. `evaluation` is of this output, with a text's divergence if there is one."""
    script, style = _asset("page.js"), _asset("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:;"
        f" script-src 'sha256-{digest}'"
    )
    sections = (
        _header(output),
        _headlines(output, evaluation),
        _sizes(output),
        accuracy(output),
        divergence(output, evaluation),
        errors(output),
        coverage(output),
        scales(output),
        run(output),
        _making(output),
    )
    head = element(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        Html('<link rel="icon" href="data:,">'),
        element("title", f"{output.name}: halfbyte report"),
        element("style", Html(style)),
    )
    body = element(
        "body",
        element("main", *sections),
        element("div", id="hint", role="status", hidden="hidden"),
        element("script", Html(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _asset(name: str) -> str:
    return (resources.files("halfbyte") / "report" / name).read_text(encoding="utf-8")


def _header(output: Output) -> Html:
    report, origin = output.report, output.report.origin
    source: str = origin.repo or origin.name
    if origin.repo is not None:
        source = element("a", origin.repo, href=f"https://huggingface.co/{origin.repo}")
    facts = [
        joined(["from ", source]),
        *([f"revision {origin.revision[:12]}"] if origin.revision else []),
        f"recipe {report.recipe['name']}",
        METHODS.get(report.settings.method, report.settings.method),
        f"halfbyte {report.versions.get('halfbyte', '')}",
    ]
    return element(
        "header",
        element("h1", output.name),
        element("p", *(element("span", fact) for fact in facts), class_="facts"),
    )


# Headlines.


def _headlines(output: Output, evaluation: EvalReport | None) -> Html:
    report, gpus = output.report, output.parallel()
    before, after = output.per_gpu(gpus)
    size = f"{format_gib(before)} → {format_gib(after)} on each of {gpus} GPUs" if gpus > 1 else ""
    tiles = [
        _tile(
            "Size",
            f"{_tied(format_bytes(report.bytes_in))} → {_tied(format_bytes(report.bytes_out))}",
            f"{percent(report.bytes_out, report.bytes_in)} of the source",
            size,
        ),
        _divergence_tile(evaluation),
        _gate_tile(output.gate),
        _linears_tile(report.linears, report.settings.method),
    ]
    return element("section", *tiles, class_="tiles", aria_label="Headlines")


def _tied(figure: str) -> str:
    """A number and its unit, on one line."""
    return figure.replace(" ", "\N{NO-BREAK SPACE}")


def _tile(label: str, figure: str, *notes: str, style: str | None = None) -> Html:
    return element(
        "div",
        element("h3", label),
        element("p", figure, class_=f"figure {style}" if style else "figure"),
        *(element("p", note) for note in notes if note),
        class_="tile",
    )


def _divergence_tile(evaluation: EvalReport | None) -> Html:
    text = evaluation.text if evaluation is not None else None
    if text is None or text.divergence is None:
        notes = [f"perplexity {text.perplexity:.4f}"] if text is not None else []
        return _tile("KL divergence", "not measured", *notes, style="none")
    found = text.divergence
    return _tile(
        "KL divergence from the source",
        f"{found.mean_kl:.5f} nats",
        f"99 % of tokens below {found.p99_kl:.4f}",
        f"top-1 agreement {100 * found.top1_agreement:.2f} %, perplexity {text.perplexity:.4f}",
    )


def _gate_tile(gate: Gate | None) -> Html:
    if gate is None:
        return _tile("Accuracy gate", "not judged", style="none")
    notes = [f"policy {gate.policy}"]
    if gate.mean is not None:
        notes.insert(0, f"mean change {points(gate.mean)} points")
    style = gate.verdict if gate.verdict in ("pass", "fail") else "doubt"
    return _tile("Accuracy gate", gate.verdict, *notes, style=style)


def _linears_tile(linears: Sequence[LinearReport], method: str) -> Html:
    if not linears:
        return _tile("INT4 linears", "none", style="none")
    fell = sum(linear.fallback is not None for linear in linears)
    error, rounding = (
        median([getattr(linear, name) for linear in linears]) for name in ("error", "rtn_error")
    )
    notes = [f"median error {short(error)}"]
    if method != "rtn":
        notes = [f"median error {short(error)}, by rounding alone {short(rounding)}"]
        notes.append(f"{fell:,} fell back ({percent(fell, len(linears))})")
    return _tile("INT4 linears", f"{len(linears):,}", *notes)


# Sections.


def _sizes(output: Output) -> Html:
    rules = output.report.rules
    whole = sum(rule.bytes_out for rule in rules) or 1
    bars = []
    for side, total in (("source", "bytes_in"), ("INT4", "bytes_out")):
        largest = max(output.report.bytes_in, output.report.bytes_out, 1)
        parts = [
            (f"{side}: {_stored(rule.action, rule.scheme)}, {rule.reason}",
             getattr(rule, total) / largest, "c0" if rule.action == "quantize" else f"k{i % 3}")
            for i, rule in enumerate(rules) if getattr(rule, total)
        ]  # fmt: skip
        bars.append(element("div", element("span", side, class_="name"), share_bar(parts)))
    rows = [
        [
            _stored(rule.action, rule.scheme),
            rule.reason,
            f"{rule.tensors:,}",
            format_bytes(rule.bytes_in),
            format_bytes(rule.bytes_out),
            percent(rule.bytes_out, whole),
        ]
        for rule in rules[:ROWS_SHOWN]
    ]
    all_rules = [
        "total", "", f"{sum(rule.tensors for rule in rules):,}",
        format_bytes(output.report.bytes_in), format_bytes(output.report.bytes_out), "100.0 %",
    ]  # fmt: skip
    return section(
        "Size",
        "What each rule of the recipe made of the weights it matched.",
        element("div", *bars, class_="bars"),
        element(
            "p",
            element("span", element("span", class_="box c0"), "INT4", class_="key"),
            element("span", element("span", class_="box k0"), "the rest, by rule", class_="key"),
            class_="legend",
        ),
        table(
            "Tensors and bytes by rule",
            ["stored as", "why", "tensors", "before", "after", "share"],
            [*rows, all_rules],
            numbers=(2, 3, 4, 5),
            spare=(1, 2),
        ),
    )


def _stored(action: str, scheme: str | None) -> str:
    kept = {"dequantize": "BF16", "copy": "unchanged", "drop": "left out"}
    return scheme or kept.get(action, action)


def _making(output: Output) -> Html:
    report = output.report
    lines = [commands.download_command(report), commands.quantize_command(report, output.name)]
    serve = [commands.vllm_command(output), commands.sglang_command(output)]
    settings = [[key, str(value)] for key, value in asdict(report.settings).items()]
    versions = [[name, version] for name, version in sorted(report.versions.items())]
    shards = [[name, element("code", digest)] for name, digest in report.shards.items()]
    parts: list[str] = [
        element("h3", "Make it again"),
        element("pre", element("code", "\n".join(line for line in lines if line))),
        element("h3", "Serve it"),
        element("pre", element("code", "\n".join(serve))),
    ]
    if report.warnings:
        parts.append(element("h3", "What the plan warned of"))
        parts.append(element("ul", *(element("li", warning) for warning in report.warnings)))
    parts += [
        details("Settings", table("Settings", ["setting", "value"], settings)),
        details("Versions", table("Versions", ["package", "version"], versions)),
        details(
            f"Shards: {len(shards):,}",
            table("Shards", ["file", "SHA-256"], shards[:ROWS_SHOWN]),
        ),
        element("p", f"Plan {report.fingerprint}, source {report.source}.", class_="note hash"),
    ]
    return section("Making and serving", None, *parts)
