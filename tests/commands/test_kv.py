"""`quantize kv`: what it reads, prints and refuses; figures are checked in tests/calibration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte import cli
from halfbyte.testing.tiny import write_tiny

Kv = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Kv:
    """Runs `quantize kv` in this process on a short text."""
    text = tmp_path / "text.jsonl"
    lines = [f"The {n}th of {n * 7} records says {n * n} and no more." for n in range(60)]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))

    def run(source: Path, *words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        asked = ["--calibration", text, "--samples", 8, "--sequence-length", 32, *words]
        code = cli.main(["kv", str(source), *map(str, asked)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_sequences_of_two_lengths(kv: Kv, tiny: Path) -> None:
    code, out, _ = kv(tiny, "--json", "--long-samples", 40)
    document = json.loads(out)
    assert (code, document["schema_version"]) == (0, 1)
    short, long = document["windows"]
    assert short == [8, 32]
    assert long[0] == 40
    assert 60 < long[1] < 120  # a fortieth of the text
    assert document["tokens"] == 8 * 32 + 40 * long[1]
    assert json.loads(kv(tiny, "--json", "--long-length", 50)[1])["windows"][1] == [4, 50]
    for words in (("--long-samples", 0), ("--long-length", 32)):
        assert json.loads(kv(tiny, "--json", *words)[1])["windows"] == [[8, 32]]


def test_rows_that_scale_themselves_and_rows_that_do_not(kv: Kv, tiny: Path) -> None:
    _, out, _ = kv(tiny, "--long-samples", 0)
    assert "(FlashMLA's): safe; tiles of the latent have scales of their own" in out
    assert "raw FP8 rows (TRT-LLM's, TileLang's): safe at scale 1.0" in out
    rows = [line.split()[:2] for line in out.splitlines() if line.split()[1:2] == ["latent"]]
    assert [int(layer) for layer, _ in rows] == [0, 1, 2, 3, 4]  # the last is the MTP layer


def test_keys_and_values_get_scales(kv: Kv, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "glm", model_type="glm4_moe", source="ct-channel")
    code, out, _ = kv(source, "--long-samples", 0)
    assert code == 0
    assert "key, 2 heads" in out
    assert "safe with the scales of the last column" in out
    code, out, _ = kv(source, "--long-samples", 0, "-o", tmp_path / "scaled")
    assert out.splitlines()[-1] == f"{tmp_path / 'scaled'} written, 10 tensors added"


def test_a_safe_model_is_not_folded(kv: Kv, tiny: Path, tmp_path: Path) -> None:
    code, out, _ = kv(tiny, "--fold", "-o", tmp_path / "folded", "--long-samples", 0)
    assert code == 0
    assert out.splitlines()[-1] == "nothing to fold: nothing is written"
    assert not (tmp_path / "folded").exists()


@pytest.mark.parametrize(
    ("source", "words", "code", "says", "hint"),
    [
        ("glm_moe_dsa", ["--fold"], 2, "--fold writes a checkpoint", "add -o DIR"),
        ("glm_moe_dsa", ["-o", "out"], 2, "latent rows take no scales", "add --fold"),
        ("glm4_moe", ["--fold", "-o", "out"], 2, "caches keys and values", "leave it out"),
        ("glm4_moe", ["-o", "out"], 1, "quant_method 'fp8'", "quantize SOURCE --to int4"),
        ("glm_moe_dsa", ["--fold", "-o", "."], 1, "lie in each other", "-o DIR"),
        ("glm_moe_dsa", ["--fold", "-o", "taken"], 1, "is there already: it holds notes", "-o DIR"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_read(
    kv: Kv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    source: str, words: list[str], code: int, says: str, hint: str,
) -> None:  # fmt: skip
    folder = write_tiny(tmp_path / source, model_type=source)  # type: ignore[arg-type]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("halfbyte.calibration.kv.measure_ranges", None)
    found, out, err = kv(folder, *words)
    assert (found, out) == (code, "")
    assert says in err
    assert hint in err


def test_evaluations_with_a_cache_and_their_verdict(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One and two make three, and three and four make seven. " * 20)
    words = ["eval", str(tiny), "--text", str(text), "--sequence-length", "64"]
    words += ["--baseline", str(tiny)]
    reports = {}
    for kv_cache in ("bf16", "fp8"):
        path = tmp_path / f"{kv_cache}.json"
        assert cli.main([*words, "--kv-cache", kv_cache, "-o", str(path)]) == 0
        reports[kv_cache] = json.loads(path.read_text())
    assert {kind: found["kv_cache"] for kind, found in reports.items()} == {
        "bf16": "bf16",
        "fp8": "fp8",
    }
    kl = {kind: found["text"]["divergence"]["mean_kl"] for kind, found in reports.items()}
    assert 0 < kl["bf16"] < kl["fp8"] / 10
    files = [str(tmp_path / f"{kind}.json") for kind in ("bf16", "fp8")]
    capsys.readouterr()
    assert cli.main(["gate", *files, "--json"]) == 4  # text alone passes nothing
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["kv_cache"] == {"baseline": "bf16", "candidate": "fp8"}
    assert cli.main(["gate", *reversed(files)]) == 5
    assert "the KV cache is fp8 in the baseline, bf16 in the candidate" in capsys.readouterr().out
    served = ["eval", str(tiny), "--tasks", str(tmp_path), "--endpoint", "http://127.0.0.1:1"]
    assert cli.main([*served, "--kv-cache", "fp8"]) == 2
    assert "a server has the cache it was started with" in capsys.readouterr().err
