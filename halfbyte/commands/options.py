"""The options that several commands share, and the console they ask for."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import typer

from halfbyte.console import Console


def _check_device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value):
        raise typer.BadParameter(f"{value!r} is not auto, cpu, cuda or cuda:<n>")
    return value


Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="Checkpoint folder, or a name of `quantize models`.")
]
RecipeName = Annotated[
    str | None,
    typer.Option("--recipe", help="Built-in recipe or YAML file. [default: by model type]"),
]
MethodName = Annotated[
    Literal["gptq", "awq", "awq+gptq", "rtn"],
    typer.Option(
        "--method",
        help="gptq makes up for rounding errors, awq scales inputs before rounding; both are"
        " calibrated on text. rtn needs no data.",
    ),
]
EngineName = Annotated[
    Literal["halfbyte", "llmcompressor"],
    typer.Option("--engine", help="Whose GPTQ solves each linear."),
]
GroupSizeName = Literal["32", "64", "128", "channel"]
GroupSize = Annotated[
    GroupSizeName | None,
    typer.Option("--group-size", help="Columns that share a scale. [default: the recipe's]"),
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Calibration windows.")]
SequenceLength = Annotated[
    int, typer.Option("--sequence-length", min=1, help="Tokens of each window.")
]
Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="auto|cpu|cuda[:N]", callback=_check_device, help="Where to compute."
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option("--dtype", help="Of activations. auto: bfloat16 on a GPU, float32 on a CPU."),
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**63 - 1, help="Chooses the calibration windows.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing but the result's path.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print details and log messages.")]


def open_console(json: bool, quiet: bool = False, verbose: bool = False) -> Console:
    return Console("json" if json else "quiet" if quiet else "human", verbose=verbose)
