"""Commands that show a finished output to others: `card` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.commands.options import Json, Quiet, open_console
from halfbyte.errors import OutputError, UsageError

EvalOption = Annotated[
    Path | None,
    typer.Option("--eval", help="Evaluation of DIR by `eval -o`, with --text and --baseline."),
]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The finished output of a run.")]
GateOption = Annotated[
    Path | None,
    typer.Option("--gate", help="Verdict of `gate -o`. [default: gate.json in DIR, if there]"),
]


def card(folder: Folder, gate: GateOption = None, json: Json = False, quiet: Quiet = False) -> None:
    """Write the model card, README.md, from what a run left in its folder."""
    from halfbyte.report.card import write_card
    from halfbyte.report.output import read_output

    console = open_console(json, quiet)
    path = write_card(folder, read_output(folder, gate))
    console.line(f"{path} written")
    console.result({"card": str(path)}, quiet=str(path))


def report(
    folder: Folder,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="File to write. [default: halfbyte_report.html in DIR]"
        ),
    ] = None,
    evaluation: EvalOption = None,
    gate: GateOption = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page with all that is known of a run: sizes, errors, divergence, verdict.

    The page needs no network and no server.
    """
    from halfbyte.evals.report import EvalReport, require_evaluation_of
    from halfbyte.formats.files import write_atomic
    from halfbyte.formats.folder import PAGE_FILE
    from halfbyte.report.output import read_output
    from halfbyte.report.page import page

    console = open_console(json, quiet)
    path = folder / PAGE_FILE if output is None else output
    if path.is_dir():
        raise UsageError(f"-o {path} is a folder", hint="name a file: -o report.html")
    measured = None if evaluation is None else EvalReport.read(evaluation)
    found = read_output(folder, gate)
    if measured is not None:
        require_evaluation_of(folder, measured)
    made = page(found, measured)
    try:
        write_atomic(path, made.encode())
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror}", hint="name another file with -o FILE"
        ) from error
    console.line(f"{path} written")
    console.result({"page": str(path)}, quiet=str(path))
