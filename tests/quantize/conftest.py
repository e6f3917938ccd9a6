"""INT4 outputs of the trained model that tests share; to be treated as read-only."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.calibration.data import token_windows
from halfbyte.core import Settings
from halfbyte.evals.demo import FOLDER
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.quantize.pipeline import run
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe


@pytest.fixture(scope="session")
def nano() -> Path:
    """The trained model that is part of the package."""
    return FOLDER / "glm-nano-fp8"


@pytest.fixture(scope="session")
def nano_rtn(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("nano") / "rtn"
    run(make_plan(open_checkpoint(nano), load_recipe("glm-5"), Settings(method="rtn")), output)
    return output


@pytest.fixture(scope="session")
def nano_gptq(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("nano") / "gptq"
    settings = Settings(samples=8, sequence_length=256)
    tokens = token_windows(FOLDER / "calibration.jsonl", nano, 8, 256, seed=0)
    run(make_plan(open_checkpoint(nano), load_recipe("glm-5"), settings), output, tokens=tokens)
    return output


@pytest.fixture(params=["rtn", "gptq"])
def nano_int4(request: pytest.FixtureRequest) -> Path:
    """Rounded, and calibrated."""
    folder: Path = request.getfixturevalue(f"nano_{request.param}")
    return folder
