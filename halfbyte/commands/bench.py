"""Commands that measure speed on the machine's GPU: `bench-decode`."""

from __future__ import annotations

from typing import Annotated

import typer

from halfbyte.commands.options import (
    Device,
    GroupSizeName,
    Json,
    Quiet,
    Source,
    Verbose,
    open_console,
)

BATCHES = (1, 8, 16, 32, 64)
TENSOR_PARALLEL = (1, 8)


def decode(
    source: Source,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch",
            metavar="N",
            min=1,
            max=4096,
            help="Requests at once, a token each; may be repeated. [default: 1, 8, 16, 32, 64]",
        ),
    ] = None,
    tensor_parallel: Annotated[
        list[int] | None,
        typer.Option(
            "--tensor-parallel",
            metavar="N",
            min=1,
            help="GPUs that share a layer, of which one is measured; may be repeated."
            " [default: 1, 8]",
        ),
    ] = None,
    group_size: Annotated[
        GroupSizeName, typer.Option("--group-size", help="Columns that share a scale in INT4.")
    ] = "32",
    device: Device = "auto",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Time the matrix products of a decoder layer: FP8 against INT4.

    One layer with routed experts, of one token per request, with random weights: of SOURCE only the
    config counts. Attention itself, norms and communication are not in it.
    """
    from halfbyte.commands import decode_tables
    from halfbyte.formats.config import text_config
    from halfbyte.formats.source import open_source
    from halfbyte.kernels import decode_bench, decode_run
    from halfbyte.kernels.decode_time import decoder_layer

    console = open_console(json, quiet, verbose)
    gpu = decode_bench.decode_device(device)
    checkpoint = open_source(source)
    config = text_config(checkpoint.config)
    layers = [decoder_layer(config, ranks) for ranks in tensor_parallel or TENSOR_PARALLEL]
    bench = decode_bench.Bench(gpu, None if group_size == "channel" else int(group_size))
    with console.working() as progress:
        times = decode_run.measure(layers, batch or BATCHES, bench, progress)
    name = decode_bench.device_name(gpu)
    for line in decode_tables.summary(checkpoint, name, bench.group_size, times):
        console.line(line)
    console.line()
    console.table(decode_tables.layer_table(times))
    if verbose:
        console.line()
        console.table(decode_tables.parts_table(times))
    console.line()
    for line in decode_tables.notes(times):
        console.line(line)
    console.result(decode_tables.record(checkpoint, name, bench.group_size, times))
