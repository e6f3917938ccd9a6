"""Commands that only look: `inspect`, `verify`, `models`, `env`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.commands.options import Json, Quiet, Source, open_console
from halfbyte.console import EXIT_FAILURE


def inspect(source: Source, json: Json = False, quiet: Quiet = False) -> None:
    """Summarize a checkpoint by dtype and tensor name."""
    from halfbyte.commands import tables
    from halfbyte.formats.source import open_source

    console = open_console(json, quiet)
    record = tables.checkpoint_record(open_source(source))
    for line in tables.checkpoint_summary(record):
        console.line(line)
    for table in tables.checkpoint_tables(record):
        console.line()
        console.table(table)
    console.result(record)


def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A quantized checkpoint.")],
    source: Annotated[
        Path | None, typer.Option("--source", help="Also compare its weights with this checkpoint.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a quantized checkpoint holds what it should. Exit 1 if anything is off."""
    from halfbyte.commands import tables
    from halfbyte.quantize.verify import verify as run_verify

    console = open_console(json, quiet)
    with console.working():
        result = run_verify(folder, source)
    for note in result.notes:
        console.warning(note)
    for line in tables.verify_lines(result):
        console.line(line)
    console.result(tables.verify_record(folder, result))
    if result.mismatches:
        raise typer.Exit(EXIT_FAILURE)


def models(json: Json = False) -> None:
    """List the names that SOURCE may be."""
    from halfbyte.commands import tables
    from halfbyte.models import MODELS

    console = open_console(json)
    console.table(tables.models_table(MODELS))
    console.result(tables.models_record(MODELS))


def environment(json: Json = False) -> None:
    """Show versions and devices, for bug reports."""
    from halfbyte.commands import tables
    from halfbyte.commands.environment import environment_record

    console = open_console(json)
    with console.working():
        record = environment_record()
    console.table(tables.environment_table(record))
    console.result(record)
