"""How questions get to an engine: none is cut, each is asked once, and every answer is kept.

lm-eval hands over all questions at once. They are asked in batches that depend on nothing but the
questions, and a batch is kept as a whole; so an evaluation that goes on after a crash forms the
same batches, and ends in the same bits.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from halfbyte.errors import EvaluationError
from halfbyte.evals.kept import KeptAnswers, RawAnswer, question_keys
from halfbyte.progress import Progress

CHOICES_OF_A_QUESTION = 4
"""Choices that a batch has for each of its questions: those of one letter share a prompt, which
transformers then computes once."""

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Engine:
    """A model that answers, and what a result says about it."""

    model: Any
    """lm-eval's `TemplateLM`."""
    name: str
    dtype: str
    versions: dict[str, str]
    """Package -> version, of what computes the answers."""
    batch_size: int
    max_length: int
    max_new_tokens: int
    flags: dict[str, str] = field(default_factory=dict)
    """What else was set that may change an answer."""
    identity: dict[str, str] = field(default_factory=dict)
    """What tells this engine from another that has the same settings: a server's address."""
    spare: int = 1
    """Tokens of the context that a prompt needs beside its own to be scored. A server generates
    one; transformers is not even given the last of the prompt, -1."""
    parallel: bool = False
    """Whether each question is asked by itself, `batch_size` of them at the same time."""


def language_model(engine: Engine, kept: KeptAnswers, progress: Progress) -> Any:
    """lm-eval's view of an engine. It refuses a prompt that does not fit, which lm-eval would cut
    with no more than a warning, asks only for answers that are not kept, and reports progress."""
    from lm_eval.api.model import LM
    from lm_eval.models.utils import normalize_gen_kwargs

    class LanguageModel(LM):  # type: ignore[misc]
        max_length = engine.max_length
        max_gen_toks = engine.max_new_tokens

        def tok_encode(self, text: str) -> list[int]:
            tokens: list[int] = engine.model.tok_encode(text)
            return tokens

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            for request in requests:
                prompt, arguments = request.args
                new = normalize_gen_kwargs(dict(arguments), self.max_gen_toks)["max_gen_toks"]
                self._check(request.task_name, len(self.tok_encode(prompt)) + new)
            progress.start("answers", len(requests), "items")
            return self._ask("generate_until", requests, engine.batch_size)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            for request in requests:
                tokens = len(self.tok_encode("".join(request.args)))
                self._check(request.task_name, tokens + engine.spare)
            progress.start("choices", len(requests), "choices")
            return self._ask("loglikelihood", requests, CHOICES_OF_A_QUESTION * engine.batch_size)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise EvaluationError(
                f"task {requests[0].task_name} measures the likelihood of whole texts",
                hint="measure perplexity with --text, and leave the task out",
            )

        def _check(self, task: str, tokens: int) -> None:
            if tokens > self.max_length:
                raise EvaluationError(
                    f"an item of task {task} needs {tokens} tokens with its answer, "
                    f"the maximum length is {self.max_length}",
                    hint="raise --max-length, or leave the task out",
                )

        def _ask(self, kind: str, requests: Sequence[Any], size: int) -> list[RawAnswer | None]:
            keys = question_keys(kind, [request.args for request in requests])
            answers = [kept.get(key) for key in keys]
            order = batches([request.args for request in requests], 1 if engine.parallel else size)
            asked = [batch for batch in order if any(answers[i] is None for i in batch)]
            progress.advance(len(requests) - sum(map(len, asked)))

            def ask(batch: Sequence[int]) -> list[RawAnswer]:
                questions = [requests[i] for i in batch]
                found: list[RawAnswer] = getattr(engine.model, kind)(questions, disable_tqdm=True)
                return found

            workers = engine.batch_size if engine.parallel else 1
            for batch, found in as_done(ask, asked, workers):
                kept.add([keys[i] for i in batch], found)
                for i, answer in zip(batch, found, strict=True):
                    answers[i] = answer
                progress.advance(len(batch))
            return answers

    return LanguageModel()


def batches(questions: Sequence[Sequence[Any]], size: int) -> list[list[int]]:
    """Positions of the questions in batches of `size`: alike in how they are to be answered, the
    longest first, choices of one question next to each other."""

    def rank(i: int) -> tuple[str, int]:
        prompt, how = questions[i]
        return "" if isinstance(how, str) else json.dumps(how, sort_keys=True), -len(prompt)

    order = sorted(range(len(questions)), key=rank)
    return [order[begin : begin + size] for begin in range(0, len(order), size)]


def as_done(work: Callable[[T], U], tasks: Sequence[T], workers: int) -> Iterator[tuple[T, U]]:
    """Each task with its result, as soon as there is one, computed by `workers` threads. What a
    task raises is raised here, and no further task is begun."""
    if workers == 1:
        for task in tasks:
            yield task, work(task)
        return
    waiting: SimpleQueue[T] = SimpleQueue()
    done: SimpleQueue[tuple[T, U] | BaseException] = SimpleQueue()
    for task in tasks:
        waiting.put(task)
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            try:
                task = waiting.get_nowait()
            except Empty:
                return
            try:
                done.put((task, work(task)))
            except BaseException as error:
                done.put(error)
                return

    # Threads of a pool would keep an interrupted process alive until their last answer.
    for _ in range(min(workers, len(tasks))):
        threading.Thread(target=run, daemon=True).start()
    try:
        for _ in tasks:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        stop.set()
