"""lm-eval's vLLM and SGLang models, as we build them, over stand-ins for the two packages.

Neither package can be had on a machine without a GPU. The stand-ins take what the packages' own
constructors take and compute with the embedded model, so lm-eval's code for them runs as it is.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from halfbyte.errors import DependencyError, EvaluationError, UsageError
from halfbyte.evals.engines import Backend, BackendName, parse_arguments, scheduled_arguments
from halfbyte.evals.evaluation import Evaluation
from halfbyte.evals.harness import run_tasks
from halfbyte.evals.report import TaskResults
from halfbyte.kvcache.layout import Kv
from halfbyte.progress import SilentProgress

DEMO = Path(__file__).resolve().parents[2] / "halfbyte" / "demo"
MODEL = DEMO / "glm-nano-fp8"
TASKS = ["glm_recall", "glm_arc_like"]


@pytest.fixture(scope="module")
def in_process() -> TaskResults:
    return run_tasks(MODEL, DEMO / "tasks", TASKS, limit=4)


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, version: str, **modules: Any
) -> None:
    """Make a package of the given submodules importable, in that version."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))
    parents = {path.rpartition(".")[0] for path in modules}
    for path in sorted({name, *modules, *parents} - {""}):
        module = ModuleType(path)
        module.__spec__ = importlib.machinery.ModuleSpec(path, None)
        vars(module).update(modules.get(path, {}))
        monkeypatch.setitem(sys.modules, path, module)


def test_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nano: Any, in_process: TaskResults
) -> None:
    started: list[dict[str, Any]] = []
    asked: list[int] = []

    class LLM:
        def __init__(self, **arguments: Any) -> None:
            started.append(arguments)
            config = SimpleNamespace(max_model_len=arguments["max_model_len"])
            self.llm_engine = SimpleNamespace(model_config=config)

        def generate(self, prompts: Any, sampling_params: Any, **_: Any) -> list[Any]:
            asked.append(len(prompts))
            return [
                self._answer(prompt["prompt_token_ids"], how)
                for prompt, how in zip(prompts, sampling_params, strict=True)
            ]

        def _answer(self, ids: list[int], how: Any) -> Any:
            if "prompt_logprobs" not in vars(how):
                text = nano.generate(ids, how.max_tokens, how.stop, [])
                return SimpleNamespace(outputs=[SimpleNamespace(text=text)])
            rows: list[Any] = [None]
            for row, token in zip(nano.log_probs(ids), ids[1:], strict=False):
                best = int(row.argmax())
                rows.append({t: SimpleNamespace(logprob=float(row[t])) for t in (best, token)})
            return SimpleNamespace(prompt_logprobs=rows)

    install(
        monkeypatch,
        tmp_path,
        "vllm",
        "0.25.1",
        **{
            "vllm": {"LLM": LLM, "SamplingParams": SimpleNamespace, "TokensPrompt": dict},
            "vllm.lora.request": {"LoRARequest": object},
            "vllm.renderers.hf": {"resolve_chat_template": lambda **_: None},
            "vllm.tokenizers": {"get_tokenizer": lambda *_, **__: nano.tokenizer},
        },
    )
    engine = Backend("vllm", {"tensor_parallel_size": 8, "enforce_eager": True})
    found = run_tasks(MODEL, DEMO / "tasks", TASKS, engine=engine, limit=4, batch_size=3)
    for ours, theirs in zip(found.tasks, in_process.tasks, strict=True):
        assert (ours.items, ours.metrics) == (theirs.items, theirs.metrics)
    (arguments,) = started
    given = ("model", "tokenizer", "dtype", "max_model_len", "trust_remote_code")
    assert [arguments[name] for name in given] == [str(MODEL), str(MODEL), "float32", 1024, False]
    assert (arguments["tensor_parallel_size"], arguments["enforce_eager"]) == (8, True)
    assert asked == [3, 1, 12, 4]
    settings = found.settings
    assert (settings.backend, settings.versions["vllm"]) == ("vllm", "0.25.1")
    assert settings.flags == {"tensor_parallel_size": "8", "enforce_eager": "true"}
    assert "torch" not in settings.versions
    # A scored prompt needs room for the token that vLLM generates.
    longest = max(len(nano.tokenizer.encode(text)) for text in prompts(nano))
    with pytest.raises(EvaluationError, match=f"needs {longest + 1} tokens"):
        run_tasks(MODEL, DEMO / "tasks", TASKS[1:], engine=engine, limit=1, max_length=longest)


def prompts(nano: Any) -> list[str]:
    """Prompts with their choices, of the first question of the second task."""
    import json

    row = json.loads((DEMO / "tasks" / "arc_like.jsonl").read_text().split("\n", 1)[0])
    return [f"Question: {row['question']}\nAnswer: {choice}" for choice in row["choices"]]


def test_sglang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nano: Any, in_process: TaskResults
) -> None:
    started: list[dict[str, Any]] = []

    class Engine:
        def __init__(self, **arguments: Any) -> None:
            started.append(arguments)
            self.tokenizer_manager = SimpleNamespace(tokenizer=nano.tokenizer)

        def generate(
            self, input_ids: Any, sampling_params: Any, return_logprob: bool, **_: Any
        ) -> list[Any]:
            return [
                self._answer(ids, how, return_logprob)
                for ids, how in zip(input_ids, sampling_params, strict=True)
            ]

        def _answer(self, ids: list[int], how: Any, scored: bool) -> Any:
            if not scored:
                return {"text": nano.generate(ids, how["max_new_tokens"], how["stop"], [])}
            table = nano.log_probs(ids)
            rows = [(float(row[t]), t, None) for row, t in zip(table, ids[1:], strict=False)]
            tops = [[(float(row.max()), int(row.argmax()), None)] for row in table[:-1]]
            return {
                "meta_info": {
                    "input_token_logprobs": [(None, ids[0], None), *rows],
                    "input_top_logprobs": [None, *tops],
                }
            }

    import lm_eval.models.sglang_causallms as theirs_module

    module = {"Engine": Engine}
    install(monkeypatch, tmp_path, "sglang", "0.5.9", sglang=module)
    monkeypatch.setattr(theirs_module, "sgl", SimpleNamespace(**module), raising=False)
    engine = Backend("sglang", {"tp_size": 2})
    found = run_tasks(MODEL, DEMO / "tasks", TASKS, engine=engine, limit=4, max_length=512)
    for ours, theirs in zip(found.tasks, in_process.tasks, strict=True):
        assert (ours.items, ours.metrics) == (theirs.items, theirs.metrics)
    (arguments,) = started
    given = ("model_path", "tokenizer_path", "dtype", "tp_size", "trust_remote_code")
    assert [arguments[name] for name in given] == [str(MODEL), str(MODEL), "float32", 2, False]
    settings = found.settings
    assert (settings.backend, settings.max_length, settings.batch_size) == ("sglang", 512, 512)
    assert settings.versions["sglang"] == "0.5.9"


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_package_that_is_not_installed(name: str) -> None:
    with pytest.raises(DependencyError, match=f"the package {name} is not installed") as caught:
        run_tasks(MODEL, DEMO / "tasks", TASKS, engine=Backend(name), limit=1)
    assert "pip install" in str(caught.value.hint)


def test_arguments() -> None:
    words = ["tensor_parallel_size=8", "gpu_memory_utilization=0.9", "enforce_eager=true", "q=fp8"]
    nested = 'hf_overrides={"a": [1, 2]}'
    assert parse_arguments([*words, nested]) == {
        "tensor_parallel_size": 8,
        "gpu_memory_utilization": 0.9,
        "enforce_eager": True,
        "q": "fp8",
        "hf_overrides": {"a": [1, 2]},
    }
    for word in ("tensor_parallel_size", "=8", "a b=1", "a=[", "a=.nan", "a=2020-01-01"):
        with pytest.raises(UsageError):
            parse_arguments([word])
    with pytest.raises(UsageError, match="tp_size is given twice"):
        parse_arguments(["tp_size=1", "tp_size=2"])
    for name in ("trust_remote_code", "max_length", "pretrained", "max_gen_toks"):
        with pytest.raises(UsageError, match="this argument is set by the command"):
            run_tasks(MODEL, DEMO / "tasks", TASKS, engine=Backend("vllm", {name: 1}))


@pytest.mark.parametrize(
    ("name", "kv_cache", "dtype"),
    [("vllm", "fp8", "fp8"), ("sglang", "fp8", "fp8_e4m3"), ("sglang", "bf16", "bfloat16")],
)
def test_engines_are_told_the_format_of_their_cache(
    name: BackendName, kv_cache: Kv, dtype: str
) -> None:
    def arguments(choice: Backend) -> dict[str, Any]:
        return scheduled_arguments(choice, MODEL, 1024, 256, "auto")

    assert arguments(Backend(name, {}, kv_cache))["kv_cache_dtype"] == dtype
    assert "kv_cache_dtype" not in arguments(Backend(name))
    with pytest.raises(UsageError, match="kv_cache_dtype: this argument is set by the command"):
        arguments(Backend(name, {"kv_cache_dtype": "auto"}, kv_cache))
    with pytest.raises(UsageError, match=f"--kv-cache fp8-raw: {name} has no such option"):
        arguments(Backend(name, {}, "fp8-raw"))


def test_the_cache_is_part_of_what_is_evaluated() -> None:
    def told(kv_cache: Kv | None) -> Mapping[str, str]:
        return Evaluation(
            MODEL, text=DEMO / "heldout.jsonl", engine=Backend(kv_cache=kv_cache)
        ).identity()

    kinds: list[Kv | None] = [None, "bf16", "fp8", "fp8-raw"]
    assert [told(kind)["KV cache"] for kind in kinds] == ["as computed", "bf16", "fp8", "fp8-raw"]


def test_kept_answers_are_of_one_cache(tmp_path: Path) -> None:
    class Notes(SilentProgress):
        def note(self, text: str) -> None:
            notes.append(text)

    notes: list[str] = []
    kinds: list[Kv] = ["fp8", "fp8", "fp8-raw"]
    for kind in kinds:
        run_tasks(
            MODEL,
            DEMO / "tasks",
            TASKS[1:],
            engine=Backend(kv_cache=kind),
            limit=1,
            answers=tmp_path / "answers",
            progress=Notes(),
        )
    assert [note.partition(": ")[2] for note in notes] == [
        "4 answers are kept",
        "kept answers are of another kv_cache",
    ]
