"""What the README tells a reader to type exists and is what CI runs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfbyte.cli import COMMANDS, app, insert_run, main
from halfbyte.testing.hub import LoopbackHub

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md", "docs/kv-integrity.md",
]  # fmt: skip
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def code_lines(page: str) -> list[str]:
    """Lines of a page's indented code blocks, comments after the command dropped."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    lines = re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)
    return [shlex.join(shlex.split(line, comments=True)) for line in lines]


def test_the_first_two_commands() -> None:
    assert code_lines("README.md")[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    in_prose = re.findall(r"`make ([a-z-]+)", text)
    in_code = [line.split()[1] for line in code_lines(page) if line.startswith("make ")]
    assert {*in_prose, *in_code} <= TARGETS


@pytest.mark.parametrize(
    "line", [line for page in PAGES for line in code_lines(page) if line.startswith("quantize ")]
)
def test_quantize_commands_exist(line: str) -> None:
    command, *words = insert_run(line.split()[1:])
    assert command in COMMANDS
    options = CliRunner().invoke(app, [command, "--help"], prog_name="quantize").stdout
    for word in words:
        if word.startswith("-"):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", options), word


def test_the_commands_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """README's own lines on the embedded model, with fewer and shorter samples than by default."""
    demo = REPOSITORY / "halfbyte" / "demo"
    (tmp_path / "GLM-5.2-FP8").symlink_to(demo / "glm-nano-fp8")
    (tmp_path / "text.jsonl").symlink_to(demo / "calibration.jsonl")
    (tmp_path / "tasks").mkdir()
    for name in ("glm_recall.yaml", "recall.jsonl"):
        shutil.copy(demo / "tasks" / name, tmp_path / "tasks")
    monkeypatch.chdir(tmp_path)
    less = {"GLM-5.2-FP8": ["--samples", "8", "--sequence-length", "64"]}
    assert main(["eval", "GLM-5.2-FP8", "--tasks", "tasks", "-o", "fp8.json", "-q"]) == 0
    lines = [line for line in code_lines("README.md") if line.startswith("quantize ")]
    assert len(lines) == 8
    with LoopbackHub(tmp_path / "hub") as hub, hub.in_use(tmp_path / "home"):
        for line in lines:
            words = line.split()[1:]
            words += less.get(words[0], [])
            # So few questions decide nothing, and a model this small may well lose one.
            assert main(words) in ((0, 3, 4) if words[0] == "gate" else (0,)), line
        repo = hub.repos["someone/GLM-5.2-INT4"]
        assert {"README.md", "config.json"} <= repo.commits[repo.refs["main"]].keys()


def test_ci_runs_the_test_command_and_the_checks() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert {"set -euo pipefail", "make test", "make check"} <= set(script)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((REPOSITORY / page).parent / target).exists(), target


def test_generated_pages_are_fresh() -> None:
    tool = [sys.executable, str(REPOSITORY / "tools" / "generate_docs.py"), "--check"]
    result = subprocess.run(tool, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_lock_pins_every_requirement_and_travels() -> None:
    """No version of one machine only, and all that pyproject.toml asks for. What exists for Linux
    only says so, and is left out elsewhere. NVRTC is of the version that torch asks for."""
    lines = (REPOSITORY / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    pin_format = r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*(; platform_system == 'Linux')?"
    free = [pin for pin in pins if not re.fullmatch(pin_format, pin)]
    assert free == ["nvidia-cuda-nvrtc<14; platform_system == 'Linux'"]
    assert [pin.split("==")[0] for pin in pins if ";" in pin and pin not in free] == ["triton"]
    pinned = {normal_name(re.split("==|<", pin)[0]) for pin in pins}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {normal_name(match[0]) for w in wanted if (match := re.match(r"[\w.-]+", w))}
    assert names - pinned == set()


def normal_name(name: str) -> str:
    """A distribution's name in the spelling that indexes compare (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
