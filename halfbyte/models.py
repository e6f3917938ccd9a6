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

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", flags=re.ASCII)
"""ORG/NAME."""


@dataclass(frozen=True, slots=True)
class RepositoryName:
    """A repository of the Hugging Face Hub as people write it: ORG/NAME or ORG/NAME@REVISION."""

    name: str
    revision: str | None = None
    """A branch, tag or commit; None is the default branch."""

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def resolve(source: str) -> Path | RepositoryName:
    """What a user means by `source`: a folder if there is one, else a repository or an alias of it.

    Raises `HalfbyteError` when it can be neither.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise HalfbyteError(f"{source} is a file; a checkpoint is a folder")
    by_alias = {model.alias: model.repo for model in MODELS}
    name, _, revision = source.partition("@")
    repository = by_alias.get(name.lower(), name)
    if REPOSITORY.fullmatch(repository) and not source.endswith("@"):
        return RepositoryName(repository, revision or None)
    close = difflib.get_close_matches(name.lower(), by_alias, n=3)
    suggestion = f"; known models like it: {', '.join(close)}" if close else ""
    raise HalfbyteError(
        f"there is no folder {source}{suggestion}",
        hint="give a folder, ORG/NAME of the Hugging Face Hub, or a name of `quantize models`",
    )


def recipe_for(checkpoint: Checkpoint) -> str:
    """Name of the built-in recipe that suits the checkpoint's architecture."""
    recipes = {model.model_type: model.recipe for model in MODELS}
    return recipes.get(checkpoint.model_type, DEFAULT_RECIPE)
