"""Print the reasons of a verdict as annotations of a GitHub workflow run.

    annotate.py VERDICT.json

The form is that of workflow commands: docs.github.com, "Workflow commands for GitHub Actions".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SHOWN = 10
"""A step shows no more annotations of a kind."""


def main(path: str) -> None:
    verdict = json.loads(Path(path).read_text(encoding="utf-8"))
    level = "warning" if verdict["verdict"] == "inconclusive" else "error"
    for reason in verdict["reasons"][:SHOWN]:
        print(f"::{level} title=Accuracy gate, {verdict['verdict']}::{escaped(reason)}")


def escaped(text: str) -> str:
    """Text that stays on its line."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


if __name__ == "__main__":
    main(*sys.argv[1:])
