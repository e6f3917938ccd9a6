"""The map from norms to their readers is what transformers' own layers do, and complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.calibration.architecture import Architecture
from halfbyte.core import Settings, Unit
from halfbyte.errors import UnsupportedModelError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.weights import logical_weights
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.readers import norm_readers, scalable_inputs, up_and_down
from halfbyte.quantize.recipe import load_recipe
from halfbyte.testing.tiny import write_tiny

FAMILIES = ["glm_moe_dsa", "glm4_moe", "deepseek_v3"]
AROUND_MTP = ("eh_proj", "enorm", "hnorm", "shared_head", "embed_tokens")


def layer_shapes(path: Path, index: int) -> dict[str, tuple[int, ...]]:
    """Logical tensors of a layer by their name within it."""
    prefix = f"model.layers.{index}."
    weights = logical_weights(open_checkpoint(path))
    return {n.removeprefix(prefix): w.shape for n, w in weights.items() if n.startswith(prefix)}


@torch.no_grad()
def readers_in_transformers(path: Path, index: int) -> dict[str, set[str]]:
    """What a forward pass of transformers' layer shows: modules with a weight matrix whose input is
    the very memory that a norm wrote. Routed experts, one module there, are given as `mlp.experts`.
    """
    architecture = Architecture.of(open_checkpoint(path))
    config = architecture.config
    torch.manual_seed(0)
    layer = architecture.layer(index).to_empty(device="cpu")
    for tensor in [*layer.parameters(), *layer.buffers()]:
        tensor.normal_(std=0.1)
    outputs: dict[int, tuple[str, torch.Tensor]] = {}
    readers: dict[str, set[str]] = {}

    def keep(name: str) -> Any:
        def hook(_: nn.Module, args: Any, out: torch.Tensor) -> None:
            outputs[out.data_ptr()] = (name, out)  # held, so that no memory is used twice

        return hook

    def see(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.data_ptr() in outputs:
                    readers.setdefault(outputs[value.data_ptr()][0], set()).add(name)

        return hook

    for name, module in layer.named_modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.register_forward_hook(keep(name))
        elif any(p.dim() >= 2 for p in module.parameters(recurse=False)):
            module.register_forward_pre_hook(see(name), with_kwargs=True)
    hidden = torch.randn(1, 24, config.hidden_size)
    position = torch.arange(24)[None]
    arguments: dict[str, Any] = {
        "position_ids": position,
        "position_embeddings": architecture.rotary(torch.device("cpu"))(hidden, position),
    }
    if architecture.index_topk is not None:
        arguments["attention_mask"] = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
        arguments["prev_topk_indices"] = torch.arange(24, dtype=torch.int32).expand(1, 24, 24)
    layer(hidden, **arguments)
    return readers


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("index", range(5))  # dense, indexer, shared selection, sparse, MTP
def test_map_is_what_transformers_does(tmp_path: Path, model_type: Any, index: int) -> None:
    path = write_tiny(tmp_path / "tiny", model_type=model_type)
    found: dict[str, set[str]] = {}
    for norm, linears in norm_readers(layer_shapes(path, index)).items():
        found[norm] = {re.sub(r"experts\.\d+\..*", "experts", m) for m in linears}
    assert found == readers_in_transformers(path, index)
    has_indexer = any("indexer" in m for linears in found.values() for m in linears)
    assert has_indexer == (model_type == "glm_moe_dsa" and index != 3)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("index", [0, 1, 4])
def test_every_matrix_of_a_layer_has_its_place(tmp_path: Path, model_type: Any, index: int) -> None:
    """Exactly once: behind a norm, behind an up projection, or known to read neither."""
    shapes = layer_shapes(write_tiny(tmp_path / "tiny", model_type=model_type), index)
    modules = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2}
    behind_norms = [m for linears in norm_readers(shapes).values() for m in linears]
    behind_up = list(up_and_down(modules).values())
    neither = {"self_attn.o_proj"} | {m for m in modules if m.startswith(AROUND_MTP)}
    assert sorted([*behind_norms, *behind_up, *neither]) == sorted(modules)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("self_attn.indexer.wk_weights_proj.weight", (8, 8)),  # fused, as servers hold it
        ("mlp.experts.gate_up_proj", (4, 8, 8)),
        ("mlp.gate_up_proj.weight", (8, 8)),
        ("self_attn.q_c_proj.weight", (8, 8)),
        ("post_feedforward_layernorm.weight", (8,)),
        ("mlp.gate.scale", (8,)),
    ],
)
def test_a_tensor_nobody_thought_of_is_an_error(
    tiny: Path, name: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(name)):
        norm_readers(layer_shapes(tiny, 1) | {name: shape})


def test_a_reader_without_its_norm_is_an_error(tiny: Path) -> None:
    shapes = layer_shapes(tiny, 1)
    del shapes["post_attention_layernorm.weight"]
    with pytest.raises(UnsupportedModelError, match="post_attention_layernorm"):
        norm_readers(shapes)


def unit_of(path: Path, recipe: str, index: int) -> Unit:
    plan = make_plan(open_checkpoint(path), load_recipe(recipe), Settings(method="rtn"))
    return next(u for u in plan.units if u.index == index)


def sources(path: Path, recipe: str, index: int) -> tuple[list[str], tuple[str, ...]]:
    prefix = f"model.layers.{index}."
    found, left_out = scalable_inputs(unit_of(path, recipe, index))
    return [i.source.removeprefix(prefix) for i in found], left_out


def test_only_inputs_that_quantized_linears_read_are_scaled(tiny: Path) -> None:
    experts = [f"mlp.experts.{e}.up_proj" for e in range(4)]
    assert sources(tiny, "glm-5", 0) == ([], ())  # dense: stays BF16
    assert sources(tiny, "glm-5", 1) == (["post_attention_layernorm", *experts], ())
    norms = ["post_attention_layernorm", "self_attn.q_a_layernorm"]
    assert sources(tiny, "experts-and-dense", 0) == ([*norms, "mlp.up_proj"], ())
    found, _ = sources(tiny, "experts-and-dense", 4)
    assert found == [*norms, *experts, "mlp.shared_experts.up_proj"]


def test_every_reader_is_listed_and_the_quantized_ones_among_them(tiny: Path) -> None:
    norm = scalable_inputs(unit_of(tiny, "glm-5", 1))[0][0]
    leaves = {re.sub(r"\d+", "N", m.removeprefix("model.layers.1.mlp.")) for m in norm.readers}
    experts = {"experts.N.gate_proj", "experts.N.up_proj"}
    assert leaves == {"gate", "shared_experts.gate_proj", "shared_experts.up_proj", *experts}
    assert len(norm.quantized) == 8
    assert all(".experts." in m for m in norm.quantized)


def test_a_reader_that_stays_fp8_leaves_its_norm_alone(tiny: Path) -> None:
    found, left_out = sources(tiny, "glm-5-fp8-rest", 1)
    assert found == [f"mlp.experts.{e}.up_proj" for e in range(4)]
    (sentence,) = left_out
    assert "layers.1.post_attention_layernorm is not scaled" in sentence
    assert "shared_experts.gate_proj.weight stays F8_E4M3" in sentence
