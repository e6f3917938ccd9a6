"""Reads in lm-eval's samples what the model answered, and how it was asked.

lm-eval tells neither why a text ended nor how many tokens it has, so the tokenizer of the
checkpoint counts them; a text of nearly as many as were allowed counts as cut off.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.evals.report import Answer

INVALID = "[invalid]"
"""What lm-eval's filters give for a text without an answer."""


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """For samples of one model."""

    tokenizer: Any
    max_new_tokens: int
    """Where a task sets no limit of its own."""

    def answer(self, filtered: Sequence[Mapping[str, Any]]) -> Answer:
        """The answer to an item, from its samples, one for each filter."""
        sample = filtered[0]
        if not _is_text(sample):
            found = [float(repeats[0][0]) for repeats in sample["resps"]]
            digest = _digest(" ".join(value.hex() for value in found))
            return Answer(digest, choices=len(found), spread=max(found) - min(found))
        texts = [text for repeats in sample["resps"] for text in repeats]
        empty = not any(text.strip() for text in texts)
        unread = [s["filter"] for s in filtered if empty or _fails(s["filtered_resps"])]
        return self.text(texts, self._settings(sample)["max_gen_toks"], unread)

    def text(self, texts: Sequence[str], limit: int, unread: Sequence[str] = ()) -> Answer:
        """An answer of generated text (of several, when it was asked for more than once), of which
        each might have `limit` tokens."""
        counts = [len(self._encode(text)) for text in texts]
        capped = max(counts) >= limit - max(1, limit // 50)
        return Answer(
            _digest("\0".join(texts)), tokens=sum(counts), capped=capped, unread=tuple(unread)
        )

    def question(self, sample: Mapping[str, Any]) -> bytes:
        """The tokens that an item's prompt and choices consist of."""
        texts = [sample["arguments"][0][0]]
        if not _is_text(sample):
            texts += [choice for _, choice, *_ in sample["arguments"]]
        return self.tokens(texts)

    def tokens(self, texts: Iterable[str]) -> bytes:
        """The tokens of texts, with their ends."""
        return b"".join(array("i", [*self._encode(text), -1]).tobytes() for text in texts)

    def generation(self, sample: Mapping[str, Any]) -> set[str]:
        """The settings under which text was generated, as JSON; none for choices."""
        return {json.dumps(self._settings(sample), sort_keys=True)} if _is_text(sample) else set()

    def _settings(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        from lm_eval.models.utils import normalize_gen_kwargs

        asked = dict(sample["arguments"][0][1])
        settings: Mapping[str, Any] = normalize_gen_kwargs(asked, self.max_new_tokens)
        return settings

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens


def _is_text(sample: Mapping[str, Any]) -> bool:
    """Whether text was asked for, and not how likely choices are."""
    return isinstance(sample["arguments"][0][1], Mapping)


def _fails(filtered: Sequence[Any]) -> bool:
    return all(found == INVALID or found == [INVALID] for found in filtered)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
