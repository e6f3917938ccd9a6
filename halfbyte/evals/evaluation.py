"""One evaluation of a checkpoint: what is measured, how, and the report that comes of it."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path

from halfbyte.evals.endpoint import Endpoint
from halfbyte.evals.engines import HF_BATCH, TRANSFORMERS, Backend, describe
from halfbyte.evals.harness import run_tasks
from halfbyte.evals.report import EvalReport, checkpoint_fingerprint
from halfbyte.evals.store import Identity, content_sha256
from halfbyte.evals.stream import evaluate_text
from halfbyte.evals.suites import Suite
from halfbyte.evals.tool_files import possible_answers
from halfbyte.evals.toolcalls import TOOL_CALL_TOKENS, run_tool_calls, together
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.kvcache.layout import Kv
from halfbyte.progress import Progress

VERSIONS = ("lm_eval", "torch", "transformers")


@dataclass(frozen=True)
class Evaluation:
    """What `quantize eval` is asked for. What is None is not measured, or left to its default."""

    checkpoint: Path
    text: Path | None = None
    baseline: Path | None = None
    """Checkpoint that divergence on the text is measured from."""
    sequence_length: int = 2048
    max_windows: int | None = None
    tasks: Path | Suite | None = None
    names: tuple[str, ...] = ()
    """Of single tasks or groups; all when empty."""
    tool_calls: Path | None = None
    engine: Backend | Endpoint = TRANSFORMERS
    """What answers the tasks, and the tool calls if it is a server. The format of its KV cache is
    that of all that is measured."""
    limit: int | None = None
    batch_size: int | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None
    device: str = "cpu"
    """Of what is computed by transformers or layer by layer."""
    dtype: str = "float32"
    engine_dtype: str = "float32"
    """Of the engine that answers the tasks, which may know "auto"."""

    @property
    def kv_cache(self) -> Kv | None:
        """The format of the KV cache that was asked for."""
        return self.engine.kv_cache if isinstance(self.engine, Backend) else None

    def identity(self) -> Identity:
        """All that decides the result: no other evaluation has the same. A server is asked for
        what it serves."""
        hardware = ""
        if self.device.startswith("cuda"):
            import torch

            hardware = torch.cuda.get_device_name(self.device)
        parts = {
            "checkpoint": _fingerprint(self.checkpoint),
            **{name: importlib.metadata.version(name) for name in VERSIONS},
            "evaluator": content_sha256(Path(__file__).parent),
            "device": hardware or self.device,
            "dtype": self.dtype,
            "KV cache": self.kv_cache or "as computed",
        }
        if self.text is not None:
            parts |= {
                "text": content_sha256(self.text),
                "sequence length": str(self.sequence_length),
                "windows": str(self.max_windows or "all"),
                "divergence from": _fingerprint(self.baseline) if self.baseline else "nothing",
            }
        if self.tasks is not None:
            suite = isinstance(self.tasks, Suite)
            parts |= {
                "tasks": repr(self.tasks) if suite else content_sha256(Path(str(self.tasks))),
                "task names": ", ".join(self.names) or "all",
            }
        if self.tool_calls is not None:
            answers = possible_answers(self.tool_calls)
            parts["tool calls"] = content_sha256(self.tool_calls)
            parts["possible answers"] = content_sha256(answers) if answers.exists() else "none"
        if self.tasks is not None or self.tool_calls is not None:
            parts |= {"engine": repr(self.engine), "engine dtype": self.engine_dtype}
            parts |= {f"engine {name}": told for name, told in describe(self.engine).items()}
            asked = (self.limit, self.batch_size, self.max_length, self.max_new_tokens)
            names = ("limit", "batch size", "max length", "max new tokens")
            parts |= {name: json.dumps(value) for name, value in zip(names, asked, strict=True)}
        return parts

    def run(self, answers: Path | None, progress: Progress) -> EvalReport:
        """Measure it. `answers` is where those to tasks are kept until the report is written.

        Raises what `evaluate_text`, `run_tasks` and `run_tool_calls` raise.
        """
        text, tasks = None, []
        if self.text is not None:
            text = evaluate_text(
                self.checkpoint,
                self.text,
                baseline=self.baseline,
                sequence_length=self.sequence_length,
                max_windows=self.max_windows,
                device=self.device,
                dtype=self.dtype,
                kv_cache=self.kv_cache,
                progress=progress,
            )
        if self.tasks is not None:
            found = run_tasks(
                self.checkpoint,
                self.tasks,
                self.names or None,
                engine=self.engine,
                limit=self.limit,
                batch_size=self.batch_size,
                max_length=self.max_length,
                max_new_tokens=self.max_new_tokens,
                device=self.device,
                dtype=self.engine_dtype,
                answers=answers,
                progress=progress,
            )
            tasks.append(found)
        if self.tool_calls is not None:
            found = run_tool_calls(
                self.checkpoint,
                self.tool_calls,
                server=self.engine if isinstance(self.engine, Endpoint) else None,
                limit=self.limit,
                batch_size=self.batch_size or HF_BATCH,
                max_length=self.max_length,
                max_new_tokens=self.max_new_tokens or TOOL_CALL_TOKENS,
                device=self.device,
                dtype=self.dtype,
                kv_cache=self.kv_cache,
                answers=answers if self.tasks is None else None,
                progress=progress,
            )
            tasks.append(found)
        made = _fingerprint(self.checkpoint)
        return EvalReport(str(self.checkpoint), made, text, together(tasks), kv_cache=self.kv_cache)


def _fingerprint(checkpoint: Path) -> str:
    return checkpoint_fingerprint(open_checkpoint(checkpoint))
