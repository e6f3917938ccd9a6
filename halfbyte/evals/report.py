"""What an evaluation found: text metrics and task scores, item by item, and their JSON form.

Scores keep one value per item, so that two reports can be compared question by question
(`evals.gate`) and every sum is exact. Averages are derived, never stored without their items.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from halfbyte.core import Checkpoint, fingerprint
from halfbyte.errors import EvaluationError
from halfbyte.evals.record import decode, encode
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.files import write_atomic

EVALUATION_SCHEMA = 3
SAMPLE_BYTES = 512


class Item(NamedTuple):
    """One question as it was put, identified by its content."""

    task: str
    """The task that holds it; for a group, the member task."""
    number: int
    """Position in that task's documents."""
    document: str
    """First 16 hexadecimal digits of SHA-256, as of `prompt` and `target`."""
    prompt: str
    target: str


class Answer(NamedTuple):
    """What the model made of a question, as far as it shows whether the evaluation worked."""

    sha256: str
    """First 16 hexadecimal digits, of the text or of the log-probabilities of the choices."""
    choices: int = 0
    """How many were scored; 0 where text was generated."""
    spread: float = 0.0
    """Log-probability of the likeliest choice less that of the least likely, in nats."""
    tokens: int = 0
    """Of the text."""
    capped: bool = False
    """Whether the text ends where the limit of tokens does."""
    unread: tuple[str, ...] = ()
    """Filters that found no answer in the text."""


@dataclass(frozen=True)
class MetricScores:
    """One metric of a task with its value for each item, in the order of the task's items."""

    DERIVED: ClassVar[tuple[str, ...]] = ("count", "total", "mean", "standard_error")

    metric: str
    filter: str
    """lm-eval's answer filter ("strict-match", ...), "none" where there is no choice."""
    higher_is_better: bool
    values: tuple[float, ...]

    @property
    def name(self) -> str:
        """The key that lm-eval prints, `metric,filter`."""
        return f"{self.metric},{self.filter}"

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def exact_total(self) -> Fraction:
        """Sum of the values without rounding; for right-or-wrong metrics the number right."""
        return sum(map(Fraction, self.values), Fraction(0))

    @property
    def total(self) -> float:
        return float(self.exact_total)

    @property
    def mean(self) -> float:
        return float(self.exact_total / self.count)

    @property
    def standard_error(self) -> float | None:
        """Sample standard deviation over the square root of the count; None for a single item."""
        n = self.count
        if n < 2:
            return None
        squares = sum((Fraction(v) ** 2 for v in self.values), Fraction(0))
        return math.sqrt((squares - self.exact_total**2 / n) / (n - 1) / n)


@dataclass(frozen=True)
class TaskScores:
    """All metrics of one task, or of a group of tasks pooled item by item."""

    name: str
    version: str
    items: tuple[Item, ...]
    metrics: tuple[MetricScores, ...]
    """In the task's own order; the first is its primary metric."""
    items_sha256: str
    """Hash over the full content hashes of all items: equal for the same questions."""
    answers: tuple[Answer, ...]
    """To each item."""
    generation: tuple[str, ...]
    """How text was generated: stop strings, limit of tokens and the like, as JSON, once each."""
    tokens_sha256: str
    """Hash over the tokens of all prompts and choices: equal for the same tokenizer."""

    def __post_init__(self) -> None:
        if not self.metrics or not self.items:
            raise EvaluationError(f"task {self.name} has no items or no metrics")
        if len({(item.task, item.number) for item in self.items}) != len(self.items):
            raise EvaluationError(f"task {self.name} lists an item twice")
        for metric in self.metrics:
            if metric.count != len(self.items):
                raise EvaluationError(
                    f"task {self.name}: {metric.name} has {metric.count} values "
                    f"for {len(self.items)} items"
                )
        if len(self.answers) != len(self.items):
            raise EvaluationError(
                f"task {self.name} has {len(self.answers)} answers for {len(self.items)} items"
            )


@dataclass(frozen=True)
class TaskSettings:
    """How the tasks were run: what must be equal for two results to be comparable."""

    limit: int | None
    """Items per task; None for all."""
    batch_size: int
    max_length: int
    """Tokens of prompt and answer together."""
    dtype: str
    """Of what computes the answers, "as served" for a server that does not say."""
    versions: Mapping[str, str]
    """Package -> version, the engine's own among them where it is known."""
    backend: str = "hf"
    """What answered: "hf", "vllm", "sglang", "openai endpoint", "sglang endpoint"."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """What else was set in it, as JSON by name."""


@dataclass(frozen=True)
class TaskResults:
    settings: TaskSettings
    tasks: tuple[TaskScores, ...]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise EvaluationError("no tasks")
        if len({task.name for task in self.tasks}) != len(self.tasks):
            raise EvaluationError("a task is listed twice")


@dataclass(frozen=True)
class Histogram:
    """How many values lie where."""

    edges: tuple[float, ...]
    """Upper ends of all bins but the last, which has none; a value on an edge counts below it."""
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.edges) + 1:
            raise EvaluationError(
                f"{len(self.counts)} counts for {len(self.edges)} edges, one more is expected"
            )
        if not all(low < high for low, high in pairwise((0.0, *self.edges))):
            raise EvaluationError("edges must be positive and ascend")
        if min(self.counts) < 0:
            raise EvaluationError(f"a count is {min(self.counts)}")


@dataclass(frozen=True)
class WorstToken:
    """A token before which the two distributions differ most."""

    window: int
    position: int
    """Of the token in its window."""
    kl: float
    context: str
    """The end of the text before it."""
    token: str
    probability: float
    """Of the token, by this checkpoint."""
    baseline_probability: float
    choice: str
    """Token that this checkpoint holds most likely."""
    baseline_choice: str


@dataclass(frozen=True)
class Divergence:
    """How far the next-token distributions are from a baseline's, over all predicted tokens."""

    baseline: str
    """Fingerprint of the baseline checkpoint."""
    mean_kl: float
    """KL divergence of this checkpoint from the baseline in nats, per token."""
    median_kl: float
    p99_kl: float
    top1_agreement: float
    """Share of tokens whose most likely prediction is the baseline's."""
    histogram: Histogram
    """Of the KL divergence per token."""
    worst: tuple[WorstToken, ...]
    """The largest divergence first."""


@dataclass(frozen=True)
class TextMetrics:
    """Prediction of held-out text."""

    DERIVED: ClassVar[tuple[str, ...]] = ("perplexity",)

    tokens_sha256: str
    """`calibration.data.text_sha256` of the token windows."""
    windows: int
    sequence_length: int
    dtype: str
    tokens: int
    """Predicted tokens: all of a window but its first."""
    nll: float
    """Mean negative log likelihood per predicted token, in nats."""
    divergence: Divergence | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


@dataclass(frozen=True)
class EvalReport:
    """The evaluation of one checkpoint."""

    checkpoint: str
    """The folder, as it was named."""
    fingerprint: str
    """`checkpoint_fingerprint` of it."""
    text: TextMetrics | None = None
    tasks: TaskResults | None = None
    kv_cache: str | None = None
    """Format of the KV cache that was asked for ("bf16", "fp8", "fp8-raw"); None when none was."""
    schema_version: int = EVALUATION_SCHEMA

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`; derived figures (means, perplexity) are written along."""
        record: dict[str, Any] = encode(self)
        return record

    @classmethod
    def from_json(cls, record: Any) -> EvalReport:
        """Raises EvaluationError that names the field which is missing, unknown or wrong."""
        found = record.get("schema_version") if isinstance(record, dict) else None
        if found != EVALUATION_SCHEMA:
            raise EvaluationError(
                f"schema_version is {found!r:.40}, this version reads {EVALUATION_SCHEMA}",
                hint="write the report again: quantize eval",
            )
        return decode(cls, record)

    def write(self, path: Path) -> None:
        text = json.dumps(self.to_json(), ensure_ascii=False, allow_nan=False)
        write_atomic(path, text.encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> EvalReport:
        """Raises EvaluationError, with the file's name, for what is no evaluation report."""
        try:
            record = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise EvaluationError(f"{path}: not an evaluation report: {error}") from error
        try:
            return cls.from_json(record)
        except EvaluationError as error:
            raise EvaluationError(f"{path}: {error}", hint=error.hint) from error


def require_of(folder: Path, fingerprint: str, what: str) -> None:
    """Raises EvaluationError when `what`, which measured the checkpoint with this fingerprint, is
    not of the one in `folder`."""
    found = checkpoint_fingerprint(open_checkpoint(folder))
    if fingerprint != found:
        raise EvaluationError(
            f"{what} is of another checkpoint than {folder}, or of what it was before: fingerprint "
            f"{fingerprint:.12}, not {found:.12}",
            hint=f"evaluate it as it is now: quantize eval {folder} -o FILE",
        )


def checkpoint_fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 that tells checkpoints apart without reading them whole.

    Over the config, the tensor table, `SAMPLE_BYTES` from the middle of every tensor and the side
    files (a tokenizer decides scores, too). It is an identity, not a proof of integrity.
    """
    samples = hashlib.sha256()
    in_files = sorted(checkpoint.tensors.values(), key=lambda info: (info.shard, info.begin))
    for shard, tensors in groupby(in_files, key=lambda info: info.shard):
        with (checkpoint.path / shard).open("rb") as file:
            for info in tensors:
                middle = (info.begin + info.end - SAMPLE_BYTES) // 2
                file.seek(max(info.begin, middle))
                samples.update(file.read(min(SAMPLE_BYTES, info.nbytes)))
    table = sorted([t.name, t.dtype, list(t.shape)] for t in checkpoint.tensors.values())
    sides = {
        name: hashlib.sha256((checkpoint.path / name).read_bytes()).hexdigest()
        for name in checkpoint.side_files
    }
    return fingerprint([checkpoint.config, table, samples.hexdigest(), sides])
