"""The comparison with other quantizers: whole on a tiny model, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks import bench_accuracy
from benchmarks.bench_accuracy import (
    OURS,
    ROWS,
    Job,
    Row,
    expected_seconds,
    main,
    read_results,
    table,
)
from benchmarks.checks import (
    BenchmarkError,
    Codes,
    check_calibration,
    check_codes,
    expected_linears,
)
from benchmarks.cost import Cost
from halfbyte.testing.tiny import write_tiny

TEXT = [f"The {n}th of {n * 7} records says {n * n} and no more." for n in range(80)]
COST = Cost(1.0, 2**30, None, "tokens", None, {})


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which rounding and llm-compressor's GPTQ were compared on a tiny model."""
    folder = tmp_path_factory.mktemp("bench")
    write_tiny(folder / "fp8", layers=2)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXT))
    assert run(folder, "rtn,llmc-gptq-routed") == 0
    return folder


def run(folder: Path, rows: str, *more: str) -> int:
    text = str(folder / "text.jsonl")
    argv = [str(folder / "fp8"), "--calibration", text, "--text", text, "--rows", rows]
    argv += ["--group-sizes", "32", "--samples", "8", "--sequence-length", "32"]
    argv += ["--max-windows", "4", "--work", str(folder / "work"), "--keep"]
    return main([*argv, "--results", str(folder / "results.jsonl"), *more])


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_rows_hold_the_same_linears(bench: Path) -> None:
    rounded, peer = results(bench)
    linears = len(expected_linears(bench / "fp8"))
    assert linears == 12  # one MoE layer of 4 experts; the MTP layer does not count
    assert (rounded["row"], peer["row"]) == ("rtn-g32", "llmc-gptq-routed-g32")
    assert rounded["codes"] == {"linears": linears, "moved": 0.0, "rounded": linears}
    assert peer["codes"]["linears"] == linears
    assert peer["codes"]["rounded"] == 0
    assert peer["cost"]["solved"] == linears
    assert peer["cost"]["fallbacks"] == {}
    assert peer["cost"]["tokens_sha256"] == peer["setup"]["tokens_sha256"]
    for record in (rounded, peer):
        assert record["text"]["divergence"]["mean_kl"] > 0
        assert record["text"]["windows"] == 4


def test_finished_rows_are_not_made_again(
    bench: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_accuracy, "run_job", None)
    before = results(bench)
    assert run(bench, "rtn,llmc-gptq-routed") == 0
    assert results(bench) == before
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["rtn-g32", "llmc-gptq-routed-g32"]
    assert len({line.count("|") for line in lines}) == 1
    # Another text is another table, and other flags are another row.
    path, setup = bench / "results.jsonl", before[0]["setup"]
    assert read_results(path, setup | {"text": "other"}) == {}
    monkeypatch.setattr(bench_accuracy, "ROWS", {**ROWS, "rtn": Row(OURS, "--method gptq")})
    assert list(read_results(path, setup)) == ["llmc-gptq-routed-g32"]


def test_a_row_that_will_not_fit_is_not_started(
    bench: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_accuracy, "run_job", None)
    assert run(bench, "gptq", "--time-limit", "0.1") == 0
    assert "no time for gptq-g32" in capsys.readouterr().err


def test_expected_seconds_are_those_of_the_row_or_its_kind() -> None:
    done = {
        key: {"row_seconds": seconds}
        for key, seconds in {"fp8": 5, "rtn-g32": 10, "gptq-g32": 20, "llmc-gptq-g32": 90}.items()
    }
    assert expected_seconds(Job("rtn", 128), done) == 10
    assert expected_seconds(Job("autoround", 32), done) == 90
    assert expected_seconds(Job("fp8", None), {}) == 0


def test_a_checkpoint_that_lacks_an_expert_is_refused(bench: Path, tmp_path: Path) -> None:
    [peer] = (bench / "work").glob("llmc-gptq-routed-g32-*/checkpoint")
    tensors = load_file(peer / "model.safetensors")
    expert = "model.layers.1.mlp.experts.2."
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(expert)}
    assert len(tensors) - len(kept) == 9
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((peer / "config.json").read_bytes())
    expected = expected_linears(bench / "fp8")
    with pytest.raises(BenchmarkError, match=r"9 INT4 linears, 12 expected; .*experts\.2\."):
        check_codes(tmp_path, bench / "fp8", expected, 32)
    with pytest.raises(BenchmarkError, match="expected groups of 64"):
        check_codes(peer, bench / "fp8", expected, 64)


def test_what_did_not_calibrate_is_refused() -> None:
    codes = Codes(linears=12, moved=0.3, rounded=0)
    check_calibration(replace(COST, solved=12), codes, "tokens")
    with pytest.raises(BenchmarkError, match="calibrated on tokens"):
        check_calibration(COST, codes, "others")
    with pytest.raises(BenchmarkError, match="11 of 12 linears report a loss"):
        check_calibration(replace(COST, solved=11), codes, "tokens")
    with pytest.raises(BenchmarkError, match="7 of 12 linears are plainly rounded"):
        check_calibration(COST, replace(codes, rounded=7), "tokens")


def test_the_table_orders_rows_and_leaves_what_is_missing_empty() -> None:
    text = {"perplexity": 8.0, "divergence": None}
    divergence = {"mean_kl": 0.01, "p99_kl": 0.1, "top1_agreement": 0.95}
    made = {
        "text": text | {"divergence": divergence},
        "tasks": {},
        "cost": {
            "seconds": 90,
            "peak_host_bytes": 2**30,
            "peak_gpu_bytes": None,
            "fallbacks": {"rtn": 2},
        },
        "codes": {"moved": 0.25, "rounded": 3, "linears": 12},
    }
    names = [f"{name}-g{size}" for size in (128, 32) for name in ROWS]
    done = {name: made | {"row": name} for name in names}
    done["fp8"] = {"row": "fp8", "text": text, "tasks": {"arc acc": 0.5}}
    header, _, *rows = table(done)
    assert "arc acc" in header
    assert rows[0] == "| fp8 |  |  |  | 8.0000 | 50.00 |  |  |  |  |  |  |"
    ordered = [f"{name}-g{size}" for size in (32, 128) for name in ROWS]
    assert [row.split()[1] for row in rows[1:]] == ordered
    cells = "0.01000 | 0.1000 | 95.00 | 8.0000 |  | 1.50 | 1.00 |  | 25.0 | 3 of 12 | rtn 2 |"
    assert rows[1] == f"| rtn-g32 | {cells}"
