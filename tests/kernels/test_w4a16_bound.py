"""The kernels keep the bound that `verify --kernels` holds them to."""

from __future__ import annotations

import pytest
import torch

from halfbyte.kernels import reference, w4a16
from halfbyte.kernels.w4a16 import Packed, Weight
from halfbyte.quantize import products

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ROWS, COLUMNS, TOKENS = (2048, 6144, 128) if CUDA else (100, 640, 20)


pytestmark = pytest.mark.usefixtures("int4_kernels")


def linear(generator: torch.Generator, rows: int, columns: int) -> products.Linear:
    codes = torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)
    scales = (torch.rand(rows, columns // 32, generator=generator) * 0.02 + 1e-3).bfloat16()
    weight = codes.float() * scales.float().repeat_interleave(32, 1)
    stored = Packed(reference.pack_int4(codes).to(DEVICE), scales.to(DEVICE))
    return products.Linear(stored, weight.to(DEVICE))


def activations(generator: torch.Generator, columns: int, *, massive: bool) -> torch.Tensor:
    x = torch.randn(TOKENS, columns, generator=generator)
    if massive:  # as trained models have them: all that follows is added to a large number
        x[:, 3] = 1000.0
    return x.bfloat16().to(DEVICE)


@pytest.mark.parametrize("massive", [False, True], ids=["normal", "massive"])
def test_a_product(monkeypatch: pytest.MonkeyPatch, massive: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    one = linear(generator, ROWS, COLUMNS)
    x = activations(generator, COLUMNS, massive=massive)
    monkeypatch.setattr(
        reference, "linear_int4", lambda x, *stored: w4a16.linear(x, Weight.of(Packed(*stored)))
    )
    results, _ = one.judged(x)
    assert len(results) == 3
    for judged in results:
        assert judged.fault is None, judged.fault


def test_the_experts_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, intermediate = (2048, 512) if CUDA else (256, 128)
    width = products.Width("model.layers.0.mlp.", 4, intermediate, hidden, 2)
    x = activations(generator, hidden, massive=False)
    together = products.Together(products.Routed.at_random(x, width), width)
    shapes = {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden)}
    for expert in range(4):
        for leaf, shape in {**shapes, "down_proj": (hidden, intermediate)}.items():
            name = f"{width.prefix}experts.{expert}.{leaf}.weight"
            together.take(name, linear(generator, *shape))

    def experts(
        x: torch.Tensor, gate_up: Packed, down: Packed, *rest: torch.Tensor
    ) -> torch.Tensor:
        chosen, router = rest
        return w4a16.experts(
            x, Weight.of(Packed(*gate_up)), Weight.of(Packed(*down)), chosen, router
        )

    monkeypatch.setattr(reference, "experts_int4", experts)
    for judged in together.judged():
        assert judged.fault is None, judged.fault
        assert judged.error is not None
        assert judged.rounding is not None
        assert judged.error < 1.05 * judged.rounding
