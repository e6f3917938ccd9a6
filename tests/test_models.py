"""Names of models: what is a folder is taken, what is not is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.core import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.models import DEFAULT_RECIPE, MODELS, RepositoryName, recipe_for, resolve
from halfbyte.quantize.recipe import load_recipe


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def test_a_folder_may_be_called_like_an_alias(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "glm-5.2").mkdir()
    assert resolve("glm-5.2") == Path("glm-5.2")


@pytest.mark.parametrize(
    ("source", "name", "revision"),
    [
        ("glm-5.2", "zai-org/GLM-5.2-FP8", None),
        ("GLM-5.2@v1", "zai-org/GLM-5.2-FP8", "v1"),
        ("someone/Model", "someone/Model", None),
        ("someone/Model@refs/pr/3", "someone/Model", "refs/pr/3"),
    ],
)
def test_names_of_repositories(source: str, name: str, revision: str | None) -> None:
    assert resolve(source) == RepositoryName(name, revision)


def test_a_folder_wins_over_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone/Model").mkdir(parents=True)
    assert resolve("someone/Model") == Path("someone/Model")


@pytest.mark.parametrize("source", ["../Model", "./Model", "a/b/c", "someone/Model@", "/a/b"])
def test_paths_are_no_repositories(source: str) -> None:
    with pytest.raises(HalfbyteError, match=f"there is no folder {source}"):
        resolve(source)


def test_close_matches_are_suggested() -> None:
    with pytest.raises(HalfbyteError, match=r"known models like it: .*glm-5\.2"):
        resolve("glm5.2")


def test_what_is_nothing_is_said_so() -> None:
    with pytest.raises(HalfbyteError, match="there is no folder /nowhere/at all"):
        resolve("/nowhere/at all")


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(HalfbyteError, match="is a file"):
        resolve(str(file))


def test_aliases_are_unique_and_their_recipes_exist() -> None:
    assert len({model.alias for model in MODELS}) == len(MODELS)
    for name in {model.recipe for model in MODELS}:
        assert load_recipe(name).rules


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "deepseek_v3", "unheard_of"])
def test_every_architecture_has_a_recipe(model_type: str) -> None:
    checkpoint = Checkpoint(Path(), {"model_type": model_type}, {}, {}, ())
    assert recipe_for(checkpoint) == DEFAULT_RECIPE
