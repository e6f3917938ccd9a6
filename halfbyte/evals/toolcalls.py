"""Does the model still call its tools as it should? Questions with functions to choose from.

Prompts are the checkpoint's own chat template's, thinking switched off where the template knows
that, and answers are greedy. Each metric is 1 or 0 for an item (`tool_items`), so that the gate
compares two checkpoints question by question. How far they agree on *whether* to call is what the
gate's table says of `called` and `no_call`: the items lost and won.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from halfbyte.calibration.data import load_tokenizer
from halfbyte.errors import EvaluationError
from halfbyte.evals.answers import AnswerReader
from halfbyte.evals.endpoint import Endpoint
from halfbyte.evals.engines import open_engine
from halfbyte.evals.generation import Generator, ModelGenerator, ServerGenerator, stop_tokens
from halfbyte.evals.harness import PACKAGES, settings_of
from halfbyte.evals.kept import keep_answers
from halfbyte.evals.model import load_model
from halfbyte.evals.record import encode
from halfbyte.evals.report import (
    Item,
    MetricScores,
    TaskResults,
    TaskScores,
    TaskSettings,
    checkpoint_fingerprint,
)
from halfbyte.evals.tool_answers import ToolFormat, format_of
from halfbyte.evals.tool_files import read_tool_tasks
from halfbyte.evals.tool_items import METRICS, ToolTask
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.kvcache.layout import Kv
from halfbyte.progress import Progress, SilentProgress

VERSION = 1
"""Raised when prompts or judgements change, so that scores before and after are not compared."""
TOOL_CALL_TOKENS = 512
"""An answer has at most, unless another limit is asked for."""


def run_tool_calls(
    checkpoint_path: Path,
    tasks_path: Path,
    *,
    server: Endpoint | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    max_length: int | None = None,
    max_new_tokens: int = TOOL_CALL_TOKENS,
    device: str = "cpu",
    dtype: str = "float32",
    kv_cache: Kv | None = None,
    answers: Path | None = None,
    progress: Progress | None = None,
) -> TaskResults:
    """Score a checkpoint on a file or folder of questions with tools (`tool_files`), in this
    process or by a server that serves it.

    `limit` takes the first items of each task. `max_length` bounds prompt and answer together, in
    tokens; None is the model's own limit. An answer ends at the model's own stop tokens, or after
    `max_new_tokens`. `kv_cache` is as in `load_model`, in this process. `answers` is a file that
    those of a server are kept in (`evals.kept`).

    Raises EvaluationError for files that cannot be read, a chat template without tools or with a
    format of calls that is not known, a prompt that leaves no room for an answer, and a server that
    `endpoint.open_endpoint` refuses.
    """
    if limit is not None and limit < 1:
        raise EvaluationError(f"a limit of {limit} items leaves nothing to score")
    progress = progress or SilentProgress()
    files = read_tool_tasks(tasks_path)
    if files.left_out:
        progress.note(f"{tasks_path}: left out, not supported: {', '.join(files.left_out)}")
    tasks = [replace(task, items=task.items[:limit]) for task in files.tasks]
    chat = ToolChat.of(checkpoint_path, load_tokenizer(checkpoint_path))
    prompts = [chat.prompts(task) for task in tasks]

    def scores(generator: Generator) -> tuple[TaskScores, ...]:
        # All at once: what is too long shows before the first answer.
        texts = iter(generator.generate([*chain(*prompts)], max_new_tokens, chat.stop))
        return tuple(
            scored(task, asked, [*islice(texts, len(asked))], chat, max_new_tokens)
            for task, asked in zip(tasks, prompts, strict=True)
        )

    if server is not None:
        with open_engine(
            server,
            checkpoint_path,
            batch_size=batch_size,
            max_length=max_length,
            max_new_tokens=max_new_tokens,
            device=device,
            dtype=dtype,
            scoring=(),
            progress=progress,
        ) as engine:
            settings = settings_of(engine, limit)
            identity = {
                "checkpoint": checkpoint_fingerprint(open_checkpoint(checkpoint_path)),
                "settings": encode(settings),
                "tool calls": VERSION,
                "server": engine.identity,
            }
            with keep_answers(answers, identity, progress) as kept:
                return TaskResults(settings, scores(ServerGenerator(engine, kept, progress)))
    model = load_model(checkpoint_path, dtype=dtype, device=device, kv_cache=kv_cache)
    max_length = max_length or model.config.max_position_embeddings
    generator: Generator = ModelGenerator(
        model, chat.tokenizer, batch_size=batch_size, max_length=max_length, progress=progress
    )
    progress.start("tool calls", sum(map(len, prompts)), "items")
    versions = {name: importlib.metadata.version(name) for name in (*PACKAGES, "torch")}
    settings = TaskSettings(limit, batch_size, max_length, dtype, versions)
    return TaskResults(settings, scores(generator))


@dataclass(frozen=True)
class ToolChat:
    """How a checkpoint is asked, and how it answers."""

    tokenizer: Any
    form: ToolFormat
    stop: tuple[str, ...]

    @classmethod
    def of(cls, checkpoint_path: Path, tokenizer: Any) -> ToolChat:
        """By its chat template and generation config. Raises EvaluationError without either."""
        try:
            template = tokenizer.get_chat_template(tools=[])
        except ValueError as error:
            raise EvaluationError(
                f"{checkpoint_path}: the tokenizer has no chat template",
                hint="the folder needs chat_template.jinja",
            ) from error
        form = format_of(template)
        if form is None:
            raise EvaluationError(
                f"{checkpoint_path}: its chat template asks for no format of tool calls that is "
                "known here: GLM's, DeepSeek's, or JSON in <tool_call>"
            )
        return cls(tokenizer, form, tuple(stop_tokens(checkpoint_path, tokenizer)))

    def prompts(self, task: ToolTask) -> list[str]:
        """The questions as the model gets them. Raises EvaluationError when the template fails, or
        leaves a function out."""
        from jinja2 import TemplateError

        prompts = []
        for item in task.items:
            where = f"task {task.name}, item {item.number}"
            try:
                text = self.tokenizer.apply_chat_template(
                    [dict(message) for message in item.messages],
                    tools=[tool.definition for tool in item.tools] or None,
                    add_generation_prompt=True,
                    tokenize=False,
                    enable_thinking=False,
                )
            except (TemplateError, TypeError, ValueError) as error:
                raise EvaluationError(f"{where}: the chat template fails: {error}") from error
            if absent := [tool.name for tool in item.tools if tool.name not in text]:
                raise EvaluationError(
                    f"{where}: the chat template leaves out the function {absent[0]}"
                )
            prompts.append(text)
        return prompts


def scored(
    task: ToolTask,
    prompts: Sequence[str],
    texts: Sequence[str],
    chat: ToolChat,
    max_new_tokens: int,
) -> TaskScores:
    """Parse and judge the answers to the items of one task."""
    pairs = zip(texts, task.items, strict=True)
    answers = [chat.form.parse(text, item.schemas) for text, item in pairs]
    metrics = tuple(
        MetricScores(
            name,
            "none",
            True,
            tuple(float(METRICS[name](*pair)) for pair in zip(task.items, answers, strict=True)),
        )
        for name in task.metrics
    )
    version = f"{VERSION}, {chat.form.name} calls"
    items, digest = [], hashlib.sha256(f"{task.name} {version}\n".encode())
    for item, prompt in zip(task.items, prompts, strict=True):
        hashes = [_sha256(text) for text in (item.document, prompt, item.target)]
        digest.update("\n".join([str(item.number), *hashes, ""]).encode())
        items.append(Item(task.name, item.number, *(text[:16] for text in hashes)))
    reader = AnswerReader(chat.tokenizer, max_new_tokens)
    settings = {"do_sample": False, "max_gen_toks": max_new_tokens, "until": list(chat.stop)}
    return TaskScores(
        name=task.name,
        version=version,
        items=tuple(items),
        metrics=metrics,
        items_sha256=digest.hexdigest(),
        answers=tuple(reader.text([text], max_new_tokens) for text in texts),
        generation=(json.dumps(settings, sort_keys=True),),
        tokens_sha256=hashlib.sha256(reader.tokens(prompts)).hexdigest(),
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def together(parts: Sequence[TaskResults]) -> TaskResults | None:
    """Results of one checkpoint as one. Raises EvaluationError when they were run differently."""
    if not parts:
        return None
    if any(part.settings != parts[0].settings for part in parts):
        raise EvaluationError("tasks were run with different settings, so they make no one result")
    return TaskResults(parts[0].settings, tuple(task for part in parts for task in part.tasks))
