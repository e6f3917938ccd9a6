"""Task scores by lm-eval, for a checkpoint of any encoding, offline and with every item kept.

A task folder holds lm-eval YAML files and their data. It is code: a YAML may name Python functions
of the folder (`!function`), which lm-eval imports and runs. Only use folders you trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from halfbyte.calibration.data import load_tokenizer
from halfbyte.errors import EvaluationError
from halfbyte.evals.answers import AnswerReader
from halfbyte.evals.model import load_model
from halfbyte.evals.report import Answer, Item, MetricScores, TaskResults, TaskScores, TaskSettings
from halfbyte.progress import Progress, SilentProgress

PACKAGES = ("lm_eval", "transformers", "torch")
"""What decides scores besides the checkpoint; their versions are part of a result."""


def run_tasks(
    checkpoint_path: Path,
    tasks_dir: Path,
    tasks: Sequence[str] | None = None,
    *,
    limit: int | None = None,
    batch_size: int = 16,
    max_length: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Progress | None = None,
) -> TaskResults:
    """Score a checkpoint on the tasks of a folder.

    `tasks` names tasks or groups; None runs all, members of a group as part of the group. A group
    is one result, its members' items pooled. `limit` takes the first items of each task (of each
    member of a group). `max_length` bounds prompt and answer together, in tokens; None is the
    model's own limit. Data files in the YAML are relative to `tasks_dir`; the working directory
    is there while tasks run. Answers are never cached, and nothing is fetched from the network.

    Raises EvaluationError for a folder without tasks, an unknown task, a task that lm-eval cannot
    load, an item longer than `max_length` and a metric that is not a mean over items.
    """
    if limit is not None and limit < 1:
        raise EvaluationError(f"a limit of {limit} items leaves nothing to score")
    checkpoint_path, tasks_dir = checkpoint_path.resolve(), tasks_dir.resolve()
    with _private_lm_eval(tasks_dir):
        loaded, plan = _load_tasks(tasks_dir, tasks)
        model = load_model(checkpoint_path, dtype=dtype, device=device)
        tokenizer = load_tokenizer(checkpoint_path)
        lm = _language_model(
            model,
            tokenizer,
            batch_size=batch_size,
            max_length=max_length or model.config.max_position_embeddings,
            progress=progress or SilentProgress(),
        )
        results = _evaluate(lm, loaded, limit)
        settings = TaskSettings(
            limit=limit,
            batch_size=batch_size,
            max_length=lm.max_length,
            dtype=dtype,
            versions={name: importlib.metadata.version(name) for name in PACKAGES},
        )
        reader = AnswerReader(tokenizer, lm.max_gen_toks)
        return TaskResults(settings, tuple(_scores(task, results, reader) for task in plan))


class _PlannedTask(NamedTuple):
    """A task or group that is reported as one."""

    name: str
    loaded: Any
    """lm-eval's Task or Group."""
    members: tuple[str, ...]
    """Names of the tasks it consists of; itself for a plain task."""


@contextlib.contextmanager
def _private_lm_eval(tasks_dir: Path) -> Iterator[None]:
    """lm-eval without network, without a data cache that outlives it, and without its chatter."""
    import datasets
    import huggingface_hub.constants
    import transformers  # noqa: F401  its first import sets the level of its logger
    from tqdm import tqdm

    if not tasks_dir.is_dir():
        raise EvaluationError(f"{tasks_dir}: no such folder", hint="--tasks takes a folder")
    loud = tqdm.__init__

    def silent(bar: Any, *args: Any, **kwargs: Any) -> None:
        loud(bar, *args, **{**kwargs, "disable": True})

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "transformers")]
    levels = [logger.level for logger in loggers]
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="halfbyte-eval-"))
        stack.enter_context(contextlib.chdir(tasks_dir))
        stack.enter_context(_replaced(datasets.config, "HF_DATASETS_CACHE", cache))
        stack.enter_context(_replaced(huggingface_hub.constants, "HF_HUB_OFFLINE", True))
        stack.enter_context(_replaced(tqdm, "__init__", silent))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(logging.ERROR)
            stack.callback(logger.setLevel, level)
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _load_tasks(
    tasks_dir: Path, names: Sequence[str] | None
) -> tuple[Mapping[str, Any], list[_PlannedTask]]:
    """The tasks as lm-eval wants them and as they are reported, their data read."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks_dir), include_defaults=False)
    if not manager.all_tasks:
        raise EvaluationError(f"{tasks_dir}: no lm-eval task in the folder")
    if unknown := sorted(set(names or ()) - set(manager.all_tasks)):
        raise EvaluationError(
            f"{tasks_dir}: no task {unknown[0]}; it has {', '.join(manager.all_tasks)}"
        )
    plan: dict[str, _PlannedTask] = {}
    for name in names or manager.all_groups + manager.all_subtasks:
        try:
            found = manager.load([name])
        except Exception as error:
            raise EvaluationError(f"{tasks_dir}: task {name} cannot be loaded: {error}") from error
        if name in found["groups"]:
            plan[name] = _PlannedTask(name, found["groups"][name], tuple(found["tasks"]))
        else:  # one task, or the tasks of a tag
            for member, task in found["tasks"].items():
                plan[member] = _PlannedTask(member, task, (member,))
    if names is None:
        groups = [task for name, task in plan.items() if task.members != (name,)]
        grouped = {member for group in groups for member in group.members}
        plan = {name: task for name, task in plan.items() if name not in grouped}
    try:
        loaded = manager.load([task.loaded for task in plan.values()])
    except ValueError as error:  # a task asked for by itself and in a group
        raise EvaluationError(f"{tasks_dir}: {error}") from error
    _check_means(loaded["tasks"])
    return loaded, list(plan.values())


def _check_means(tasks: Mapping[str, Any]) -> None:
    """Only a mean over items can be pooled and compared item by item (perplexity, F1 cannot)."""
    from lm_eval.api.metrics import mean

    for name, task in tasks.items():
        for metric, aggregation in task.aggregation().items():
            if aggregation is not mean:
                raise EvaluationError(
                    f"metric {metric} of task {name} is not the mean of its items",
                    hint="leave it out of the task's metric_list",
                )


def _language_model(
    model: Any, tokenizer: Any, *, batch_size: int, max_length: int, progress: Progress
) -> Any:
    """lm-eval's transformers backend around a model instance; it reports progress and refuses to
    cut a prompt, which lm-eval would do with no more than a warning."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import normalize_gen_kwargs

    class Counter:
        """lm-eval tells its cache hook about every answer; here it only counts."""

        def add_partial(self, attr: str, req: Any, res: Any) -> None:
            progress.advance(1)

    class LanguageModel(HFLM):  # type: ignore[misc]
        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            for request in requests:
                prompt, arguments = request.args
                new = normalize_gen_kwargs(dict(arguments), self.max_gen_toks)["max_gen_toks"]
                self._check(request.task_name, len(self.tok_encode(prompt)) + new)
            progress.start("answers", len(requests), "items")
            return super().generate_until(requests, disable_tqdm=True)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            for request in requests:
                # The last token is predicted but never read.
                self._check(request.task_name, len(self.tok_encode("".join(request.args))) - 1)
            progress.start("choices", len(requests), "choices")
            return super().loglikelihood(requests, disable_tqdm=True)

        def _check(self, task: str, tokens: int) -> None:
            if tokens > self.max_length:
                raise EvaluationError(
                    f"an item of task {task} needs {tokens} tokens with its answer, "
                    f"the maximum length is {self.max_length}",
                    hint="raise --max-length, or leave the task out",
                )

    lm = LanguageModel(
        pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length
    )
    lm.set_cache_hook(Counter())
    return lm


def _evaluate(lm: Any, loaded: Mapping[str, Any], limit: int | None) -> Mapping[str, Any]:
    """Run lm-eval as its `simple_evaluate` does by default, without the calls to git and to the
    hardware that it makes for its own log. Standard errors are ours, so its bootstrap is off."""
    from lm_eval import evaluate
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    results: Mapping[str, Any] = evaluate(lm, loaded, limit=limit, bootstrap_iters=0)
    return results


def _scores(task: _PlannedTask, results: Mapping[str, Any], reader: AnswerReader) -> TaskScores:
    """Pool the item values of a task's members, metric by metric and filter by filter."""
    digest, tokens = hashlib.sha256(), hashlib.sha256()
    items: list[Item] = []
    answers: list[Answer] = []
    generation: set[str] = set()
    values: dict[tuple[str, str], list[float]] = {}
    better: dict[tuple[str, str], bool] = {}
    for member in task.members:
        by_filter: dict[str, list[Any]] = {}
        for sample in results["samples"][member]:
            by_filter.setdefault(sample["filter"], []).append(sample)
        # lm-eval keeps metrics in the order of the YAML here.
        for metric, higher_is_better in results["higher_is_better"][member].items():
            for name, samples in by_filter.items():
                pooled = values.setdefault((metric, name), [])
                pooled += [_number(member, metric, s.get(metric)) for s in samples]
                better[metric, name] = higher_is_better
        digest.update(f"{member} {results['versions'][member]}\n".encode())
        for filtered in zip(*by_filter.values(), strict=True):
            sample = filtered[0]
            hashes = [sample[f"{part}_hash"] for part in ("doc", "prompt", "target")]
            digest.update("\n".join([str(sample["doc_id"]), *hashes, ""]).encode())
            items.append(Item(member, sample["doc_id"], *(text[:16] for text in hashes)))
            answers.append(reader.answer(filtered))
            tokens.update(reader.question(sample))
            generation |= reader.generation(sample)
    metrics = tuple(
        MetricScores(metric, name, better[metric, name], tuple(found))
        for (metric, name), found in values.items()
    )
    return TaskScores(
        name=task.name,
        version=str(results["versions"].get(task.name)),
        items=tuple(items),
        metrics=metrics,
        items_sha256=digest.hexdigest(),
        answers=tuple(answers),
        generation=tuple(sorted(generation)),
        tokens_sha256=tokens.hexdigest(),
    )


def _number(task: str, metric: str, value: Any) -> float:
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise EvaluationError(f"task {task} scores an item {value!r:.40} by {metric}, not a number")
