"""INT4 products: the kernels against float64 with the decoded weights.

Without a GPU `host_kernel` compiles the very source with the host's compiler; there a cluster is
one program, and copies happen at once.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from halfbyte.kernels import reference, w4a16
from halfbyte.kernels.w4a16 import Packed, Tile, Weight

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


pytestmark = pytest.mark.usefixtures("int4_kernels")


def packed(*shape: int, group: int = 32, seed: int = 0) -> Packed:
    """Random codes; scales of both signs and of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    *leading, rows, columns = shape
    bound = 2**31
    codes = torch.randint(-bound, bound, (*leading, rows, columns // 8), generator=generator)
    sizes = torch.rand(*leading, rows, columns // (group or columns), generator=generator)
    signs = torch.randint(0, 2, sizes.shape, generator=generator) * 2 - 1
    scales = (signs * (sizes * 0.02 + 1e-4)).bfloat16()
    return Packed(codes.int().to(DEVICE), scales.to(DEVICE))


def linear(x: torch.Tensor, weight: Packed, *, early: bool = False) -> torch.Tensor:
    return w4a16.linear(x, Weight.of(weight), early=early)


def run_experts(
    x: torch.Tensor, gate_up: Packed, down: Packed, *rest: torch.Tensor, early: bool = False
) -> torch.Tensor:
    chosen, router = rest
    return w4a16.experts(x, Weight.of(gate_up), Weight.of(down), chosen, router, early=early)


def activations(tokens: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns, generator=generator).to(dtype).to(DEVICE)


def exact(weight: Packed) -> torch.Tensor:
    """float64 [..., N, K], nibble by nibble."""
    nibbles = torch.stack([weight.codes >> (4 * i) & 15 for i in range(8)], dim=-1).flatten(-2) - 8
    columns_per_group = nibbles.shape[-1] // weight.scales.shape[-1]
    return nibbles.double() * weight.scales.double().repeat_interleave(columns_per_group, -1)


def error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


def rounded_weight_error(x: torch.Tensor, weight: Packed, expected: torch.Tensor) -> float:
    """Of a product with weights in the dtype of the activations, as other kernels have them."""
    product = x.double() @ exact(weight).to(x.dtype).double().T
    return error(product.to(x.dtype), expected)


ROWS, COLUMNS = (584, 2240) if CUDA else (100, 704)
"""The last tile and the last block are not full, and warps have different numbers of blocks."""
TOKENS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 128) if CUDA else (1, 8, 9, 17, 65)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 128, 0], ids="g{}".format)
def test_a_product_is_nearer_than_with_rounded_weights(dtype: torch.dtype, group: int) -> None:
    columns = COLUMNS - COLUMNS % (group or 32)
    weight = packed(ROWS, columns, group=group)
    for tokens in TOKENS:
        x = activations(tokens, columns, dtype, seed=tokens)
        y = linear(x, weight)
        expected = x.double() @ exact(weight).T
        assert y.dtype == dtype
        # With more tokens weights are rounded, too, and only the order of sums differs. Code times
        # scale has 12 bits at most, which float16 rounds little and bfloat16 to 8.
        exact_weights = tokens <= 16
        equal = 1.0 if dtype == torch.bfloat16 and exact_weights else 1.001
        assert error(y, expected) <= equal * rounded_weight_error(x, weight, expected)
        if exact_weights:  # all that is left is the rounding of the result
            assert error(y, expected) <= 1.001 * error(expected.to(dtype), expected) + 1e-5


@pytest.mark.parametrize(
    "tile",
    [
        Tile(1, 8, 1, 1),
        Tile(4, 8, 3, 1, depth=2),
        Tile(3, 8, 1, 4),
        Tile(2, 8, 2, 3, depth=1),
        Tile(4, 16, 1, 2),
        Tile(2, 16, 3, 2, depth=3),
        Tile(4, 32, 2, 1, depth=2),
        Tile(1, 32, 1, 4, depth=2),
        Tile(4, 64, 1, 2, depth=2),
        Tile(2, 64, 2, 1),
        Tile(3, 16, 2, 2, depth=2),
        Tile(2, 16, 4, 1, wide=True),
        Tile(1, 32, 4, 2, wide=True, depth=2),
        Tile(2, 64, 4, 2, wide=True),
        Tile(1, 128, 8, 1, wide=True),
    ],
    ids=str,
)
def test_every_tile(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed(ROWS, COLUMNS)
    x = activations(tile.tokens - 1, COLUMNS, torch.bfloat16)
    expected = x.double() @ exact(weight).T
    for split in (1, 2, 4, 8) if CUDA else (1,):
        monkeypatch.setattr(w4a16, "_dense_tile", lambda *_, split=split: (tile, split))
        assert error(linear(x, weight), expected) < 3e-3


@pytest.mark.usefixtures("earlier_gpu")
@pytest.mark.parametrize("tile", [Tile(3, 8, 1, 3, depth=2), Tile(2, 64, 2, 1)], ids=str)
def test_products_on_earlier_gpus(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed(ROWS, COLUMNS)
    x = activations(tile.tokens - 1, COLUMNS, torch.bfloat16)
    monkeypatch.setattr(w4a16, "_dense_tile", lambda *_: (tile, 1))
    assert error(linear(x, weight), x.double() @ exact(weight).T) < 3e-3


@pytest.mark.usefixtures("earlier_gpu")
def test_experts_on_earlier_gpus() -> None:
    problem = layer(3, 256, 128, 5, 2, torch.bfloat16)
    assert error(run_experts(*problem), expected_experts(*problem)) < 4e-3


@pytest.mark.parametrize("size", [2.0**-40, 1e-8, 1e4, 2.0**40])
def test_activations_of_any_size(size: float) -> None:
    weight = packed(64, 256)
    x = (activations(3, 256, torch.float32) * size).bfloat16()
    expected = x.double() @ exact(weight).T
    assert error(linear(x, weight), expected) < 2e-3


def test_one_code_in_one_place() -> None:
    """Every nibble of a row meets its own activation and its own scale."""
    columns = 256
    scales = torch.arange(1, 9).bfloat16().expand(32, 8).contiguous().to(DEVICE)
    x = torch.eye(columns)[[0, 5, 31, 32, 127, 128, 200, 255]].bfloat16().to(DEVICE)
    nibbles = (torch.arange(columns) * 7 + torch.arange(32)[:, None] * 3) % 16
    codes = reference.pack_int4((nibbles - 8).to(torch.int8)).to(DEVICE)
    y = linear(x, Packed(codes, scales)).float().cpu()
    column = x.float().argmax(dim=1).cpu()
    assert torch.equal(y, ((nibbles[:, column] - 8) * (column // 32 + 1)).T.float())


def test_what_is_not_finite_stays_in_its_token() -> None:
    weight = packed(64, 256)
    x = activations(4, 256, torch.bfloat16)
    clean = linear(x, weight)
    x[1, 17], x[2, 200] = float("inf"), float("nan")
    y = linear(x, weight)
    assert not y[1:3].isfinite().any()
    assert torch.equal(y[[0, 3]], clean[[0, 3]])


def layer(
    experts: int, hidden: int, intermediate: int, tokens: int, chosen_of: int, dtype: torch.dtype
) -> tuple[torch.Tensor, Packed, Packed, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :chosen_of].int()
    router = torch.rand(tokens, chosen_of, generator=generator)
    return (
        activations(tokens, hidden, dtype),
        packed(experts, 2 * intermediate, hidden, seed=4),
        packed(experts, hidden, intermediate, seed=5),
        chosen.to(DEVICE),
        router.to(DEVICE),
    )


def expected_experts(
    x: torch.Tensor, gate_up: Packed, down: Packed, chosen: torch.Tensor, router: torch.Tensor
) -> torch.Tensor:
    """float64, token by token; the gated product rounded to the dtype as the kernels do."""
    first, second = exact(gate_up), exact(down)
    y = torch.zeros_like(x, dtype=torch.float64)
    for token in range(x.shape[0]):
        for place, expert in enumerate(chosen[token].tolist()):
            if 0 <= expert < first.shape[0]:
                gate, up = (first[expert] @ x[token].double()).chunk(2)
                gated = (torch.nn.functional.silu(gate) * up).to(x.dtype).double()
                y[token] += second[expert] @ gated * router[token, place].double()
    return y


LAYERS = (
    [(16, 2048, 512, tokens, 8) for tokens in (1, 2, 16, 64, 200)]
    if CUDA
    else [(3, 256, 128, 5, 2)]
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", LAYERS)
def test_the_experts_of_a_layer(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    problem = layer(*shape, dtype)
    y = run_experts(*problem)
    expected = expected_experts(*problem)
    assert y.dtype == dtype
    assert error(y, expected) < (4e-3 if dtype == torch.bfloat16 else 1e-3)


def test_an_expert_with_many_tokens_and_pairs_of_other_machines() -> None:
    x, gate_up, down, chosen, router = layer(3, 256, 128, 12, 2, torch.bfloat16)
    chosen[:, 0] = 1  # more pairs than a piece holds
    chosen[:, 1] = torch.tensor([-1, 3, 0], dtype=torch.int32, device=DEVICE).repeat(4)
    y = run_experts(x, gate_up, down, chosen, router)
    assert error(y, expected_experts(x, gate_up, down, chosen, router)) < 4e-3


def test_the_work_of_a_layer_is_sorted_and_cut() -> None:
    chosen = torch.tensor([[2, 0], [2, 5], [0, 2], [2, -1]] * 3, dtype=torch.int32, device=DEVICE)
    work = w4a16.Work.of(chosen, 4)
    pairs = chosen.flatten().tolist()
    order = [i for e in range(4) for i, expert in enumerate(pairs) if expert == e]
    assert work.order[: len(order)].tolist() == order
    count = int(work.count)
    # Six pairs of expert 0, twelve of expert 2, eight to a piece.
    assert work.pieces[:count, :3].tolist() == [[0, 0, 6], [2, 6, 8], [2, 14, 4]]


def test_little_work_is_shared_by_many_programs() -> None:
    """Eight experts of one token, an eighth of GLM-5.2's rows each: 512 rows, 132 processors."""
    tile = w4a16._expert_tile(w4a16._GATE_UP_TILES, 8, 512, 6144, 132)
    assert 8 * 512 / (16 * tile.strips) >= 0.9 * 132
    tile = w4a16._expert_tile(w4a16._GATE_UP_TILES, 512, 4096, 6144, 132)
    assert tile.strips >= 4
    tile = w4a16._expert_tile(w4a16._DOWN_TILES, 512, 6144, 2048, 132)
    assert tile.strips >= 16


def test_a_layer_without_work() -> None:
    x, gate_up, down, chosen, router = layer(3, 256, 128, 2, 2, torch.bfloat16)
    y = run_experts(x, gate_up, down, torch.full_like(chosen, 7), router)
    assert torch.equal(y, torch.zeros_like(x))


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (packed(8, 128, group=16), "groups of 16 columns"),
        (packed(8, 96), "96 columns are no multiple of 64"),
        (packed(8, 384, group=96), "groups of 96 columns"),
    ],
)
def test_what_does_not_fit_is_refused(weight: Packed, reason: str) -> None:
    assert reason in w4a16.unsupported(weight)
    with pytest.raises(ValueError, match=reason):
        linear(activations(1, weight.columns, torch.bfloat16), weight)


def test_gates_and_ups_are_whole_strips() -> None:
    weight = packed(3, 24, 128)
    assert not w4a16.unsupported(weight)
    reason = "24 rows of gates and ups are no multiple of 32"
    assert w4a16.unsupported(weight, gate_up=True) == reason
    x, _, down, chosen, router = layer(3, 128, 64, 2, 2, torch.bfloat16)
    with pytest.raises(ValueError, match=reason):
        run_experts(x, weight, down, chosen, router)


def test_activations_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"activations \[1, 128\] .* takes \[M, 256\]"):
        linear(activations(1, 128, torch.bfloat16), packed(8, 256))
    with pytest.raises(ValueError, match="float32"):
        linear(activations(1, 256, torch.float32), packed(8, 256))


def test_a_routing_of_another_kind_is_refused() -> None:
    x, gate_up, down, chosen, router = layer(3, 256, 128, 2, 2, torch.bfloat16)
    for wrong, message in (
        ((chosen.long(), router), "chosen .* of torch.int64"),
        ((chosen, router.bfloat16()), "router .* of torch.bfloat16"),
        ((chosen, router[:, :1]), r"router \[2, 1\]"),
        ((chosen[:1], router[:1]), "experts of 1 tokens for activations of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            run_experts(x, gate_up, down, *wrong)


GLM_SHAPES = [
    *[(2048, 6144), (16384, 2048), (576, 6144), (28672, 512), (6144, 16384), (4096, 6144)],
    *[(6144, 2048), (24576, 6144), (6144, 12288)],
    # A GPU's part of eight.
    *[(2048, 2048), (3584, 512), (512, 6144), (6144, 256), (3072, 6144), (6144, 1536)],
]
"""Rows and columns of GLM-5.2's linears."""


@pytest.mark.skipif(not CUDA, reason="graphs and streams are the GPU's")
class TestOnGpu:
    @pytest.mark.parametrize("group", [32, 64, 128, 0], ids="g{}".format)
    @pytest.mark.parametrize("shape", GLM_SHAPES, ids=str)
    def test_linears_of_glm(
        self, shape: tuple[int, int], group: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weight = packed(*shape, group=group, seed=group)
        ours, whole = Weight.of(weight), exact(weight)
        rounded, empty = whole.bfloat16().double(), torch.empty
        monkeypatch.setattr(torch, "empty", lambda *s, **how: empty(*s, **how).fill_(float("nan")))
        for tokens in TOKENS:
            x = activations(tokens, shape[1], torch.bfloat16, seed=tokens)
            expected = x.double() @ whole.T
            bound = error((x.double() @ rounded.T).bfloat16(), expected)
            found = error(w4a16.linear(x, ours), expected)
            assert found <= (1.0 if tokens <= 16 else 1.001) * bound

    def test_a_graph_and_two_streams_give_the_same_bits(self) -> None:
        problem = layer(16, 2048, 512, 16, 8, torch.bfloat16)
        weight, x = packed(4096, 6144), activations(8, 6144, torch.bfloat16)
        y, z = linear(x, weight), run_experts(*problem)
        streams = [torch.cuda.Stream() for _ in range(2)]
        results = []
        torch.cuda.synchronize()
        for stream in streams * 20:
            with torch.cuda.stream(stream):
                results.append((linear(x, weight), run_experts(*problem)))
        torch.cuda.synchronize()
        assert all(torch.equal(a, y) and torch.equal(b, z) for a, b in results)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = linear(x, weight)
            second = run_experts(*problem)
        for _ in range(5):
            first.fill_(float("nan"))
            second.fill_(float("nan"))
            graph.replay()
            assert torch.equal(first, y)
            assert torch.equal(second, z)

    def test_a_kernel_that_starts_early_waits_for_its_activations(self) -> None:
        first, second = packed(6144, 6144), packed(4096, 6144, seed=7)
        x = activations(4, 6144, torch.bfloat16)
        expected = linear(linear(x, first), second)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear(linear(x, first, early=True), second, early=True)
        for _ in range(50):
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, expected)

    def test_experts_that_start_early_wait_for_each_other(self) -> None:
        first = layer(16, 2048, 512, 4, 8, torch.bfloat16)
        expected = run_experts(run_experts(*first), *first[1:])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run_experts(run_experts(*first, early=True), *first[1:], early=True)
        for _ in range(50):
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, expected)

    def test_an_offset_beyond_32_bits(self) -> None:
        """The last expert's codes begin beyond 2^31 words of four bytes."""
        experts, rows, columns = 1024, 4096, 4224
        codes = torch.randint(
            -(2**31), 2**31, (experts, 2 * rows, columns // 8), dtype=torch.int32, device=DEVICE
        )
        assert codes[: experts - 1].numel() > 2**31
        scales = torch.ones(experts, 2 * rows, 1, dtype=torch.bfloat16, device=DEVICE) / 64
        gate_up = Packed(codes, scales)
        x = activations(1, columns, torch.bfloat16)
        chosen = torch.tensor([[experts - 1]], dtype=torch.int32, device=DEVICE)
        work = w4a16.Work.of(chosen, experts)
        gated = torch.full((1, rows), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        w4a16.run_gate_up(x, Weight.of(gate_up), work, gated)
        last = exact(Packed(codes[-1], scales[-1]))
        gate, up = (last @ x[0].double()).chunk(2)
        assert error(gated[0], torch.nn.functional.silu(gate) * up) < 4e-3


def test_importing_needs_no_gpu() -> None:
    code = "import halfbyte.kernels.w4a16, halfbyte.kernels.reference"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
