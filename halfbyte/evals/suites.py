"""Named sets of benchmarks: lm-eval's own tasks, with the versions and shots that a set is made of.

A set is a YAML file in `halfbyte/suites`. The questions come from the Hugging Face cache, or from
the Hub when they are not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from halfbyte.errors import EvaluationError
from halfbyte.evals.record import decode

SUITE_SCHEMA = 1
NAMES = ("article",)


@dataclass(frozen=True)
class SuiteTask:
    """A task or group of lm-eval as it is asked in a set."""

    folder: str
    """Of its definition, among the tasks of lm-eval."""
    version: str
    """As lm-eval reports it."""
    shots: int
    """Examples before each question."""
    data: str
    """Repository of the questions on the Hub."""


@dataclass(frozen=True)
class Suite:
    schema_version: int
    name: str
    description: str
    max_new_tokens: int
    """Tokens of an answer, for tasks that set no limit of their own."""
    tasks: Mapping[str, SuiteTask]

    def __post_init__(self) -> None:
        if self.schema_version != SUITE_SCHEMA:
            raise EvaluationError(
                f"schema_version is {self.schema_version}, this version reads {SUITE_SCHEMA}"
            )

    def folders(self) -> list[str]:
        """Where lm-eval defines the tasks. It has thousands of others, which take long to list."""
        import lm_eval.tasks

        home = Path(lm_eval.tasks.__file__).parent
        return [str(home / folder) for folder in {task.folder for task in self.tasks.values()}]

    def pin(self, name: str, loaded: Any, members: Iterable[Any]) -> None:
        """Give a loaded task or group of lm-eval, and the tasks it consists of, the set's shots.

        Raises EvaluationError for one that the installed lm-eval defines in another version.
        """
        asked = self.tasks[name]
        version = str(loaded.version if hasattr(loaded, "version") else loaded.VERSION)
        if version != asked.version:
            raise EvaluationError(
                f"task {name} of set {self.name} is version {asked.version}, "
                f"the installed lm-eval has version {version}",
                hint="install the lm-eval that halfbyte asks for: pip install halfbyte",
            )
        for task in members:
            task.set_config(key="num_fewshot", value=asked.shots)

    def unavailable(self, task: str, reason: Exception) -> EvaluationError:
        """The error for a task whose questions cannot be had."""
        said = str(reason).strip().split("\n")[0]
        return EvaluationError(
            f"task {task} of set {self.name}: the data set {self.tasks[task].data} cannot be "
            f"loaded: {said}",
            hint="fetch it where there is a network: python -c "
            f"\"from lm_eval.tasks import TaskManager; TaskManager().load(['{task}'])\"",
        )


def load_suite(name: str) -> Suite:
    """A set by its name, one of `NAMES`."""
    import yaml

    text = (resources.files("halfbyte") / "suites" / f"{name}.yaml").read_text(encoding="utf-8")
    return decode(Suite, yaml.safe_load(text))
