"""Writes a planned checkpoint: every byte has its place, and nothing half-written is loadable.

The plan fixes names, dtypes and shapes of all outputs, so a shard's header and all offsets exist
before any weight is read, and a tensor goes to its place as soon as it is ready: memory never
holds a shard. A shard grows under the name `<file>.partial` and is renamed when its last unit is
committed. The index and `config.json` come last: an unfinished folder cannot be loaded as a model.

Files are written, hashed and made durable by one thread in the order of the calls, while the
caller computes what comes next. So a commit is a promise that is kept later; only `commits`,
`shard_hashes` and `finish` wait for it. What fails there is raised by the next call.

Several processes may write a checkpoint together, each its own shards; the journal is common.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.core import OutputTensor, Plan, ShardLayout, Unit
from halfbyte.errors import ResumeError
from halfbyte.formats.budgets import PIECE
from halfbyte.formats.files import copy_atomic, sync_folder, write_atomic
from halfbyte.formats.folder import (
    CONFIG_FILE,
    INDEX_FILE,
    JOURNAL_FILE,
    REPORT_FILE,
    WORK_FOLDER,
    lock_folder,
)
from halfbyte.formats.journal import Commit, Journal, identity_difference
from halfbyte.formats.layout import file_layout
from halfbyte.formats.writebehind import Target, WriteBehind, dtype_name, explained

if TYPE_CHECKING:
    import torch

    from halfbyte.formats.rows import Rows


@dataclass(slots=True)
class SavedState:
    """A file of the work folder that is being written, or was."""

    target: Target
    begun: float
    """When the caller began to hand it over, by `time.monotonic`."""
    sha256: str | None = None
    """None until it is durable."""
    seconds: float | None = None
    """What writing it took, from its first byte until it was durable; None until then."""


class CheckpointWriter:
    """Writes units of a plan in order; `commit` makes one durable, `finish` makes the model.

    `identity` names all that a resumed run must share with the run it goes on from.
    `units` are those that this process writes, all of the plan by default; no other process may
    write into their shards. The first process opens the folder alone, those after it with `joins`.
    Raises ResumeError when an existing journal differs from `identity`, and names the difference.
    Tensors belong to the writer from the call on: nobody may change them any more.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        identity: Mapping[str, Any],
        units: Sequence[Unit] | None = None,
        *,
        joins: bool = False,
    ) -> None:
        self._folder = folder
        self._plan = plan
        self._place = {
            name: (shard, begin, end)
            for shard in plan.shards
            for name, (begin, end) in shard.offsets.items()
        }
        self._outputs = {o.name: o for t in plan.tensors for o in t.outputs}
        self._rows: dict[str, int] = {}
        """Output tensor of the unit in work -> rows written; a scalar counts as one."""
        self._targets = {
            shard.file: Target(folder / (shard.file + ".partial"), shard) for shard in plan.shards
        }
        self.saved: SavedState | None = None
        """What `save` stored last."""
        self._state: SavedState | None = None
        """The same until a commit names it."""
        self._held: list[tuple[Commit, Sequence[str]]] = []
        """Units that become final with the next one, and the shards that are full with them."""
        own = plan.units if units is None else units
        self._own = {self._place[o.name][0].file for u in own for t in u.tensors for o in t.outputs}
        """The shards that this process writes."""
        self._lock = lock_folder(folder / WORK_FOLDER, folder, joins=joins)
        try:
            self._journal = self._take_up(identity)
        except BaseException:
            os.close(self._lock)
            raise
        written = sum(o.nbytes for u in own for t in u.tensors for o in t.outputs)
        budget = min(written, plan.memory.placement.streams.write_behind)
        self._behind = WriteBehind(folder, budget, plan.settings.device)

    def _take_up(self, identity: Mapping[str, Any]) -> Journal:
        """The journal of the run to go on with, checked, or a new one."""
        folder = self._folder
        path = folder / WORK_FOLDER / JOURNAL_FILE
        # A journal whose very first line was cut off never committed anything.
        if not path.exists() or b"\n" not in path.read_bytes():
            return Journal.create(path, identity)
        journal = Journal(path)
        if difference := identity_difference(journal.identity, identity):
            raise ResumeError(
                f"{folder} holds another run: {difference}",
                hint="give the same options and inputs, or start again with --overwrite",
            )
        self._check_prefixes(journal)
        return journal

    @property
    def commits(self) -> Sequence[Commit]:
        """What is finished, by all processes; of the units of one of them it is a prefix."""
        self._behind.drain()
        return self._journal.commits

    @property
    def work(self) -> Path:
        """Folder for files that only an unfinished run needs."""
        return self._folder / WORK_FOLDER

    def write(self, name: str, tensor: torch.Tensor, rows: tuple[int, int] | None = None) -> None:
        """Put a tensor, which must be as planned and not written before, at its place.

        With `rows` it is these rows of the planned tensor, which must come in order.
        """
        target, place = self._claimed(name, tensor, rows)
        self._behind.put(target, place, tensor)

    def write_together(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put whole tensors at their places, those that lie side by side at once."""
        claimed = [(self._claimed(name, t), t) for name, t in tensors.items()]
        claimed.sort(key=lambda item: (item[0][0].path, item[0][1]))
        run: list[torch.Tensor] = []
        for number, ((target, place), tensor) in enumerate(claimed):
            run.append(tensor)
            behind = (target, place + tensor.nbytes)
            if number + 1 == len(claimed) or claimed[number + 1][0] != behind:
                start = behind[1] - sum(t.nbytes for t in run)
                self._behind.put(target, start, *run)
                run = []

    def _claimed(
        self, name: str, tensor: torch.Tensor, rows: tuple[int, int] | None = None
    ) -> tuple[Target, int]:
        """Where a tensor, or these rows of it, goes now. Raises AssertionError when it is not as
        planned, or not its turn."""
        expected, written = self._outputs.get(name), self._rows.get(name)
        begin, end = rows or (0, tensor.shape[0] if tensor.ndim else 1)
        if expected is None or begin != (written or 0) or (written is not None and not begin):
            raise AssertionError(f"{name} is {'written twice' if expected else 'not planned'}")
        shape = (end - begin, *expected.shape[1:]) if rows else expected.shape
        dtype = dtype_name(tensor.dtype)
        if (dtype, tuple(tensor.shape)) != (expected.dtype, shape):
            raise AssertionError(
                f"{name} is {dtype} {list(tensor.shape)}, planned {expected.dtype} {list(shape)}"
            )
        shard, place, _ = self._place[name]
        place += begin * (expected.nbytes // expected.shape[0]) if begin else 0
        self._rows[name] = end
        return self._targets[shard.file], place

    def save(self, file: str, tensors: Mapping[str, Rows]) -> None:
        """Store tensors as a safetensors file of the work folder.

        The next commit names it, under `state` in its record, with `file` and `sha256`, and removes
        the one before it. The tensors may be changed afterwards.
        """
        outputs = [OutputTensor(n, dtype_name(t.dtype), t.shape) for n, t in tensors.items()]
        state = SavedState(Target(self.work / file, file_layout(file, outputs)), time.monotonic())
        self.saved = self._state = state
        started = 0.0

        def start() -> None:
            nonlocal started
            self._behind.settle()  # so that the disk never holds three
            started = time.monotonic()

        def finish() -> None:
            state.sha256 = self._behind.sync(state.target, state.target.layout.nbytes)
            self._behind.release(state.target)
            state.seconds = time.monotonic() - started

        self._behind.submit(start)
        for name, tensor in tensors.items():
            place, _ = state.target.layout.offsets[name]
            for piece in tensor.split(max(1, PIECE // max(1, tensor.row_bytes))):
                self._behind.put(state.target, place, piece, borrowed=True)
                place += piece.nbytes
        self._behind.submit(finish)

    def commit(self, unit: Unit, record: Mapping[str, Any], *, hold: bool = False) -> None:
        """Make a whole unit durable. Every planned tensor of it must have been written.

        With `hold` the run could not go on behind this unit: it becomes final, and part of
        `commits`, together with the next one that is not held.
        """
        names = [o.name for t in unit.tensors for o in t.outputs]
        if missing := [name for name in names if not self._is_whole(name)]:
            raise AssertionError(f"{unit.name} lacks {len(missing)} tensors, first {missing[0]}")
        ends: dict[str, tuple[ShardLayout, int]] = {}
        for name in names:
            shard, _, end = self._place[name]
            ends[shard.file] = (shard, max(end, ends.get(shard.file, (shard, 0))[1]))
            del self._rows[name]
        state, self._state = self._state, None
        self._behind.commit(
            [(self._targets[file], end) for file, (_, end) in ends.items()],
            lambda hashes: self._finish_unit(unit.name, record, ends, hashes, state, hold),
        )

    def finish(self, config: Mapping[str, Any], report: Mapping[str, Any]) -> None:
        """Write side files, report, index and, last, `config.json`; then drop the work folder.

        `report` and `config` are stored as given.
        """
        source, folder = self._plan.checkpoint, self._folder
        done = {commit.unit for commit in self.commits}
        if done != {unit.name for unit in self._plan.units}:
            raise AssertionError(f"{len(done)} of {len(self._plan.units)} units are committed")
        with explained(folder):
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
        """Finish what was handed over, unless writing has failed, and let go of the folder."""
        try:
            self._behind.close()
        finally:
            os.close(self._lock)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._behind.drain()
        finally:
            self.close()

    def _is_whole(self, name: str) -> bool:
        shape = self._outputs[name].shape
        return self._rows.get(name) == (shape[0] if shape else 1)

    # In the background.

    def _finish_unit(
        self,
        unit: str,
        record: Mapping[str, Any],
        ends: Mapping[str, tuple[ShardLayout, int]],
        hashes: Sequence[str],
        state: SavedState | None,
        hold: bool,
    ) -> None:
        """Put a durable unit, of whose shards these are the hashes up to its end, on record."""
        digests = {file: (end, h) for (file, (_, end)), h in zip(ends.items(), hashes, strict=True)}
        saved = None
        if state is not None:
            saved = {"file": state.target.path.name, "sha256": state.sha256}
        full = [file for file, (shard, end) in ends.items() if end == shard.nbytes]
        self._held.append((Commit(unit, digests, {**record, "state": saved}), full))
        if hold:
            return
        self._journal.append([commit for commit, _ in self._held])
        for _, files in self._held:
            for file in files:
                self._complete(file)
        self._held.clear()
        if state is not None:
            for stale in self.work.glob("state-*.safetensors"):
                if stale != state.target.path:
                    stale.unlink()

    def _complete(self, file: str) -> None:
        """Give a full shard its final name; it may have it already."""
        target = self._targets[file]
        self._behind.release(target)
        if target.path.exists():
            os.replace(target.path, self._folder / file)
            sync_folder(self._folder)

    def _check_prefixes(self, journal: Journal) -> None:
        """Rehash what the journal says of our shards; a resumed run trusts nothing else."""
        last: dict[str, tuple[int, str]] = {}
        for commit in journal.commits:
            last.update(commit.shards)
        if unknown := last.keys() - self._targets.keys():
            raise _damaged(self._folder / min(unknown), "the plan has no such shard")
        for shard in self._plan.shards:
            if shard.file not in last or shard.file not in self._own:
                continue
            end, digest = last[shard.file]
            path = self._targets[shard.file].path
            if not path.exists():
                path = self._folder / shard.file
            try:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    found = self._targets[shard.file].prefix.extend(descriptor, end)
                finally:
                    os.close(descriptor)
            except (OSError, EOFError) as error:
                raise _damaged(path, str(error)) from error
            if found != digest:
                raise _damaged(path, f"SHA-256 of its first {end} bytes is {found}, not {digest}")


def _damaged(path: Path, reason: str) -> ResumeError:
    return ResumeError(
        f"{path} is not what the interrupted run wrote: {reason}",
        hint="start again with --overwrite",
    )


def _json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=2, ensure_ascii=False).encode() + b"\n"
