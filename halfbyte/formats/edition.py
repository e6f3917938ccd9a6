"""A copy of a checkpoint in which the bytes of some tensors are others, and some tensors are new.

Headers of shards stay as they are, so only bytes at known places change. The copy grows beside its
folder and gets its name at the end: the folder is a whole model, or not there.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from halfbyte.core import Checkpoint, OutputTensor, TensorInfo
from halfbyte.errors import OutputError
from halfbyte.formats.checkpoint import read_json_object
from halfbyte.formats.files import copy_atomic, sync_folder, write_at, write_atomic
from halfbyte.formats.folder import CONFIG_FILE, INDEX_FILE
from halfbyte.formats.layout import file_layout
from halfbyte.formats.writebehind import dtype_name, explained
from halfbyte.progress import Progress

if TYPE_CHECKING:
    import torch


def write_edition(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    config: Mapping[str, Any],
    replaced: Mapping[str, torch.Tensor] = MappingProxyType({}),
    added: Mapping[str, Mapping[str, torch.Tensor]] = MappingProxyType({}),
    progress: Progress,
) -> None:
    """Write `checkpoint`, which is a folder, to `folder`. `replaced` are tensors of the same dtype
    and shape as before; `added` are shards by file name. `config` is stored as given.

    Reports and cards about the checkpoint are not copied: they are of other bytes.
    Raises OutputError as `require_free` does, and when the folder cannot be written.
    """
    require_free(folder)
    work = _work(folder)
    with explained(folder):
        work.mkdir(parents=True)
        _require_room(work, checkpoint)
        progress.start(f"copy to {folder}", len(checkpoint.shards), "shards")
        for file in checkpoint.shards:
            copy_atomic(checkpoint.path / file, work / file)
            own = {
                name: (checkpoint.tensors[name], tensor)
                for name, tensor in replaced.items()
                if checkpoint.tensors[name].shard == file
            }
            _replace(work / file, own)
            progress.advance(1)
        for file, tensors in added.items():
            _add(work / file, tensors)
        _write_index(checkpoint, work, added)
        for name in checkpoint.side_files:
            copy_atomic(checkpoint.path / name, work / name)
        write_atomic(work / CONFIG_FILE, _json(config))
        os.replace(work, folder)
        sync_folder(folder.absolute().parent)


def require_free(folder: Path) -> None:
    """Raises OutputError when there is something at `folder`, or at what it grows in."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} is there already", hint="choose another folder with -o DIR")
    if (work := _work(folder)).exists():
        raise OutputError(
            f"{work} is there already, perhaps of a run that was interrupted",
            hint=shlex.join(["rm", "-r", str(work)]),
        )


def _work(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _require_room(work: Path, checkpoint: Checkpoint) -> None:
    needed, free = sum(checkpoint.shards.values()), shutil.disk_usage(work).free
    if free < needed:
        work.rmdir()
        raise OutputError(
            f"the disk of {work.parent} is too small: {needed:,} bytes needed, {free:,} free",
            hint="free some space or choose another folder with -o DIR",
        )


def _replace(path: Path, tensors: Mapping[str, tuple[TensorInfo, torch.Tensor]]) -> None:
    """Put bytes of tensors to their places in a shard. Raises AssertionError for another shape."""
    if not tensors:
        return
    descriptor = os.open(path, os.O_RDWR)
    try:
        for name, (info, tensor) in tensors.items():
            found = dtype_name(tensor.dtype), tuple(tensor.shape)
            if found != (info.dtype, info.shape):
                raise AssertionError(f"{name} is {found}, was {info.dtype} {info.shape}")
            write_at(descriptor, info.begin, _bytes(tensor))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _add(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write small tensors as a shard."""
    outputs = [OutputTensor(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items()]
    data = b"".join(bytes(_bytes(tensor)) for tensor in tensors.values())
    write_atomic(path, file_layout(path.name, outputs).header + data)


def _write_index(
    checkpoint: Checkpoint, work: Path, added: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """The index as it was, with what is new; one shard alone needs none."""
    path = checkpoint.path / INDEX_FILE
    if not path.exists() and not added:
        return
    index = read_json_object(path) if path.exists() else {}
    places = {name: info.shard for name, info in checkpoint.tensors.items()}
    total = checkpoint.nbytes
    for file, tensors in added.items():
        places |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    metadata = index.get("metadata")
    known = metadata if isinstance(metadata, dict) else {}
    index |= {"metadata": {**known, "total_size": total}, "weight_map": places}
    write_atomic(work / INDEX_FILE, _json(index))


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=2, ensure_ascii=False).encode() + b"\n"
