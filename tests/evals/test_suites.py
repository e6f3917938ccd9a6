"""A named set: lm-eval's own tasks with the set's shots, and what is said when data are missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from halfbyte.errors import EvaluationError
from halfbyte.evals.harness import run_tasks
from halfbyte.evals.policy import load_policy
from halfbyte.evals.suites import NAMES, SuiteTask, load_suite

MODEL = Path(__file__).resolve().parents[2] / "halfbyte" / "demo" / "glm-nano-fp8"

SUMS = [{"question": f"{n} + 1?", "answer": f"It is #### {n + 1}"} for n in range(8)]
QUESTIONS = [
    {
        "question": f"Which is {word}?",
        "choices": {"text": ["dog", "cat"], "label": ["A", "B"]},
        "answerKey": "A",
    }
    for word in ("first", "second")
]
KNOWLEDGE = [
    {"question": f"Which is {word}?", "choices": ["a", "b", "c", "d"], "answer": 1, "subject": "x"}
    for word in ("first", "second", "third", "fourth", "fifth")
]
DATA = {"openai/gsm8k": SUMS, "allenai/ai2_arc": QUESTIONS, "cais/mmlu": KNOWLEDGE}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Made-up data in the form of the real ones; what was loaded."""
    loaded: list[tuple[str, str]] = []

    def load(path: str, name: str, **_: Any) -> dict[str, datasets.Dataset]:
        loaded.append((path, name))
        rows = datasets.Dataset.from_list(DATA[path])
        return dict.fromkeys(("train", "validation", "test", "dev"), rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return loaded


def test_tasks_of_lm_eval_with_the_shots_of_the_set(
    hub: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM

    prompts: list[str] = []

    def remember(self: Any, requests: Any, **options: Any) -> Any:
        prompts.extend(request.args[0] for request in requests)
        return ["#### 1" for _ in requests]

    monkeypatch.setattr(HFLM, "generate_until", remember)
    suite = load_suite("article")
    found = run_tasks(
        MODEL, suite, ["gsm8k", "arc_easy", "mmlu"], limit=1, max_new_tokens=16, batch_size=64
    )
    assert [(task.name, task.version, len(task.items)) for task in found.tasks] == [
        ("gsm8k", "3.0", 1),
        ("arc_easy", "1.0", 1),
        ("mmlu", "2", 57),
    ]
    # What the default policy judges by is there.
    primary = load_policy("default").primary
    assert all(primary[task.name] in [m.name for m in task.metrics] for task in found.tasks)
    assert [prompt.count("Question:") for prompt in prompts] == [6]
    assert ("allenai/ai2_arc", "ARC-Easy") in hub
    assert sum(path == "cais/mmlu" for path, _ in hub) == 57
    asked = [json.loads(how)["max_gen_toks"] for task in found.tasks for how in task.generation]
    assert asked == [16]


def test_article() -> None:
    """The five tasks, with the shots that lm-eval publishes."""
    assert NAMES == ("article",)
    suite = load_suite("article")
    shots = {name: task.shots for name, task in suite.tasks.items()}
    assert shots == {"gsm8k": 5, "arc_easy": 0, "arc_challenge": 0, "mmlu": 0, "mmlu_pro": 5}
    assert set(load_policy("default").primary) == set(suite.tasks)


def test_another_version_is_refused(hub: list[tuple[str, str]]) -> None:
    old = SuiteTask("gsm8k", "2.0", 5, "openai/gsm8k")
    suite = replace(load_suite("article"), tasks={"gsm8k": old})
    with pytest.raises(EvaluationError, match=r"version 2\.0, the installed lm-eval has .* 3\.0"):
        run_tasks(MODEL, suite, ["gsm8k"])
    with pytest.raises(EvaluationError, match="set article: no task mmlu; it has gsm8k"):
        run_tasks(MODEL, suite, ["mmlu"])


@pytest.mark.parametrize("task", ["gsm8k", "arc_easy", "mmlu_pro"])
def test_no_data_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    suite = load_suite("article")
    with pytest.raises(EvaluationError) as caught:
        run_tasks(MODEL, suite, [task])
    assert f"the data set {suite.tasks[task].data} cannot be loaded: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert f"TaskManager().load(['{task}'])" in str(caught.value.hint)
