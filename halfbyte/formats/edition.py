"""A copy of a checkpoint in which the bytes of some tensors are others, and some tensors are new.

Headers of shards stay as they are, so only bytes at known places change. The copy grows beside its
folder and gets its name at the end: the folder is a whole model, or not there. What a killed run
left beside it is known by its name, and the next one begins anew.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from halfbyte.core import Checkpoint, OutputTensor, RunReport, TensorInfo
from halfbyte.errors import CheckpointError, OutputError
from halfbyte.formats.checkpoint import open_checkpoint, read_json_object
from halfbyte.formats.files import copy_atomic, file_sha256, sync_folder, write_at, write_atomic
from halfbyte.formats.folder import (
    CONFIG_FILE,
    INDEX_FILE,
    REPORT_FILE,
    WORK_FOLDER,
    entries,
    lock_folder,
    require_apart,
    require_room,
)
from halfbyte.formats.layout import file_layout
from halfbyte.formats.servers import is_divided
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

    The report of the run that wrote `checkpoint` is copied with the hashes of the new shards;
    cards, pages and verdicts are not: they are of other bytes.
    Raises what `require_edition` does, CheckpointError when a shard is not what the report says or
    changed since `checkpoint` was opened, and OutputError when the folder cannot be written.
    """
    require_edition(checkpoint, folder)
    report = _report(checkpoint)
    with _growing(checkpoint, folder) as work:
        progress.start(f"copy to {folder}", len(checkpoint.shards), "shards")
        hashes = {}
        for file in checkpoint.shards:
            hashes[file] = _copy_shard(checkpoint, file, work, report)
            own = {
                name: (checkpoint.tensors[name], tensor)
                for name, tensor in replaced.items()
                if checkpoint.tensors[name].shard == file
            }
            if own:
                _replace(work / file, own)
                hashes[file] = file_sha256(work / file)
            progress.advance(1)
        for file, tensors in added.items():
            _add(work / file, tensors)
            hashes[file] = file_sha256(work / file)
        _write_index(checkpoint, work, added)
        for name in checkpoint.side_files:
            copy_atomic(checkpoint.path / name, work / name)
        if report is not None:
            write_atomic(work / REPORT_FILE, _json(_edited(report, hashes, added).to_json()))
        write_atomic(work / CONFIG_FILE, _json(config))
        open_checkpoint(work)  # as others will, who ask that index and headers agree


def require_edition(checkpoint: Checkpoint, folder: Path) -> None:
    """Raises OutputError when an edition of `checkpoint` cannot be written to `folder`: something
    is there already, or where it grows; it lies in the source, or has too little room.
    CheckpointError when the report of `checkpoint` cannot be read or is of other shards."""
    require_apart(folder, checkpoint.path)
    if present := entries(folder):
        raise OutputError(
            f"{folder} is there already: it holds {present[0]}",
            hint="choose another folder with -o DIR",
        )
    work = _work(folder)
    files = {*checkpoint.side_files, CONFIG_FILE, INDEX_FILE, REPORT_FILE}
    for name in entries(work):
        stem = name.removesuffix(".partial")
        if stem not in files and Path(stem).suffix != ".safetensors":
            raise OutputError(
                f"{work}, in which {folder.name} would grow, holds {name}, which is not of a copy"
                f" of {checkpoint.path}",
                hint=f"move it away: {shlex.join(['mv', str(work), f'{work}.old'])}",
            )
    require_room(work, sum(checkpoint.shards.values()))
    _report(checkpoint)


def _work(folder: Path) -> Path:
    """The folder in which an edition grows: on the same disk, so that it can be renamed."""
    target = folder.resolve()
    return target.with_name(target.name + WORK_FOLDER)


@contextmanager
def _growing(checkpoint: Checkpoint, folder: Path) -> Iterator[Path]:
    """The folder in which an edition grows, at first empty, for this process alone. It becomes
    `folder` when all went well, and is removed otherwise."""
    work = _work(folder)
    with explained(folder, hint="make room, then repeat the command"):
        work.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(work, folder)
        try:
            for name in entries(work):
                (work / name).unlink()
            yield work
            os.replace(work, folder.resolve())
            sync_folder(work.parent)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        finally:
            os.close(lock)


def _copy_shard(checkpoint: Checkpoint, file: str, work: Path, report: RunReport | None) -> str:
    """Copy a shard; its SHA-256. Raises CheckpointError when it is not what it should be: damage
    would get the hash of a sound file."""
    source = checkpoint.path / file
    copy_atomic(source, work / file)
    size, expected = (work / file).stat().st_size, checkpoint.shards[file]
    if size != expected:
        raise CheckpointError(
            f"{source} now has {size:,} bytes, {expected:,} when it was opened first",
            hint="repeat the command when nothing else writes to it",
        )
    digest = file_sha256(work / file)
    if report is not None and digest != report.shards[file]:
        raise CheckpointError(
            f"{source} is damaged: its SHA-256 is {digest}, {REPORT_FILE} says"
            f" {report.shards[file]}",
            hint=shlex.join(["quantize", "verify", str(checkpoint.path)]),
        )
    return digest


def _report(checkpoint: Checkpoint) -> RunReport | None:
    """The report of the run that wrote a checkpoint; None when others wrote it."""
    path = checkpoint.path / REPORT_FILE
    if not path.exists():
        return None
    try:
        report = RunReport.from_json(read_json_object(path), output=str(checkpoint.path))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}",
            hint="it is of another version, or damaged; without it nothing can be verified",
        ) from error
    if other := report.shards.keys() ^ checkpoint.shards.keys():
        raise CheckpointError(
            f"{path} and the folder disagree about {min(other)}",
            hint=shlex.join(["quantize", "verify", str(checkpoint.path)]),
        )
    return report


def _edited(
    report: RunReport,
    hashes: Mapping[str, str],
    added: Mapping[str, Mapping[str, torch.Tensor]],
) -> RunReport:
    """A report about an edition: hashes and sizes are those of its shards."""
    tensors = {name: t.nbytes for shard in added.values() for name, t in shard.items()}
    return replace(
        report,
        shards=dict(hashes),
        bytes_out=report.bytes_out + sum(tensors.values()),
        whole_out=report.whole_out + sum(n for name, n in tensors.items() if not is_divided(name)),
    )


def _replace(path: Path, tensors: Mapping[str, tuple[TensorInfo, torch.Tensor]]) -> None:
    """Put bytes of tensors to their places in a shard. Raises AssertionError for another shape."""
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
