"""Measures the products of a decoder layer when tokens are generated: FP8 beside INT4.

Weights and activations are random. Copies of a weight are used in turn, together larger than the
GPU's cache, and launches are replayed from a CUDA graph, as servers do. Each product follows
itself, so what one gains from the end of another is not seen. All experts have equal chances; real
routing favours some, so fewer are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch

from halfbyte.errors import UsageError
from halfbyte.kernels import fp8
from halfbyte.kernels.decode_bench import Bench, check_product, dtype_of
from halfbyte.kernels.decode_experts import Routing, check_experts, time_experts
from halfbyte.kernels.decode_time import Format, Layer, LayerTime, Linear, PartTime, Timing
from halfbyte.kernels.fp8 import Scaled
from halfbyte.progress import Progress

LIMITS: Mapping[Format, float] = {"bf16": 1e-2, "fp8": 3e-2}
"""Of the relative error. The sums of FP8 products on Hopper have about 14 bits."""


def measure(
    layers: Sequence[Layer], batches: Sequence[int], bench: Bench, progress: Progress
) -> list[LayerTime]:
    """The times of each layer at each batch, in this order.

    Raises UsageError for what FP8 or INT4 products cannot take, and HalfbyteError for a product
    that is not that of float64.
    """
    for layer in layers:
        _check_linears(layer)
        check_experts(layer, bench)
    progress.start("measuring", sum(len(layer.linears) + 1 for layer in layers), "products")
    on_gpu = bench.device.type == "cuda"
    times = []
    with (
        torch.cuda.device(bench.device) if on_gpu else nullcontext(),
        torch.random.fork_rng([bench.device] if on_gpu else []),
    ):
        torch.manual_seed(0)
        bandwidth = bench.bandwidth()
        for layer in layers:
            parts = []
            for linear in layer.linears:
                parts.append(_time_linear(linear, batches, bench))
                progress.advance(1)
            routings = [Routing.of(layer.experts, batch, bench) for batch in batches]
            parts.append(time_experts(layer.experts, routings, bench))
            progress.advance(1)
            times += [
                LayerTime(layer.ranks, routing.batch, routing.active, tuple(made), bandwidth)
                for routing, *made in zip(routings, *parts, strict=True)
            ]
            if on_gpu:
                torch.cuda.empty_cache()  # the next layer's weights have other sizes
    return times


def _check_linears(layer: Layer) -> None:
    for linear in layer.linears:
        if linear.quantized and (linear.rows % 16 or linear.columns % 16):
            raise UsageError(
                f"--tensor-parallel {layer.ranks}: FP8 products cannot take {linear.name}, which is"
                f" {linear.rows} x {linear.columns}: no multiples of 16",
                hint="choose another --tensor-parallel",
            )


def _time_linear(linear: Linear, batches: Sequence[int], bench: Bench) -> list[PartTime]:
    """The times at each batch, in all formats."""
    weights = {form: _weights(linear, form, bench) for form in linear.formats}

    def part(batch: int) -> PartTime:
        times = (_time(linear, form, weights[form], batch, bench) for form in linear.formats)
        return PartTime(linear, tuple(times))

    return [part(batch) for batch in batches]


def _weights(linear: Linear, form: Format, bench: Bench) -> list[Scaled]:
    """Copies, whose scales only FP8 uses; those of heads are [heads, K, N]."""
    shape: tuple[int, ...] = linear.rows, linear.columns
    if linear.by_head:
        shape = linear.count, linear.columns, linear.rows
    first = bench.random(*shape, dtype=dtype_of(form))
    scale = torch.full((), linear.columns**-0.5 if form == "fp8" else 1.0, device=bench.device)
    return [Scaled(first.clone(), scale) for _ in range(bench.copies(first.nbytes))]


def _time(
    linear: Linear, form: Format, weights: Sequence[Scaled], batch: int, bench: Bench
) -> Timing:
    heads = (linear.count,) if linear.by_head else ()
    x = bench.random(*heads, batch, linear.columns, dtype=dtype_of(form))
    one = torch.ones((), device=bench.device)

    def run(i: int) -> torch.Tensor:
        if form == "fp8":
            return fp8.linear(x, one, weights[i])
        if heads:
            return torch.bmm(x, weights[i].values)
        return torch.nn.functional.linear(x, weights[i].values)

    weight = weights[0].decoded()
    exact = x.double() @ (weight if heads else weight.mT)
    check_product(f"{linear.name} in {form} at batch {batch}", run(0), exact, LIMITS[form])
    return Timing(form, "torch", bench.timer(run, len(weights)))
