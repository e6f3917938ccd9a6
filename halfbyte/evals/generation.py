"""Greedy answers to finished prompts: the protocol, the model in this process, and a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from halfbyte.errors import EvaluationError
from halfbyte.evals.asking import Engine, language_model
from halfbyte.evals.kept import KeptAnswers
from halfbyte.progress import Progress


class Generator(Protocol):
    """Whatever continues prompts: a model in this process, a server."""

    def generate(
        self, prompts: Sequence[str], max_new_tokens: int, stop: Sequence[str]
    ) -> list[str]:
        """The most likely continuation of each prompt, special tokens included, up to
        `max_new_tokens` or the first of the tokens `stop`, which is not part of it."""


class ModelGenerator:
    """A transformers model and its tokenizer, `batch_size` prompts at once.

    `max_length` bounds prompt and answer together, in tokens.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch_size: int,
        max_length: int,
        progress: Progress,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._max_length = max_length
        self._progress = progress

    def generate(
        self, prompts: Sequence[str], max_new_tokens: int, stop: Sequence[str]
    ) -> list[str]:
        """As in the protocol. Raises EvaluationError for a prompt that leaves no room for
        `max_new_tokens`, and for a stop that is no token."""
        ids = [self._tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
        for number, prompt in enumerate(ids):
            if len(prompt) + max_new_tokens > self._max_length:
                raise EvaluationError(
                    f"prompt {number + 1} of {len(ids)} has {len(prompt)} tokens; with "
                    f"{max_new_tokens} of an answer that is more than the maximum length, "
                    f"{self._max_length}",
                    hint="lower --max-new-tokens, or raise --max-length",
                )
        stops = [self._token(text) for text in stop]
        answers = [""] * len(prompts)
        # Prompts of like length share a batch, the longest first: what is too large shows at once.
        order = sorted(range(len(ids)), key=lambda number: (-len(ids[number]), number))
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            found = self._answers([ids[number] for number in batch], max_new_tokens, stops)
            for number, answer in zip(batch, found, strict=True):
                answers[number] = answer
            self._progress.advance(len(batch))
        return answers

    def _token(self, text: str) -> int:
        number = self._tokenizer.get_vocab().get(text)
        if number is None:
            raise EvaluationError(f"{text!r:.40} should end an answer, but is no token")
        return int(number)

    def _answers(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stops: Sequence[int]
    ) -> list[str]:
        import torch

        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        rows = [[stops[0]] * pad + list(p) for pad, p in zip(padding, prompts, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=torch.tensor(rows, device=self._model.device),
                attention_mask=torch.tensor(mask, device=self._model.device),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=list(stops),
                pad_token_id=stops[0],
            )
        return [self._text(row, stops) for row in output[:, width:].tolist()]

    def _text(self, tokens: Sequence[int], stops: Sequence[int]) -> str:
        end = next((at for at, token in enumerate(tokens) if token in stops), len(tokens))
        text: str = self._tokenizer.decode(tokens[:end], skip_special_tokens=False)
        return text


class ServerGenerator:
    """A server (`evals.endpoint`), asked as many prompts at the same time as its engine says."""

    def __init__(self, engine: Engine, kept: KeptAnswers, progress: Progress) -> None:
        self._model = language_model(engine, kept, progress)

    def generate(
        self, prompts: Sequence[str], max_new_tokens: int, stop: Sequence[str]
    ) -> list[str]:
        """As in the protocol. Raises EvaluationError for a prompt that leaves no room for
        `max_new_tokens`, and as the server does."""
        from lm_eval.api.instance import Instance

        how = {
            "until": list(stop),
            "do_sample": False,
            "max_gen_toks": max_new_tokens,
            "add_special_tokens": False,  # the chat template has put them in
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        asked = [
            Instance("generate_until", {}, (prompt, how), 0, ("tool calls", number, 1))
            for number, prompt in enumerate(prompts)
        ]
        answers: list[str] = self._model.generate_until(asked)
        return answers


def stop_tokens(checkpoint_path: Path, tokenizer: Any) -> list[str]:
    """The tokens that end an answer by the checkpoint's own word: `eos_token_id` of its
    generation_config.json, else of its config.json, else the tokenizer's end-of-text token.

    Raises EvaluationError when there is none, or one is no token of the tokenizer.
    """
    ids: Any = None
    for name in ("generation_config.json", "config.json"):
        path = checkpoint_path / name
        if ids is None and path.is_file():
            try:
                record = json.loads(path.read_bytes())
            except (ValueError, RecursionError) as error:
                raise EvaluationError(f"{path}: not JSON: {error}") from error
            ids = record.get("eos_token_id") if isinstance(record, dict) else None
    if ids is None:
        ids = tokenizer.eos_token_id
    values = ids if isinstance(ids, list) else [ids]
    if not values or not all(type(v) is int and 0 <= v < len(tokenizer) for v in values):
        raise EvaluationError(
            f"{checkpoint_path}: eos_token_id is {ids!r:.80}, the tokenizer has "
            f"{len(tokenizer)} tokens",
            hint="name the tokens that end an answer in generation_config.json",
        )
    return [str(tokenizer.convert_ids_to_tokens(value)) for value in values]
