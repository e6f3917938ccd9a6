"""The output folder: whether we may write there, and what we may delete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from halfbyte.core import Plan
from halfbyte.errors import OutputError

WORK_FOLDER = ".halfbyte"
"""Folder inside the output that exists while a run is unfinished: journal and calibration state."""
CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
REPORT_FILE = "halfbyte_report.json"


def prepare_folder(folder: Path, plan: Plan, *, resume: bool, overwrite: bool) -> None:
    """Make sure that `folder` may be written: ours to write, and with room for the plan.

    Raises OutputError when it lies in the source, holds something already, cannot be written, or
    the disk is too small.
    """
    source = plan.checkpoint.path.resolve()
    if folder.resolve() == source or source in folder.resolve().parents:
        raise OutputError(
            f"the output {folder} lies in the source checkpoint {source}",
            hint="choose another folder with -o DIR",
        )
    present = _entries(folder)
    if present and overwrite and not resume:
        _clear(folder, present)
    elif present and not resume:
        unfinished = WORK_FOLDER in present
        raise OutputError(
            f"the output folder {folder} is not empty: it holds {len(present)} entries, "
            f"{present[0]} the first" + (", of an unfinished run" if unfinished else ""),
            hint="go on with --resume, start again with --overwrite, or choose another -o DIR",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WORK_FOLDER).mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write to {folder}: {error.strerror}", hint="choose another folder with -o DIR"
        ) from error
    written = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if free + written < plan.disk:
        raise OutputError(
            f"the disk of {folder} is too small: {plan.disk - written:,} bytes needed, "
            f"{free:,} free",
            hint="free some space or choose another folder with -o DIR",
        )


def _entries(folder: Path) -> list[str]:
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
    """Empty a folder that an earlier run of ours filled; anything else is not ours to delete."""
    if WORK_FOLDER not in present and REPORT_FILE not in present:
        raise OutputError(
            f"{folder} was not written by halfbyte, so --overwrite does not delete it",
            hint="delete it yourself or choose another folder with -o DIR",
        )
    # What makes the folder a model goes first, so that a crash here leaves no broken model.
    for entry in sorted(present, key=lambda name: name not in (CONFIG_FILE, INDEX_FILE)):
        path = folder / entry
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
