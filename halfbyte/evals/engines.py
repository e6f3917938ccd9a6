"""Who answers the questions: transformers around our own loading, vLLM or SGLang in this process,
or a server (`evals.endpoint`).

lm-eval's defaults of 2048 tokens of context and 256 of an answer cut prompts and answers of models
that allow more, with no error; so every engine is told both.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from halfbyte.calibration.data import load_tokenizer
from halfbyte.core import Checkpoint
from halfbyte.errors import DependencyError, EvaluationError, UsageError
from halfbyte.evals import endpoint
from halfbyte.evals.asking import Engine
from halfbyte.evals.endpoint import Endpoint, open_endpoint
from halfbyte.evals.model import load_model
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.kvcache.layout import Kv
from halfbyte.progress import Progress

BackendName = Literal["hf", "vllm", "sglang"]

HF_BATCH = 16
AT_ONCE = 16
"""Requests that a server gets at the same time."""
SCHEDULED_BATCH = 512
"""Questions that vLLM and SGLang get at once. They form their own batches out of these."""

_INSTALL: Mapping[str, str] = {
    "vllm": "pip install 'lm-eval[vllm]'",
    "sglang": "pip install sglang",
}


@dataclass(frozen=True)
class Backend:
    """An engine in this process, and arguments of its own, such as `tensor_parallel_size`."""

    name: BackendName = "hf"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    kv_cache: Kv | None = None
    """Format of its KV cache; None leaves it to the engine, which transformers computes without."""


KV_DTYPES: Mapping[BackendName, Mapping[Kv, str]] = {
    "vllm": {"bf16": "bfloat16", "fp8": "fp8"},
    "sglang": {"bf16": "bfloat16", "fp8": "fp8_e4m3"},
}
"""What engines call the formats. Which rows `fp8` means for a latent is theirs to choose."""

TRANSFORMERS = Backend()


@contextlib.contextmanager
def open_engine(
    choice: Backend | Endpoint,
    checkpoint_path: Path,
    *,
    batch_size: int | None,
    max_length: int | None,
    max_new_tokens: int,
    device: str,
    dtype: str,
    scoring: tuple[str, ...],
    progress: Progress,
) -> Iterator[Engine]:
    """The engine, ready to answer. `scoring` names the tasks that need log-probabilities.

    Raises DependencyError for a package that is missing, UsageError for arguments that are not an
    engine's own, and what `endpoint.open_endpoint` and `model.load_model` raise.
    """
    if isinstance(choice, Endpoint):
        with open_endpoint(
            choice,
            checkpoint_path,
            parallel=batch_size or AT_ONCE,
            max_length=max_length,
            limit=_model_limit(open_checkpoint(checkpoint_path)),
            max_new_tokens=max_new_tokens,
            scoring=scoring,
            progress=progress,
        ) as engine:
            yield engine
    elif choice.name == "hf":
        yield _transformers(
            checkpoint_path,
            batch_size or HF_BATCH,
            max_length,
            max_new_tokens,
            device,
            dtype,
            choice.kv_cache,
        )
    else:
        yield _scheduled(
            choice,
            checkpoint_path,
            batch_size or SCHEDULED_BATCH,
            max_length or _model_limit(open_checkpoint(checkpoint_path)),
            max_new_tokens,
            dtype,
        )


def _transformers(
    checkpoint_path: Path,
    batch_size: int,
    max_length: int | None,
    max_new_tokens: int,
    device: str,
    dtype: str,
    kv_cache: Kv | None,
) -> Engine:
    """lm-eval's transformers backend around a model that our own code has loaded."""
    from lm_eval.models.huggingface import HFLM

    class LanguageModel(HFLM):  # type: ignore[misc]
        max_gen_toks = max_new_tokens  # a constant in lm-eval

    model = load_model(checkpoint_path, dtype=dtype, device=device, kv_cache=kv_cache)
    max_length = max_length or model.config.max_position_embeddings
    lm = LanguageModel(
        pretrained=model,
        tokenizer=load_tokenizer(checkpoint_path),
        batch_size=batch_size,
        max_length=max_length,
    )
    versions = {"torch": importlib.metadata.version("torch")}
    return Engine(lm, "hf", dtype, versions, batch_size, max_length, max_new_tokens, spare=-1)


def _scheduled(
    choice: Backend,
    checkpoint_path: Path,
    batch_size: int,
    max_length: int,
    max_new_tokens: int,
    dtype: str,
) -> Engine:
    """vLLM or SGLang, which load the checkpoint themselves, by lm-eval's backends for them."""
    arguments = scheduled_arguments(choice, checkpoint_path, max_length, max_new_tokens, dtype)
    versions = _version(choice.name)
    from lm_eval.api.registry import get_model

    lm = get_model(choice.name)(**arguments)
    flags = {name: json.dumps(value) for name, value in choice.arguments.items()}
    return Engine(lm, choice.name, dtype, versions, batch_size, max_length, max_new_tokens, flags)


def describe(choice: Backend | Endpoint) -> dict[str, str]:
    """What of an engine may change an answer beside `choice` itself, by name: the version of its
    package, or what a server says of itself.

    Raises DependencyError for a package that is missing, EvaluationError as `open_endpoint` does.
    """
    if isinstance(choice, Endpoint):
        return endpoint.describe(choice)
    return {} if choice.name == "hf" else _version(choice.name)


def _version(package: str) -> dict[str, str]:
    if importlib.util.find_spec(package) is None:
        raise DependencyError(
            f"--backend {package}: the package {package} is not installed", hint=_INSTALL[package]
        )
    return {package: importlib.metadata.version(package)}


def scheduled_arguments(
    choice: Backend, checkpoint_path: Path, max_length: int, max_new_tokens: int, dtype: str
) -> dict[str, Any]:
    """Arguments of lm-eval's `vllm` and `sglang` models.

    Raises UsageError for an argument of the user's that is set here.
    """
    tokenizer = {"vllm": "tokenizer", "sglang": "tokenizer_path"}[choice.name]
    arguments = {
        "pretrained": str(checkpoint_path),
        tokenizer: str(checkpoint_path),
        "trust_remote_code": False,
        "dtype": dtype,
        "max_model_len": max_length,
        "max_gen_toks": max_new_tokens,
        "batch_size": "auto",  # all questions that it is given, scheduled by the engine
    }
    if choice.kv_cache is not None:
        if choice.kv_cache not in KV_DTYPES[choice.name]:
            raise UsageError(
                f"--kv-cache {choice.kv_cache}: {choice.name} has no such option",
                hint="--kv-cache fp8, in rows of the engine's choice",
            )
        arguments["kv_cache_dtype"] = KV_DTYPES[choice.name][choice.kv_cache]
    # Other names of what is set above.
    taken = {*arguments, "max_length", "context_length", "model_path", "model"}
    if both := sorted(taken & choice.arguments.keys()):
        raise UsageError(
            f"--backend-arg {both[0]}: this argument is set by the command",
            hint="quantize eval has --dtype, --max-length, --max-new-tokens and --batch-size",
        )
    return {**arguments, **choice.arguments}


def parse_arguments(words: list[str]) -> dict[str, Any]:
    """`["tensor_parallel_size=8", "enforce_eager=true"]` as arguments; values are YAML.

    Raises UsageError for a word that is not `name=value`.
    """
    import yaml

    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(
                f"--backend-arg {word!r} is not NAME=VALUE",
                hint="for example --backend-arg tensor_parallel_size=8",
            )
        if name in arguments:
            raise UsageError(f"--backend-arg {name} is given twice")
        try:
            arguments[name] = yaml.safe_load(value)
            json.dumps(arguments[name], allow_nan=False)
        except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
            raise UsageError(f"--backend-arg {word!r}: the value cannot be read") from error
    return arguments


def _model_limit(checkpoint: Checkpoint) -> int:
    """Tokens that the model was made for, by its config."""
    text = checkpoint.config.get("text_config")
    for settings in (checkpoint.config, text if isinstance(text, dict) else {}):
        limit = settings.get("max_position_embeddings")
        if isinstance(limit, int) and limit > 1:
            return limit
    raise EvaluationError(
        f"{checkpoint.path}: config.json has no max_position_embeddings",
        hint="say how many tokens prompt and answer may have: --max-length N",
    )
