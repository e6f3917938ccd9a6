"""Where every tensor of the output lies, before any exists."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from halfbyte.core import DTYPE_BYTES, OutputTensor, ShardLayout


def lay_out_shards(outputs: Sequence[OutputTensor], max_bytes: int) -> tuple[ShardLayout, ...]:
    """Cut tensors, in the order given, into shards of at most `max_bytes` of data.

    A tensor larger than that gets a shard of its own. A tensor whose place would not be a multiple
    of its element size starts a new shard, since readers map the file and view it as its dtype.
    """
    groups: list[list[OutputTensor]] = []
    filled = max_bytes
    for output in outputs:
        if filled + output.nbytes > max_bytes or filled % DTYPE_BYTES[output.dtype]:
            groups.append([])
            filled = 0
        groups[-1].append(output)
        filled += output.nbytes
    return tuple(
        file_layout(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group)
        for i, group in enumerate(groups, 1)
    )


def file_layout(file: str, outputs: Sequence[OutputTensor]) -> ShardLayout:
    """Header and offsets of one safetensors file that holds these tensors in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in outputs:
        begin, end = end, end + output.nbytes
        entries[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts 8-aligned, as the safetensors library pads
    header = len(text).to_bytes(8, "little") + text
    return ShardLayout(
        file=file,
        header=header,
        offsets={
            name: (len(header) + e["data_offsets"][0], len(header) + e["data_offsets"][1])
            for name, e in entries.items()
            if name != "__metadata__"
        },
        nbytes=len(header) + end,
    )
