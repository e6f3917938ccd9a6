"""INT4 and FP8 products of other projects, from their released libraries.

vLLM's two libraries are loaded by path, without vLLM: unzip its wheel (0.24.0 was built for torch
2.11) and give the folder `vllm` in it. Humming is an installed package (`humming-kernels`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.formats.marlin import scales_to_marlin, weights_to_marlin
from halfbyte.kernels.w4a16 import Packed

LIBRARIES = ("_C_stable_libtorch.abi3.so", "_moe_C_stable_libtorch.abi3.so")
U4B8 = 1125899907892224
"""vLLM's number for 4 bits without sign and an offset of 8."""

Product = Callable[[torch.Tensor], torch.Tensor]


def load_vllm(folder: Path) -> None:
    for name in LIBRARIES:
        torch.ops.load_library(str(folder / name))


@functools.cache
def _workspace(per_multiprocessor: int) -> torch.Tensor:
    """The locks of Marlin, which it leaves at zero."""
    count = torch.cuda.get_device_properties().multi_processor_count
    return torch.zeros(count * per_multiprocessor, dtype=torch.int32, device="cuda")


def marlin(weight: Packed, y: torch.Tensor) -> Product:
    """Dense Marlin with vLLM's options, into `y`. Its own packer makes the weight, and ours has to
    make the same."""
    rows, columns = weight.rows, weight.columns
    codes = torch.ops._C.gptq_marlin_repack(
        weight.codes.t().contiguous(), torch.empty(0, dtype=torch.int32, device="cuda"), columns,
        rows, 4, False,
    )  # fmt: skip
    if not torch.equal(codes, weights_to_marlin(weight.codes)):
        raise AssertionError("vLLM's packer and halfbyte.formats.marlin differ")
    scales = scales_to_marlin(weight.scales)
    none, exact, atomic, in_float32 = None, True, False, True
    return lambda x: torch.ops._C.marlin_gemm(
        x, y, codes, none, scales, none, none, none, none, none, _workspace(1), U4B8, x.shape[0],
        rows, columns, exact, atomic, in_float32, False,
    )  # fmt: skip


def machete(weight: Packed) -> Product:
    """Machete, for groups of 64, 128 or a row."""
    group = weight.columns // weight.scales.shape[1]
    codes = torch.ops._C.machete_prepack_B(weight.codes.t(), torch.bfloat16, U4B8, torch.bfloat16)
    scales = weight.scales.t().contiguous()
    return lambda x: torch.ops._C.machete_mm(
        x, codes, U4B8, None, scales, None, group, None, None, None
    )


def humming(weight: Packed, y: torch.Tensor, tokens: int) -> Product:
    """Humming, tuned by its own rules for so many tokens."""
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    layer: Any = HummingLayer(
        shape_n=weight.rows, shape_k=weight.columns,
        weight_config={"dtype": "int4", "group_size": weight.columns // weight.scales.shape[1]},
        torch_dtype=torch.bfloat16,
    ).to("cuda")  # fmt: skip
    layer.load_from_tensors({"weight": weight.codes, "weight_scale": weight.scales})
    layer.transform()
    tuning = json.dumps(
        get_heuristics_config(
            layer.humming_config, shape_m=tokens, gemm_type="dense", device=y.device
        )
    )
    return lambda x: layer(
        x, outputs=y, compute_config='{"gemm_type": "dense"}', tuning_config=tuning
    )


def fp8(weight: torch.Tensor, y: torch.Tensor) -> Product:
    """vLLM's CUTLASS FP8 product, a scale to a row and to a token; `weight` float8_e4m3fn [N, K].
    The activations are FP8 already."""
    ones = torch.ones(max(weight.shape[0], y.shape[0]), 1, device="cuda")
    right = weight.t()

    def product(x: torch.Tensor) -> torch.Tensor:
        torch.ops._C.cutlass_scaled_mm(
            y, x, right, ones[: x.shape[0]], ones[: weight.shape[0]], None
        )
        return y

    return product


def torch_fp8(weight: torch.Tensor) -> Product:
    """The same by torch (cuBLAS), one scale each."""
    one, right = torch.ones((), device="cuda"), weight.t()
    return lambda x: torch._scaled_mm(x, right, one, one, out_dtype=torch.bfloat16)


@dataclass
class MarlinExperts:
    """What vLLM launches for the experts of a layer: first product, SiLU and product, second
    product with the router's weights. The pairs are sorted beforehand."""

    gate_up: tuple[torch.Tensor, torch.Tensor]
    down: tuple[torch.Tensor, torch.Tensor]

    @staticmethod
    def of(gate_up: Packed, down: Packed) -> MarlinExperts:
        return MarlinExperts(_experts(gate_up), _experts(down))

    def run(self, chosen: torch.Tensor, router: torch.Tensor) -> Product:
        """A function of x [M, H] that gives parts [M T, H]."""
        of_token = chosen.shape[1]
        experts, hidden = self.gate_up[0].shape[0], 16 * self.gate_up[0].shape[1]
        intermediate = 16 * self.down[0].shape[1]
        block = next(
            (size for size in (8, 16, 32, 48, 64) if chosen.numel() / experts / size < 0.9), 64
        )
        most = min(chosen.numel() * block, chosen.numel() + experts * (block - 1))
        order = torch.empty(most, dtype=torch.int32, device="cuda")
        of_block = torch.empty(-(-most // block), dtype=torch.int32, device="cuda")
        total = torch.empty(1, dtype=torch.int32, device="cuda")
        torch.ops._moe_C.moe_align_block_size(chosen, experts, block, order, of_block, total, None)
        first, gated, second = (
            torch.empty(chosen.numel(), width, dtype=torch.bfloat16, device="cuda")
            for width in (2 * intermediate, intermediate, hidden)
        )

        def product(
            x: torch.Tensor, y: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor],
            of_token: int, weighted: bool,
        ) -> None:  # fmt: skip
            torch.ops._moe_C.moe_wna16_marlin_gemm(
                x, y, weight[0], None, weight[1], None, None, None, None, None, _workspace(4),
                order, of_block, total, router, block, of_token, weighted, U4B8, x.shape[0],
                y.shape[1], x.shape[1], True, False, True, False, -1, -1, -1,
            )  # fmt: skip

        def run(x: torch.Tensor) -> torch.Tensor:
            product(x, first, self.gate_up, of_token, False)
            torch.ops._C.silu_and_mul(gated, first)
            product(gated, second, self.down, 1, True)
            return second

        return run


def _experts(weight: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    # One by one: the layout of all at once would need several times their memory.
    codes = torch.stack([weights_to_marlin(codes) for codes in weight.codes])
    return codes, torch.stack([scales_to_marlin(scales) for scales in weight.scales])
