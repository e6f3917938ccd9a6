"""Our GPTQ solver against llm-compressor's, on the expert shapes of GLM-5.2.

    python benchmarks/bench_solver.py --device cuda

Both get the same random weights, the same Hessians and the same scales, and give codes:
llm-compressor through the `quantize_weight` of the installed package in batches, ours through
`factorize` and `gptq`. The error is tr(E H E^T) in float64 over some linears, relative to
llm-compressor's. Ours as it runs by default, with its own scale search and refinement, is timed
besides. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from halfbyte.core import Scheme, Settings
from halfbyte.kernels.reference import dequantize_int4
from halfbyte.quantize import llmcompressor
from halfbyte.quantize.gptq import factorize, gptq
from halfbyte.quantize.scales import group_scales
from halfbyte.quantize.solver import Inputs, solve

SHAPES = {"gate and up": (2, 2048, 6144), "down": (1, 6144, 2048)}
"""Linears that share an input, rows, columns."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--experts", type=int, default=32, help="experts in a batch of ours")
    parser.add_argument("--peer-experts", type=int, default=8, help="in a batch of the peer's")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scale-down", type=int, default=1, help="divide shapes, for a quick look")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    scheme = Scheme(4, arguments.group_size)
    results: dict[str, Any] = {"group_size": arguments.group_size, "torch": torch.__version__}
    if arguments.device != "cpu":
        results["hardware"] = torch.cuda.get_device_name()
    for name, (linears, rows, columns) in SHAPES.items():
        rows, columns = rows // arguments.scale_down, columns // arguments.scale_down
        weights, hessians = _problem(
            arguments.experts, linears * rows, columns, torch.device(arguments.device)
        )
        results[name] = _compare(weights, hessians, scheme, linears, arguments)
        row = results[name]
        print(
            f"{name:12} llm-compressor {row['peer_ms']:8.3f} ms a linear   ours {row['ms']:7.3f} ms"
            f" ({row['speedup']:.1f}x), error ratio {row['error_ratio']:.6f}   by default "
            f"{row['default_ms']:7.3f} ms, error ratio {row['default_error_ratio']:.4f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results))
    print(json.dumps(results))


def _compare(
    weights: torch.Tensor,
    hessians: torch.Tensor,
    scheme: Scheme,
    linears: int,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    # Positive scales, which is what the peer makes.
    scales = group_scales(weights, scheme, "mse", signed=False)
    peer_count = min(arguments.peer_experts, len(weights))
    some = slice(0, peer_count)

    def ours() -> torch.Tensor:
        return gptq(weights, factorize(hessians, 0.01), scales, scheme)

    def peer() -> torch.Tensor:
        # The peer has a Hessian for every linear: gate and up are two linears to it.
        split = weights[some].unflatten(1, (linears, -1)).flatten(0, 1)
        codes, _ = llmcompressor.gptq(
            split,
            hessians[some].repeat_interleave(linears, 0),
            scales[some].unflatten(1, (linears, -1)).flatten(0, 1),
            scheme,
            dampening=0.01,
        )
        return codes.view(peer_count, -1, weights.shape[-1])

    settings = replace(Settings(), device=arguments.device)
    solved = solve(weights, scheme, Inputs(hessians), settings)
    peer_ms, peer_codes = _milliseconds(peer, arguments.repeat)
    ms, codes = _milliseconds(ours, arguments.repeat)
    default_ms, _ = _milliseconds(
        lambda: solve(weights, scheme, Inputs(hessians), settings).codes, arguments.repeat
    )
    baseline = _error(weights, hessians, peer_codes, scales, peer_count)
    per_linear = ms / len(weights) / linears
    return {
        "peer_ms": peer_ms / peer_count / linears,
        "ms": per_linear,
        "speedup": peer_ms / peer_count / linears / per_linear,
        "codes_equal": float((codes[some] == peer_codes).float().mean()),
        "error_ratio": _error(weights, hessians, codes, scales, peer_count) / baseline,
        "default_ms": default_ms / len(weights) / linears,
        "default_error_ratio": _error(weights, hessians, solved.codes, solved.scales, peer_count)
        / baseline,
    }


def _error(
    weights: torch.Tensor,
    hessians: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    count: int,
) -> float:
    total = 0.0
    for weight, hessian, code, scale in zip(
        weights[:count], hessians[:count], codes[:count], scales[:count], strict=True
    ):
        error = (weight - dequantize_int4(code, scale)).double()
        total += float(((error @ hessian.double()) * error).sum())
    return total


def _milliseconds(function: Callable[[], torch.Tensor], repeat: int) -> tuple[float, torch.Tensor]:
    """Median wall time of a call, and its result; a first call warms up."""
    result, times = function(), []
    for _ in range(repeat):
        _rest()
        started = time.perf_counter()
        function()
        _rest()
        times.append(1000 * (time.perf_counter() - started))
    return sorted(times)[len(times) // 2], result


def _rest() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _problem(
    count: int, rows: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights [B, N, K] and the Hessians [B, K, K] of correlated inputs of unequal size."""
    generator = torch.Generator(device=device).manual_seed(0)
    weights = torch.empty(count, rows, columns, device=device)
    hessians = torch.empty(count, columns, columns, device=device)
    for item in range(count):
        weights[item].normal_(0, columns**-0.5, generator=generator)
        mix = torch.randn(columns // 4, columns, device=device, generator=generator)
        causes = torch.randn(2 * columns, columns // 4, device=device, generator=generator)
        inputs = causes @ mix * (columns // 4) ** -0.5
        inputs += 0.5 * torch.randn(inputs.shape, device=device, generator=generator)
        inputs *= torch.rand(columns, device=device, generator=generator) + 0.1
        hessians[item] = inputs.T @ inputs / len(inputs)
    return weights, hessians


if __name__ == "__main__":
    main()
