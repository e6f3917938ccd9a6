"""The output folder: whether we may write there, and what we may delete."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path

from halfbyte.core import Plan
from halfbyte.errors import OutputError

WORK_FOLDER = ".halfbyte"
"""Folder inside the output that exists while a run is unfinished: journal and calibration state."""
CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
REPORT_FILE = "halfbyte_report.json"
RUN_FILE = "halfbyte_run.json"
"""What a run took, which differs from run to run."""
PAGE_FILE = "halfbyte_report.html"
GATE_FILE = "gate.json"
CARD_FILE = "README.md"
CARD_MARK = "<!-- written by `quantize card`, which replaces it -->"
"""Line that tells our card from one that somebody wrote."""
MAX_CARD_BYTES = 1 << 20
JOURNAL_FILE = "journal.jsonl"
SOURCE_FOLDER = "source"
"""Folder inside the work folder where shards of a repository lie while they are read."""


def prepare_folder(folder: Path, plan: Plan, *, resume: bool, overwrite: bool) -> None:
    """Make sure that `folder` may be written: ours to write, and with room for the plan.

    Raises OutputError when it lies in the source, holds something already, cannot be written, or
    the disk is too small.
    """
    require_apart(folder, plan.checkpoint.path)
    present = entries(folder)
    if present and not resume and not overwrite:
        unfinished = WORK_FOLDER in present
        raise OutputError(
            f"the output folder {folder} is not empty: it holds {len(present)} entries, "
            f"{present[0]} the first" + (", of an unfinished run" if unfinished else ""),
            hint="go on with --resume, start again with --overwrite, or choose another -o DIR",
        )
    foreign = [name for name in present if not _is_ours(folder, name, plan)]
    if foreign or (present and WORK_FOLDER not in present and REPORT_FILE not in present):
        raise OutputError(
            f"{folder} holds {(foreign or present)[0]}, which halfbyte did not write, so nothing "
            "there is resumed or overwritten",
            hint="move it away, or choose another folder with -o DIR",
        )
    journal = folder / WORK_FOLDER / JOURNAL_FILE
    if resume and set(present) - {WORK_FOLDER} and not journal.exists():
        raise OutputError(
            f"{folder} holds no interrupted run, but {present[0]} of an earlier one",
            hint="start again with --overwrite",
        )
    require_room(folder, plan.disk)
    try:
        if overwrite and not resume:
            _clear(folder, present)
        (folder / WORK_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write to {folder}: {error.strerror}", hint="choose another folder with -o DIR"
        ) from error


def require_apart(folder: Path, source: Path) -> None:
    """Raises OutputError when an output and its source lie in each other."""
    source, target = source.resolve(), folder.resolve()
    if target == source or source in target.parents or target in source.parents:
        raise OutputError(
            f"the output {folder} and the source checkpoint {source} lie in each other",
            hint="choose another folder with -o DIR",
        )


def _is_ours(folder: Path, name: str, plan: Plan) -> bool:
    """Whether a run of this plan, or of another plan for the same model, writes such a file, or
    we do about it."""
    if name == CARD_FILE:
        return is_our_card(folder / name)
    ours = {CONFIG_FILE, INDEX_FILE, REPORT_FILE, RUN_FILE, PAGE_FILE, GATE_FILE, WORK_FOLDER}
    ours |= set(plan.checkpoint.side_files)
    stem = name.removesuffix(".partial")
    return stem in ours or re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", stem) is not None


def is_our_card(path: Path) -> bool:
    """Whether a model card is one that `quantize card` wrote."""
    if not path.is_file() or path.stat().st_size > MAX_CARD_BYTES:
        return False
    return CARD_MARK.encode() in path.read_bytes().splitlines()


def require_room(folder: Path, nbytes: int) -> None:
    """Raises OutputError when the disk has less room than that for a folder.

    What the folder holds already counts as room: it is part of the result, or makes way.
    """
    written = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free + written < nbytes:
        raise OutputError(
            f"the disk of {folder} is too small: {nbytes - written:,} bytes needed, {free:,} free",
            hint="free some space or choose another folder with -o DIR",
        )


def lock_folder(folder: Path, output: Path, *, joins: bool = False) -> int:
    """Keep other runs out of a folder while the descriptor is open; the kernel frees it when we
    die. The processes of a run, those after the first with `joins`, hold the lock together, so it
    stays until the last of them has ended.

    Raises OutputError, which names `output`, while another run holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not joins:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise OutputError(
            f"another process is writing to {output}",
            hint="wait for it, or choose another folder with -o DIR",
        ) from error
    return descriptor


def entries(folder: Path) -> list[str]:
    """Sorted names in an output folder; none if it is not there. Raises OutputError for a file, and
    for a folder that cannot be read."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(
            f"the output {folder} is a file", hint="choose another folder with -o DIR"
        )
    try:
        return sorted(os.listdir(folder)) if folder.exists() else []
    except OSError as error:
        raise OutputError(
            f"cannot read {folder}: {error.strerror}", hint="choose another folder with -o DIR"
        ) from error


def _clear(folder: Path, present: list[str]) -> None:
    """Empty a folder that an earlier run of ours filled."""

    def turn(name: str) -> int:
        # First what makes the folder a model, so that a crash here leaves no broken one; last
        # what shows that the folder is ours, so that the same command can be repeated.
        return {CONFIG_FILE: 0, INDEX_FILE: 0, REPORT_FILE: 2, WORK_FOLDER: 2}.get(name, 1)

    for entry in sorted(present, key=turn):
        path = folder / entry
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
