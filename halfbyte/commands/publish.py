"""Commands that show a finished output to others: `card` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.commands.options import Json, Quiet, open_console

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
