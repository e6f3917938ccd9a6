"""Sections on layers and experts: errors, coverage by tokens, scales and outliers."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from halfbyte.core import LinearReport, Rung, ScaledInput
from halfbyte.report.axis import short
from halfbyte.report.card import RUNGS
from halfbyte.report.charts import Cells, Line, heat_map, line_plot, lines_key, stacked_bars
from halfbyte.report.html import (
    ROWS_SHOWN,
    Html,
    details,
    element,
    missing,
    percent,
    section,
    table,
)
from halfbyte.report.linears import (
    by_kind,
    counted,
    expert_tokens,
    kind_summaries,
    median,
    place_of,
)
from halfbyte.report.output import Output

BAND = "least to most"
LADDER: tuple[Rung, ...] = ("routed", "blended", "all-tokens", "weights-only")


def errors(output: Output) -> Html:
    """Of each expert as a map, of each layer as lines, of each kind of linear as a table."""
    report = output.report
    if not report.linears:
        return section("Error", "Nothing was quantized.")
    measured = (
        "Squared error of a linear's output as a share of the output's square, on calibration"
        " tokens that were held out."
        if report.settings.method != "rtn"
        else "Squared error of a linear's weight as a share of its square."
    )
    grid = _Grid.of(report.linears)
    parts: list[str] = []
    if grid.experts:
        parts.append(heat_map("error", grid.error_cells(), "mean error of an expert's linears"))
    kinds = by_kind(report.linears)
    plots = [_error_plot(kind, members, report.settings.method) for kind, members in kinds.items()]
    styles = {"main": "median of a layer", "other": "median by rounding alone", "band": BAND}
    if report.settings.method == "rtn":
        del styles["other"]
    parts.append(lines_key(**styles))
    parts.append(element("div", *plots, class_="plots"))
    rows = [
        [
            kind.kind,
            f"{kind.count:,}",
            short(kind.median),
            short(kind.rounding),
            short(kind.worst),
            element("code", kind.worst_name),
            f"{kind.fallbacks:,}",
        ]
        for kind in kind_summaries(report.linears)[:ROWS_SHOWN]
    ]
    head = ["linear", "count", "median", "by rounding", "worst", "where", "fell back"]
    parts.append(
        table("Error by kind of linear", head, rows, numbers=(1, 2, 3, 4, 6), spare=(1, 5, 6))
    )
    fell = [linear for linear in report.linears if linear.fallback is not None]
    if fell:
        reasons = counted(linear.fallback or "" for linear in fell)
        listed = "; ".join(f"{count:,} to {what}" for what, count in reasons.items())
        parts.append(element("p", f"Fell back from the method asked for: {listed}."))
    parts.append(details("Error of each layer", _layer_table(report.linears)))
    worst = sorted(report.linears, key=lambda linear: -linear.error)[:20]
    parts.append(details("The 20 linears with the largest error", _linear_table(worst)))
    if fell:
        parts.append(details(f"Linears that fell back: {len(fell):,}", _linear_table(fell)))
    return section("Error", measured, *parts)


def _error_plot(kind: str, members: Sequence[LinearReport], method: str) -> Html:
    layers, groups = _by_layer(members)
    errors = [[linear.error for linear in group] for group in groups]
    lines = [Line("median", [median(group) for group in errors], "main")]
    if method != "rtn":
        rounding = [median([linear.rtn_error for linear in group]) for group in groups]
        lines.append(Line("by rounding alone", rounding, "other"))
    band = [min(group) for group in errors], [max(group) for group in errors]
    return line_plot(f"{kind}, by layer", layers, lines, band)


def _by_layer(linears: Iterable[LinearReport]) -> tuple[list[str], list[list[LinearReport]]]:
    """Linears by layer, layers in order; those outside of any come last."""
    layers: dict[int | None, list[LinearReport]] = {}
    for linear in linears:
        layers.setdefault(place_of(linear.name).layer, []).append(linear)
    order = sorted(layers, key=lambda layer: (layer is None, layer))
    return ["-" if n is None else str(n) for n in order], [layers[n] for n in order]


def _layer_table(linears: Sequence[LinearReport]) -> Html:
    layers, groups = _by_layer(linears)
    rows = [
        [
            layer,
            f"{len(group):,}",
            short(median([linear.error for linear in group])),
            short(median([linear.rtn_error for linear in group])),
            short(max(linear.error for linear in group)),
            f"{sum(linear.fallback is not None for linear in group):,}",
        ]
        for layer, group in zip(layers, groups, strict=True)
    ]
    head = ["layer", "linears", "median", "by rounding", "worst", "fell back"]
    return table("Error by layer", head, rows[:ROWS_SHOWN], numbers=range(1, 6))


def _linear_table(linears: Sequence[LinearReport]) -> Html:
    rows = [
        [
            element("code", linear.name),
            short(linear.error),
            short(linear.rtn_error),
            f"{linear.tokens:,}",
            linear.rung,
            linear.fallback or "",
        ]
        for linear in linears[:ROWS_SHOWN]
    ]
    head = ["linear", "error", "by rounding", "tokens", "calibrated on", "fell back to"]
    return table("Linears", head, rows, numbers=(1, 2, 3), spare=(2, 4))


@dataclass(frozen=True)
class _Grid:
    """Routed experts by layer and number."""

    layers: list[int]
    experts: int
    """Columns: the largest number of an expert and one."""
    linears: dict[tuple[int, int], list[LinearReport]]

    @classmethod
    def of(cls, linears: Iterable[LinearReport]) -> _Grid:
        found: dict[tuple[int, int], list[LinearReport]] = {}
        for linear in linears:
            place = place_of(linear.name)
            if place.layer is not None and place.expert is not None:
                found.setdefault((place.layer, place.expert), []).append(linear)
        layers = sorted({layer for layer, _ in found})
        # Names are not trusted: a number far out must not make a map of a million columns.
        experts = max((expert for _, expert in found), default=-1) + 1
        return cls(layers, experts if experts * len(layers) <= 1 << 18 else 0, found)

    def rows(self) -> list[list[list[LinearReport]]]:
        """The linears of each expert of each layer; none for an expert that is not there."""
        return [
            [self.linears.get((layer, expert), []) for expert in range(self.experts)]
            for layer in self.layers
        ]

    def error_cells(self) -> Cells:
        rows = self.rows()
        leaves = sorted({_leaf(linear) for group in self.linears.values() for linear in group})
        hints: dict[str, list[list[float | str | None]]] = {
            f"{leaf} error": [
                [next((_three(n.error) for n in cell if _leaf(n) == leaf), None) for cell in row]
                for row in rows
            ]
            for leaf in leaves
        }
        means = [
            [_three(sum(n.error for n in cell) / len(cell)) if cell else None for cell in row]
            for row in rows
        ]
        return Cells(self._names(), self.experts, means, {"mean error": means, **hints})

    def token_cells(self, tokens: dict[tuple[int, int], int]) -> Cells:
        counts = [[tokens.get((n, e)) for e in range(self.experts)] for n in self.layers]
        rungs = [
            [", ".join(sorted({n.rung for n in cell})) or None for cell in row]
            for row in self.rows()
        ]
        return Cells(
            self._names(), self.experts, counts, {"tokens": counts, "calibrated on": rungs}
        )

    def _names(self) -> list[str]:
        return [str(layer) for layer in self.layers]


def _leaf(linear: LinearReport) -> str:
    return linear.name.rpartition(".")[2]


def _three(value: float) -> float:
    """Three digits: what a tooltip shows, and no more than the page should hold."""
    return float(f"{value:.3g}")


def coverage(output: Output) -> Html:
    """How many tokens reached each expert, and what linears were calibrated on therefore."""
    report = output.report
    if report.settings.method == "rtn":
        name = shlex.quote(report.origin.name)
        return missing(
            "Coverage",
            "Weights were rounded without data, so no tokens reached them.",
            f"quantize {name} --to int4 --calibration text.jsonl",
        )
    settings = report.settings
    lead = (
        f"Calibrated on {settings.samples:,} windows of {settings.sequence_length:,} tokens,"
        f" {settings.samples * settings.sequence_length:,} in all."
    )
    tokens, grid = expert_tokens(report.linears), _Grid.of(report.linears)
    parts: list[str] = []
    if grid.experts:
        counts = sorted(tokens.values())
        lead += (
            f" Of {len(counts):,} routed experts the least used saw {counts[0]:,}, the median"
            f" {median(counts):,}, the most used {counts[-1]:,};"
            f" {sum(not count for count in counts):,} saw none."
        )
        cells = grid.token_cells(tokens)
        parts.append(heat_map("tokens", cells, "tokens that the router sent to an expert"))
    layers, groups = _by_layer(report.linears)
    rungs: dict[str, list[float]] = {
        rung: [float(sum(n.rung == rung for n in group)) for group in groups]
        for rung in LADDER
        if any(n.rung == rung for n in report.linears)
    }
    if len(rungs) > 1:
        bars = stacked_bars("Linears by rung of the ladder", layers, rungs, lambda v: f"{v:,.0f}")
        parts.append(element("div", bars, class_="wide"))
    found = counted(linear.rung for linear in report.linears)
    rows = [
        [rung, RUNGS.get(rung, rung), f"{count:,}", percent(count, len(report.linears))]
        for rung, count in found.items()
    ]
    head = ["rung", "calibrated", "linears", "share"]
    parts.append(table("What linears are calibrated on", head, rows, numbers=(2, 3)))
    if tokens:
        parts.append(details("Tokens of each layer's experts", _token_table(tokens)))
    return section("Coverage", lead, *parts)


def _token_table(tokens: dict[tuple[int, int], int]) -> Html:
    rows = []
    for layer in sorted({layer for layer, _ in tokens})[:ROWS_SHOWN]:
        counts = [count for (of, _), count in tokens.items() if of == layer]
        sizes = [min(counts), median(counts), max(counts), sum(not count for count in counts)]
        rows.append([str(layer), f"{len(counts):,}", *(f"{size:,}" for size in sizes)])
    head = ["layer", "experts", "fewest", "median", "most", "without any"]
    return table("Tokens by layer", head, rows, numbers=range(1, 6))


def scales(output: Output) -> Html:
    """Sizes of scales and of outliers, by kind of linear and layer, and what AWQ scaled."""
    linears = output.report.linears
    if not linears:
        return section("Scales and outliers", "Nothing was quantized.")
    sizes, peaks = [], []
    for kind, members in by_kind(linears).items():
        layers, groups = _by_layer(members)
        means = [median([n.mean_scale for n in group]) for group in groups]
        ends = (
            [min(n.smallest_scale for n in group) for group in groups],
            [max(n.largest_scale for n in group) for group in groups],
        )
        sizes.append(line_plot(kind, layers, [Line("median of means", means, "main")], ends))
        found = [[n.peak for n in group] for group in groups]
        middle = Line("median", [median(group) for group in found], "main")
        ends = [min(group) for group in found], [max(group) for group in found]
        peaks.append(line_plot(kind, layers, [middle], ends))
    rows = [
        [
            kind,
            short(min(n.smallest_scale for n in members)),
            short(median([n.mean_scale for n in members])),
            short(max(n.largest_scale for n in members)),
            short(median([n.peak for n in members])),
            short(max(n.peak for n in members)),
        ]
        for kind, members in list(by_kind(linears).items())[:ROWS_SHOWN]
    ]
    head = ["linear", "smallest scale", "median of means", "largest", "median peak", "largest peak"]
    scaled = [_scaled_inputs(output.report.scaled)] if output.report.scaled else []
    return section(
        "Scales and outliers",
        "Sizes of the groups' scales, and how far the largest weight of a linear stands out from"
        " their root mean square (RMS).",
        lines_key(main="median of a layer", band=BAND),
        element("h3", "Scales by layer"),
        element("div", *sizes, class_="plots"),
        element("h3", "Largest weight over RMS, by layer"),
        element("div", *peaks, class_="plots"),
        table("Scales by kind of linear", head, rows, numbers=range(1, 6), spare=(2, 4)),
        *scaled,
    )


def _scaled_inputs(inputs: Sequence[ScaledInput]) -> Html:
    """What AWQ did to the inputs of linears, by what makes them."""
    kinds: dict[str, list[ScaledInput]] = {}
    for one in inputs:
        kinds.setdefault(one.name.rpartition(".")[2], []).append(one)
    rows = []
    for kind, members in list(kinds.items())[:ROWS_SHOWN]:
        changed = [one for one in members if one.exponent is not None]
        exponents = [one.exponent for one in changed if one.exponent is not None]
        rows.append(
            [
                kind,
                f"{len(members):,}",
                f"{len(changed):,}",
                short(median(exponents)) if changed else "-",
                short(median([one.gain for one in changed])) if changed else "-",
                short(min(one.smallest for one in members)),
                short(max(one.largest for one in members)),
            ]
        )
    head = ["made by", "inputs", "scaled", "median exponent", "error left", "smallest", "largest"]
    return table("Inputs that AWQ scaled", head, rows, numbers=range(1, 7), spare=(3, 5, 6))
