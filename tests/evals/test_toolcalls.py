"""Tool calls of a trained model against lm-eval's own scores, and what cannot be asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from halfbyte.calibration.data import load_tokenizer
from halfbyte.cli import main
from halfbyte.errors import EvaluationError
from halfbyte.evals.gate import gate
from halfbyte.evals.harness import run_tasks
from halfbyte.evals.kept import kept_path
from halfbyte.evals.policy import load_policy
from halfbyte.evals.report import EvalReport, TaskResults, TaskSettings
from halfbyte.evals.tool_files import read_tool_tasks
from halfbyte.evals.toolcalls import ToolChat, run_tool_calls, scored, together

DEMO = Path(__file__).resolve().parents[2] / "halfbyte" / "demo"
MODEL = DEMO / "glm-nano-fp8"
CALLS = DEMO / "tasks" / "tool_call.jsonl"
LIMIT = 8

GLM_TEMPLATE = """[gMASK]<sop>{% for t in tools %}{{ t | tojson }}{% endfor %}
<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>
{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"""


@pytest.fixture(scope="module")
def ours() -> TaskResults:
    return run_tool_calls(MODEL, CALLS, limit=LIMIT, batch_size=8)


def test_every_item_scores_as_in_lm_eval(ours: TaskResults) -> None:
    lm_eval = run_tasks(MODEL, DEMO / "tasks", ["glm_tool_call"], limit=LIMIT, batch_size=8)
    (found,), (expected,) = ours.tasks, lm_eval.tasks
    assert [item.prompt for item in found.items] == [item.prompt for item in expected.items]
    values = {metric.metric: metric.values for metric in found.metrics}
    assert values.pop("called") == (1.0,) * LIMIT
    assert values == {metric.metric: metric.values for metric in expected.metrics}
    assert 0 < sum(values["exact_arguments"]) < LIMIT  # right and wrong answers were compared
    both = together([lm_eval, ours])
    assert both is not None
    assert [task.name for task in both.tasks] == ["glm_tool_call", "tool_call"]


@pytest.mark.parametrize("api", ["openai", "sglang"])
def test_server_calls_as_this_process_does(
    server: Any, ours: TaskResults, tmp_path: Path, api: str
) -> None:
    server.apis = (api,)
    saved, calls = tmp_path / "calls.json", ["--tool-calls", CALLS, "--limit", LIMIT]
    words = ["eval", MODEL, *calls, "--endpoint", server.url, "-q", "-o", saved]
    # The answers that were given before the server failed are not asked for again.
    server.refusals = []
    server.on_question = lambda: len(server.questions) == 5 and server.refusals.append(400)
    assert main([str(word) for word in [*words, "--batch-size", 1]]) == 1
    assert len(kept_path(saved).read_bytes().splitlines()) == 1 + 5
    assert main([str(word) for word in [*words, "--batch-size", 1]]) == 0
    assert len(server.questions) == LIMIT
    found = EvalReport.read(saved).tasks
    assert found is not None
    assert found.settings.backend == f"{api} endpoint"
    assert found.tasks == ours.tasks


def report(tmp_path: Path, answers: Sequence[str]) -> EvalReport:
    """Two questions that want a call and one that wants none, answered as written."""
    lines = CALLS.read_text().splitlines()[:2]
    silent = json.dumps({**json.loads(lines[0]), "user": "Hello!", "name": None})
    path = tmp_path / "calls.jsonl"
    path.write_text("\n".join([*lines, silent]))
    chat = ToolChat.of(MODEL, load_tokenizer(MODEL))
    assert chat.stop == ("<|endoftext|>", "<|user|>", "<|observation|>")
    scores = tuple(
        scored(task, chat.prompts(task), texts, chat, 512)
        for task, texts in zip(read_tool_tasks(path).tasks, (answers[:2], answers[2:]), strict=True)
    )
    settings = TaskSettings(None, 1, 1024, "float32", {})
    return EvalReport("model", "fingerprint", None, TaskResults(settings, scores))


def test_gate_compares_calls_item_by_item(tmp_path: Path) -> None:
    right = [json.loads(line) for line in CALLS.read_text().splitlines()[:2]]
    calls = [
        f'<tool_call>{{"name": "{r["name"]}", "arguments": {r["arguments"]}}}</tool_call>'
        for r in right
    ]
    baseline = report(tmp_path, [*calls, "Hello."])
    candidate = report(tmp_path, [calls[0], "I cannot.", calls[0]])
    rows = gate(baseline, candidate, load_policy("default")).rows
    assert [(r.task, r.metric, r.baseline, r.candidate, r.lost, r.won) for r in rows] == [
        ("calls", "exact_arguments,none", 2, 1, 1, 0),
        ("calls", "right_function,none", 2, 1, 1, 0),
        ("calls", "valid,none", 2, 1, 1, 0),
        ("calls", "called,none", 2, 1, 1, 0),
        ("calls_no_call", "no_call,none", 1, 0, 1, 0),
    ]
    assert [row.decides for row in rows] == [True, False, False, False, True]


def model_with(folder: Path, **files: str | None) -> Path:
    """The demo's tokenizer and configs with other files; None removes one."""
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, text in files.items():
        path = folder / name.replace("__", ".")
        path.unlink() if text is None else path.write_text(text)
    return folder


def test_chat_is_the_checkpoints_own(tmp_path: Path) -> None:
    folder = model_with(tmp_path / "glm", chat_template__jinja=GLM_TEMPLATE)
    chat = ToolChat.of(folder, load_tokenizer(folder))
    (task,) = read_tool_tasks(CALLS).tasks
    prompt = chat.prompts(task)[0]
    assert chat.form.name == "GLM"
    assert prompt.endswith("<|assistant|></think>")  # thinking is switched off
    assert json.loads(prompt.split("<sop>")[1].split("\n")[0].split("}{")[0] + "}")["function"]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"chat_template__jinja": None}, "the tokenizer has no chat template"),
        ({"chat_template__jinja": "{{ messages }}"}, "no format of tool calls that is known here"),
        ({"generation_config__json": '{"eos_token_id": [5000]}'}, r"eos_token_id is \[5000\], the"),
        ({"generation_config__json": "[" * 100_000}, "generation_config.json: not JSON"),
        (
            {"chat_template__jinja": GLM_TEMPLATE.replace("t | tojson", "t.type")},
            "task tool_call, item 0: the chat template leaves out the function set_alarm",
        ),
        (
            {"chat_template__jinja": GLM_TEMPLATE + "{{ raise_exception('no') }}"},
            "task tool_call, item 0: the chat template fails: no",
        ),
    ],
)
def test_checkpoints_that_cannot_be_asked(
    tmp_path: Path, files: dict[str, str | None], says: str
) -> None:
    folder = model_with(tmp_path / "model", **files)
    (task,) = read_tool_tasks(CALLS).tasks
    with pytest.raises(EvaluationError, match=says):
        ToolChat.of(folder, load_tokenizer(folder)).prompts(task)


def test_answer_needs_room() -> None:
    with pytest.raises(
        EvaluationError, match=r"prompt 1 of 1 has .* with 900 of an answer that is more"
    ):
        run_tool_calls(MODEL, CALLS, limit=1, max_new_tokens=900)
    with pytest.raises(EvaluationError, match="a limit of 0 items"):
        run_tool_calls(MODEL, CALLS, limit=0)
