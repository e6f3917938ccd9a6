"""Where a source checkpoint came from, and what its model card says of its licence.

Both are read from what downloading leaves on the disk; nothing is asked of the network. Only a
few short values are taken from the card, and none of them is trusted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfbyte.core import Checkpoint, Origin
from halfbyte.formats.folder import CARD_FILE, MAX_CARD_BYTES
from halfbyte.models import MODELS

MAX_VALUE = 200
"""Characters of a value of the card; longer ones are left out."""

_REVISION = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)", re.ASCII)
"""Folder of a repository in the cache of huggingface_hub; its snapshots are named by commit."""


def read_origin(checkpoint: Checkpoint) -> Origin:
    """What a source tells about where it came from.

    Of a folder the repository is that of the Hub's cache, or the known one of the folder's name and
    model type; the revision that of the cache, or of `hf download --local-dir`.
    """
    folder = checkpoint.path.resolve()
    source = checkpoint.repository
    cached = _CACHED.fullmatch(folder.parents[1].name) if len(folder.parents) > 1 else None
    repo: str | None
    revision: str | None
    if source is not None:
        repo, revision = source.name, source.commit
        name = source.name.split("/")[-1]
    elif cached is not None and folder.parent.name == "snapshots":
        name = cached[2]
        repo = f"{cached[1]}/{name}"
        revision = folder.name if _REVISION.fullmatch(folder.name) else None
    else:
        name = checkpoint.path.absolute().name  # links keep the name the user knows
        repo = _known_repository(name, checkpoint.model_type)
        revision = _downloaded_revision(folder)
    card = front_matter(folder / CARD_FILE)
    language = card.get("language")
    languages = language if isinstance(language, list) else [language]
    return Origin(
        name=name,
        repo=repo,
        revision=revision,
        license=_text(card.get("license")),
        license_name=_text(card.get("license_name")),
        license_link=_text(card.get("license_link")),
        pipeline_tag=_text(card.get("pipeline_tag")),
        library_name=_text(card.get("library_name")),
        language=tuple(text for entry in languages[:100] if (text := _text(entry))),
    )


def front_matter(path: Path) -> Mapping[str, Any]:
    """The YAML at the top of a model card; empty when there is none that can be read."""
    import yaml

    if not path.is_file() or path.stat().st_size > MAX_CARD_BYTES:
        return {}
    lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return {}
    end = next((i for i, line in enumerate(lines[1:], 1) if line.strip() == "---"), None)
    if end is None:
        return {}
    try:
        parsed = yaml.safe_load("\n".join(lines[1:end]))
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _known_repository(name: str, model_type: str) -> str | None:
    for model in MODELS:
        if model.model_type == model_type and model.repo.split("/")[1].lower() == name.lower():
            return model.repo
    return None


def _downloaded_revision(folder: Path) -> str | None:
    """The commit that `hf download --local-dir` notes for each file, in its first line."""
    note = folder / ".cache" / "huggingface" / "download" / "config.json.metadata"
    if not note.is_file() or note.stat().st_size > MAX_VALUE:
        return None
    first = note.read_bytes().decode("ascii", "replace").partition("\n")[0].strip()
    return first if _REVISION.fullmatch(first) else None


def _text(value: Any) -> str | None:
    """A short line of text, or nothing."""
    if not isinstance(value, str) or len(value) > MAX_VALUE or not value.isprintable():
        return None
    return value.strip() or None
