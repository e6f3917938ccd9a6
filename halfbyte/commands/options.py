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
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Checkpoint folder, ORG/NAME or ORG/NAME@REVISION of the Hugging Face Hub, or a name"
        " of `quantize models`.",
    ),
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
Refine = Annotated[
    int,
    typer.Option(
        "--refine", min=0, max=100, help="Sweeps over codes and scales after GPTQ; 0 for none."
    ),
]
RowFeedback = Annotated[
    bool,
    typer.Option(
        "--row-feedback/--no-row-feedback",
        help="Whether rows of down projections make up for each other, by what moves the logits.",
    ),
]
ExpertHessianName = Annotated[
    Literal["routed", "blend", "all"],
    typer.Option(
        "--expert-hessian",
        help="What an expert is calibrated on: the tokens routed to it, all of the layer's, or a"
        " blend of both.",
    ),
]
Affinity = Annotated[
    bool,
    typer.Option("--affinity", help="Count an expert's tokens by the square of their weight."),
]
ScaleSearchName = Annotated[
    Literal["minmax", "mse"],
    typer.Option(
        "--scale-search",
        help="minmax: a group's scale by its largest weight; mse: by the least error of rounding.",
    ),
]
SignedScales = Annotated[
    bool,
    typer.Option(
        "--signed-scales/--positive-scales",
        help="Whether scales may be negative, which lets all groups use the code -8.",
    ),
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


def _parse_size(value: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)?", value.strip(), flags=re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{value!r} is not a size; write 24GiB, 80GB or bytes")
    unit = (match[2] or "").upper()
    step = 1024 if "I" in unit else 1000
    return int(float(match[1]) * step ** "KMGT".index(unit[0]) * step if unit else float(match[1]))


MaxGpuMemory = Annotated[
    int | None,
    typer.Option(
        "--max-gpu-memory",
        metavar="SIZE",
        parser=_parse_size,
        help="Keep GPU memory below this, as 24GiB: fewer experts at once, hidden states in host"
        " memory or on the disk.",
    ),
]
MaxHostMemory = Annotated[
    int | None,
    typer.Option(
        "--max-host-memory",
        metavar="SIZE",
        parser=_parse_size,
        help="The same for the host: hidden states on the disk, in the output folder.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing but the result's path.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print details and log messages.")]


def open_console(json: bool, quiet: bool = False, verbose: bool = False) -> Console:
    return Console("json" if json else "quiet" if quiet else "human", verbose=verbose)
