"""Decode times of a layer: its products, their sums, and every run on a CPU with small sizes.

Without a GPU plain torch stands in for the kernels of INT4 and FP8 experts, and Triton interprets
the latter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte.errors import CheckpointError, DependencyError, HalfbyteError, UsageError
from halfbyte.kernels import decode_bench, decode_experts, decode_run, fp8
from halfbyte.kernels.decode_bench import Bench, Run
from halfbyte.kernels.decode_time import (
    Experts,
    Layer,
    LayerTime,
    Linear,
    PartTime,
    Timing,
    decoder_layer,
)
from halfbyte.kernels.fp8 import FP8, GroupedExperts, Scaled
from halfbyte.kernels.w4a16 import Work
from halfbyte.progress import SilentProgress
from halfbyte.testing.architectures import ModelType, tiny_config
from halfbyte.testing.glm52 import glm52_config
from halfbyte.testing.numeric import relative_error

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if CUDA else "cpu")


# Shapes.


def shapes(layer: Layer) -> dict[str, tuple[int, int, int]]:
    return {linear.name: (linear.rows, linear.columns, linear.count) for linear in layer.linears}


def test_a_layer_of_glm_52() -> None:
    """As its published config has it, on one GPU and on each of eight."""
    one, eight = (decoder_layer(glm52_config(), ranks) for ranks in (1, 8))
    assert shapes(one) == {
        "q_a and kv_a": (2624, 6144, 1),
        "q_b": (16384, 2048, 1),
        "kv_b of keys": (512, 192, 64),
        "kv_b of values": (256, 512, 64),
        "o": (6144, 16384, 1),
        "router": (256, 6144, 1),
        "shared gate and up": (4096, 6144, 1),
        "shared down": (6144, 2048, 1),
    }
    assert one.experts == Experts(256, 8, 6144, 2048)
    assert shapes(eight) == {
        "q_a and kv_a": (2624, 6144, 1),
        "q_b": (2048, 2048, 1),
        "kv_b of keys": (512, 192, 8),
        "kv_b of values": (256, 512, 8),
        "o": (6144, 2048, 1),
        "router": (256, 6144, 1),
        "shared gate and up": (512, 6144, 1),
        "shared down": (6144, 256, 1),
    }
    assert eight.experts == Experts(256, 8, 6144, 256)
    # Both halves of kv_b are the weight [28672, 512].
    halves = [linear for linear in one.linears if linear.by_head]
    assert sum(linear.nbytes("bf16", 0) for linear in halves) == 2 * 28672 * 512
    unquantized = {linear.name for linear in one.linears if linear.formats == ("bf16",)}
    assert unquantized == {"router", "kv_b of keys", "kv_b of values"}


def test_attention_without_a_latent_query_and_with_groups() -> None:
    direct = decoder_layer(glm52_config() | {"q_lora_rank": None}, 8)
    assert shapes(direct)["q"] == (2048, 6144, 1)
    assert shapes(direct)["kv_a"] == (576, 6144, 1)
    grouped = tiny_config(
        "glm4_moe", layers=2, dense_layers=1, experts=8, hidden=256, moe_intermediate=256,
        index_topk=16, mtp=False, tied=False,
    )  # fmt: skip
    assert shapes(decoder_layer(grouped, 1)) == {
        "q, k and v": ((4 + 2 + 2) * 32, 256, 1),
        "o": (256, 4 * 32, 1),
        "router": (8, 256, 1),
        "shared gate and up": (512, 256, 1),
        "shared down": (256, 256, 1),
    }
    # Two key heads for four GPUs: each has one, which another has as well.
    assert shapes(decoder_layer(grouped, 4))["q, k and v"] == ((1 + 1 + 1) * 32, 256, 1)
    without = decoder_layer(grouped | {"n_shared_experts": 0}, 1)
    assert list(shapes(without)) == ["q, k and v", "o", "router"]


@pytest.mark.parametrize(
    ("change", "ranks", "error", "message"),
    [
        ({"n_routed_experts": None}, 1, CheckpointError, "no routed experts: n_routed_experts is"),
        ({"v_head_dim": None}, 1, CheckpointError, "no v_head_dim"),
        ({"hidden_size": 0}, 1, CheckpointError, "hidden_size is 0"),
        ({"hidden_size": "6144"}, 1, CheckpointError, "hidden_size is '6144'"),
        ({"num_experts_per_tok": 300}, 1, CheckpointError, "is 300, and n_routed_experts 256"),
        ({}, 3, UsageError, "3 does not divide moe_intermediate_size, which is 2048"),
        ({"num_attention_heads": 4}, 8, UsageError, "8 does not divide num_attention_heads"),
    ],
)
def test_what_a_config_lacks_is_named(
    change: dict[str, Any], ranks: int, error: type[HalfbyteError], message: str
) -> None:
    with pytest.raises(error, match=message):
        decoder_layer(glm52_config() | change, ranks)


def test_key_heads_that_no_gpus_share() -> None:
    config = glm52_config() | {"num_key_value_heads": 3, "num_attention_heads": 12}
    del config["kv_lora_rank"]
    with pytest.raises(UsageError, match="2 does not divide num_key_value_heads, which is 3"):
        decoder_layer(config, 2)


# Sums.


def test_gains_are_of_the_fastest_kernels_that_a_layer_has() -> None:
    linear = Linear("o", 64, 32)
    router = Linear("router", 4, 32, quantized=False)
    experts = Experts(4, 2, 64, 32)
    time = LayerTime(
        ranks=1,
        batch=2,
        active=3.0,
        parts=(
            PartTime(linear, (Timing("bf16", "torch", 6.0), Timing("fp8", "torch", 4.0))),
            PartTime(router, (Timing("bf16", "torch", 1.0),)),
            PartTime(
                experts,
                (
                    Timing("int4", "halfbyte", 5.0),
                    Timing("int4", "halfbyte", 3.0, overlapped=True),
                    Timing("fp8", "halfbyte", 19.0),
                    Timing("fp8", "torch, grouped", 15.0),
                ),
            ),
        ),
        bandwidth=1e9,
    )
    assert time.us("fp8") == 4 + 1 + 15
    assert time.us("int4") == 6 + 1 + 5
    assert time.us("int4-fp8") == 4 + 1 + 5
    assert time.gain("int4-fp8") == pytest.approx(100)
    fp8_bytes = (64 * 32 + 2 * (32 + 2 * 64)) + 2 * (4 * 32 + 2 * (32 + 4))
    fp8_bytes += 3 * 3 * 64 * 32 + 2 * 3 * 64
    assert time.bound_us == pytest.approx(fp8_bytes / 1e3)
    assert time.gain_over_bound("int4") == pytest.approx(100 * (fp8_bytes / 1e3 / 12 - 1))


# Runs.


def small(model_type: ModelType = "glm_moe_dsa") -> dict[str, Any]:
    return tiny_config(
        model_type, layers=2, dense_layers=1, experts=6, hidden=256, moe_intermediate=256,
        index_topk=16, mtp=False, tied=False,
    )  # fmt: skip


class Recorder:
    """A timer that runs everything once and says how often it did."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, run: Run, count: int) -> float:
        for i in range(count):
            assert bool(run(i).isfinite().all())
        self.counts.append(count)
        return 10.0


def bench(timer: decode_bench.Timer, **changes: Any) -> Bench:
    made = Bench(torch.device("cpu"), timer=timer, cache_bytes=1 << 20, read_bytes=1 << 16)
    return replace(made, **changes)


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe"])
def test_every_product_runs_and_is_that_of_float64(model_type: ModelType) -> None:
    timer = Recorder()
    layers = [decoder_layer(small(model_type), ranks) for ranks in (1, 2)]
    times = decode_run.measure(layers, (1, 3), bench(timer), SilentProgress())
    assert [(time.ranks, time.batch) for time in times] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    for layer, time in zip((0, 0, 1, 1), times, strict=True):
        assert [part.product for part in time.parts[:-1]] == list(layers[layer].linears)
        assert time.parts[-1].product == layers[layer].experts
        made = [(t.format, t.kernel, t.overlapped) for t in time.parts[-1].timings]
        assert made == [
            ("int4", "halfbyte", False),
            ("int4", "halfbyte", True),
            ("fp8", "halfbyte", False),
            ("fp8", "torch, grouped", False),
        ]
        assert time.us("fp8") == 10 * len(time.parts)
        assert time.bandwidth == pytest.approx((1 << 16) / 10e-6)
    assert times[0].active == times[2].active == 2
    assert 2 < times[1].active <= 6
    # The first is the speed of memory; each product has copies that exceed the cache.
    router = layers[0].linears[-3]
    assert router.name == "router"
    assert timer.counts[0] == 1
    assert decode_bench.MOST_COPIES in timer.counts  # of the router, which is small
    assert -(-(1 << 20) // (256 * 256)) in timer.counts  # of the shared down projection in FP8


def test_a_scale_to_a_row_and_the_seed_outside() -> None:
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    layer = decoder_layer(small(), 1)
    decode_run.measure([layer], (2,), bench(Recorder(), group_size=None), SilentProgress())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_choices_of_experts_are_the_same_in_every_run() -> None:
    experts = decoder_layer(small(), 1).experts
    first, second = (
        decode_experts.Routing.of(experts, 5, bench(Recorder())).chosen for _ in range(2)
    )
    assert len(first) >= decode_experts.ROUTINGS
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == torch.int32
        assert all(len(set(row)) == 2 for row in one.tolist())


def enlarged(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments: 1.1 * function(*arguments)


@pytest.mark.parametrize(
    ("module", "name", "what"),
    [
        (fp8, "linear", "q_a and kv_a in fp8 at batch 2"),
        (torch, "bmm", "kv_b of keys in bf16 at batch 2"),
        (decode_experts, "experts_int4", "routed experts in int4 at batch 2"),
        (fp8, "experts", "routed experts in fp8 at batch 2"),
        (fp8, "_grouped", "routed experts in fp8, grouped by torch at batch 2"),
    ],
)
def test_a_wrong_product_is_not_timed(
    module: Any, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, enlarged(getattr(module, name)))
    with pytest.raises(HalfbyteError, match=f"{what}: the result is off by 0.[1-4]"):
        decode_run.measure([decoder_layer(small(), 1)], (2,), bench(Recorder()), SilentProgress())


def test_torch_without_grouped_products_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise NotImplementedError("no such product\nat length")

    monkeypatch.setattr(fp8, "_grouped", absent)
    layer = decoder_layer(small(), 1)
    (time,) = decode_run.measure([layer], (2,), bench(Recorder()), SilentProgress())
    part = time.parts[-1]
    assert part.fastest("fp8").kernel == "halfbyte"
    assert part.notes == ("torch's grouped FP8 products do not run here: no such product",)


@pytest.mark.parametrize(
    ("change", "ranks", "group", "message"),
    [
        ({}, 4, 128, "4: INT4 products cannot take down of an expert: 64 columns are no whole"),
        ({"hidden_size": 272}, 1, 32, "take gate and up of an expert: 272 columns"),
        ({"kv_lora_rank": 129}, 1, 32, "take q_a and kv_a, which is 241 x 256"),
    ],
)
def test_what_products_cannot_take_is_refused_first(
    change: dict[str, Any], ranks: int, group: int, message: str
) -> None:
    timer = Recorder()
    layers = [decoder_layer(small(), 1), decoder_layer(small() | change, ranks)]
    with pytest.raises(UsageError, match=message):
        decode_run.measure(layers, (1,), bench(timer, group_size=group), SilentProgress())
    assert timer.counts == []


def test_a_gpu_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DependencyError, match="--device cpu is the CPU here"):
        decode_bench.decode_device("cpu")
    monkeypatch.setattr("halfbyte.kernels.decode_bench.resolve_device", lambda _: "cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    with pytest.raises(DependencyError, match=r"compute capability 8\.0"):
        decode_bench.decode_device("auto")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert decode_bench.decode_device("auto") == torch.device("cuda:0")


# FP8 experts.

EXPERTS, TOKENS, PER_TOKEN = 5, 27, 3


class Case:
    """Random FP8 experts, and what float64 makes of them."""

    def __init__(self, hidden: int, width: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(FP8)

        def scales(columns: int) -> torch.Tensor:
            return (torch.rand(EXPERTS, generator=generator) + 0.5) / columns**0.5

        self.x = random(TOKENS, hidden)
        self.gate_up = Scaled(random(EXPERTS, 2 * width, hidden), scales(hidden))
        self.down = Scaled(random(EXPERTS, hidden, width), scales(width))
        order = torch.rand(TOKENS, EXPERTS - 1, generator=generator).argsort(dim=1)
        # The last expert has no token, and others have more than a program takes.
        self.chosen = order[:, :PER_TOKEN].int().contiguous()
        self.router = torch.rand(TOKENS, PER_TOKEN, generator=generator)

    def pairs(self) -> list[tuple[int, int]]:
        return [(i // PER_TOKEN, e) for i, e in enumerate(self.chosen.flatten().tolist())]

    def gated(self) -> torch.Tensor:
        """float64 [pairs, I]."""
        rows = []
        for token, expert in self.pairs():
            gate, up = (exact(self.gate_up, expert) @ self.x[token].double()).chunk(2)
            rows.append(gate / (1 + (-gate).exp()) * up)
        return torch.stack(rows)

    def parts(self, gated: torch.Tensor) -> torch.Tensor:
        """float64 [pairs, H]."""
        rows = [
            weight * (exact(self.down, expert) @ row)
            for (_, expert), weight, row in zip(
                self.pairs(), self.router.flatten().double(), gated.double(), strict=True
            )
        ]
        return torch.stack(rows)

    def result(self) -> torch.Tensor:
        """float64 [M, H]."""
        parts = self.parts(self.gated().float().to(FP8))
        return parts.view(TOKENS, PER_TOKEN, -1).sum(1)

    def to(self, device: torch.device) -> Case:
        for name in ("x", "chosen", "router"):
            setattr(self, name, getattr(self, name).to(device))
        for name in ("gate_up", "down"):
            weight = getattr(self, name)
            setattr(self, name, Scaled(weight.values.to(device), weight.scales.to(device)))
        return self


def exact(weight: Scaled, expert: int) -> torch.Tensor:
    return weight.values[expert].double() * float(weight.scales[expert])


def listed(chosen: torch.Tensor, expert_count: int, *, tokens: int = 8) -> Work:
    """`Work.of` in plain Python."""
    flat, pieces = chosen.flatten().tolist(), []
    order = sorted(range(len(flat)), key=lambda pair: flat[pair])
    end = 0
    for expert in range(expert_count):
        first, end = end, end + flat.count(expert)
        for start in range(first, end, tokens):
            pieces.append((expert, start, min(tokens, end - start), 0))
    count = len(pieces)
    pieces += [(-1, -1, -1, -1)] * 2  # launched, and not to be read
    return Work(
        *(torch.tensor(part, dtype=torch.int32) for part in (order, pieces, [count])),
        tokens,
        chosen.shape[1],
    )


@pytest.mark.parametrize("name", ["plain", "grouped"])
def test_experts_in_fp8_are_those_of_float64(name: str) -> None:
    case = Case(96, 64)
    if name == "plain":
        y = fp8.experts(case.x, case.gate_up, case.down, case.chosen, case.router)
    else:
        y = GroupedExperts.of(case.gate_up, case.down)(case.x, case.chosen, case.router)
    assert y.dtype == torch.bfloat16
    # What lies between is FP8: a value near the middle of two goes to the other one now and then.
    assert relative_error(y, case.result()) < (4e-3 if name == "plain" else 3e-2)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton", reason="Triton comes with torch on Linux")
    from halfbyte.kernels import fp8_experts

    def add_parts(parts: torch.Tensor, chosen: torch.Tensor, count: int, y: torch.Tensor) -> None:
        y.copy_(parts.view(*chosen.shape, -1).sum(1))

    if not CUDA:
        monkeypatch.setattr(Work, "of", listed)
        monkeypatch.setattr(fp8_experts, "add_parts", add_parts)
    return fp8_experts


@pytest.mark.parametrize("launch", range(7))
def test_each_launch_of_the_fp8_kernels(kernels: Any, launch: int) -> None:
    """Rows that do not fill the last program, and pieces that do not fill a tile."""
    chosen = kernels.LAUNCHES[launch]
    case = Case(512, 72)
    gated = case.gated()
    case.to(DEVICE)
    work = Work.of(case.chosen, EXPERTS, tokens=kernels.TOKENS)
    found = torch.full(gated.shape, float("nan"), device=DEVICE)
    kernels.run_gate_up(case.x, case.gate_up, work, found, chosen)
    assert relative_error(found.cpu(), gated) < (1e-2 if CUDA else 1e-6)

    case = Case(200, 512)
    inputs = case.gated().float().to(FP8)
    expected = case.parts(inputs)
    parts = torch.full(expected.shape, float("nan"), device=DEVICE)
    case.to(DEVICE)
    work = Work.of(case.chosen, EXPERTS, tokens=kernels.TOKENS)
    kernels.run_down(inputs.to(DEVICE), case.down, work, case.router, parts, chosen)
    assert relative_error(parts.cpu(), expected) < (1e-2 if CUDA else 1e-6)


def test_a_layer_of_fp8_experts(kernels: Any) -> None:
    case = Case(256, 128)
    expected = case.result()
    case.to(DEVICE)
    launch = kernels.Launch(32, 128, 2, 2)
    y = kernels.experts(case.x, case.gate_up, case.down, case.chosen, case.router, launch, launch)
    # The interpreter cuts off what FP8 does not hold, instead of rounding it.
    assert relative_error(y.cpu(), expected) < (2e-2 if CUDA else 8e-2)
    with pytest.raises(ValueError, match="256 columns are no multiple of 512"):
        kernels.experts(
            case.x, case.gate_up, case.down, case.chosen, case.router, kernels.LAUNCHES[1], launch
        )
    large = Work.of(case.chosen, EXPERTS, tokens=32)
    with pytest.raises(ValueError, match="pieces of 32 pairs; a program takes 16"):
        kernels.run_gate_up(case.x, case.gate_up, large, case.x, launch)


# On a GPU.


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_a_layer_is_timed_on_the_gpu() -> None:
    config = small() | {"hidden_size": 512, "moe_intermediate_size": 1024}
    layers = [decoder_layer(config, ranks) for ranks in (1, 4)]
    made = Bench(DEVICE, cache_bytes=1 << 22, read_bytes=1 << 26)
    times = decode_run.measure(layers, (1, 16, 40), made, SilentProgress())
    for time in times:
        assert all(timing.us > 0 for part in time.parts for timing in part.timings)
        assert time.bound_us > 0
        if torch.cuda.get_device_capability() == (9, 0):
            assert {t.kernel for t in time.parts[-1].timings} == {"halfbyte", "torch, grouped"}
