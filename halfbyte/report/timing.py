"""The section on the run itself: time by unit and phase, and memory against the plan."""

from __future__ import annotations

from halfbyte.report import commands
from halfbyte.report.axis import short
from halfbyte.report.charts import Line, line_plot, lines_key, stacked_bars
from halfbyte.report.html import Html, details, element, missing, percent, section, table
from halfbyte.report.output import Output, RunTimes
from halfbyte.units import format_gib, format_seconds

PHASES_SHOWN = 5
"""Phases that have a colour of their own; the rest is one more."""


def run(output: Output) -> Html:
    """What the run took, and what its plan foretold."""
    times = output.times
    if times is None:
        return missing(
            "Run",
            "What the run took is not in this folder; the command line stores it there.",
            commands.quantize_command(output.report, output.name),
        )
    planned = times.planned
    together = f" in {planned.ranks} processes" if planned.ranks > 1 else ""
    lead = (
        f"{format_seconds(times.seconds)} from its last start{together};"
        f" {format_seconds(planned.seconds)} were planned."
    )
    return section(
        "Run",
        lead,
        element("div", _time_by_unit(times), class_="wide"),
        lines_key(main="measured", other="planned"),
        element("div", *_memory(times), class_="plots"),
        _against_plan(times),
        *_phases(times),
    )


def _units(times: RunTimes) -> list[str]:
    """Short names: the numbers of layers."""
    return [u.unit.removeprefix("layers.").replace("embedding", "embed") for u in times.units]


def _time_by_unit(times: RunTimes) -> Html:
    longest = [name for name in times.phases() if name != "other"][:PHASES_SHOWN]
    series = {name: [unit.phases.get(name, 0.0) for unit in times.units] for name in longest}
    rest = [
        max(0.0, unit.seconds - sum(values[i] for values in series.values()))
        for i, unit in enumerate(times.units)
    ]
    series["other" if series else "all phases"] = rest
    return stacked_bars(
        "Seconds of each unit", _units(times), series, lambda seconds: f"{short(seconds)} s"
    )


def _memory(times: RunTimes) -> list[Html]:
    """A plot for each kind of memory that was used."""
    kinds = (
        ("host", [unit.host / 2**30 for unit in times.units], times.planned.host / 2**30),
        ("GPU", [unit.gpu / 2**30 for unit in times.units], times.planned.gpu / 2**30),
    )
    return [
        line_plot(
            f"Peak {name} memory so far",
            _units(times),
            [Line("measured", measured, "main"), Line("planned", [peak] * len(measured), "other")],
            from_zero=lambda size: f"{short(size)} GiB",
        )
        for name, measured, peak in kinds
        if any(measured)
    ]


def _against_plan(times: RunTimes) -> Html:
    planned, spent = times.planned, sum(unit.seconds for unit in times.units)
    rows = [_memory_row("host", planned.host, times.host)]
    if planned.gpu or times.gpu:
        rows.append(_memory_row("GPU", planned.gpu, times.gpu))
    share = percent(spent, planned.seconds)
    rows.append(
        ["time of all units", format_seconds(planned.seconds), format_seconds(spent), share]
    )
    head = ["", "planned", "measured", "of it"]
    return table("Planned and measured", head, rows, numbers=(1, 2, 3))


def _memory_row(name: str, planned: int, measured: int) -> list[str]:
    share = percent(measured, planned)
    return [f"{name} memory, peak", format_gib(planned), format_gib(measured), share]


def _phases(times: RunTimes) -> list[Html]:
    phases = times.phases()
    if not phases:
        return []
    total = sum(phases.values())
    rows = [[n, format_seconds(seconds), percent(seconds, total)] for n, seconds in phases.items()]
    return [
        details("Phases", table("Time by phase", ["phase", "time", "share"], rows, numbers=(1, 2)))
    ]
