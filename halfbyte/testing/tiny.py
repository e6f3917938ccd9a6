"""Writes small random checkpoints in the layouts of the real ones, awkward on purpose.

A weight and its scale lie in different shards, `kv_a_proj_with_mqa` ends in a partial 128-block,
one layer shares its predecessor's indexer, the MTP layer follows the last layer, the
correction bias is float32, and sequences longer than `index_topk` need the indexer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from halfbyte.core import tensor_bytes
from halfbyte.testing.architectures import (
    EOS_TOKEN_IDS,
    Kind,
    ModelType,
    tensor_specs,
    tiny_config,
)

Source = Literal["fp8", "bf16", "ct-channel", "ct-block"]

BLOCK = 128
FP8_MAX = 448.0
SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny(
    path: Path | str,
    *,
    model_type: ModelType = "glm_moe_dsa",
    source: Source = "fp8",
    layers: int = 4,
    dense_layers: int = 1,
    experts: int = 4,
    hidden: int = 128,
    moe_intermediate: int = 64,
    index_topk: int = 16,
    mtp: bool = True,
    tied: bool = False,
    shards: int = 3,
    seed: int = 0,
) -> Path:
    """Write a random checkpoint with tokenizer to the folder `path` and return it.

    Weights are Gaussian, scaled so that activations keep their size. `hidden` and
    `moe_intermediate` must be multiples of 32; with the defaults gate and up (128 columns) take
    groups of 32, 64 and 128, down (64 columns) only 32 and 64. `shards=1` writes a lone
    `model.safetensors` without an index. The same arguments give the same bytes.
    """
    folder = Path(path)
    config = tiny_config(
        model_type,
        layers=layers,
        dense_layers=dense_layers,
        experts=experts,
        hidden=hidden,
        moe_intermediate=moe_intermediate,
        index_topk=index_topk,
        mtp=mtp,
        tied=tied,
    ) | _quantization_config(source)

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape, kind in tensor_specs(config):
        values = _values(shape, kind, generator)
        if kind == "linear" and source != "bf16":
            tensors |= _fp8(name, values, source)
        else:
            tensors[name] = values if kind == "correction" else values.to(torch.bfloat16)
    write_checkpoint(folder, config, _cut(tensors, shards))
    _write_tokenizer(folder)
    return folder


def write_nested(path: Path | str, plain: Path) -> Path:
    """A checkpoint around the language model in `plain`, in Kimi-K2.5's layout: its config under
    `text_config`, its tensors under `language_model.`, a vision tower beside it; no tokenizer."""
    from safetensors.torch import load_file

    tensors = {
        f"language_model.{name}": tensor
        for shard in sorted(plain.glob("*.safetensors"))
        for name, tensor in load_file(shard).items()
    }
    tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(4, 4)
    text = json.loads((plain / "config.json").read_text()) | {"model_type": "kimi_k2"}
    return write_checkpoint(path, {"model_type": "kimi_k25", "text_config": text}, [tensors])


def write_checkpoint(
    path: Path | str, config: Mapping[str, Any], shards: list[dict[str, torch.Tensor]]
) -> Path:
    """Write given tensors as a checkpoint folder; a single shard gets no index."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            file = "model.safetensors"
        write_safetensors(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        total = sum(t.nbytes for tensors in shards for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", config)
    return folder


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write one shard with the safetensors library itself."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def write_sparse_shard(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write a shard of given dtypes and shapes that takes no disk: all data is a hole of zeros."""
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Let `edit` change the header of a shard in place; the data stays as it is."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def _quantization_config(source: Source) -> dict[str, Any]:
    if source == "bf16":
        return {}
    if source == "fp8":
        quantization: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
        return {"quantization_config": quantization}
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    inputs = weights | {"dynamic": True}
    if source == "ct-channel":
        weights |= {"strategy": "channel"}
        inputs |= {"strategy": "token"}
    else:
        weights |= {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
        inputs |= {"strategy": "group", "group_size": BLOCK}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*eh_proj$", r"re:.*weights_proj$"],
    }
    return {"quantization_config": quantization}


def _values(shape: tuple[int, ...], kind: Kind, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    match kind:
        case "norm":
            return torch.exp(0.3 * noise)
        case "bias" | "correction":
            return 0.05 * noise
        case "linear" | "float":
            return noise / math.sqrt(shape[1])


def _fp8(name: str, weight: torch.Tensor, source: Source) -> dict[str, torch.Tensor]:
    """F8_E4M3 weight and its scale, amax / 448 of each 128 x 128 block or each row.

    Scales are float32 as GLM and DeepSeek store them, BF16 as compressed-tensors does.
    """
    rows, columns = weight.shape
    height, width = (1, columns) if source == "ct-channel" else (BLOCK, BLOCK)
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    scale = blocks.abs().amax((1, 3)) / FP8_MAX
    if source != "fp8":
        scale = scale.to(torch.bfloat16)
    codes = (blocks / scale.float()[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    stored = codes.view(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn)
    return {name: stored.contiguous(), f"{name}_scale" + "_inv" * (source == "fp8"): scale}


def _cut(tensors: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Split into shards of about equal size, in plain name order, each cut after an FP8 weight.

    So the scale of the last weight of a shard is the first tensor of the next one.
    """
    total = sum(t.nbytes for t in tensors.values())
    any_fp8 = any(t.dtype == torch.float8_e4m3fn for t in tensors.values())
    shards: list[dict[str, torch.Tensor]] = [{}]
    done = 0
    for name in sorted(tensors):
        shards[-1][name] = tensors[name]
        done += tensors[name].nbytes
        cuttable = tensors[name].dtype == torch.float8_e4m3fn or not any_fp8
        if len(shards) < count and cuttable and done >= total * len(shards) / count:
            shards.append({})
    return shards


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: ids 0..255 are bytes, then the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "generation_config.json", {"eos_token_id": EOS_TOKEN_IDS})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
