"""Writes a planned checkpoint: every byte has its place, and nothing half-written is loadable.

The plan fixes names, dtypes and shapes of all outputs, so a shard's header and all offsets exist
before any weight is read, and a tensor goes to its place as soon as it is ready: memory never
holds a shard. A shard grows under the name `<file>.partial` and is renamed when its last unit is
committed. The index and `config.json` come last: an unfinished folder cannot be loaded as a model.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.core import DTYPE_BYTES, OutputTensor, Plan, ShardLayout, Unit
from halfbyte.errors import OutputError, ResumeError
from halfbyte.formats.files import PrefixHash, copy_atomic, sync_folder, write_atomic
from halfbyte.formats.folder import (
    CONFIG_FILE,
    INDEX_FILE,
    JOURNAL_FILE,
    REPORT_FILE,
    WORK_FOLDER,
)
from halfbyte.formats.journal import Commit, Journal, identity_difference

if TYPE_CHECKING:
    import torch


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
        _layout(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group)
        for i, group in enumerate(groups, 1)
    )


def _layout(file: str, outputs: Sequence[OutputTensor]) -> ShardLayout:
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


class CheckpointWriter:
    """Writes the units of a plan in order; `commit` makes one durable, `finish` makes the model.

    `identity` names all that a resumed run must share with the run it goes on from.
    Raises ResumeError when an existing journal differs from it, and names the difference.
    """

    def __init__(self, folder: Path, plan: Plan, identity: Mapping[str, Any]) -> None:
        self._folder = folder
        self._plan = plan
        self._place = {
            name: (shard, begin, end)
            for shard in plan.shards
            for name, (begin, end) in shard.offsets.items()
        }
        self._outputs = {o.name: o for t in plan.tensors for o in t.outputs}
        self._written: set[str] = set()
        self._hashes = {shard.file: PrefixHash() for shard in plan.shards}
        self._descriptors: dict[str, int] = {}
        self._lock = _lock(folder / WORK_FOLDER)
        try:
            self._journal = self._take_up(identity)
        except BaseException:
            os.close(self._lock)
            raise

    def _take_up(self, identity: Mapping[str, Any]) -> Journal:
        """The journal of the run to go on with, checked, or a new one."""
        folder = self._folder
        path = folder / WORK_FOLDER / JOURNAL_FILE
        # A journal whose very first line was cut off never committed anything.
        if not path.exists() or b"\n" not in path.read_bytes():
            path.unlink(missing_ok=True)
            return Journal.create(path, identity)
        journal = Journal.load(path)
        if difference := identity_difference(journal.identity, identity):
            raise ResumeError(
                f"{folder} holds another run: {difference}",
                hint="give the same options and inputs, or start again with --overwrite",
            )
        self._check_prefixes(journal)
        return journal

    @property
    def commits(self) -> Sequence[Commit]:
        """What is finished, in order; a prefix of the plan's units."""
        return self._journal.commits

    @property
    def work(self) -> Path:
        """Folder for files that only an unfinished run needs."""
        return self._folder / WORK_FOLDER

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor, which must be as planned and not written before, at its place."""
        expected = self._outputs.get(name)
        if expected is None or name in self._written:
            raise AssertionError(f"{name} is {'written twice' if expected else 'not planned'}")
        dtype, view = _bytes_of(tensor)
        if (dtype, tuple(tensor.shape)) != (expected.dtype, expected.shape):
            raise AssertionError(
                f"{name} is {dtype} {list(tensor.shape)}, "
                f"planned {expected.dtype} {list(expected.shape)}"
            )
        shard, begin, _ = self._place[name]
        descriptor = self._open(shard)
        done = 0
        with _explained(self._folder):
            while done < len(view):
                done += os.pwrite(descriptor, view[done:], begin + done)
        self._written.add(name)

    def commit(self, unit: Unit, record: Mapping[str, Any]) -> None:
        """Make a whole unit durable. Every planned tensor of it must have been written."""
        names = [o.name for t in unit.tensors for o in t.outputs]
        if missing := [name for name in names if name not in self._written]:
            raise AssertionError(f"{unit.name} lacks {len(missing)} tensors, first {missing[0]}")
        ends: dict[str, tuple[ShardLayout, int]] = {}
        for name in names:
            shard, _, end = self._place[name]
            ends[shard.file] = (shard, max(end, ends.get(shard.file, (shard, 0))[1]))
        digests = {}
        with _explained(self._folder):
            for file, (shard, end) in ends.items():
                descriptor = self._open(shard)
                os.fsync(descriptor)
                digests[file] = (end, self._hashes[file].extend(descriptor, end))
            self._journal.append(Commit(unit.name, digests, record))
            for file, (shard, end) in ends.items():
                if end == shard.nbytes:
                    self._complete(file)
        self._written.difference_update(names)

    def finish(self, config: Mapping[str, Any], report: Mapping[str, Any]) -> None:
        """Write side files, report, index and, last, `config.json`; then drop the work folder.

        `report` and `config` are stored as given.
        """
        source, folder = self._plan.checkpoint, self._folder
        done = [commit.unit for commit in self.commits]
        if done != [unit.name for unit in self._plan.units]:
            raise AssertionError(f"{len(done)} of {len(self._plan.units)} units are committed")
        with _explained(folder):
            for shard in self._plan.shards:
                self._complete(shard.file)
            for name in source.side_files:
                copy_atomic(source.path / name, folder / name)
            index = {
                "metadata": {"total_size": sum(o.nbytes for o in self._outputs.values())},
                "weight_map": {name: place[0].file for name, place in self._place.items()},
            }
            write_atomic(folder / REPORT_FILE, _json(report))
            write_atomic(folder / INDEX_FILE, _json(index))
            write_atomic(folder / CONFIG_FILE, _json(config))
            shutil.rmtree(folder / WORK_FOLDER)
            sync_folder(folder)

    def shard_hashes(self) -> dict[str, str]:
        """SHA-256 of every finished shard, as the journal holds it."""
        digests: dict[str, str] = {}
        for commit in self.commits:
            digests.update({file: digest for file, (_, digest) in commit.shards.items()})
        return {shard.file: digests[shard.file] for shard in self._plan.shards}

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        os.close(self._lock)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, shard: ShardLayout) -> int:
        """Descriptor of the growing shard, created with its header and full (sparse) size."""
        if shard.file not in self._descriptors:
            path = self._folder / (shard.file + ".partial")
            with _explained(self._folder):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                os.ftruncate(descriptor, shard.nbytes)
                os.pwrite(descriptor, shard.header, 0)
                sync_folder(self._folder)
            self._descriptors[shard.file] = descriptor
        return self._descriptors[shard.file]

    def _complete(self, file: str) -> None:
        """Give a full shard its final name; it may have it already."""
        partial = self._folder / (file + ".partial")
        if (descriptor := self._descriptors.pop(file, None)) is not None:
            os.close(descriptor)
        if partial.exists():
            os.replace(partial, self._folder / file)
            sync_folder(self._folder)

    def _check_prefixes(self, journal: Journal) -> None:
        """Rehash what the journal says is on the disk; a resumed run trusts nothing else."""
        last: dict[str, tuple[int, str]] = {}
        for commit in journal.commits:
            last.update(commit.shards)
        if unknown := last.keys() - self._hashes.keys():
            raise _damaged(self._folder / min(unknown), "the plan has no such shard")
        for shard in self._plan.shards:
            if shard.file not in last:
                continue
            end, digest = last[shard.file]
            path = self._folder / (shard.file + ".partial")
            if not path.exists():
                path = self._folder / shard.file
            try:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    found = self._hashes[shard.file].extend(descriptor, end)
                finally:
                    os.close(descriptor)
            except (OSError, EOFError) as error:
                raise _damaged(path, str(error)) from error
            if found != digest:
                raise _damaged(path, f"SHA-256 of its first {end} bytes is {found}, not {digest}")


def _lock(folder: Path) -> int:
    """Keep other processes out while the descriptor is open; the kernel frees it when we die."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise OutputError(
            f"another process is writing to {folder.parent}",
            hint="wait for it, or choose another folder with -o DIR",
        ) from error
    return descriptor


def _damaged(path: Path, reason: str) -> ResumeError:
    return ResumeError(
        f"{path} is not what the interrupted run wrote: {reason}",
        hint="start again with --overwrite",
    )


def _json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=2, ensure_ascii=False).encode() + b"\n"


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn a failing write into an OutputError that says how to go on."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"writing to {folder} failed: {error.strerror or error}",
            hint="finished layers are kept: make room, then repeat the command with --resume",
        ) from error


def _bytes_of(tensor: torch.Tensor) -> tuple[str, memoryview]:
    """safetensors dtype and the bytes of a tensor, in memory of the host."""
    import torch

    from halfbyte.formats.shards import TORCH_DTYPES

    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return names[tensor.dtype], memoryview(flat.numpy().data)
