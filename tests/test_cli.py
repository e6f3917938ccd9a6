"""The command line: what is typed, what is printed where, and how it exits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

import halfbyte
from halfbyte import cli
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.evals.gate import gate as judge
from halfbyte.evals.policy import load_policy
from halfbyte.evals.report import (
    Answer,
    EvalReport,
    Item,
    MetricScores,
    TaskResults,
    TaskScores,
    TaskSettings,
)
from halfbyte.evals.store import BaselineStore


class Outcome(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)


Quantize = Callable[..., Outcome]


@pytest.fixture
def quantize(capsys: pytest.CaptureFixture[str]) -> Quantize:
    """Runs a command line in this process."""

    def run(*words: object) -> Outcome:
        capsys.readouterr()
        code = cli.main([str(word) for word in words])
        return Outcome(code, *capsys.readouterr())

    return run


# Words.


@pytest.mark.parametrize(
    ("typed", "called"),
    [
        (["GLM-FP8", "--to", "int4"], ["run", "GLM-FP8", "--to", "int4"]),
        (["zai-org/GLM-5.2-FP8"], ["run", "zai-org/GLM-5.2-FP8"]),
        (["run", "model"], ["run", "model"]),
        (["plan", "model"], ["plan", "model"]),
        (["--version"], ["--version"]),
        (["-h"], ["-h"]),
        ([], []),
    ],
)
def test_run_is_the_default_command(typed: list[str], called: list[str]) -> None:
    assert cli.insert_run(typed) == called


def test_a_folder_named_like_a_command_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="plans is neither a command nor a folder"):
        cli.insert_run(["plans"])
    (tmp_path / "plans").mkdir()
    assert cli.insert_run(["plans"]) == ["run", "plans"]


def test_every_name_that_models_lists_can_be_typed() -> None:
    from halfbyte.models import MODELS

    for model in MODELS:
        assert cli.insert_run([model.alias]) == ["run", model.alias]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plna", "x"], "did you mean `quantize plan`?"),
        (["plan"], "Missing argument 'SOURCE'"),
        (["plan", ".", "--bits", "4"], "No such option: --bits"),
        (["plan", ".", "--group-size", "33"], "'33' is not one of"),
        (["plan", ".", "--device", "tpu"], "'tpu' is not auto, cpu, cuda or cuda:<n>"),
        (["run", ".", "--samples", "0"], "greater than or equal to 1"),
        (["run", ".", "--to", "int3"], "'int3' is not"),
        (["run", ".", "--resume", "--overwrite"], "exclude each other"),
        (["run", "."], "quantize . --to int4 --calibration text.jsonl"),
        (["run", ".", "--method", "rtn", "--calibration", "a.txt"], "rtn uses no text"),
        (["plan", ".", "--method", "rtn", "--engine", "llmcompressor"], "solves gptq only"),
        (["plan", ".", "--method", "awq", "--engine", "llmcompressor"], "solves gptq only"),
        (["run", ".", "--method", "awq"], "--method awq needs text"),
        (["run", ".", "--method", "awq+gptq"], "needs text"),
        (["eval", "."], "nothing to measure"),
        (["eval", ".", "--tasks", ".", "--baseline", "."], "add --text"),
        (["eval", ".", "--text", "a.txt", "--task", "a"], "add --tasks FOLDER"),
        (["eval", ".", "--text", "a.txt", "--backend", "vllm"], "add --tasks FOLDER"),
        (["eval", ".", "--tasks", ".", "--backend", "hf", "--endpoint", "http://a"], "use one of"),
        (["eval", ".", "--tasks", ".", "--backend-arg", "a=1"], "add --backend vllm or sglang"),
        (
            ["eval", ".", "--tasks", ".", "--backend", "vllm", "--backend-arg", "a"],
            "not NAME=VALUE",
        ),
        (["eval", ".", "--tasks", ".", "--model", "a"], "add --endpoint"),
        (["eval", ".", "--tasks", ".", "--endpoint", "localhost:8000"], "--endpoint http://HOST"),
        (["eval", ".", "--tasks", ".", "--endpoint", "http://a", "--device", "cpu"], "--device is"),
        (
            ["eval", ".", "--tasks", ".", "--endpoint", "http://a", "--dtype", "float32"],
            "--dtype: a",
        ),
        (["eval", ".", "--tasks", ".", "--fresh"], "add -o FILE"),
        (["bench-decode", ".", "--batch", "0"], "Invalid value for '--batch'"),
    ],
)
def test_wrong_usage_exits_2(quantize: Quantize, words: list[str], message: str) -> None:
    outcome = quantize(*words)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert message in outcome.stderr


def test_version(quantize: Quantize) -> None:
    assert quantize("--version") == (0, f"quantize {halfbyte.__version__}\n", "")


@pytest.mark.parametrize("words", [[], *([name] for name in cli.COMMANDS)])
def test_help_fits_a_terminal_and_shows_examples(
    quantize: Quantize, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = quantize(*words, "-h")
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    assert "Examples:\n    quantize " in outcome.stdout


def without_torch(*words: object) -> Outcome:
    """Runs a command line in a process of its own that must not load torch."""
    code = (
        "import sys; from halfbyte.cli import main\n"
        f"try: code = main({[str(word) for word in words]!r})\n"
        "except SystemExit as exit: code = exit.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return Outcome(result.returncode, result.stdout, result.stderr)


def test_help_plan_and_inspect_do_not_import_torch(tiny: Path) -> None:
    planning = ["plan", tiny, "--sequence-length", "512", "--json"]
    for words in (
        ["--help"],
        ["bench-decode", "-h"],
        ["models"],
        planning,
        ["inspect", tiny, "--json"],
    ):
        outcome = without_torch(*words)
        assert (outcome.exit_code, outcome.stderr) == (0, ""), words
    outcome = without_torch("run", tiny, "--dry-run", "--json")
    assert outcome.document["source"] == str(tiny)


# Results.


def test_plan_under_torchrun_is_of_each_rank(
    quantize: Quantize, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert re.search(
        r"peak memory  host .* in each of 2 processes\n", quantize("plan", tiny).stdout
    )
    document = quantize("plan", tiny, "--device", "cpu", "--json").document
    assert document["memory"]["ranks"] == 2
    assert document["duration"]["workers"] == 2  # of one thread each, as torchrun has it
    monkeypatch.setenv("RANK", "1")
    assert quantize("plan", tiny, "--json") == (0, "", "")


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--method", "awq+gptq"], "method", "awq+gptq"),
        (["--engine", "llmcompressor"], "engine", "llmcompressor"),
        (["--scale-search", "minmax"], "scale_search", "minmax"),
        (["--positive-scales"], "signed_scales", False),
        (["--refine", "3"], "refine", 3),
        (["--no-row-feedback"], "row_feedback", False),
        (["--expert-hessian", "routed"], "expert_hessian", "routed"),
        (["--affinity"], "affinity", True),
        (["--samples", "7"], "samples", 7),
        (["--sequence-length", "33"], "sequence_length", 33),
    ],
)
def test_options_reach_the_settings(
    quantize: Quantize, tiny: Path, flags: list[str], field: str, value: object
) -> None:
    settings = [quantize("plan", tiny, "--json", *f).document["settings"] for f in ([], flags)]
    assert settings[1] == {**settings[0], field: value} != settings[0]


def test_plan_adds_up(quantize: Quantize, tiny: Path) -> None:
    human, document = quantize("plan", tiny), quantize("plan", tiny, "--json").document
    files = sum(file.stat().st_size for file in tiny.glob("*.safetensors"))
    assert sum(rule["bytes_in"] for rule in document["rules"]) == document["bytes_in"] < files
    assert sum(rule["bytes_out"] for rule in document["rules"]) == document["bytes_out"]
    assert "quantize INT4 g32" in human.stdout
    assert "peak memory  host" in human.stdout
    assert quantize("plan", tiny, "--sequence-length", "512", "--quiet") == (0, "", "")


def test_inspect_counts_what_the_headers_hold(quantize: Quantize, tiny: Path) -> None:
    document = quantize("inspect", tiny, "--json").document
    assert (document["layers"], document["mtp_layers"], document["experts"]) == (4, [4], 4)
    assert document["fp8_block"] == [128, 128]
    assert sum(row["tensors"] for row in document["patterns"]) == document["tensors"]
    assert sum(row["bytes"] for row in document["dtypes"].values()) == document["bytes"]
    names = {row["pattern"]: row for row in document["patterns"]}
    # 3 MoE layers and the MTP layer, 4 experts each.
    assert names["model.layers.*.mlp.experts.*.up_proj.weight"]["tensors"] == 16
    assert (
        "4 layers and an MTP layer at index 4, 4 routed experts" in quantize("inspect", tiny).stdout
    )


def test_run_prints_one_result_in_each_mode(quantize: Quantize, tiny: Path, tmp_path: Path) -> None:
    def run(output: Path, *words: str) -> Outcome:
        return quantize(tiny, "--to", "int4", "--method", "rtn", "-o", output, *words)

    human = run(tmp_path / "human")
    assert human.exit_code == 0
    assert f"{tmp_path / 'human'}: " in human.stdout
    assert run(tmp_path / "quiet", "-q") == (0, f"{tmp_path / 'quiet'}\n", "")
    document = run(tmp_path / "json", "--json").document
    assert document["schema_version"] == 1
    assert document["output"] == str(tmp_path / "json")
    assert set(document["shards"]) == {file.name for file in tmp_path.glob("json/*.safetensors")}

    again = run(tmp_path / "json", "--json")
    assert (again.exit_code, again.stdout) == (1, "")
    assert "--resume" in again.stderr
    resumed = run(tmp_path / "json", "--resume")
    assert (resumed.exit_code, resumed.stdout) == (
        0,
        f"{tmp_path / 'json'} is finished already\n",
    )


def test_a_run_leaves_its_own_card(quantize: Quantize, tiny_copy: Path, tmp_path: Path) -> None:
    """Not the source's, whose licence it carries; and one that a new run may replace."""
    (tiny_copy / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Words of the source\n")
    words = [tiny_copy, "--to", "int4", "--method", "rtn", "-o", tmp_path / "out", "-q"]
    assert quantize(*words).exit_code == 0
    card = tmp_path / "out" / "README.md"
    written = card.read_text()
    assert written.startswith("---\nlicense: apache-2.0\n")
    assert "Words of the source" not in written
    assert quantize("verify", tmp_path / "out", "--source", tiny_copy).exit_code == 0
    (tmp_path / "out" / "gate.json").write_text("{}")
    refused = quantize("card", tmp_path / "out")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "gate.json is not a verdict" in refused.stderr
    assert quantize(*words, "--overwrite").exit_code == 0
    assert card.read_text() == written
    card.write_text("# Words of somebody\n")
    refused = quantize(*words, "--overwrite")
    assert refused.exit_code == 1
    assert "README.md, which halfbyte did not write" in refused.stderr


def test_verify_exits_1_on_a_mismatch(quantize: Quantize, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    quantize(tiny, "--to", "int4", "--method", "rtn", "-o", output, "-q")
    good = quantize("verify", output, "--source", tiny, "--json")
    assert (good.exit_code, good.document["ok"], good.document["mismatches"]) == (0, True, [])
    config = json.loads((output / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (output / "config.json").write_text(json.dumps(config))
    bad = quantize("verify", output)
    assert bad.exit_code == 1
    assert re.search(r"checked: \d+ mismatch", bad.stdout)
    assert quantize("verify", output, "-q")[:2] == (1, "")


def test_verify_with_kernels_shows_each_layer(
    quantize: Quantize, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfbyte.kernels import reference

    output, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("words of a text " * 99)
    quantize(tiny, "--to", "int4", "--method", "rtn", "-o", output, "-q")
    words = ["verify", output, "--source", tiny, "--kernels", "--layers", "1-2,4"]
    shown = quantize(*words, "--calibration", text, "--samples", 2, "--sequence-length", 24)
    assert shown.exit_code == 0
    assert "inputs  what linears read of 48 tokens of text" in shown.stdout
    assert "check kernels: " in shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines() if re.match(r" +\d+  ", line)]
    assert [row[:2] for row in rows] == [["1", "12"], ["2", "12"], ["4", "12"]]
    assert all(row[-1].startswith("mlp.experts.") and row[4].endswith("%") for row in rows)
    found = quantize(*words[:2], "--kernels", "--device", "cpu", "--json")
    assert found.exit_code == 0
    kernels = found.document["kernels"]
    assert kernels["inputs"] == "standard normal numbers"
    assert {check["name"].split(".")[2] for check in kernels["linears"]} == {"1", "2", "3", "4"}
    assert len(kernels["experts"]) == 4
    assert all(0 < check["error"] < 0.005 for check in kernels["linears"])
    monkeypatch.setattr(reference, "linear_int4", lambda x, *_: x.new_zeros(len(x), 64))
    wrong = quantize("verify", output, "--kernels", "--layers", "2")
    assert wrong.exit_code == 1
    assert "kernel: model.layers.2.mlp.experts.0.gate_proj: with 1 token the output" in wrong.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "3"], "--layers is for --kernels"),
        (["--calibration", "text.txt"], "--calibration is for --kernels"),
        (["--kernels", "--samples", "3"], "--samples and --sequence-length are of the text"),
        (["--kernels", "--layers", "3,x"], "--layers 3,x: 'x' is no layer"),
        (["--kernels", "--layers", "4-3"], "--layers 4-3: '4-3' is no layer"),
        (["--kernels", "--layers", ""], "'' is no layer"),
    ],
)
def test_verify_with_options_that_do_not_fit(
    quantize: Quantize, tiny: Path, words: list[str], message: str
) -> None:
    outcome = quantize("verify", tiny, *words)
    assert outcome.exit_code == 2
    assert message in outcome.stderr


def test_eval_measures_text_and_saves_what_it_found(
    quantize: Quantize, tiny: Path, tmp_path: Path
) -> None:
    text, saved = tmp_path / "text.txt", tmp_path / "evaluation.json"
    text.write_text("the quick brown fox jumps over the lazy dog " * 20)
    words = ["eval", tiny, "--text", text, "--baseline", tiny, "--sequence-length", 16]
    outcome = quantize(*words, "--max-windows", 2, "--json", "-o", saved)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    measured = outcome.document["text"]
    assert measured["tokens"] == 2 * 15
    assert measured["divergence"]["mean_kl"] == pytest.approx(0, abs=1e-6)
    assert measured["divergence"]["top1_agreement"] == 1
    assert json.loads(saved.read_text()) == outcome.document
    assert quantize(*words, "-q", "-o", saved)[:2] == (0, f"{saved}\n")
    table = quantize(*words).stdout.splitlines()
    assert any(re.fullmatch(r"top-1 agreement % +100\.00", line) for line in table)


def test_eval_measures_once_what_a_store_has(
    quantize: Quantize, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, store = tmp_path / "text.txt", tmp_path / "baselines"
    text.write_text("the quick brown fox jumps over the lazy dog " * 20)
    words = ["eval", tiny, "--text", text, "--sequence-length", 16, "--store", store]
    first = quantize(*words, "--max-windows", 2, "--json")
    assert (first.exit_code, first.stderr) == (0, "")
    other = quantize(*words, "--max-windows", 1)
    assert re.search(
        r"not used, since another evaluation, \w+\.json: windows was 2, now 1", other.stderr
    )
    assert len(list(store.iterdir())) == 2

    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("halfbyte.evals.evaluation.evaluate_text", never)
    assert "just this was evaluated before" in quantize(*words, "--max-windows", 2).stderr
    assert quantize(*words, "--max-windows", 2, "--json").document == first.document
    text.write_text("another text " * 99)
    assert "measured again" in quantize(*words, "--max-windows", 2).stderr


def evaluation(
    path: Path, right: int, of: int = 1000, task: str = "arithmetic", checkpoint: str = "0" * 64
) -> Path:
    """Saves the scores of a made-up task with `right` answers right."""
    items = tuple(Item(task, i, f"{i:016x}", f"{i:016x}", f"{i:016x}") for i in range(of))
    values = tuple(float(i < right) for i in range(of))
    metrics = (MetricScores("acc", "none", True, values),)
    answers = tuple(Answer(f"{i:015x}{int(i < right)}") for i in range(of))
    scores = TaskScores(task, "1", items, metrics, "0" * 64, answers, (), "0" * 64)
    settings = TaskSettings(None, 8, 1024, "float32", {"lm_eval": "0.4.13"})
    EvalReport("folder", checkpoint, tasks=TaskResults(settings, (scores,))).write(path)
    return path


@pytest.mark.parametrize(
    ("right", "task", "margin", "exit_code", "verdict"),
    [
        (892, "arithmetic", "0.8", 0, "pass"),
        (891, "arithmetic", "0.8", 3, "fail"),
        (891, "arithmetic", "0.9", 0, "pass"),
        (900, "another", "0.8", 5, "invalid"),
    ],
)
def test_gate_exit_codes(
    quantize: Quantize,
    tmp_path: Path,
    right: int,
    task: str,
    margin: str,
    exit_code: int,
    verdict: str,
) -> None:
    baseline = evaluation(tmp_path / "baseline.json", 900)
    candidate = evaluation(tmp_path / "candidate.json", right, task=task)
    words = ("gate", baseline, candidate, "--policy", "article", "--margin", margin)
    human, document = quantize(*words), quantize(*words, "--json")
    assert (human.exit_code, document.exit_code) == (exit_code, exit_code)
    assert f"gate: {verdict}" in human.stdout
    assert document.document["verdict"] == verdict
    assert quantize(*words, "--quiet") == (exit_code, "", "")


def test_gate_finds_its_baseline_in_a_store(quantize: Quantize, tmp_path: Path) -> None:
    candidate = evaluation(tmp_path / "candidate.json", 895, checkpoint="1" * 64)
    store = BaselineStore(tmp_path / "store")
    words = ("gate", store.folder, candidate, "--policy", "article")
    store.folder.mkdir()
    missing = quantize(*words)
    assert missing.exit_code == 1
    assert "no evaluation fits the candidate" in missing.stderr
    store.add({"checkpoint": "0"}, EvalReport.read(evaluation(tmp_path / "fp8.json", 900)))
    found = quantize(*words, "--json")
    assert (found.exit_code, found.document["rows"][0]["baseline"]) == (0, 900)


def test_the_default_gate_says_what_would_decide(quantize: Quantize, tmp_path: Path) -> None:
    """1,000 items of which four changed: the mean is shown to drop by less than 0.8 points only
    with twice as many."""
    baseline = evaluation(tmp_path / "baseline.json", 900)
    candidate = evaluation(tmp_path / "candidate.json", 896)
    human = quantize("gate", baseline, candidate)
    assert human.exit_code == 4
    assert "gate: inconclusive (policy default: the mean may drop by 0.8 points" in human.stdout
    assert "times as many items would decide" in human.stdout
    unknown = quantize("gate", baseline, candidate, "--policy", "strict")
    assert unknown.exit_code == 2
    assert "choose default or article" in unknown.stderr


def test_the_gate_writes_what_others_read(quantize: Quantize, tmp_path: Path) -> None:
    baseline = evaluation(tmp_path / "baseline.json", 900)
    candidate = evaluation(tmp_path / "candidate.json", 897)
    verdict, junit, summary, flips = (
        tmp_path / name for name in ("gate.json", "gate.xml", "summary.md", "flips.jsonl")
    )
    summary.write_text("before\n")
    words = ("gate", baseline, candidate, "-o", verdict, "--junit", junit)
    words = (*words, "--summary", summary, "--flips", flips)
    found = quantize(*words, "--json")
    assert json.loads(verdict.read_text()) == found.document
    assert ElementTree.parse(junit).getroot()[0].attrib["tests"] == "2"
    assert summary.read_text().startswith("before\n### Accuracy gate: pass\n")
    lines = [json.loads(line) for line in flips.read_text().splitlines()]
    assert [(line["baseline"], line["candidate"]) for line in lines] == [(1, 0)] * 3
    absent = tmp_path / "absent" / "flips.jsonl"
    missing = quantize(*words[:-1], absent)
    assert missing.exit_code == 1
    assert f"No such file or directory: {absent}" in missing.stderr


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decode products run on the CPU, once each, and take as many microseconds as were run before;
    how many follow each other is kept."""
    import torch

    counts: list[int] = []

    def timer(run: Callable[[int], object], count: int) -> float:
        run(0)
        counts.append(count)
        return float(len(counts))

    def bench(device: torch.device, group_size: int | None) -> object:
        return make(device, group_size, timer, cache_bytes=1 << 16, read_bytes=1 << 16)

    from halfbyte.kernels import decode_bench

    make = decode_bench.Bench
    monkeypatch.setattr(decode_bench, "Bench", bench)
    monkeypatch.setattr(decode_bench, "decode_device", lambda option: torch.device("cpu"))
    return counts


def test_bench_decode_times_a_layer(quantize: Quantize, tiny: Path, without_gpu: list[int]) -> None:
    words = ("bench-decode", tiny, "--batch", 1, "--batch", 3, "--tensor-parallel", 1)
    document = quantize(*words, "--json").document
    assert [(layer["tensor_parallel"], layer["batch"]) for layer in document["layers"]] == [
        (1, 1),
        (1, 3),
    ]
    assert (document["group_size"], document["device"]) == (32, "CPU")
    assert "attention itself" in document["left_out"]
    parts = [part for layer in document["layers"] for part in layer["parts"]]
    assert len(without_gpu) == 1 + sum(len(part["timings"]) for part in parts)
    for layer in document["layers"]:
        *rest, experts = (
            {(t["format"], t["kernel"], t["overlapped"]): t["us"] for t in part["timings"]}
            for part in layer["parts"]
        )
        bf16 = sum(part["bf16", "torch", False] for part in rest)
        fp8 = sum(part.get(("fp8", "torch", False), part["bf16", "torch", False]) for part in rest)
        fastest = min(us for (form, *_), us in experts.items() if form == "fp8")
        int4 = experts["int4", "halfbyte", False]
        assert ("int4", "halfbyte", True) in experts  # launched early; in no sum
        assert layer["us"] == {"fp8": fp8 + fastest, "int4": bf16 + int4, "int4-fp8": fp8 + int4}
        gain = 100 * (layer["us"]["fp8"] / layer["us"]["int4"] - 1)
        assert layer["gain_percent"]["int4"] == pytest.approx(gain)
    human = quantize(*words, "-v").stdout
    assert re.search(r"^ *1 +1 +2\.0 +FP8 +\d+\.0 +-\d+ % ", human, re.M)
    assert re.search(r"INT4, rest FP8 +\d+\.0 +[+-]\d+ % +-\d+ % +\w+", human)
    assert re.search(r"routed experts +INT4 +halfbyte, launched early +\d+\.0", human)
    assert "routed experts in FP8 by halfbyte: TP 1, batch 1, 3\n" in human
    assert "not in it: attention itself, the indexer, norms" in human
    assert "launched early" not in quantize(*words).stdout
    assert quantize(*words, "-q") == (0, "", "")
    by_row = quantize(*words, "--group-size", "channel", "--json").document
    assert by_row["group_size"] == "channel"


def test_bench_decode_explains_what_it_cannot_time(
    quantize: Quantize, tiny_copy: Path, without_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    default = quantize("bench-decode", tiny_copy)
    assert (default.exit_code, default.stdout) == (2, "")
    assert "--tensor-parallel 8 does not divide num_attention_heads, which is 4" in default.stderr
    config = json.loads((tiny_copy / "config.json").read_text())
    del config["num_experts_per_tok"]
    (tiny_copy / "config.json").write_text(json.dumps(config))
    missing = quantize("bench-decode", tiny_copy, "--tensor-parallel", 1)
    assert (missing.exit_code, missing.stdout, len(without_gpu)) == (1, "", 0)
    assert "num_experts_per_tok is missing" in missing.stderr
    monkeypatch.undo()
    absent = quantize("bench-decode", tiny_copy, "--device", "cpu")
    assert (absent.exit_code, absent.stdout) == (1, "")
    assert "decode time is measured on a GPU" in absent.stderr


def test_demo_ends_with_one_table_and_the_verdict(
    quantize: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_demo(output: Path, progress: object) -> SimpleNamespace:
        print("chatter")
        fp8 = EvalReport.read(evaluation(tmp_path / "fp8.json", 900))
        saved = evaluation(tmp_path / "gptq.json", 880, checkpoint="1" * 64)
        gptq = EvalReport.read(saved)
        return SimpleNamespace(
            output=str(output),
            variants=(
                SimpleNamespace(name="FP8", nbytes=12_000_000, evaluation=fp8),
                SimpleNamespace(name="GPTQ", nbytes=7_000_000, evaluation=gptq),
            ),
            verdict=judge(fp8, gptq, load_policy("article")),
        )

    monkeypatch.setitem(sys.modules, "halfbyte.evals.demo", SimpleNamespace(run_demo=run_demo))
    shown = SimpleNamespace(show_demo=lambda report: Path(report.output, "page.html"))
    monkeypatch.setitem(sys.modules, "halfbyte.report.demo", shown)
    outcome = quantize("demo", "-o", tmp_path / "demo")
    assert outcome.exit_code == 3
    assert outcome.stdout.splitlines() == [
        "measure                FP8     GPTQ",
        "───────────────────────────────────",
        "size               12.0 MB   7.0 MB",
        "arithmetic acc %     90.00    88.00",
        "",
        "gate: fail (policy article: a task may drop by 0.8 points)",
        "- arithmetic acc,none drops by 2.000 points (900 to 880 of 1000), more than 0.8",
        f"all of it on a page: {tmp_path / 'demo' / 'page.html'}",
    ]
    assert quantize("demo", "-q", "-o", tmp_path)[:2] == (3, f"{tmp_path}\n")
    document = quantize("demo", "--json", "-o", tmp_path).document
    assert (document["gate"]["verdict"], document["variants"][1]["bytes"]) == ("fail", 7_000_000)


def test_models_lists_names(quantize: Quantize) -> None:
    assert "zai-org/GLM-5.2-FP8" in quantize("models").stdout
    models = quantize("models", "--json").document["models"]
    assert "glm-5.2" in [model["alias"] for model in models]


def test_env_lists_versions(quantize: Quantize) -> None:
    document = quantize("env", "--json").document
    assert document["halfbyte"] == halfbyte.__version__
    assert document["packages"]["transformers"].startswith("5.")
    assert "torch" in quantize("env").stdout


# Failures.


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Iterator[None]:
    """Inside, opening a checkpoint fails with `error`."""

    def fail(path: Path) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("halfbyte.formats.checkpoint.open_checkpoint", fail)
        yield


@pytest.mark.parametrize("mode", [[], ["--json"], ["-q"]])
def test_failures_print_nothing_on_stdout(
    quantize: Quantize, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: list[str]
) -> None:
    with failing(monkeypatch, CheckpointError("a is short", hint="copy it")):
        outcome = quantize("inspect", tmp_path, *mode)
    assert outcome == (1, "", "error: a is short\nhint: copy it\n")


def test_a_bug_says_how_to_see_its_traceback(
    quantize: Quantize, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HALFBYTE_DEBUG", raising=False)
    with failing(monkeypatch, KeyError("gone")):
        outcome = quantize("inspect", tmp_path)
        assert (outcome.exit_code, outcome.stdout) == (1, "")
        assert "error: unexpected KeyError: 'gone'" in outcome.stderr
        assert "HALFBYTE_DEBUG=1" in outcome.stderr
        assert "Traceback" not in outcome.stderr
        monkeypatch.setenv("HALFBYTE_DEBUG", "1")
        assert "Traceback" in quantize("inspect", tmp_path).stderr


def test_a_bad_environment_variable_is_an_error(
    quantize: Quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFBYTE_DEBUG", "maybe")
    outcome = quantize("models")
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "HALFBYTE_DEBUG is 'maybe'" in outcome.stderr


def test_ctrl_c_exits_130(
    quantize: Quantize, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with failing(monkeypatch, KeyboardInterrupt()):
        outcome = quantize("inspect", tmp_path)
    assert (outcome.exit_code, outcome.stdout) == (130, "")


def test_an_interrupted_run_says_how_to_go_on(
    quantize: Quantize, monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    from halfbyte.quantize import pipeline

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "run", interrupted)
    words = [tiny, "--method", "rtn", "-o", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["quantize", *map(str, words)])
    outcome = quantize(*words, "--json")
    assert (outcome.exit_code, outcome.stdout) == (130, "")
    assert f"hint: go on with: quantize {tiny} --method rtn -o {tmp_path}/out --resume" in (
        outcome.stderr
    )


def test_unknown_sources_are_explained(quantize: Quantize, tmp_path: Path) -> None:
    outcome = quantize("plan", "glm-5.2")
    assert outcome.exit_code == 1
    assert "zai-org/GLM-5.2-FP8 is on the Hugging Face Hub, and HF_HUB_OFFLINE" in outcome.stderr
    assert quantize("plan", tmp_path / "absent").exit_code == 1


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("models/GLM-5.2-FP8", "GLM-5.2-INT4"),
        ("glm-nano-fp8/", "glm-nano-INT4"),
        ("Kimi-K2", "Kimi-K2-INT4"),
    ],
)
def test_default_output(source: str, output: str) -> None:
    assert cli.convert.default_output(Path(source)) == Path(output)
