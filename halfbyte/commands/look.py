"""Commands that only look: `inspect`, `verify`, `models`, `env`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.commands.options import Device, Json, Quiet, Source, open_console
from halfbyte.console import EXIT_FAILURE
from halfbyte.errors import UsageError

if TYPE_CHECKING:
    from halfbyte.quantize.kernel_check import KernelRequest

SAMPLES, SEQUENCE_LENGTH = 8, 512
"""Windows of text that `verify --kernels` runs through a checkpoint, if not told."""


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
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="Also put every INT4 linear through the kernels, and compare with float64.",
        ),
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            help="Text whose activations --kernels takes: .jsonl with a `text` each, or .txt."
            " Without it normal numbers.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", metavar="LIST", help="Layers for --kernels, as 3,40-42."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, help=f"Windows of the text. [default: {SAMPLES}]"),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            "--sequence-length", min=1, help=f"Tokens of each. [default: {SEQUENCE_LENGTH}]"
        ),
    ] = None,
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a quantized checkpoint holds what it should. Exit 1 if anything is off."""
    from halfbyte.commands import tables
    from halfbyte.quantize.verify import verify as run_verify

    console = open_console(json, quiet)
    given = {"--calibration": calibration, "--layers": layers, "--samples": samples}
    given |= {"--sequence-length": sequence_length}
    if unused := [name for name, value in given.items() if value is not None and not kernels]:
        raise UsageError(f"{unused[0]} is for --kernels", hint="add --kernels")
    with console.working() as progress:
        request = None
        if kernels:
            request = _kernel_request(folder, calibration, layers, samples, sequence_length, device)
        result = run_verify(folder, source, kernels=request, progress=progress)
    for note in result.notes:
        console.warning(note)
    if result.kernels is not None:
        for line in tables.kernel_lines(result.kernels):
            console.line(line)
        console.table(tables.kernel_table(result.kernels))
        console.line()
    for line in tables.verify_lines(result):
        console.line(line)
    console.result(tables.verify_record(folder, result))
    if result.mismatches:
        raise typer.Exit(EXIT_FAILURE)


def _kernel_request(
    folder: Path,
    calibration: Path | None,
    layers: str | None,
    samples: int | None,
    sequence_length: int | None,
    device: str,
) -> KernelRequest:
    from halfbyte.calibration.data import token_windows
    from halfbyte.devices import resolve_device
    from halfbyte.quantize.kernel_check import KernelRequest

    if calibration is None and (samples or sequence_length):
        raise UsageError(
            "--samples and --sequence-length are of the text", hint="add --calibration text.jsonl"
        )
    chosen = None if layers is None else parse_layers(layers)
    tokens = None
    if calibration is not None:
        length = sequence_length or SEQUENCE_LENGTH
        tokens = token_windows(calibration, folder, samples or SAMPLES, length, seed=0)
    return KernelRequest(resolve_device(device), tokens, chosen)


def parse_layers(text: str) -> frozenset[int]:
    """`3,40-42` to the numbers in it. Raises UsageError for what is no such list."""
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(f"--layers {text}: {part!r} is no layer", hint="write 3,40-42")
        layers.update(range(first, last + 1))
    return frozenset(layers)


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
