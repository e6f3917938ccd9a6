"""Ways to damage a checkpoint folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.folder import REPORT_FILE
from halfbyte.formats.shards import ShardReader

INDEX_FILE = "model.safetensors.index.json"


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def edit_tensor(
    folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], *, rehash: bool = True
) -> None:
    """Overwrite a tensor in place; with `rehash` the report believes the new bytes."""
    checkpoint = open_checkpoint(folder)
    info = checkpoint.tensors[name]
    with ShardReader(checkpoint) as reader:
        values = change(reader.read(info))
    with (folder / info.shard).open("r+b") as file:
        file.seek(info.begin)
        file.write(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if rehash:
        believe(folder)


def believe(folder: Path) -> None:
    """Make the report's hashes those of the shards as they are."""
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.safetensors")
    }
    edit_json(folder / REPORT_FILE, lambda report: report.update(shards=hashes))


def read(folder: Path, name: str) -> torch.Tensor:
    checkpoint = open_checkpoint(folder)
    with ShardReader(checkpoint) as reader:
        return reader.read(checkpoint.tensors[name])
