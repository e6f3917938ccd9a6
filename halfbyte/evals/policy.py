"""What the gate asks for: a versioned file of margins and levels, by name or of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from fractions import Fraction
from importlib import resources
from pathlib import Path

from halfbyte.errors import EvaluationError, UsageError
from halfbyte.evals.record import decode

POLICY_SCHEMA = 1
NAMES = ("default", "article")
"""Policies that come with the package."""


@dataclass(frozen=True)
class Policy:
    """How two evaluations are judged. Margins are points, hundredths of a score."""

    schema_version: int
    name: str
    description: str
    rule: str
    """"paired": statistics of the items that both answered; "plain": the difference of scores."""
    margin: float
    """The mean of all tasks may drop by less; one that drops as far, significantly, fails. The
    plain rule lets each task drop by as much."""
    task_margin: float = 2.0
    """A task that drops further fails, and one that cannot be shown to drop less does not pass."""
    confidence: float = 0.95
    """Of each confidence limit by itself."""
    significance: float = 0.05
    """Level of the exact McNemar tests of all tasks together."""
    power: float = 0.8
    """Chance to decide that the number of items needed is given for."""
    decimals: int | None = None
    """Of points, to which the plain rule rounds a drop; None compares exactly."""
    primary: Mapping[str, str] = field(default_factory=dict)
    """Task -> the metric that decides; a task's first where it is not named."""
    max_unread: float = 2.0
    """Percent of a baseline's answers in which no filter finds one; more is a broken evaluation."""
    max_capped: float = 0.5
    """Percent of a baseline's answers that may reach the limit of tokens."""
    max_mean_kl: float | None = None
    """Nats per token of held-out text, above which a checkpoint fails; None asks nothing."""
    max_perplexity_ratio: float | None = None
    """Of its perplexity to the baseline's."""

    def __post_init__(self) -> None:
        if self.schema_version != POLICY_SCHEMA:
            raise EvaluationError(
                f"schema_version is {self.schema_version}, this version reads {POLICY_SCHEMA}"
            )
        if self.rule not in ("paired", "plain"):
            raise EvaluationError(f"rule is {self.rule!r:.40}, not paired or plain")
        for name, most in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not 0 <= value <= most:
                raise EvaluationError(f"{name} is {value}; it must be from 0 to {most}")
        for name in ("confidence", "significance", "power"):
            if not 0 < getattr(self, name) < 1:
                raise EvaluationError(f"{name} is {getattr(self, name)}, not between 0 and 1")

    def deciding(self, task: str, metrics: Sequence[str]) -> str:
        """Name of the metric that `task` is judged by, which it may not have."""
        return self.primary.get(task, metrics[0])

    @property
    def exact_margin(self) -> Fraction:
        """The margin as it is written: 0.8 is four fifths."""
        return Fraction(str(self.margin))

    @property
    def exact_task_margin(self) -> Fraction:
        """The same of a single task's."""
        return Fraction(str(self.task_margin))


def load_policy(name_or_path: str, margin: float | None = None) -> Policy:
    """A policy of the package by its name, or of a YAML file, with another margin if one is given.

    Raises UsageError for a name that is not known, or a file that is no policy.
    """
    import yaml

    path = Path(name_or_path)
    if name_or_path in NAMES:
        source = resources.files("halfbyte") / "policies" / f"{name_or_path}.yaml"
        text = source.read_text(encoding="utf-8")
    elif path.suffix in (".yaml", ".yml"):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--policy {path}: {reason}") from error
    else:
        raise UsageError(
            f"--policy {name_or_path}: there is no such policy",
            hint=f"choose {' or '.join(NAMES)}, or name a file: --policy FILE.yaml",
        )
    try:
        record = yaml.safe_load(text)
        if isinstance(record, dict):
            optional = {f: getattr(_DEFAULTS, f) for f in _OPTIONAL if f not in record}
            record = {**record, **optional}
        policy = decode(Policy, record)
    except (yaml.YAMLError, RecursionError, EvaluationError) as error:
        raise UsageError(f"--policy {name_or_path}: {error}") from error
    try:
        return policy if margin is None else replace(policy, margin=margin)
    except EvaluationError as error:
        raise UsageError(f"--margin {margin:g}: {error}") from error


_RANGES = {
    "margin": 100,
    "task_margin": 100,
    "decimals": 10,
    "max_unread": 100,
    "max_capped": 100,
    "max_mean_kl": 100,
    "max_perplexity_ratio": 100,
}
_DEFAULTS = Policy(POLICY_SCHEMA, "", "", "plain", 0.0)
_OPTIONAL = (*(f.name for f in fields(Policy) if f.default is not MISSING), "primary")
