"""Checkpoints that tests share. Treat both as read-only; `tiny_copy` is there to be damaged.

Without a GPU, Triton interprets the kernels, so that their tests run anywhere.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from halfbyte.testing.tiny import write_tiny

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs the network
if not torch.cuda.is_available():
    # Read when Triton is first imported, which no import above does.
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def testbed() -> Path:
    """Folder of the trained test checkpoints, tasks and texts."""
    default = REPOSITORY.parent / "shared" / "testbed"
    folder = Path(os.environ.get("HALFBYTE_TESTBED", default))
    if not (folder / "glm-nano-fp8" / "config.json").is_file():
        pytest.skip(f"no testbed at {folder}; set HALFBYTE_TESTBED to its folder")
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random FP8 checkpoint of GLM-5.2's architecture in three shards."""
    return write_tiny(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture
def tiny_copy(tiny: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint, fresh for this test."""
    return Path(shutil.copytree(tiny, tmp_path / "tiny"))
