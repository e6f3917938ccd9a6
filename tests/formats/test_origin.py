"""Where a source came from, by what is left on the disk; and a card that nobody trusts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from halfbyte.core import Origin
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.origin import front_matter, read_origin

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_plain_folder_tells_its_name(tiny: Path) -> None:
    assert read_origin(open_checkpoint(tiny)) == Origin("tiny")


def test_a_download_into_a_folder(tiny_copy: Path) -> None:
    folder = tiny_copy.rename(tiny_copy.parent / "GLM-5.2-FP8")
    note = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{COMMIT}\n{'e' * 40}\n1764500000.5\n")
    (folder / "README.md").write_text(
        "---\nlicense: other\nlicense_name: glm\nlicense_link: LICENSE\nlanguage:\n- en\n- zh\n"
        "pipeline_tag: text-generation\nlibrary_name: transformers\nextra: [1]\n---\n# GLM\n"
    )
    assert read_origin(open_checkpoint(folder)) == Origin(
        name="GLM-5.2-FP8",
        repo="zai-org/GLM-5.2-FP8",
        revision=COMMIT,
        license="other",
        license_name="glm",
        license_link="LICENSE",
        pipeline_tag="text-generation",
        library_name="transformers",
        language=("en", "zh"),
    )


def test_the_cache_of_the_hub(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models--some-org--Some-Model" / "snapshots" / COMMIT
    shutil.copytree(tiny, folder)
    found = read_origin(open_checkpoint(folder))
    assert (found.name, found.repo, found.revision) == ("Some-Model", "some-org/Some-Model", COMMIT)


@pytest.mark.parametrize(
    "text",
    [
        "# no front matter",
        "---\nlicense: mit\n",
        "---\nlicense: [\n---\n",
        "---\n- a list\n---\n",
        "---\n" + "[" * 5000 + "\n---\n",
        "---\nlicense: !!python/object/apply:os.system ['true']\n---\n",
    ],
)
def test_a_card_that_cannot_be_read_tells_nothing(tmp_path: Path, text: str) -> None:
    card = tmp_path / "README.md"
    card.write_text(text)
    assert front_matter(card) == {}


def test_values_that_are_no_short_line_are_left_out(tiny_copy: Path) -> None:
    (tiny_copy / "README.md").write_text(
        '---\nlicense: "a\\nb"\npipeline_tag: 3\nlanguage: {a: b}\nlicense_name: '
        + "x" * 201
        + "\n---\n"
    )
    assert read_origin(open_checkpoint(tiny_copy)) == Origin("tiny")
