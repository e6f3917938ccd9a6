"""A checkpoint as BF16, decoded by our reader: what tools that cannot read block FP8 start from.

transformers' own dequantization takes the block height as rows over scale rows, which is wrong for
a weight whose last row block is partial, so it must not make a peer's input.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.config import without_quantization
from halfbyte.formats.folder import CONFIG_FILE
from halfbyte.formats.shards import ShardReader
from halfbyte.formats.weights import logical_weights


def write_bf16(source: Path, output: Path) -> None:
    """Write the checkpoint `source`, FP8 weights decoded to BF16, into the new folder `output`.

    All weights are in memory at once. The config comes last, so a folder with one is complete.
    """
    checkpoint = open_checkpoint(source)
    output.mkdir(parents=True, exist_ok=True)
    with ShardReader(checkpoint) as reader:
        tensors = {
            name: reader.read(weight.parts["weight"])
            if weight.encoding == "plain"
            else reader.read_weight(weight, torch.bfloat16)
            for name, weight in logical_weights(checkpoint).items()
        }
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    for name in checkpoint.side_files:
        shutil.copyfile(source / name, output / name)
    config = without_quantization(checkpoint.config)
    (output / CONFIG_FILE).write_text(json.dumps(config, indent=2))
