"""How far the tiles that `halfbyte.kernels.w4a16` chooses are from the best of many, on this GPU.

    python -m benchmarks.tune_tiles [--tokens 1 8 16 32 64] [--json FILE]

Linears of GLM-5.2 at tensor parallelism 1 and 8, and its routed experts. Each tile that could be
fast is timed as `bench_gemm` times products, launched early; the fastest ones and the chosen one
are timed again for longer. Prints a line for each product, and writes one of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.bench_gemm import CHOSEN, EXPERTS, HIDDEN, INTERMEDIATE, SHAPES, random_weight
from halfbyte.kernels import jit, w4a16
from halfbyte.kernels.decode_bench import CACHE_BYTES, MOST_COPIES, graph_time
from halfbyte.kernels.w4a16 import Tile, Weight, Work

RANKS = 8
PARTS = (
    (2048, 2048), (3584, 512), (512, 6144), (576, 6144), (6144, 256), (3072, 6144), (6144, 1536),
    (2048, 6144),
)  # fmt: skip
"""Rows and columns of linears of one GPU of eight."""
WARPS = {
    8: ((1, 4), (1, 8), (2, 2), (2, 4), (2, 6), (4, 2), (4, 3), (4, 4)),
    16: ((1, 4), (1, 8), (2, 2), (2, 4), (4, 2), (4, 3)),
    32: ((2, 4), (3, 4), (4, 2), (4, 3), (8, 2)),
    64: ((4, 2), (4, 3), (8, 2)),
}
"""By rows and by columns, for so many tokens."""
ROW_GROUPS = {8: (2, 3, 4, 6, 8), 16: (2, 3, 4, 6, 12), 32: (1, 2, 3), 64: (1, 2, 3)}
DEPTHS = (2, 3)
LIKELY = 1.5
"""Tiles that the formula thinks take more than so many times the least are left out."""
AGAIN = 5
"""So many of the fastest are timed for longer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--json", type=Path, default=Path("build/tune-tiles.jsonl"))
    arguments = parser.parse_args()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    compile_all(arguments.tokens)
    lost: dict[str, list[float]] = {}
    with arguments.json.open("w") as file:
        for line in (*dense_lines(arguments.tokens), *expert_lines(arguments.tokens)):
            file.write(json.dumps(line) + "\n")
            lost.setdefault(line["kind"], []).append(line["us"] / line["best"][0]["us"])
            best = "  ".join(f"{each['us']:.2f} {each['tile']}" for each in line["best"][:3])
            print(f"{line['what']} M={line['tokens']}: chosen {line['us']:.2f} us; best {best}")
    for kind, ratios in lost.items():
        mean = statistics.geometric_mean(ratios)
        print(f"{kind}: {mean:.3f} times the best on average, {max(ratios):.3f} at most")


def tiles(tokens: int) -> list[Tile]:
    size = next(size for size in WARPS if size >= tokens)
    found = [
        Tile(groups, size, *warps, wide=wide, depth=depth)
        for groups in ROW_GROUPS[size]
        for warps in WARPS[size]
        for depth in DEPTHS
        for wide in ((False, True) if size > 16 and warps[0] % 4 == 0 else (False,))
    ]
    return [tile for tile in found if tile.row_groups * tile.tokens <= 192]


def compile_all(tokens: Sequence[int]) -> None:
    """Ahead, on all cores, into the cache that launches look in."""
    sizes = {next(size for size in WARPS if size >= count) for count in tokens}
    wanted = {tile.instance("dense", torch.bfloat16, 4) for size in sizes for tile in tiles(size)}
    for entry in ("gate_up", "down"):
        wanted |= {tile.instance(entry, torch.bfloat16, 4) for tile in tiles(8)}
    major, minor = torch.cuda.get_device_capability()
    architecture = f"sm_{major}{minor}" + "a" * (major == 9)
    with multiprocessing.get_context("spawn").Pool() as pool:
        pool.map(partial(_compile, architecture), sorted(wanted))


def _compile(architecture: str, instance: str) -> None:
    jit.compiled(f"{jit.read_source('w4a16')}\n{instance}".encode(), architecture)


def dense_lines(tokens: Sequence[int]) -> Iterable[dict[str, Any]]:
    processors = torch.cuda.get_device_properties().multi_processor_count
    for rows, columns in (*SHAPES, *PARTS):
        copies = max(2, min(MOST_COPIES, math.ceil(CACHE_BYTES / (rows * columns * 9 / 16))))
        weights = [Weight.of(random_weight(rows, columns, group=32)) for _ in range(copies)]
        for count in tokens:
            x = torch.randn(count, columns, device="cuda").bfloat16()
            expected = {
                (tile, split): w4a16._microseconds(tile, split, rows, columns, processors)
                for tile in tiles(count)
                for split in w4a16._CLUSTERS
            }
            least = min(expected.values())

            def run(i: int, x: torch.Tensor = x, weights: Sequence[Weight] = weights) -> Any:
                return w4a16.linear(x, weights[i], early=True)

            yield {"kind": "linears", "what": f"{rows}x{columns}", "tokens": count} | best_of(
                "_dense_tile", run, copies,
                [pair for pair, us in expected.items() if us < LIKELY * least],
            )  # fmt: skip


def expert_lines(tokens: Sequence[int]) -> Iterable[dict[str, Any]]:
    """Both products of a layer's experts, each with the other's chosen tile."""
    generator = torch.Generator().manual_seed(1)
    for width in (INTERMEDIATE, INTERMEDIATE // RANKS):
        gate_up = Weight.of(random_weight(EXPERTS, 2 * width, HIDDEN, group=32))
        down = Weight.of(random_weight(EXPERTS, HIDDEN, width, group=32))
        for count in tokens:
            routes = [
                torch.rand(count, EXPERTS, generator=generator).argsort(dim=1)[:, :CHOSEN]
                for _ in range(16 if count < 8 else 8)
            ]
            works = [Work.of(chosen.int().contiguous().cuda(), EXPERTS) for chosen in routes]
            x = torch.randn(count, HIDDEN, device="cuda").bfloat16()
            router = torch.rand(count, CHOSEN, device="cuda")
            gated = torch.empty(count * CHOSEN, width, dtype=torch.bfloat16, device="cuda")
            parts = torch.empty(count * CHOSEN, HIDDEN, device="cuda")
            for entry in ("gate and up", "down"):
                weight = gate_up if entry != "down" else down
                choose = w4a16._expert_tile

                def run(
                    i: int, x: torch.Tensor = x, works: Sequence[Work] = works,
                    all_of: tuple[Any, ...] = (gate_up, down, router, gated, parts),
                ) -> torch.Tensor:  # fmt: skip
                    gate_up, down, router, gated, parts = all_of
                    w4a16.run_gate_up(x, gate_up, works[i], gated, early=True)
                    w4a16.run_down(gated, down, works[i], router, parts, early=True)
                    result: torch.Tensor = parts
                    return result

                def only_this(
                    tile: Tile, columns: int = weight.columns, choose: Any = choose
                ) -> Callable[..., Tile]:
                    return lambda *sizes: tile if sizes[3] == columns else choose(*sizes)

                yield {
                    "kind": "experts", "what": f"{entry}, {width} wide", "tokens": count
                } | best_of("_expert_tile", run, len(works), tiles(8), only_this)  # fmt: skip


def best_of(
    name: str, run: Callable[[int], torch.Tensor], copies: int, candidates: Sequence[Any],
    choice: Callable[[Any], Callable[..., Any]] = lambda tile: lambda *_: tile,
) -> dict[str, Any]:  # fmt: skip
    """The time with what is chosen, and with the fastest of the candidates."""

    def time(candidate: Any, repeat: int) -> float:
        with patch.object(w4a16, name, choice(candidate)):
            try:
                return graph_time(run, copies, repeat)
            except RuntimeError:  # no room in shared memory, or too many registers
                return math.inf

    fast = sorted(candidates, key=lambda candidate: time(candidate, 5))[:AGAIN]
    best = sorted((time(candidate, 21), _text(candidate)) for candidate in fast)
    chosen = graph_time(run, copies)
    return {"us": chosen, "best": [{"us": us, "tile": text} for us, text in best]}


def _text(candidate: Any) -> str:
    tile, split = candidate if isinstance(candidate, tuple) else (candidate, 1)
    groups, tokens, by_rows, by_columns, wide, depth = astuple(tile)
    kind = "wide" if wide else "narrow"
    return f"{groups}x{tokens}, {by_rows}x{by_columns} warps, depth {depth}, {kind}, split {split}"


if __name__ == "__main__":
    main()
