"""Task scores by lm-eval, for a checkpoint of any encoding and whatever answers for it, with every
item kept.

A task folder holds lm-eval YAML files and their data; what is in it needs no network. It is code: a
YAML may name Python functions of the folder (`!function`), which lm-eval imports and runs. Only use
folders you trust. A named set (`evals.suites`) takes lm-eval's own tasks instead.
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
from halfbyte.evals.asking import Engine, language_model
from halfbyte.evals.endpoint import Endpoint
from halfbyte.evals.engines import TRANSFORMERS, Backend, open_engine
from halfbyte.evals.kept import keep_answers
from halfbyte.evals.record import encode
from halfbyte.evals.report import (
    Answer,
    Item,
    MetricScores,
    TaskResults,
    TaskScores,
    TaskSettings,
    checkpoint_fingerprint,
)
from halfbyte.evals.suites import NAMES, Suite
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.progress import Progress, SilentProgress

PACKAGES = ("lm_eval", "transformers")
"""What decides scores besides the checkpoint and the engine; their versions are part of a
result."""

MAX_NEW_TOKENS = 256
"""lm-eval's own limit of an answer, for tasks that set none."""


def run_tasks(
    checkpoint_path: Path,
    source: Path | Suite,
    tasks: Sequence[str] | None = None,
    *,
    engine: Backend | Endpoint = TRANSFORMERS,
    limit: int | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    answers: Path | None = None,
    progress: Progress | None = None,
) -> TaskResults:
    """Score a checkpoint on the tasks of a folder or of a named set.

    `tasks` names tasks or groups; None runs all, members of a group as part of the group. A group
    is one result, its members' items pooled. `limit` takes the first items of each task (of each
    member of a group). `batch_size` is how many questions are asked at once; None leaves it to the
    engine. `max_length` bounds prompt and answer together, in tokens; None is the model's own
    limit. `max_new_tokens` bounds the answers to tasks that set no limit; None is the set's, or
    `MAX_NEW_TOKENS`. `device` is of transformers, `dtype` of engines in this process. Data files in
    the YAML of a folder are relative to it; the working directory is there while tasks run, and
    nothing is fetched from the network. `answers` is a file that answers are kept in as they come,
    and taken from when the same evaluation is begun again (`evals.kept`); it is left to the caller.

    Raises EvaluationError for a folder without tasks, an unknown task, a task that lm-eval cannot
    load, an item longer than `max_length` and a metric that is not a mean over items, and what
    `engines.open_engine` raises.
    """
    if limit is not None and limit < 1:
        raise EvaluationError(f"a limit of {limit} items leaves nothing to score")
    progress = progress or SilentProgress()
    checkpoint_path = checkpoint_path.resolve()
    answers = answers.resolve() if answers is not None else None
    if isinstance(source, Path):
        source = source.resolve()
    default_new = source.max_new_tokens if isinstance(source, Suite) else MAX_NEW_TOKENS
    with contextlib.ExitStack() as stack:
        stack.enter_context(_private_lm_eval(source))
        loaded, plan = _load_tasks(source, tasks)
        opened = stack.enter_context(
            open_engine(
                engine,
                checkpoint_path,
                batch_size=batch_size,
                max_length=max_length,
                max_new_tokens=max_new_tokens or default_new,
                device=device,
                dtype=dtype,
                scoring=tuple(
                    name
                    for name, task in loaded["tasks"].items()
                    if task.OUTPUT_TYPE != "generate_until"
                ),
                progress=progress,
            )
        )
        settings = settings_of(opened, limit)
        identity = {
            "checkpoint": checkpoint_fingerprint(open_checkpoint(checkpoint_path)),
            "settings": encode(settings),
            "max_new_tokens": opened.max_new_tokens,
            "tasks": {name: str(task.VERSION) for name, task in loaded["tasks"].items()},
            "server": opened.identity,
        }
        if isinstance(engine, Backend):
            identity["kv_cache"] = engine.kv_cache
        kept = stack.enter_context(keep_answers(answers, identity, progress))
        results = _evaluate(language_model(opened, kept, progress), loaded, limit)
        reader = AnswerReader(load_tokenizer(checkpoint_path), opened.max_new_tokens)
        return TaskResults(settings, tuple(_scores(task, results, reader) for task in plan))


def settings_of(engine: Engine, limit: int | None) -> TaskSettings:
    """How an engine answers, as a result says it."""
    return TaskSettings(
        limit=limit,
        batch_size=engine.batch_size,
        max_length=engine.max_length,
        dtype=engine.dtype,
        versions={name: importlib.metadata.version(name) for name in PACKAGES} | engine.versions,
        backend=engine.name,
        flags=engine.flags,
    )


class _PlannedTask(NamedTuple):
    """A task or group that is reported as one."""

    name: str
    loaded: Any
    """lm-eval's Task or Group."""
    members: tuple[str, ...]
    """Names of the tasks it consists of; itself for a plain task."""


@contextlib.contextmanager
def _private_lm_eval(source: Path | Suite) -> Iterator[None]:
    """lm-eval without its chatter; for a folder also without network, and without a data cache
    that outlives it."""
    import datasets
    import huggingface_hub.constants
    import transformers  # noqa: F401  its first import sets the level of its logger
    from tqdm import tqdm

    if isinstance(source, Path) and not source.is_dir():
        raise EvaluationError(
            f"{source}: no such folder", hint=f"--tasks takes a folder, or {', '.join(NAMES)}"
        )
    loud = tqdm.__init__

    def silent(bar: Any, *args: Any, **kwargs: Any) -> None:
        loud(bar, *args, **{**kwargs, "disable": True})

    chatty = ("lm_eval", "datasets", "transformers", "huggingface_hub")
    loggers = [logging.getLogger(name) for name in chatty]
    levels = [logger.level for logger in loggers]
    with contextlib.ExitStack() as stack:
        if isinstance(source, Path):
            cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="halfbyte-eval-"))
            stack.enter_context(contextlib.chdir(source))
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
    source: Path | Suite, names: Sequence[str] | None
) -> tuple[Mapping[str, Any], list[_PlannedTask]]:
    """The tasks as lm-eval wants them and as they are reported, their data read."""
    from lm_eval.tasks import TaskManager

    where = f"set {source.name}" if isinstance(source, Suite) else str(source)
    folders = source.folders() if isinstance(source, Suite) else [str(source)]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if isinstance(source, Suite):
        known = everything = list(source.tasks)
    else:
        known, everything = manager.all_tasks, manager.all_groups + manager.all_subtasks
    if not known:
        raise EvaluationError(f"{where}: no lm-eval task in the folder")
    if unknown := sorted(set(names or ()) - set(known)):
        raise EvaluationError(f"{where}: no task {unknown[0]}; it has {', '.join(known)}")
    plan: dict[str, _PlannedTask] = {}
    for name in names or everything:
        try:
            found = manager.load([name])
        except Exception as error:
            if isinstance(source, Suite):  # the definition is lm-eval's own, so it is the data
                raise source.unavailable(name, error) from error
            raise EvaluationError(f"{where}: task {name} cannot be loaded: {error}") from error
        if name in found["groups"]:
            plan[name] = _PlannedTask(name, found["groups"][name], tuple(found["tasks"]))
        else:  # one task, or the tasks of a tag
            for member, task in found["tasks"].items():
                plan[member] = _PlannedTask(member, task, (member,))
        if isinstance(source, Suite):
            source.pin(name, plan[name].loaded, found["tasks"].values())
    if names is None:
        groups = [task for name, task in plan.items() if task.members != (name,)]
        grouped = {member for group in groups for member in group.members}
        plan = {name: task for name, task in plan.items() if name not in grouped}
    try:
        loaded = manager.load([task.loaded for task in plan.values()])
    except ValueError as error:  # a task asked for by itself and in a group
        raise EvaluationError(f"{where}: {error}") from error
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
