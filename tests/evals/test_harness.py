"""Task scores against lm-eval's own run on dequantized weights, and what a task folder may do."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.errors import EvaluationError
from halfbyte.evals.harness import run_tasks
from halfbyte.evals.model import load_model
from halfbyte.evals.report import TaskResults

DEMO = Path(__file__).resolve().parents[2] / "halfbyte" / "demo"
MODEL = DEMO / "glm-nano-fp8"
TASKS = ["glm_gsm_like", "glm_tool_call", "glm_mmlu_like", "glm_arc_like"]
LIMIT = 2


class Counting:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int]] = []
        self.counts: list[int] = []

    def start(self, phase: str, total: int, unit: str) -> None:
        self.phases.append((phase, total))
        self.counts.append(0)

    def advance(self, amount: int) -> None:
        self.counts[-1] += amount

    def note(self, message: str) -> None: ...

    def finish(self) -> None: ...


@pytest.fixture(scope="module")
def progress() -> Counting:
    return Counting()


@pytest.fixture(scope="module")
def results(progress: Counting) -> TaskResults:
    return run_tasks(MODEL, DEMO / "tasks", TASKS, limit=LIMIT, batch_size=8, progress=progress)


@pytest.fixture(scope="module")
def by_lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """lm-eval's `hf` model, from a folder that transformers loads by itself."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("dequantized")
    load_model(MODEL).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    with contextlib.chdir(DEMO / "tasks"):
        return simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder), "dtype": "float32", "max_length": 1024},
            tasks=TASKS,
            task_manager=TaskManager(include_path=str(DEMO / "tasks"), include_defaults=False),
            limit=LIMIT,
            batch_size=8,
            device="cpu",
        )


def test_every_item_scores_as_in_lm_eval(results: TaskResults, by_lm_eval: Any) -> None:
    assert [task.name for task in results.tasks] == TASKS
    for task in results.tasks:
        for scores in task.metrics:
            expected = [
                (member, sample["doc_id"], sample["doc_hash"][:16], sample[scores.metric])
                for member in dict.fromkeys(item.task for item in task.items)
                for sample in by_lm_eval["samples"][member]
                if sample["filter"] == scores.filter
            ]
            found = [
                (item.task, item.number, item.document, value)
                for item, value in zip(task.items, scores.values, strict=True)
            ]
            assert found == expected
            average = by_lm_eval["results"][task.name][scores.name]
            assert scores.mean == pytest.approx(average, abs=1e-12)


def test_metrics_keep_the_order_of_the_task(results: TaskResults) -> None:
    assert [[m.name for m in task.metrics] for task in results.tasks] == [
        ["exact_match,strict-match", "exact_match,flexible-extract"],
        ["exact_arguments,none", "right_function,none", "valid,none"],
        ["acc,none", "acc_norm,none"],
        ["acc,none", "acc_norm,none"],
    ]


def test_group_pools_its_members(results: TaskResults) -> None:
    group = results.tasks[2]
    subjects = ("animal", "artifact", "body", "food", "person")
    members = [f"glm_mmlu_like_{subject}" for subject in subjects for _ in range(LIMIT)]
    assert [item.task for item in group.items] == members
    assert [item.number for item in group.items] == [*range(LIMIT)] * 5


def test_settings_are_recorded(results: TaskResults) -> None:
    settings = results.settings
    assert (settings.limit, settings.batch_size, settings.max_length) == (LIMIT, 8, 1024)
    assert settings.versions["torch"] == torch.__version__
    assert settings.versions["lm_eval"] == "0.4.13"


def test_progress_counts_every_request(results: TaskResults, progress: Counting) -> None:
    assert sorted(progress.phases) == [("answers", 2 * LIMIT), ("choices", (5 + 1) * 4 * LIMIT)]
    assert progress.counts == [total for _, total in progress.phases]


def write_tasks(folder: Path, **files: str) -> Path:
    folder.mkdir()
    rows = [{"q": f"What is {n} + 1?", "a": str(n + 1), "n": n} for n in range(4)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in files.items():
        (folder / name.replace("_py", ".py").replace("_yaml", ".yaml")).write_text(text)
    return folder


SUMS = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: data.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
process_results: !function code.score
metric_list:
  - {metric: hits, aggregation: mean, higher_is_better: true}
generation_kwargs: {until: ["\\n"], do_sample: false, max_gen_toks: 2}
"""
SCORE = "def score(doc, results):\n    return {'hits': float(doc['n'] % 2)}\n"


def test_leaves_no_trace(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tasks(tmp_path / "tasks", sums_yaml=SUMS, code_py=SCORE)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("lm_eval").level
    (scores,) = run_tasks(Path(os.path.relpath(tiny)), Path("tasks"), batch_size=4).tasks
    assert scores.metrics[0].values == (0.0, 1.0, 0.0, 1.0)
    assert Path.cwd() == tmp_path
    assert list(scratch.iterdir()) == []
    assert logging.getLogger("lm_eval").level == level
    assert capfd.readouterr() == ("", "")


def test_all_tasks_of_a_folder_run_once(tiny: Path, tmp_path: Path) -> None:
    tasks = write_tasks(
        tmp_path / "tasks",
        sums_yaml=SUMS,
        more_yaml=SUMS.replace("task: sums", "task: more"),
        alone_yaml=SUMS.replace("task: sums", "task: alone"),
        both_yaml="group: both\ntask: [sums, more]\n",
        code_py=SCORE,
    )
    scores = run_tasks(tiny, tasks).tasks
    assert [(task.name, len(task.items)) for task in scores] == [("both", 8), ("alone", 4)]
    with pytest.raises(EvaluationError, match="Duplicate task 'sums'"):
        run_tasks(tiny, tasks, ["both", "sums"])


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        (
            SUMS.replace("aggregation: mean", "aggregation: median"),
            "hits of task sums is not the mean",
        ),
        (SUMS.replace("data.jsonl", "absent.jsonl"), "task sums cannot be loaded: Unable to find"),
        (SUMS.replace("dataset_path: json", "dataset_path: someone/data"), "cannot be loaded"),
        (SUMS.replace("code.score", "code.absent"), "task sums cannot be loaded"),
        (SUMS.replace("code.score", "code.nan"), "task sums scores an item nan by hits"),
        (
            SUMS.replace("max_gen_toks: 2", "max_gen_toks: 1020"),
            "needs 10.. tokens with its answer",
        ),
        ("nothing: here", "no lm-eval task in the folder"),
    ],
)
def test_tasks_that_cannot_be_scored(tiny: Path, tmp_path: Path, yaml: str, says: str) -> None:
    code = SCORE + "def nan(doc, results):\n    return {'hits': float('nan')}\n"
    tasks = write_tasks(tmp_path / "tasks", sums_yaml=yaml, code_py=code)
    with pytest.raises(EvaluationError, match=says):
        run_tasks(tiny, tasks, limit=1)


def test_prompt_that_would_be_cut(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="the maximum length is 64") as caught:
        run_tasks(MODEL, DEMO / "tasks", ["glm_recall"], limit=1, max_length=64)
    assert "--max-length" in str(caught.value.hint)
    with pytest.raises(EvaluationError, match="an item of task glm_arc_like needs"):
        run_tasks(MODEL, DEMO / "tasks", ["glm_arc_like"], limit=1, max_length=8)


def test_what_does_not_exist(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="no such folder"):
        run_tasks(tiny, tmp_path / "absent")
    with pytest.raises(EvaluationError, match="no task sum; it has sums"):
        run_tasks(tiny, write_tasks(tmp_path / "tasks", sums_yaml=SUMS, code_py=SCORE), ["sum"])
    with pytest.raises(EvaluationError, match="a limit of 0 items"):
        run_tasks(tiny, tmp_path, limit=0)
