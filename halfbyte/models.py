"""The names people use for models, and where each one lives.

Nothing else in halfbyte knows a model by its name: all other decisions come from the config and
the tensors of the checkpoint itself.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from halfbyte.core import Checkpoint
from halfbyte.errors import HalfbyteError

DEFAULT_RECIPE = "glm-5"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that people ask for by a short name."""

    alias: str
    repo: str
    """Repository of the checkpoint to start from, FP8 where there is one."""
    model_type: str
    recipe: str = DEFAULT_RECIPE


MODELS: tuple[KnownModel, ...] = (
    KnownModel("glm-5.3", "zai-org/GLM-5.3", "glm_moe_dsa"),
    KnownModel("glm-5.2", "zai-org/GLM-5.2-FP8", "glm_moe_dsa"),
    KnownModel("glm-5.1", "zai-org/GLM-5.1-FP8", "glm_moe_dsa"),
    KnownModel("glm-5", "zai-org/GLM-5-FP8", "glm_moe_dsa"),
    KnownModel("glm-4.7", "zai-org/GLM-4.7-FP8", "glm4_moe"),
    KnownModel("glm-4.6", "zai-org/GLM-4.6-FP8", "glm4_moe"),
    KnownModel("glm-4.5", "zai-org/GLM-4.5-FP8", "glm4_moe"),
    KnownModel("deepseek-v3", "deepseek-ai/DeepSeek-V3", "deepseek_v3"),
    KnownModel("deepseek-r1", "deepseek-ai/DeepSeek-R1", "deepseek_v3"),
    KnownModel("kimi-k2", "moonshotai/Kimi-K2-Instruct", "kimi_k2"),
)

_REPO = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(source: str) -> Path:
    """The folder of a checkpoint named by its path.

    Raises `HalfbyteError` when there is no such folder; for an alias or a repository id the hint
    is the command that downloads it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise HalfbyteError(f"{source} is a file; a checkpoint is a folder")
    by_alias = {model.alias: model.repo for model in MODELS}
    if (repo := by_alias.get(source.lower())) is not None:
        raise HalfbyteError(
            f"{source} is the repository {repo}, which must first be a local folder",
            hint=f"hf download {repo} --local-dir {repo.split('/')[1]}",
        )
    close = difflib.get_close_matches(source.lower(), by_alias, n=3)
    suggestion = f"; known models like it: {', '.join(close)}" if close else ""
    if _REPO.fullmatch(source):
        raise HalfbyteError(
            f"there is no folder {source}; a repository must first be a local folder{suggestion}",
            hint=f"hf download {source} --local-dir {source.split('/')[1]}",
        )
    raise HalfbyteError(
        f"there is no folder {source}{suggestion}",
        hint="give the folder of a checkpoint; `quantize models` lists the known names",
    )


def recipe_for(checkpoint: Checkpoint) -> str:
    """Name of the built-in recipe that suits the checkpoint's architecture."""
    recipes = {model.model_type: model.recipe for model in MODELS}
    return recipes.get(checkpoint.model_type, DEFAULT_RECIPE)
