"""`quantize capacity`: how many tokens of KV cache fit beside the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halfbyte.commands.options import Json, RecipeName, open_console
from halfbyte.console import EXIT_FAILURE
from halfbyte.errors import OutputError, RecipeError, UsageError

if TYPE_CHECKING:
    from halfbyte.commands.capacity_tables import Answer
    from halfbyte.console import Console
    from halfbyte.core import Checkpoint
    from halfbyte.kvcache.sizes import Format, Weights

GPUS = 8
"""Of a server, if not told."""


def capacity(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG_OR_DIR",
            help="A config.json, or a checkpoint: folder, ORG/NAME of the Hugging Face Hub, or a"
            " name of `quantize models`.",
        ),
    ],
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            min=1,
            max=1024,
            help="GPUs of a server. [default: 8, or fewer if 8 cannot share the heads]",
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            "--gpu",
            metavar="NAME|SIZE",
            help="h100, h200 or b200, or the memory that CUDA reports, as 139.8GiB.",
        ),
    ] = "h200",
    kv: Annotated[
        Literal["bf16", "fp8", "fp8-raw"] | None,
        typer.Option("--kv", help="Format of the KV cache. [default: bf16 and fp8]"),
    ] = None,
    weights: Annotated[
        Literal["int4", "fp8", "bf16"] | None,
        typer.Option("--weights", help="Format of the weights. [default: all three]"),
    ] = None,
    recipe: RecipeName = None,
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            "--memory-fraction",
            min=0.01,
            max=1.0,
            help="Share of free memory for weights and cache, as SGLang's --mem-fraction-static."
            " [default: 0.835]",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", min=1, help="Tokens of a request. [default: 32768, or the model's]"
        ),
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option(
            "--page-size",
            min=1,
            max=65_536,
            help="Tokens of a page. [default: 64 with latent attention, else 16]",
        ),
    ] = None,
    dp_attention: Annotated[
        bool,
        typer.Option("--dp-attention", help="Every GPU attends to requests of its own."),
    ] = False,
    mtp: Annotated[
        bool, typer.Option("--mtp/--no-mtp", help="Whether the MTP layer is served.")
    ] = True,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Also draw the tokens.")
    ] = None,
    json: Json = False,
) -> None:
    """Predict how many tokens of KV cache fit beside the weights.

    From config.json and headers alone; every assumption is printed. Exit 1 if the weights fit in
    no format shown.
    """
    from halfbyte.commands import capacity_tables as tables
    from halfbyte.kvcache import planner
    from halfbyte.kvcache.layout import read_attention
    from halfbyte.kvcache.sizes import FORMATS

    console = open_console(json)
    fraction = planner.FRACTION if memory_fraction is None else memory_fraction
    kind = planner.find_gpu(gpu)
    model = _open(source)
    forms: tuple[Format, ...] = (weights,) if weights else FORMATS
    if recipe is not None:
        _require_plan(model, forms)
    attention = read_attention(model.config)
    count = gpus or (GPUS if dp_attention else math.gcd(GPUS, attention.query_heads))
    node = planner.Node(kind, count, fraction, dp_attention)
    tokens = _context(context, attention.context)
    page = page_size or planner.default_page(attention)
    layers = None if mtp else attention.layers
    found = _weights(console, model, forms, recipe, layers)
    answer = tables.Answer(
        source=source if model.checkpoint is None else model.checkpoint.origin,
        attention=attention,
        stored=model.stored,
        recipe=recipe or model.recipe,
        node=node,
        context=tokens,
        page=page,
        mtp=mtp,
        capacities=tuple(
            planner.plan_capacity(
                attention,
                node,
                form,
                each.on_each(node.gpus, node.sharing),
                cache,
                context=tokens,
                page=page,
                mtp=mtp,
            )
            for form, each in found
            for cache in ((kv,) if kv else planner.CACHES)
        ),
    )
    if svg is not None:
        _draw(svg, answer)
        console.note(f"{svg} written")
    for line in tables.summary(answer):
        console.line(line)
    for table in (tables.capacity_table(answer), tables.parts_table(answer)):
        console.line()
        console.table(table)
    console.line()
    for line in tables.notes(answer):
        console.line(line)
    console.result(tables.record(answer))
    if not any(each.fits for each in answer.capacities):
        raise typer.Exit(EXIT_FAILURE)


@dataclass(frozen=True)
class _Model:
    """What is known of a source: its config, and its headers if there are any."""

    config: dict[str, Any]
    checkpoint: Checkpoint | None = None
    stored: Format | None = None

    @property
    def recipe(self) -> str:
        """That `quantize` takes if not told."""
        from halfbyte.models import DEFAULT_RECIPE, recipe_for

        return DEFAULT_RECIPE if self.checkpoint is None else recipe_for(self.checkpoint)


def _require_plan(model: _Model, forms: tuple[Format, ...]) -> None:
    """Raises UsageError where no plan is made, so that a recipe would say nothing."""
    if "int4" not in forms:
        raise UsageError("--recipe is of INT4 weights", hint="--weights int4")
    if model.stored in (None, "int4"):
        what = "a config.json alone" if model.stored is None else "INT4 already"
        raise UsageError(
            f"--recipe plans what becomes of a checkpoint, and this is {what}",
            hint="name the checkpoint to be quantized, by its folder or repository",
        )


def _open(source: str) -> _Model:
    """A source by its config.json alone, if that is all there is, or by its headers."""
    from halfbyte.formats.checkpoint import read_json_object
    from halfbyte.formats.folder import CONFIG_FILE, INDEX_FILE
    from halfbyte.formats.source import open_source
    from halfbyte.kvcache.sizes import stored_format

    path = Path(source).expanduser()
    if path.is_file():
        return _Model(read_json_object(path))
    if path.is_dir() and not [*path.glob("*.safetensors"), *path.glob(INDEX_FILE)]:
        return _Model(read_json_object(path / CONFIG_FILE))
    checkpoint = open_source(source)
    return _Model(dict(checkpoint.config), checkpoint, stored_format(checkpoint))


def _weights(
    console: Console,
    model: _Model,
    forms: tuple[Format, ...],
    recipe: str | None,
    layers: int | None,
) -> list[tuple[Format, Weights]]:
    """The weights of so many decoder layers, or of all, in each format. One that the model cannot
    have is left out with a warning, or an error when it was asked for."""
    from halfbyte.kvcache.sizes import sum_up

    found = []
    for form in forms:
        try:
            found.append((form, sum_up(_sizes(model, form, recipe or model.recipe), layers)))
        except RecipeError as error:
            if len(forms) == 1 or recipe is not None:
                raise
            console.warning(f"{form} weights are left out: {error}")
    return found


def _sizes(model: _Model, form: Format, recipe: str) -> Iterator[tuple[str, int]]:
    """Names and bytes of a model's tensors in a format."""
    from halfbyte.kvcache import sizes

    checkpoint = model.checkpoint
    if checkpoint is None:
        return sizes.format_sizes(sizes.tensors_of(model.config), form)
    if form == model.stored:
        return sizes.stored_sizes(checkpoint)
    if form != "int4":
        return sizes.format_sizes(sizes.stored_tensors(checkpoint), form)
    from halfbyte.core import Settings
    from halfbyte.quantize.plan import make_plan
    from halfbyte.quantize.recipe import load_recipe

    plan = make_plan(checkpoint, load_recipe(recipe), Settings(method="rtn"))
    return ((output.name, output.nbytes) for t in plan.tensors for output in t.outputs)


def _context(asked: int | None, longest: int) -> int:
    """Tokens of a request. Raises UsageError for more than the model was made for."""
    from halfbyte.kvcache.planner import CONTEXT

    if asked is None:
        return min(CONTEXT, longest or CONTEXT)
    if longest and asked > longest:
        raise UsageError(
            f"--context {asked:,} is more than the {longest:,} tokens the model was made for",
            hint=f"--context {longest}",
        )
    return asked


def _draw(path: Path, answer: Answer) -> None:
    """Write the picture. Raises OutputError when that cannot be done."""
    from halfbyte.commands.capacity_tables import on
    from halfbyte.formats.files import write_atomic
    from halfbyte.report.capacity import capacity_picture

    if path.is_dir():
        raise UsageError(f"--svg {path} is a folder", hint="name a file: --svg tokens.svg")
    name = Path(answer.source).name.partition("@")[0]
    model = answer.attention.model_type if answer.stored is None else name
    title = f"Tokens of KV cache: {model} on {on(answer.node)}"
    note = (
        f"{answer.node.fraction:g} of free memory for weights and cache;"
        f" pages of {answer.page} tokens"
    )
    made = capacity_picture(title, note, answer.capacities)
    try:
        write_atomic(path, made.encode())
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror}", hint="name another file with --svg FILE"
        ) from error
