"""What a user names as a source, opened: a folder, or a repository of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from halfbyte.core import Checkpoint
from halfbyte.formats import checkpoint
from halfbyte.models import resolve


def open_source(source: str) -> Checkpoint:
    """Describe the checkpoint that `source` names by headers alone.

    A folder is opened without a look at the network. Raises what `models.resolve`,
    `formats.checkpoint.open_checkpoint` and `formats.hub.open_repository` raise.
    """
    place = resolve(source)
    if isinstance(place, Path):
        return checkpoint.open_checkpoint(place)
    from halfbyte.formats.hub import open_repository

    return open_repository(place)
