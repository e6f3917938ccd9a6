"""Products of 16-bit activations with INT4 weights as a checkpoint stores them, on the GPU.

`linear` is one product, `experts` a layer of routed experts. The kernels (`cuda/w4a16.cu`) read
`weight_packed` and `weight_scale` as they lie in a checkpoint. No atomics and no workspace: the
bits are the same in every run and on any number of streams, and a graph may capture launches.
"""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass, replace
from typing import Literal

import torch

from halfbyte.errors import DependencyError
from halfbyte.kernels.jit import Kernel, kernel

BLOCK = 128
"""Columns that the kernels take at a time; K is a multiple of it."""

Activations = Literal["of_a_warp", "shared", "wide"]

_ELEMENTS = {torch.bfloat16: "Element::bfloat16", torch.float16: "Element::float16"}
_ENTRIES = {"dense": "DENSE", "gate_up": "GATE_UP", "down": "DOWN"}


@dataclass(frozen=True)
class Packed:
    """An INT4 weight [..., N, K]: int32 [..., N, K/8] and the bfloat16 scales [..., N, groups]."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def rows(self) -> int:
        return self.codes.shape[-2]

    @property
    def columns(self) -> int:
        return 8 * self.codes.shape[-1]


@dataclass(frozen=True)
class Tile:
    """How the warps of a program share rows and columns; see `Tile` in cuda/w4a16.cu."""

    row_groups: int
    tokens: int
    warps_by_rows: int
    warps_by_columns: int
    blocks: int
    """Of 128 columns, that are copied together: one or two."""
    depth: int
    activations: Activations
    """In the ring of each warp, shared by all, or shared and read by the tensor cores of four warps
    together (`wide`, which needs compute capability 9.0)."""
    resident: int
    """Programs that are to fit a multiprocessor."""

    @property
    def rows(self) -> int:
        return 16 * self.row_groups * self.warps_by_rows

    @property
    def warps(self) -> int:
        return self.warps_by_rows * self.warps_by_columns

    @property
    def piece_bytes(self) -> int:
        """Bytes of activations that are shared, for a stage of each warp; 0 where none are."""
        if self.activations == "wide":
            return 2 * 2 * BLOCK * self.blocks * self.tokens
        if self.activations == "of_a_warp":
            return 0
        piece = 512 if self.tokens > 16 else 512 + 64
        return 4 * self.blocks * (self.tokens // 8) * self.warps_by_columns * piece

    def ring_bytes(self, scales: int) -> int:
        """Bytes of the rings of all warps; a row has `scales` in a block."""
        block = 16 * self.row_groups * (BLOCK // 2 + (2 * scales if scales > 1 else 0))
        block += 2 * BLOCK * self.tokens if self.activations == "of_a_warp" else 0
        return -(-self.warps * self.depth * self.blocks * block // 1024) * 1024

    def chunk(self, scales: int, stages: int) -> int:
        """Stages of a warp, of `stages` in all, that shared memory has room for activations of."""
        if self.activations != "shared":
            return 1
        room = SHARED_BYTES // self.resident - 1024 - self.ring_bytes(scales)
        return max(1, min(stages, room // self.piece_bytes))

    def shared_bytes(self, scales: int, chunk: int) -> int:
        """Bytes of shared memory of a program: rings and activations, and partial sums later on."""
        sums = 4 * self.warps_by_columns * self.tokens * (self.rows + 4)
        return max(self.ring_bytes(scales) + chunk * self.piece_bytes, sums)


SHARED_BYTES = 228 << 10
"""Of a multiprocessor (compute capability 9.0), of which a program's first KiB is the system's."""

DEEP = Tile(4, 8, 1, 4, 1, 2, "of_a_warp", 3)
"""For up to 8 tokens, where there are rows enough."""
QUICK = Tile(2, 8, 1, 8, 1, 3, "of_a_warp", 2)
"""For up to 8 tokens and few rows."""
MANY = (
    Tile(4, 16, 8, 1, 1, 2, "shared", 2),
    Tile(4, 32, 4, 1, 1, 2, "shared", 2),
    Tile(2, 64, 8, 1, 1, 2, "shared", 2),
)
"""For up to 16, 32 and 64 tokens."""


def unsupported(weight: Packed) -> str:
    """Why the kernels cannot take a weight; empty when they can."""
    groups, columns = weight.scales.shape[-1], weight.columns
    size = columns // groups if columns % groups == 0 else 0
    if columns % BLOCK:
        return f"{columns} columns are no multiple of {BLOCK}"
    if groups > 1 and (size < 32 or size & (size - 1)):
        return f"groups of {size} columns; they are 32, 64, 128 or another power of two, or a row"
    if weight.codes.dtype != torch.int32 or weight.scales.dtype != torch.bfloat16:
        return f"codes {weight.codes.dtype} and scales {weight.scales.dtype}"
    return ""


def usable(*weights: Packed) -> bool:
    """Whether the kernels can take these weights, on the GPU that they are on."""
    return all(
        weight.codes.is_cuda and not unsupported(weight) and available(weight.codes.device)
        for weight in weights
    )


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


def linear(x: torch.Tensor, weight: Packed, *, early: bool = False) -> torch.Tensor:
    """x [M, K] times `weight` [N, K] transposed: [M, N] in the dtype of `x`, bfloat16 or float16.

    Sums are float32. Weights are not rounded for up to 16 tokens, with more to the dtype of `x`.
    With `early` the kernel may start before the one before it in the stream has ended and read
    weights then: only where nothing in the stream writes them. Raises ValueError for what the
    kernels cannot take (see `unsupported`).
    """
    _check(x, weight, ())
    tokens, rows = x.shape[0], weight.rows
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    for start in range(0, tokens, MANY[-1].tokens):
        part = x[start : start + MANY[-1].tokens]
        tile, split = _dense_tile(part.shape[0], rows, weight.columns)
        split = split if _has_clusters(x.device) else 1
        run, chunk = _kernel("dense", tile, x.dtype, weight, split)
        run(
            (-(-rows // tile.rows), split), 32 * tile.warps, weight.codes, weight.scales, part,
            y[start : start + MANY[-1].tokens], part.shape[0], *_shape(weight), chunk,
            cluster=split > 1, early=early,
        )  # fmt: skip
    return y


def experts(
    x: torch.Tensor,
    gate_up: Packed,
    down: Packed,
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
    expert_count, intermediate = gate_up.codes.shape[0], gate_up.rows // 2
    _check(x, gate_up, (expert_count,))
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
    tile: Tile
    pairs_of_token: int

    @staticmethod
    def of(
        chosen: torch.Tensor, expert_count: int, *, tile: Tile = DEEP, early: bool = False
    ) -> Work:
        """Of `chosen` int32 [M, T], the experts of each token, in pieces for `tile`. Experts
        outside 0..expert_count-1 are left out. Raises ValueError for more than 1,024."""
        pairs = chosen.numel()
        order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
        most = min(pairs, expert_count + pairs // tile.tokens)
        pieces = torch.empty(most, 4, dtype=torch.int32, device=chosen.device)
        count = torch.empty(1, dtype=torch.int32, device=chosen.device)
        if expert_count > 1024:
            raise ValueError(f"{expert_count} experts, and the kernels take up to 1,024")
        _named("list_work")(
            (1,), 1024, chosen, pairs, expert_count, tile.tokens, order, pieces, count, early=early
        )
        return Work(order, pieces, count, tile, chosen.shape[1])


def run_gate_up(
    x: torch.Tensor, weight: Packed, work: Work, gated: torch.Tensor, *, early: bool = False
) -> None:
    """gated [pairs, I] = silu(gate) times up of each pair, for `x` [M, H]."""
    intermediate = weight.rows // 2
    strips = -(-intermediate // (work.tile.rows // 2))
    run, chunk = _kernel("gate_up", work.tile, x.dtype, weight)
    _, columns, groups, shift = _shape(weight)
    run(
        (strips, 1, work.pieces.shape[0]), 32 * work.tile.warps, weight.codes, weight.scales, x,
        gated, work.pieces, work.count, work.order, work.pairs_of_token, intermediate, columns,
        groups, shift, chunk, early=early,
    )  # fmt: skip


def run_down(
    gated: torch.Tensor,
    weight: Packed,
    work: Work,
    router: torch.Tensor,
    parts: torch.Tensor,
    *,
    early: bool = False,
) -> None:
    """parts float32 [pairs, H] = the down projection of each pair times its router weight.

    With `early` the kernel ahead has to be that of `run_gate_up` with the same work.
    """
    strips = -(-weight.rows // work.tile.rows)
    run, chunk = _kernel("down", work.tile, gated.dtype, weight)
    run(
        (strips, 1, work.pieces.shape[0]), 32 * work.tile.warps, weight.codes, weight.scales,
        gated, parts, work.pieces, work.count, work.order, router, *_shape(weight), chunk,
        early=early,
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


def _dense_tile(tokens: int, rows: int, columns: int) -> tuple[Tile, int]:
    """The tile, and the programs of a cluster that share its rows."""
    if tokens > DEEP.tokens:
        tile = next(tile for tile in MANY if tile.tokens >= tokens)
        return tile, _split(tile, rows, columns)
    if rows >= 12288 or columns <= 2048:
        return DEEP, 1
    if columns >= 12288:
        return DEEP, 2
    return QUICK, 1


def _split(tile: Tile, rows: int, columns: int) -> int:
    """So many programs share rows that a GPU of 132 multiprocessors has enough of them."""
    strips, split = -(-rows // tile.rows), 1
    most = columns // (BLOCK * tile.blocks) // tile.warps_by_columns
    while split < 8 and 2 * split <= most and strips * split < 132 * tile.resident:
        split *= 2
    return split


@functools.cache
def _has_clusters(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _kernel(
    entry: str, tile: Tile, dtype: torch.dtype, weight: Packed, split: int = 1
) -> tuple[Kernel, int]:
    """The kernel, and its chunk."""
    scales = max(1, BLOCK * weight.scales.shape[-1] // weight.columns)
    if weight.columns % (BLOCK * tile.blocks):
        tile = replace(tile, blocks=1)
    stages = weight.columns // (BLOCK * tile.blocks)
    chunk = tile.chunk(scales, -(-stages // (tile.warps_by_columns * split)))
    *shape, activations, resident = astuple(tile)
    values = (resident, *shape, f"Activations::{activations}", scales)
    arguments = ", ".join(str(value) for value in values)
    instance = f"{_ENTRIES[entry]}({_ELEMENTS[dtype]}, {arguments})"
    return kernel("w4a16", "run", tile.shared_bytes(scales, chunk), instance), chunk


@functools.cache
def _named(name: str, instance: str = "") -> Kernel:
    return kernel("w4a16", "run" if instance else name, instance=instance)


def _shape(weight: Packed) -> tuple[int, int, int, int]:
    """Rows, columns, groups and the power of two that a group has of columns."""
    groups = weight.scales.shape[-1]
    shift = (weight.columns // groups).bit_length() - 1 if groups > 1 else 31
    return weight.rows, weight.columns, groups, shift


def _check(x: torch.Tensor, weight: Packed, leading: tuple[int, ...]) -> None:
    if reason := unsupported(weight):
        raise ValueError(f"the INT4 kernels cannot take this weight: {reason}")
    rows, columns = weight.rows, weight.columns
    groups = weight.scales.shape[-1]
    expected = ((*leading, rows, columns // 8), (*leading, rows, groups))
    if (tuple(weight.codes.shape), tuple(weight.scales.shape)) != expected:
        raise ValueError(
            f"codes {list(weight.codes.shape)} and scales {list(weight.scales.shape)} are not "
            "those of one weight"
        )
    if x.dim() != 2 or x.shape[1] != columns or x.dtype not in _ELEMENTS:
        raise ValueError(
            f"activations {list(x.shape)} of {x.dtype}: the weight takes [M, {columns}] of "
            "bfloat16 or float16"
        )
