"""A whole transformers model from a checkpoint of any encoding: block FP8, BF16, INT4.

transformers' own loading is not used: it misreads FP8 blocks whose last row block is partial, and
needs the compressed-tensors package for INT4. Here every weight goes through our decoder, so the
baseline and the quantized checkpoint are read by the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.core import Checkpoint, StoredWeight
from halfbyte.errors import EvaluationError, UnsupportedModelError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import layer_index, logical_weights
from halfbyte.kvcache.layout import Kv
from halfbyte.kvcache.scales import is_cache_scale

if TYPE_CHECKING:
    import torch


def load_model(
    checkpoint_path: Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    kv_cache: Kv | None = None,
) -> Any:
    """The causal language model of a checkpoint folder, in evaluation mode on `device`.

    `dtype` names the compute dtype ("float32", "bfloat16"). Multi-token-prediction layers are left
    out, as transformers has no place for them. Memory is that of the model plus one weight. With
    `kv_cache` attention reads keys and values as a server's cache in that format gives them back.

    Raises CheckpointError for a folder that cannot be read, UnsupportedModelError for a model type
    that transformers does not know, or whose cache is not known, EvaluationError when the weights
    do not fit the model.
    """
    import torch

    checkpoint = open_checkpoint(checkpoint_path)
    config = _model_config(checkpoint)
    model = _empty_model(config, getattr(torch, dtype), device)
    weights = {
        name: weight
        for name, weight in logical_weights(checkpoint).items()
        if (layer_index(name) or 0) < config.num_hidden_layers and not is_cache_scale(name)
    }
    slots = dict(_slots(model.state_dict()))
    filled = {slots[name].data_ptr() for name in slots.keys() & weights.keys()}
    missing = [
        name for name in slots.keys() - weights.keys() if slots[name].data_ptr() not in filled
    ]
    if odd := sorted([*missing, *(weights.keys() - slots.keys())]):
        where = "checkpoint" if odd[0] in weights else "model"
        raise EvaluationError(
            f"{checkpoint_path}: checkpoint and model differ in {len(odd)} weights; "
            f"{odd[0]} is only in the {where}"
        )
    with ShardReader(checkpoint) as reader, torch.no_grad():
        for name, weight in weights.items():
            _fill(slots[name], reader, weight)
    if kv_cache is not None:
        from halfbyte.calibration.attention import layer_caches, put_cache

        cache = layer_caches(checkpoint, kv_cache)
        for number, layer in enumerate(model.model.layers):
            put_cache(layer.self_attn, cache(number))
    return model.eval()


def _model_config(checkpoint: Checkpoint) -> Any:
    """transformers' configuration object, as for a checkpoint that was never quantized."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    model_type = checkpoint.model_type
    if (
        model_type not in CONFIG_MAPPING
        or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        raise UnsupportedModelError(
            f"{checkpoint.path}: transformers has no causal language model for model_type "
            f'"{model_type}", so it cannot be evaluated on tasks'
        )
    settings = {key: v for key, v in checkpoint.config.items() if key != "quantization_config"}
    return CONFIG_MAPPING[model_type].from_dict(settings)


def _empty_model(config: Any, dtype: torch.dtype, device: str) -> Any:
    """The model with uninitialized weights; buffers that no checkpoint stores (rotary) are set."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def _slots(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint names and the memory each fills; fused experts are split into per-expert views.

    transformers holds a layer's experts as `gate_up_proj` [experts, 2 I, H] and `down_proj`
    [experts, H, I]; checkpoints hold three matrices per expert.
    """
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".")
        if not module.endswith(".mlp.experts"):
            yield name, tensor
        elif leaf == "gate_up_proj":
            for expert, fused in enumerate(tensor):
                gate, up = fused.chunk(2)
                yield f"{module}.{expert}.gate_proj.weight", gate
                yield f"{module}.{expert}.up_proj.weight", up
        else:
            for expert, matrix in enumerate(tensor):
                yield f"{module}.{expert}.{leaf}.weight", matrix


def _fill(slot: torch.Tensor, reader: ShardReader, weight: StoredWeight) -> None:
    if tuple(slot.shape) != weight.shape:
        raise EvaluationError(
            f"{weight.name} has shape {list(weight.shape)}, the model's config asks for "
            f"{list(slot.shape)}"
        )
    slot.copy_(reader.read_weight(weight, slot.dtype))
