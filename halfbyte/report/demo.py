"""What the demo leaves for people: the verdict, the model card and the page of its INT4 model."""

from __future__ import annotations

import json
from pathlib import Path

from halfbyte.evals.demo import DemoReport
from halfbyte.formats.files import write_atomic
from halfbyte.formats.folder import GATE_FILE, PAGE_FILE
from halfbyte.report.card import write_card
from halfbyte.report.output import read_output
from halfbyte.report.page import page


def show_demo(demo: DemoReport) -> Path:
    """Write them into the folder of the judged checkpoint; the page's path."""
    folder = Path(demo.variants[-1].evaluation.checkpoint)
    write_atomic(folder / GATE_FILE, json.dumps(demo.verdict.to_json(), indent=2).encode() + b"\n")
    found = read_output(folder)
    write_card(folder, found)
    path = folder / PAGE_FILE
    write_atomic(path, page(found, demo.variants[-1].evaluation).encode())
    return path
