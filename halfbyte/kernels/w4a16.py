"""Products of 16-bit activations with INT4 weights, on the GPU.

`linear` is one product, `experts` a layer of routed experts. The kernels (`cuda/w4a16.cu`) read a
`Weight`: what a checkpoint stores, codes and scales in the order that tensor cores take them in
(`fragments`). No atomics and no workspace: the bits are the same in every run and on any number of
streams, and a graph may capture launches.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from halfbyte.errors import DependencyError
from halfbyte.kernels import fragments
from halfbyte.kernels.jit import Kernel, Source, kernel, source

_ELEMENTS = {torch.bfloat16: "Element::bfloat16", torch.float16: "Element::float16"}
_ENTRIES = {"dense": "DENSE", "gate_up": "GATE_UP", "down": "DOWN"}


class Packed(NamedTuple):
    """An INT4 weight [..., N, K] as stored: int32 [..., N, K/8] and bfloat16 [..., N, groups]."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def rows(self) -> int:
        return self.codes.shape[-2]

    @property
    def columns(self) -> int:
        return 8 * self.codes.shape[-1]


@dataclass(frozen=True)
class Weight:
    """An INT4 weight [..., N, K] as the kernels read it."""

    blocks: torch.Tensor
    """int32 [..., ceil(N / 16), ceil(K / 128), words]; see `fragments`."""
    rows: int
    columns: int
    groups: int

    @staticmethod
    def of(packed: Packed) -> Weight:
        """Raises ValueError for a weight that the kernels cannot take; see `unsupported`."""
        if reason := unsupported(packed):
            raise ValueError(f"the INT4 kernels cannot take this weight: {reason}")
        leading, (rows, words) = packed.codes.shape[:-2], packed.codes.shape[-2:]
        groups = packed.scales.shape[-1]
        if packed.scales.shape != (*leading, rows, groups):
            raise ValueError(
                f"codes {list(packed.codes.shape)} and scales {list(packed.scales.shape)} are not "
                "those of one weight"
            )
        blocks = fragments.to_fragments(packed.codes, packed.scales)
        return Weight(blocks, rows, 8 * words, groups)

    @property
    def scales_of_block(self) -> int:
        return fragments.scales_of_block(self.columns, self.groups)


@dataclass(frozen=True)
class Tile:
    """How the warps of a program share rows and columns; see `Tile` in cuda/w4a16.cu."""

    row_groups: int
    tokens: int
    warps_by_rows: int
    warps_by_columns: int
    wide: bool = False
    """With the tensor cores of four warps at once, which only compute capability 9.0 has."""
    depth: int = 3
    """Stages of the ring, at most; there are as many as shared memory has room for. Few leave room
    for another program, of the next kernel, too, which loads weights while this one ends."""

    @property
    def strips(self) -> int:
        """Of 16 rows, of a program."""
        return self.row_groups * self.warps_by_rows

    @property
    def threads(self) -> int:
        return 32 * (self.warps_by_rows * self.warps_by_columns + 2)

    def stage_bytes(self, scales: int, capacity: int, *, gathered: bool) -> int:
        """Bytes of a stage of the ring, with activations of `capacity` tokens."""
        block = 2 * fragments.ROWS * scales + 4 * fragments.WORDS
        lines = capacity * (2 * self.warps_by_columns + gathered)
        stage = self.strips * self.warps_by_columns * block + LINE_BYTES * lines
        return -(-stage // 1024) * 1024

    def instance(self, entry: str, dtype: torch.dtype, scales: int) -> str:
        """The line of code that makes a kernel of this tile, for so many scales of a row in a
        block; `entry` is dense, gate_up or down."""
        shape = (self.row_groups, self.tokens, self.warps_by_rows, self.warps_by_columns)
        arguments = ", ".join(str(value).lower() for value in (*shape, self.wide, scales))
        return f"{_ENTRIES[entry]}({_ELEMENTS[dtype]}, {arguments})"

    @property
    def sums_bytes(self) -> int:
        return 4 * fragments.ROWS * self.strips * self.tokens * self.warps_by_columns


LINE_BYTES = 128
"""Of the activations of a token in shared memory, 64 columns."""
_BARRIER_BYTES = 1024
"""At the beginning of shared memory."""


def unsupported(weight: Packed, *, gate_up: bool = False) -> str:
    """Why the kernels cannot take a weight, or one of gates and ups; empty when they can."""
    groups, columns = weight.scales.shape[-1], weight.columns
    size = columns // groups if columns % groups == 0 else 0
    if groups > 1 and (size < 32 or size & (size - 1)):
        return f"groups of {size} columns; they are 32, 64, 128 or another power of two, or a row"
    if columns % (LINE_BYTES // 2):
        return f"{columns} columns are no multiple of {LINE_BYTES // 2}"
    if weight.codes.dtype != torch.int32 or weight.scales.dtype != torch.bfloat16:
        return f"codes {weight.codes.dtype} and scales {weight.scales.dtype}"
    if gate_up and weight.rows % (2 * fragments.ROWS):
        return f"{weight.rows} rows of gates and ups are no multiple of {2 * fragments.ROWS}"
    return ""


def usable(weight: Packed, *, gate_up: bool = False) -> bool:
    """Whether the kernels can take this weight, on the GPU that it is on."""
    on_gpu = weight.codes.is_cuda and not unsupported(weight, gate_up=gate_up)
    return on_gpu and available(weight.codes.device)


def available(device: torch.device) -> bool:
    """Whether the GPU and the installation can run the kernels."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        with torch.cuda.device(device):
            _named("list_work")
    except DependencyError:
        return False
    return True


def linear(x: torch.Tensor, weight: Weight, *, early: bool = False) -> torch.Tensor:
    """x [M, K] times `weight` [N, K] transposed: [M, N] in the dtype of `x`, bfloat16 or float16.

    Sums are float32. Weights are not rounded for up to 16 tokens, with more to the dtype of `x`.
    With `early` the kernel may start before the one before it in the stream has ended and read
    weights then: only where nothing in the stream writes them. Raises ValueError for activations
    that do not fit.
    """
    _check(x, weight, ())
    tokens, rows = x.shape[0], weight.rows
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    for start in range(0, tokens, MOST_TOKENS):
        part = x[start : start + MOST_TOKENS]
        count = part.shape[0]
        tile, split = _dense_tile(
            count, rows, weight.columns, _processors(x.device), _capability(x.device)
        )
        launch = _launch("dense", tile, x.dtype, weight, tile.tokens if tile.wide else count)
        launch.kernel(
            (-(-rows // (fragments.ROWS * tile.strips)), split), launch.tile.threads,
            launch.weight(weight), launch.activations(part), y[start : start + MOST_TOKENS], count,
            rows, weight.columns, *launch.memory, cluster=split > 1, early=early,
        )  # fmt: skip
    return y


def experts(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    chosen: torch.Tensor,
    router: torch.Tensor,
    *,
    early: bool = False,
) -> torch.Tensor:
    """The routed experts of a layer: [M, H] for `x` [M, H].

    `gate_up` [E, 2 I, H] has the gates first, `down` is [E, H, I]; `chosen` int32 [M, T] are the
    experts of a token, of which those outside 0..E-1 are left out, `router` float32 [M, T] their
    weights. silu(gate) times up is rounded to the dtype of `x`; all else is float32. `early` as in
    `linear`. Raises ValueError for what the kernels cannot take.
    """
    expert_count, intermediate = gate_up.blocks.shape[0], gate_up.rows // 2
    _check(x, gate_up, (expert_count,))
    if gate_up.rows % (2 * fragments.ROWS):
        raise ValueError(f"{gate_up.rows} rows of gates and ups are no multiple of 32")
    for name, routed, dtype in (("chosen", chosen, torch.int32), ("router", router, torch.float32)):
        if routed.dim() != 2 or routed.shape != chosen.shape or routed.dtype != dtype:
            raise ValueError(f"{name} {list(routed.shape)} of {routed.dtype} is not [M, T] {dtype}")
    if len(chosen) != len(x):
        raise ValueError(f"experts of {len(chosen)} tokens for activations of {len(x)}")
    work = Work.of(chosen, expert_count, early=early)
    gated = x.new_empty(chosen.numel(), intermediate)
    _check(gated, down, (expert_count,))
    run_gate_up(x, gate_up, work, gated, early=early)
    parts = torch.empty(chosen.numel(), down.rows, dtype=torch.float32, device=x.device)
    run_down(gated, down, work, router, parts, early=early)
    y = torch.empty_like(x)
    add_parts(parts, chosen, expert_count, y, early=early)
    return y


@dataclass(frozen=True)
class Work:
    """Which expert has which tokens, on the GPU: pieces of up to so many pairs (token, expert)."""

    order: torch.Tensor
    """int32 [pairs], by expert."""
    pieces: torch.Tensor
    """int32 [at most, 4]: expert, first in `order`, count."""
    count: torch.Tensor
    """int32 [1], of pieces."""
    tokens: int
    """Pairs of a piece, at most."""
    pairs_of_token: int

    @staticmethod
    def of(
        chosen: torch.Tensor, expert_count: int, *, tokens: int = 8, early: bool = False
    ) -> Work:
        """Of `chosen` int32 [M, T], the experts of each token, in pieces of up to `tokens` pairs.
        Experts outside 0..expert_count-1 are left out. Raises ValueError for more than 1,024."""
        pairs = chosen.numel()
        order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
        most = min(pairs, expert_count + pairs // tokens)
        pieces = torch.empty(most, 4, dtype=torch.int32, device=chosen.device)
        count = torch.empty(1, dtype=torch.int32, device=chosen.device)
        if expert_count > 1024:
            raise ValueError(f"{expert_count} experts, and the kernels take up to 1,024")
        _named("list_work")(
            (1,), 1024, chosen, pairs, expert_count, tokens, order, pieces, count, early=early
        )
        return Work(order, pieces, count, tokens, chosen.shape[1])


def run_gate_up(
    x: torch.Tensor, weight: Weight, work: Work, gated: torch.Tensor, *, early: bool = False
) -> None:
    """gated [pairs, I] = silu(gate) times up of each pair, for `x` [M, H]."""
    processors, most = _processors(x.device), work.pieces.shape[0]
    tile = _expert_tile(_GATE_UP_TILES, most, weight.rows, weight.columns, processors)
    intermediate = weight.rows // 2
    pieces = most * -(-intermediate // (fragments.ROWS * tile.strips // 2))
    launch = _launch("gate_up", tile, x.dtype, weight, min(work.tokens, len(x)), pieces)
    launch.kernel(
        (min(pieces, processors),), launch.tile.threads, launch.weight(weight),
        launch.activations(x), gated, work.pieces, work.count, work.order, work.pairs_of_token,
        weight.blocks.shape[0], intermediate, weight.columns, *launch.memory, early=early,
    )  # fmt: skip


def run_down(
    gated: torch.Tensor,
    weight: Weight,
    work: Work,
    router: torch.Tensor,
    parts: torch.Tensor,
    *,
    early: bool = False,
) -> None:
    """parts float32 [pairs, H] = the down projection of each pair times its router weight.

    With `early` the kernel ahead has to be that of `run_gate_up` with the same work.
    """
    processors, most = _processors(gated.device), work.pieces.shape[0]
    tile = _expert_tile(_DOWN_TILES, most, weight.rows, weight.columns, processors)
    pieces = most * -(-weight.rows // (fragments.ROWS * tile.strips))
    capacity = min(work.tokens, len(gated) // work.pairs_of_token)
    launch = _launch("down", tile, gated.dtype, weight, capacity, pieces)
    launch.kernel(
        (min(pieces, processors),), launch.tile.threads, launch.weight(weight),
        launch.activations(gated), parts, work.pieces, work.count, work.order, router,
        weight.blocks.shape[0], weight.rows, weight.columns, *launch.memory, early=early,
    )  # fmt: skip


def add_parts(
    parts: torch.Tensor,
    chosen: torch.Tensor,
    expert_count: int,
    y: torch.Tensor,
    *,
    early: bool = False,
) -> None:
    """y [M, H] = the sum of a token's pairs of `parts` float32 [pairs, H], in their order."""
    tokens, rows = y.shape
    _named("add_experts", f"ADD_EXPERTS({_ELEMENTS[y.dtype]})")(
        (-(-rows // 256), tokens), 256, parts, chosen, y, chosen.shape[1], expert_count, rows,
        early=early,
    )  # fmt: skip


# Tiles, as measured on an H200.

MOST_TOKENS = 64
"""Of one launch."""

_DENSE_TILES = (
    Tile(2, 8, 1, 8),
    Tile(3, 8, 1, 8),
    Tile(4, 8, 1, 4),
    Tile(6, 8, 1, 4),
    Tile(2, 16, 1, 8),
    Tile(3, 16, 1, 4),
    Tile(4, 16, 1, 4),
    Tile(6, 16, 1, 4),
    Tile(4, 16, 2, 2),
    Tile(3, 16, 4, 3),
    Tile(1, 32, 4, 3, wide=True),
    Tile(2, 32, 2, 4, depth=2),
    Tile(2, 32, 3, 4, depth=2),
    Tile(2, 32, 4, 3, wide=True, depth=2),
    Tile(3, 32, 4, 2, wide=True),
    Tile(1, 64, 4, 3, wide=True),
    Tile(2, 64, 4, 3, wide=True, depth=2),
)
_GATE_UP_TILES = (Tile(4, 8, 1, 8), Tile(2, 8, 1, 8))
_DOWN_TILES = (Tile(4, 8, 1, 8), Tile(4, 8, 4, 3))

_CLUSTERS = {1: 1.0, 2: 1.0, 4: 0.85, 8: 0.7}
"""The share of a GPU's multiprocessors that programs of clusters of a size find together."""


@functools.cache
def _dense_tile(
    tokens: int, rows: int, columns: int, processors: int, capability: int
) -> tuple[Tile, int]:
    """The tile, and the programs of a cluster that share its rows, that take the least time."""
    size = next(tile.tokens for tile in _DENSE_TILES if tile.tokens >= tokens)
    tiles = [tile for tile in _DENSE_TILES if tile.tokens == size]
    if capability != 9:
        tiles = [replace(tile, wide=False) for tile in tiles]
    splits = _CLUSTERS if capability >= 9 else (1,)
    return min(
        ((tile, split) for tile in tiles for split in splits),
        key=lambda pair: _microseconds(pair[0], pair[1], rows, columns, processors),
    )


@functools.cache
def _expert_tile(
    tiles: tuple[Tile, ...], pieces: int, rows: int, columns: int, processors: int
) -> Tile:
    """That takes the least time for so many pieces of work: small ones where they are few. Within
    2 % of the best on average over 10 layers."""

    def nbytes(tile: Tile) -> float:
        programs = pieces * math.ceil(rows / (fragments.ROWS * tile.strips))
        # A program costs as much time again as some kilobytes do.
        one = _bytes_of_a_program(tile, math.ceil(columns / fragments.COLUMNS)) + 10e3
        return math.ceil(programs / processors) * one

    return min(tiles, key=nbytes)


def _bytes_of_a_program(tile: Tile, blocks: int) -> float:
    """That its copies take as long as from memory, for so many blocks of columns."""
    blocks = math.ceil(blocks / tile.warps_by_columns) * tile.warps_by_columns
    # Activations come from the GPU's cache.
    return blocks * (72 * fragments.ROWS * tile.strips + 0.2 * 256 * tile.tokens)


def _microseconds(tile: Tile, split: int, rows: int, columns: int, processors: int) -> float:
    """About what a product takes, up to what is the same for all tiles: the programs that a
    multiprocessor runs one after the other times the bytes of each, and what clusters cost. Chooses
    within 3 % of the best on average over 57 products (`benchmarks/tune_tiles.py`)."""
    programs = -(-rows // (fragments.ROWS * tile.strips)) * split
    turns = math.ceil(programs / (processors * _CLUSTERS[split]))
    nbytes = _bytes_of_a_program(tile, math.ceil(math.ceil(columns / fragments.COLUMNS) / split))
    return turns * (nbytes / 30e3 + 0.5 + (1.1 + 0.03 * tile.tokens) * math.log2(split))


@functools.cache
def _capability(device: torch.device) -> int:
    """From 9 on there are clusters and an engine that copies; 9 alone has the tensor cores of four
    warps."""
    return torch.cuda.get_device_capability(device)[0]


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """That a program may have."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@dataclass(frozen=True)
class _Launch:
    """A kernel, with a tile that shared memory has room for."""

    kernel: Kernel
    tile: Tile
    halves: int
    """Strips of a program that lie together: all, or half of them."""
    lines: int
    """Tokens that are copied together."""
    memory: tuple[int, int, int]
    """The depth of the ring, the tokens of a stage, and where sums are."""

    def weight(self, weight: Weight) -> Source:
        *strips, blocks, words = weight.blocks.shape
        # In numbers of eight bytes, since a box has at most 256 along each dimension.
        return source(
            weight.blocks.data_ptr(), weight.blocks.device, 8,
            (words // 2, blocks, math.prod(strips)), (4 * words, 4 * words * blocks),
            (words // 2, self.tile.warps_by_columns, self.tile.strips // self.halves),
        )  # fmt: skip

    def activations(self, x: torch.Tensor) -> Source:
        if not x.is_contiguous() or x.data_ptr() % 16:
            raise ValueError("activations have to be contiguous, from a multiple of 16 bytes on")
        rows, columns = x.shape
        line = LINE_BYTES // 2
        return source(
            x.data_ptr(), x.device, 2, (line, rows, columns // line), (2 * columns, LINE_BYTES),
            (line, self.lines, 2 * self.tile.warps_by_columns), swizzle=True,
        )  # fmt: skip


def _launch(
    entry: str, tile: Tile, dtype: torch.dtype, weight: Weight, capacity: int, pieces: int = 1
) -> _Launch:
    """For stages of so many tokens, and so many pieces of work at most."""
    scales, room = weight.scales_of_block, _shared_bytes(weight.blocks.device) - _BARRIER_BYTES
    gathered = entry != "dense"
    while True:
        stage = tile.stage_bytes(scales, capacity, gathered=gathered)
        # Sums of one piece of work wait while the next one is copied; where there is one, they may
        # take the place of the ring.
        apart = tile.sums_bytes if gathered else 0
        depth = (room - apart) // stage
        if depth >= 2 or tile.warps_by_columns == 1:
            break
        tile = replace(tile, warps_by_columns=tile.warps_by_columns // 2)
    blocks = -(-weight.columns // fragments.COLUMNS)
    depth = min(tile.depth, depth, pieces * -(-blocks // tile.warps_by_columns))
    sums_at = _BARRIER_BYTES + (depth * stage if gathered else 0)
    shared = max(_BARRIER_BYTES + depth * stage, sums_at + tile.sums_bytes)
    made = kernel("w4a16", "run", shared, tile.instance(entry, dtype, scales))
    return _Launch(
        made, tile, 2 if entry == "gate_up" else 1,
        1 if gathered else capacity, (depth, capacity, sums_at),
    )  # fmt: skip


@functools.cache
def _named(name: str, instance: str = "") -> Kernel:
    return kernel("w4a16", "run" if instance else name, instance=instance)


def _check(x: torch.Tensor, weight: Weight, leading: tuple[int, ...]) -> None:
    if tuple(weight.blocks.shape[:-3]) != leading:
        raise ValueError(f"a weight with {list(weight.blocks.shape[:-3])} before its rows")
    if x.dim() != 2 or x.shape[1] != weight.columns or x.dtype not in _ELEMENTS:
        raise ValueError(
            f"activations {list(x.shape)} of {x.dtype}: the weight takes [M, {weight.columns}] of "
            "bfloat16 or float16"
        )
