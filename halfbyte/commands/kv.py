"""`quantize kv`: whether an FP8 KV cache holds what a model caches, and what makes it so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.commands.options import (
    Device,
    Dtype,
    Json,
    Quiet,
    Samples,
    Seed,
    SequenceLength,
    Source,
    Verbose,
    open_console,
)
from halfbyte.errors import UsageError

if TYPE_CHECKING:
    import torch

    from halfbyte.core import Checkpoint

LONGEST = 32_768
"""Tokens of a long sequence, if not told."""


def kv(
    source: Source,
    calibration: Annotated[
        Path,
        typer.Option("--calibration", help="Text to read: .jsonl with a `text` each, or .txt."),
    ],
    samples: Samples = 64,
    sequence_length: SequenceLength = 512,
    long_samples: Annotated[
        int,
        typer.Option(
            "--long-samples",
            min=0,
            help="Long sequences read besides, as long as text and model allow; 0 for none.",
        ),
    ] = 4,
    long_length: Annotated[
        int | None,
        typer.Option(
            "--long-length",
            min=1,
            help="Tokens of a long sequence at most. [default: 32768, or the model's]",
        ),
    ] = None,
    seed: Seed = 0,
    fold: Annotated[
        bool,
        typer.Option(
            "--fold",
            help="With -o: move latents that scale 1.0 does not hold by a power of two, which"
            " changes nothing else.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Write the checkpoint with scales of keys and values, or folded.",
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure the values that a model caches, and say whether an FP8 cache holds them.

    Layer by layer, in the memory of one. Latent rows (MLA) get no scales: SGLang ignores them when
    it writes and applies them when it reads.
    """
    from halfbyte.calibration.kv import measure_ranges
    from halfbyte.commands import kv_tables as tables
    from halfbyte.devices import resolve_device, resolve_dtype
    from halfbyte.formats.source import open_source
    from halfbyte.kvcache.remedy import remedied

    console = open_console(json, quiet, verbose)
    device = resolve_device(device)
    checkpoint = open_source(source)
    _require_remedy(checkpoint, fold=fold, output=output)
    windows = _windows(
        checkpoint, calibration, samples, sequence_length, seed, long_samples, long_length
    )
    with console.working() as progress:
        ranges = measure_ranges(
            checkpoint,
            windows,
            device=device,
            dtype=resolve_dtype(dtype, device),
            progress=progress,
        )
    for line in tables.summary(ranges):
        console.line(line)
    console.line()
    console.table(tables.ranges_table(ranges))
    console.line()
    for line in tables.verdict(ranges):
        console.line(line)
    changed = None
    if output is not None:
        with console.working() as progress:
            changed = remedied(checkpoint, ranges, output, progress)
        written = f"{output} written, {changed} tensors " + (
            "added" if ranges.by_head else "changed"
        )
        console.line(written if changed else "nothing to fold: nothing is written")
    console.result(
        {**tables.record(ranges), "output": str(output) if changed else None},
        quiet=str(output) if changed else "",
    )


def _require_remedy(checkpoint: Checkpoint, *, fold: bool, output: Path | None) -> None:
    """Raises UsageError for options that do not fit the model or each other, and what would be
    raised when the measuring is done: CheckpointError, OutputError."""
    from halfbyte.kvcache.layout import Latent, read_attention
    from halfbyte.kvcache.remedy import require_remediable

    latent = isinstance(read_attention(checkpoint.config).rows, Latent)
    if fold and not latent:
        raise UsageError(
            f"--fold moves latents, and {checkpoint.model_type} caches keys and values",
            hint="leave it out: -o DIR writes their scales",
        )
    if fold and output is None:
        raise UsageError("--fold writes a checkpoint", hint="add -o DIR")
    if output is not None and latent and not fold:
        raise UsageError(
            "-o: latent rows take no scales, since SGLang ignores them when it writes",
            hint="add --fold to move latents that scale 1.0 does not hold",
        )
    if output is not None and checkpoint.repository is not None:
        raise UsageError(
            f"-o copies a folder, and {checkpoint.origin} is a repository",
            hint=f"hf download {checkpoint.repository.name} --local-dir DIR",
        )
    if output is not None:
        require_remediable(checkpoint, output)


def _windows(
    checkpoint: Checkpoint,
    text: Path,
    samples: int,
    length: int,
    seed: int,
    long_samples: int,
    long_length: int | None,
) -> list[torch.Tensor]:
    """The sequences to read. Long ones that are no longer than the others are left out."""
    from halfbyte.calibration.data import longest_windows, token_windows
    from halfbyte.kvcache.layout import read_attention

    context = read_attention(checkpoint.config).context or LONGEST
    longest = min(long_length or LONGEST, context)
    windows = [token_windows(text, checkpoint.path, samples, length, seed)]
    if long_samples and longest > length:
        long = longest_windows(text, checkpoint.path, long_samples, longest)
        if long.shape[1] > length:
            windows.append(long)
    return windows
