"""INT4 products on the GPU: ours beside Marlin, Machete, Humming, cuBLAS and FP8.

    python -m benchmarks.bench_gemm --vllm WHEEL/vllm

Random weights and activations; several copies of a weight in turn, larger than the GPU's cache
together; launches replayed from a graph, the median of its runs. The products of one line run one
after the other on the same weights. A line's roofline is its bytes (codes, scales, activations and
results once) over the bandwidth that reading memory reached in this run. "early" is ours launched
so that it may load weights before the kernel ahead has ended. Results are checked against float64
first. Prints tables and writes a line of JSON for each case.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import kernels as peers
from halfbyte.kernels import w4a16
from halfbyte.kernels.decode_bench import CACHE_BYTES, MOST_COPIES, Bench, graph_time
from halfbyte.kernels.reference import decode_int4
from halfbyte.kernels.w4a16 import Packed, Weight, Work

SHAPES = ((4096, 6144), (6144, 2048), (24576, 6144), (6144, 12288), (6144, 16384), (16384, 2048))
"""Rows and columns of linears of GLM-5.2."""
OURS = ("ours", "ours, early")
EXPERTS, CHOSEN, HIDDEN, INTERMEDIATE = 256, 8, 6144, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's libraries [without them]")
    parser.add_argument("--humming", action="store_true", help="it is installed, too")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--only", choices=["dense", "experts"], help="of both [both]")
    parser.add_argument("--json", type=Path, default=Path("build/bench-gemm.jsonl"))
    arguments = parser.parse_args()
    if arguments.vllm:
        peers.load_vllm(arguments.vllm)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    bandwidth = Bench(torch.device("cuda")).bandwidth()
    print(f"{torch.cuda.get_device_name()}: memory read at {bandwidth / 1e12:.2f} TB/s")
    with arguments.json.open("w") as file:

        def report(line: dict[str, Any]) -> None:
            file.write(json.dumps(line | {"bandwidth": bandwidth}) + "\n")
            file.flush()
            times = "  ".join(f"{name} {time:.1f}" for name, time in line["us"].items())
            roofline, best = line["roofline_us"], min(line["us"][name] for name in OURS)
            print(
                f"{line['what']:>14} M={line['tokens']:<3} roofline {roofline:.1f} "
                f"({roofline / best:.0%})  {times}"
            )

        lines = []
        for rows, columns in SHAPES if arguments.only != "experts" else ():
            for line in dense(rows, columns, arguments, bandwidth):
                report(line)
                lines.append(line)
        for line in experts(arguments, bandwidth) if arguments.only != "dense" else ():
            report(line)
            lines.append(line)
    for tokens in arguments.tokens:
        now = [line for line in lines if line["tokens"] == tokens]
        products = [line["us"] for line in now if line["what"] != "experts"]
        summarize(f"M={tokens}", "Marlin", products, ("Marlin",))
        summarize(f"M={tokens}", "the best FP8", products, ("FP8, torch", "FP8, CUTLASS"))
        routed = [line["us"] for line in now if line["what"] == "experts"]
        summarize(f"M={tokens}, experts", "Marlin", routed, ("Marlin",))


def summarize(
    what: str, name: str, products: Sequence[dict[str, float]], peer: Sequence[str]
) -> None:
    """Prints how many times as fast ours are as the faster one of some peers, if they ran."""
    if not products or any(not set(peer) & us.keys() for us in products):
        return
    found = [[min(us[p] for p in peer if p in us) / us[own] for own in OURS] for us in products]
    plain, early = (statistics.geometric_mean(column) for column in zip(*found, strict=True))
    least, least_early = (min(column) for column in zip(*found, strict=True))
    print(
        f"{what}: {plain:.2f} times as fast as {name}, {early:.2f} early; least {least:.2f} and "
        f"{least_early:.2f}"
    )


def dense(
    rows: int, columns: int, arguments: argparse.Namespace, bandwidth: float
) -> Sequence[dict[str, Any]]:
    group = arguments.group_size
    stored = rows * columns // 2 + rows * columns // group * 2
    copies = max(2, min(MOST_COPIES, -(-CACHE_BYTES // stored)))
    weights = [random_weight(rows, columns, group=group) for _ in range(copies)]
    own = [Weight.of(weight) for weight in weights]
    lines = []
    for tokens in arguments.tokens:
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        y = torch.empty(tokens, rows, dtype=torch.bfloat16, device="cuda")
        us: dict[str, float] = {}

        measure = partial(_measure, us, x)
        for name, early in (("ours", False), ("ours, early", True)):
            products = [partial(w4a16.linear, weight=w, early=early) for w in own]
            measure(name, products, weights[0])
        if arguments.vllm:
            measure("Marlin", [peers.marlin(w, y) for w in weights], weights[0])
            if rows % 128 == 0:
                wide = [random_weight(rows, columns, group=128) for _ in weights]
                measure("Machete g128", [peers.machete(w) for w in wide], wide[0])
        if arguments.humming:
            measure("Humming", [peers.humming(w, y, tokens) for w in weights], weights[0])
        # Copies of 16- and 8-bit weights are larger, so fewer do.
        fewer = range(max(2, copies // 3))
        full = [torch.randn(rows, columns, device="cuda").bfloat16() for _ in fewer]
        measure("BF16", [partial(torch.nn.functional.linear, weight=w) for w in full])
        short = [w.to(torch.float8_e4m3fn) for w in full]
        in_fp8 = partial(_measure, us, x.to(torch.float8_e4m3fn))
        in_fp8("FP8, torch", [peers.torch_fp8(w) for w in short])
        if arguments.vllm:
            in_fp8("FP8, CUTLASS", [peers.fp8(w, y) for w in short])
        moved = stored + 2 * tokens * (rows + columns)
        lines.append(
            {
                "what": f"{rows}x{columns}", "tokens": tokens, "group_size": group,
                "roofline_us": moved / bandwidth * 1e6, "us": us,
            }
        )  # fmt: skip
    return lines


def _measure(
    us: dict[str, float], x: torch.Tensor, name: str, products: Sequence[peers.Product],
    weight: Packed | None = None,
) -> None:  # fmt: skip
    """Adds the time of a product; with the first one's `weight` its result is checked before."""
    if weight is not None:
        check(name, products[0](x), x, weight)
    us[name] = graph_time(lambda i: products[i](x), len(products))


def experts(arguments: argparse.Namespace, bandwidth: float) -> Sequence[dict[str, Any]]:
    """Both products of a layer's experts, with SiLU and the router's weights."""
    group = arguments.group_size
    gate_up = random_weight(EXPERTS, 2 * INTERMEDIATE, HIDDEN, group=group)
    down = random_weight(EXPERTS, HIDDEN, INTERMEDIATE, group=group)
    own = Weight.of(gate_up), Weight.of(down)
    marlin = peers.MarlinExperts.of(gate_up, down) if arguments.vllm else None
    stored = INTERMEDIATE * HIDDEN * 3 * (0.5 + 2 / group)  # of an expert
    generator = torch.Generator().manual_seed(1)
    lines = []
    for tokens in arguments.tokens:
        routes = [
            torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :CHOSEN].int().cuda()
            for _ in range(8 if tokens < 8 else 4)
        ]
        active = statistics.mean(len(chosen.unique()) for chosen in routes)
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        router = torch.rand(tokens, CHOSEN, device="cuda")
        gated = torch.empty(tokens * CHOSEN, INTERMEDIATE, dtype=torch.bfloat16, device="cuda")
        parts = torch.empty(tokens * CHOSEN, HIDDEN, device="cuda")
        works = [Work.of(chosen, EXPERTS) for chosen in routes]
        us: dict[str, float] = {}
        for name, early in (("ours", False), ("ours, early", True)):
            runs = [
                partial(_run_experts, *own, work, router, gated, parts, early) for work in works
            ]
            check_experts(name, runs[0](x), x, gate_up, down, routes[0], router)
            _measure(us, x, name, runs)
        if marlin is not None:
            peer = [marlin.run(chosen, router) for chosen in routes]
            check_experts("Marlin", peer[0](x), x, gate_up, down, routes[0], router)
            _measure(us, x, "Marlin", peer)
        moved = (
            active * stored
            + 2 * tokens * HIDDEN
            + tokens * CHOSEN * (4 * INTERMEDIATE + 4 * HIDDEN)
        )
        lines.append(
            {
                "what": "experts", "tokens": tokens, "group_size": group, "active": active,
                "roofline_us": moved / bandwidth * 1e6, "us": us,
            }
        )  # fmt: skip
    return lines


def _run_experts(
    gate_up: Weight, down: Weight, work: Work, router: torch.Tensor, gated: torch.Tensor,
    parts: torch.Tensor, early: bool, x: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    w4a16.run_gate_up(x, gate_up, work, gated, early=early)
    w4a16.run_down(gated, down, work, router, parts, early=early)
    return parts


def random_weight(*shape: int, group: int) -> Packed:
    *leading, rows, columns = shape
    codes = torch.randint(
        -(2**31), 2**31, (*leading, rows, columns // 8), dtype=torch.int32, device="cuda"
    )
    scales = torch.rand(*leading, rows, columns // group, device="cuda") * 0.01 + 0.002
    return Packed(codes, scales.bfloat16())


def check(name: str, y: torch.Tensor, x: torch.Tensor, weight: Packed) -> None:
    expected = x.double() @ decode_int4(weight.codes, weight.scales).double().T
    error = float((y.double() - expected).norm() / expected.norm())
    if not error < 6e-3:
        raise AssertionError(f"{name}: relative error {error}")


def check_experts(
    name: str, parts: torch.Tensor, x: torch.Tensor, gate_up: Packed, down: Packed,
    chosen: torch.Tensor, router: torch.Tensor,
) -> None:  # fmt: skip
    """Some pairs, in float64."""
    for pair in (0, chosen.numel() - 1):
        expert = int(chosen.flatten()[pair])
        first, second = (
            decode_int4(weight.codes[expert], weight.scales[expert]).double()
            for weight in (gate_up, down)
        )
        gate, up = (first @ x[pair // CHOSEN].double()).chunk(2)
        expected = second @ (torch.nn.functional.silu(gate) * up) * router.flatten()[pair].double()
        error = float((parts[pair].double() - expected).norm() / expected.norm())
        if not error < 1e-2:
            raise AssertionError(f"{name}, experts: relative error {error}")


if __name__ == "__main__":
    main()
