"""Name an evaluation in a cache: it changes with everything that the scores rest on.

    baseline_key.py CHECKPOINT WORD...

The words are those of `quantize eval`; one that is a file or folder counts with what it holds.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from pathlib import Path

import halfbyte
from halfbyte.core import fingerprint
from halfbyte.evals.evaluation import VERSIONS
from halfbyte.evals.report import checkpoint_fingerprint
from halfbyte.formats.checkpoint import open_checkpoint


def main(checkpoint: str, *words: str) -> None:
    print(
        fingerprint(
            [
                checkpoint_fingerprint(open_checkpoint(Path(checkpoint))),
                {name: importlib.metadata.version(name) for name in VERSIONS},
                files(Path(halfbyte.__file__).parent),
                [[word, files(Path(word))] for word in words],
            ]
        )
    )


def files(path: Path) -> list[list[str]]:
    """Name and SHA-256 of every file of a folder, or of one file and its possible answers."""
    if path.is_dir():
        found = [f for f in path.rglob("*") if "__pycache__" not in f.parts]
    else:
        found = [path, path.parent / "possible_answer" / path.name]
    return [
        [str(file.relative_to(path.parent)), hashlib.sha256(file.read_bytes()).hexdigest()]
        for file in sorted(found)
        if file.is_file()
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
