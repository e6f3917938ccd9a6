"""The demo's page, card and verdict, of a run and made-up answers."""

from __future__ import annotations

import json
from pathlib import Path

from halfbyte.cli import main
from halfbyte.evals.demo import DemoReport, DemoVariant
from halfbyte.evals.gate import gate
from halfbyte.evals.policy import load_policy
from halfbyte.evals.report import (
    Answer,
    EvalReport,
    Item,
    MetricScores,
    TaskResults,
    TaskScores,
    TaskSettings,
    checkpoint_fingerprint,
)
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.report.demo import show_demo


def evaluated(folder: Path, right: int) -> EvalReport:
    items = tuple(Item("sums", n, f"d{n}", "p", "t") for n in range(50))
    metrics = (MetricScores("acc", "none", True, (1.0,) * right + (0.0,) * (50 - right)),)
    answers = tuple(Answer(f"{folder.name}{n}", tokens=9) for n in range(50))
    scores = TaskScores("sums", "1", items, metrics, "hash", answers, (), "tokens")
    settings = TaskSettings(None, 16, 1024, "float32", {})
    made = checkpoint_fingerprint(open_checkpoint(folder))
    return EvalReport(str(folder), made, tasks=TaskResults(settings, (scores,)))


def test_a_demo_is_shown(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gptq"
    assert main([str(tiny), "--to", "int4", "--method", "rtn", "-o", str(folder), "-q"]) == 0
    source, made = evaluated(tiny, 40), evaluated(folder, 39)
    verdict = gate(source, made, load_policy("article", 10))
    variants = (DemoVariant("FP8", 2, source), DemoVariant("GPTQ", 1, made))
    path = show_demo(DemoReport(str(tmp_path), variants, verdict))
    assert "Verdict: pass" in path.read_text()
    assert "Verdict: **pass**" in (folder / "README.md").read_text()
    assert json.loads((folder / "gate.json").read_text())["candidate"] == made.fingerprint
    # What was written beside it makes it no other checkpoint.
    assert main(["card", str(folder), "-q"]) == 0
    assert main(["report", str(folder), "-q"]) == 0
