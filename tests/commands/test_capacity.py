"""`quantize capacity`: sources, formats, what it prints and how it exits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from halfbyte import cli
from halfbyte.kvcache.planner import FRACTION
from halfbyte.testing.glm52 import glm52_config
from halfbyte.testing.hub import LoopbackHub


class Outcome(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)


Capacity = Callable[..., Outcome]


@pytest.fixture
def capacity(capsys: pytest.CaptureFixture[str]) -> Capacity:
    """Runs `quantize capacity` in this process."""

    def run(*words: object) -> Outcome:
        capsys.readouterr()
        code = cli.main(["capacity", *map(str, words)])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def glm52(tmp_path: Path) -> Path:
    """The config.json of GLM-5.2-FP8, in a folder of its own."""
    folder = tmp_path / "GLM-5.2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(glm52_config()))
    return folder / "config.json"


def figures(document: Any) -> dict[tuple[str, str], tuple[int, int]]:
    return {(c["weights"], c["kv"]): (c["tokens"], c["requests"]) for c in document["capacities"]}


def test_all_formats_in_one_table(capacity: Capacity, glm52: Path) -> None:
    human, document = capacity(glm52), capacity(glm52, "--json").document
    assert document["schema_version"] == 1
    assert figures(document) == {
        ("int4", "bf16"): (690_816, 21),
        ("int4", "fp8"): (1_185_472, 36),
        ("fp8", "bf16"): (299_008, 9),
        ("fp8", "fp8"): (513_088, 15),
        ("bf16", "bf16"): (0, 0),
        ("bf16", "fp8"): (0, 0),
    }
    assert (document["stored"], document["memory_fraction"]) == (None, FRACTION)
    assert document["capacities"][1]["bytes_per_token"] == 54_728
    assert human.exit_code == 0
    assert "1,185,472" in human.stdout
    assert "62.5 GiB short" in human.stdout
    for line in document["assumptions"]:
        assert f"- {line}\n" in human.stdout
    # A folder with nothing but the config is the config.
    assert figures(capacity(glm52.parent, "--json").document) == figures(document)


def test_options_reach_the_planner(capacity: Capacity, glm52: Path) -> None:
    def one(*words: object) -> Any:
        document = capacity(glm52, "--weights", "int4", "--kv", "fp8", "--json", *words).document
        (found,) = document["capacities"]
        return document, found

    base = one()[1]
    document, found = one("--gpu", "139.8GiB", "--gpus", 8, "--memory-fraction", 0.835)
    assert found == base
    assert document["gpu"]["name"] == "GPU with 139.8 GiB"
    assert one("--gpu", "b200")[1]["tokens"] > one("--gpus", 16)[1]["tokens"] > base["tokens"]
    assert one("--memory-fraction", 0.9)[1]["room"] - base["room"] == pytest.approx(
        0.065 * 138.5 * 2**30, abs=2
    )
    assert one("--no-mtp")[1]["bytes_per_token"] == 78 * 656 + 21 * 132
    assert one("--page-size", 1)[1]["tokens"] == base["room"] // 54_728
    assert one("--context", 1_048_576)[1]["requests"] == 1
    assert one("--dp-attention")[1]["tokens"] > 5 * base["tokens"]
    raw = capacity(glm52, "--weights", "int4", "--kv", "fp8-raw", "--json").document
    assert raw["capacities"][0]["bytes_per_token"] == 48_408


def test_a_checkpoint_by_its_headers_and_what_comes_of_it(
    capacity: Capacity, tiny: Path, tmp_path: Path
) -> None:
    """The tiny source, then its INT4 output: each predicts the other's weights."""
    source = capacity(tiny, "--gpus", 4, "--json").document
    assert cli.main([str(tiny), "--to", "int4", "--method", "rtn", "-o", f"{tmp_path / 'o'}"]) == 0
    output = capacity(tmp_path / "o", "--gpus", 4, "--json").document
    assert (source["stored"], output["stored"]) == ("fp8", "int4")
    assert figures(source) == figures(output)
    stored = sum(file.stat().st_size for file in (tmp_path / "o").glob("*.safetensors"))
    each = [c["weights_on_each"] for c in output["capacities"] if c["weights"] == "int4"]
    assert stored / 4 < each[0] < stored


def test_a_repository_is_read_by_its_headers(
    capacity: Capacity, tiny: Path, tmp_path: Path
) -> None:
    with LoopbackHub(tmp_path / "hub") as hub:
        hub.add("someone/Tiny-FP8", tiny)
        with hub.in_use(tmp_path / "home"):
            remote = capacity("someone/Tiny-FP8", "--json").document
        name = f"someone/Tiny-FP8@{hub.repos['someone/Tiny-FP8'].refs['main']}"
    local = capacity(tiny, "--json").document
    assert remote == local | {"source": name}
    # Eight GPUs, if not told, but four heads.
    assert local["gpus"] == 4


def test_plan_names_the_pools(
    capacity: Capacity, tiny: Path, tiny_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = {
        (c["weights"], c["kv"]): c
        for c in capacity(tiny, "--gpus", 2, "--json").document["capacities"]
    }
    assert cli.main(["plan", str(tiny), "--json"]) == 0
    serving = json.loads(capsys.readouterr().out)["serving"]
    assert serving["unknown"] is None
    for pool, (role, name, weights) in zip(
        serving["pools"],
        [("prefill", str(tiny), "fp8"), ("decode", "tiny-INT4", "int4")],
        strict=True,
    ):
        assert (pool["role"], pool["checkpoint"], pool["gpus"]) == (role, name, 2)
        for field in ("weights_on_each", "bytes_per_token", "tokens"):
            assert pool[field] == predicted[weights, "fp8"][field]
        assert pool["sglang_flags"][-1] == role
    assert cli.main(["plan", str(tiny)]) == 0
    lines = [line.split(":")[0].split() for line in capsys.readouterr().out.splitlines()]
    assert ["prefill", str(tiny)] in lines
    assert ["decode", "tiny-INT4"] in lines

    config = json.loads((tiny_copy / "config.json").read_text())
    (tiny_copy / "config.json").write_text(json.dumps(config | {"model_type": "other"}))
    assert cli.main(["plan", str(tiny_copy), "--method", "rtn"]) == 0
    shown = capsys.readouterr().out
    assert "not estimated: config.json has model_type 'other', whose KV cache is not known" in shown


def test_a_recipe_is_planned(capacity: Capacity, tiny: Path, glm52: Path, tmp_path: Path) -> None:
    def int4(*words: object) -> Any:
        document = capacity(tiny, "--weights", "int4", "--json", *words).document
        return document["capacities"][0]["weights_on_each"], document["assumptions"]

    (default, _), (rest, said) = int4(), int4("--recipe", "glm-5-fp8-rest")
    assert rest < default
    assert any(line.endswith("recipe glm-5-fp8-rest") for line in said)
    for words, message in [
        ([glm52], "this is a config.json alone"),
        ([tiny, "--weights", "fp8"], "--recipe is of INT4 weights"),
    ]:
        outcome = capacity(*words, "--recipe", "glm-5")
        assert (outcome.exit_code, outcome.stdout) == (2, "")
        assert message in outcome.stderr
    assert capacity(tiny, "--recipe", "absent").exit_code == 1
    assert cli.main([str(tiny), "--to", "int4", "--method", "rtn", "-o", f"{tmp_path / 'o'}"]) == 0
    assert "this is INT4 already" in capacity(tmp_path / "o", "--recipe", "glm-5").stderr


def test_the_fraction_of_the_help_is_the_planners(capacity: Capacity) -> None:
    assert f"[default: {FRACTION}]" in " ".join(capacity("-h").stdout.split())


def test_nothing_fits_exits_1_with_its_result(capacity: Capacity, glm52: Path) -> None:
    outcome = capacity(glm52, "--gpu", "h100", "--weights", "fp8", "--json")
    assert (outcome.exit_code, outcome.stderr) == (1, "")
    assert not any(c["fits"] for c in outcome.document["capacities"])


def test_a_dense_model_has_no_int4_row(capacity: Capacity, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    outcome = capacity(path, "--gpus", 1, "--json")
    assert {c["weights"] for c in outcome.document["capacities"]} == {"fp8", "bf16"}
    assert outcome.document["context"] == 4096
    assert "int4 weights are left out: there are no routed experts" in outcome.stderr
    alone = capacity(path, "--gpus", 1, "--weights", "int4")
    assert (alone.exit_code, alone.stdout) == (1, "")
    assert "no routed experts" in alone.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--gpu", "h20"], 2, "hint: --gpu h200"),
        (["--gpus", "0"], 2, "Invalid value for '--gpus'"),
        (["--gpus", "6"], 2, "6 GPUs cannot share 64 attention heads\nhint: --gpus 2"),
        (["--kv", "int8"], 2, "'int8' is not"),
        (["--weights", "int3"], 2, "'int3' is not"),
        (["--memory-fraction", "1.5"], 2, "Invalid value for '--memory-fraction'"),
        (["--context", "2000000"], 2, "2,000,000 is more than the 1,048,576 tokens"),
        (["--svg", "/"], 2, "--svg / is a folder"),
        (["--svg", "/absent/a.svg"], 1, "cannot write /absent/a.svg: No such file"),
    ],
)
def test_wrong_usage(
    capacity: Capacity, glm52: Path, words: list[str], code: int, message: str
) -> None:
    outcome = capacity(glm52, *words)
    assert (outcome.exit_code, outcome.stdout) == (code, "")
    assert message in outcome.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "config.json must hold a JSON object"),
        ("{", "config.json is not valid JSON"),
        ("{}", "config.json has model_type 'unknown', whose KV cache is not known"),
        ('{"model_type": "llama"}', "config.json has no num_hidden_layers"),
        ('{"model_type": "llama", "num_hidden_layers": 1e3}', "num_hidden_layers is 1000.0"),
        ('{"text_config": {"model_type": ["llama"]}}', "model_type \"['llama']\""),
    ],
)
def test_configs_that_are_none(capacity: Capacity, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for source in (tmp_path, tmp_path / "config.json"):
        outcome = capacity(source)
        assert (outcome.exit_code, outcome.stdout) == (1, "")
        assert message in outcome.stderr
        assert outcome.stderr.count("error:") == 1


def test_shards_that_are_missing_are_not_overlooked(
    capacity: Capacity, tiny_copy: Path, tmp_path: Path
) -> None:
    shards = sorted(tiny_copy.glob("*.safetensors"))
    shards[0].unlink()
    outcome = capacity(tiny_copy)
    assert outcome.exit_code == 1
    assert "1 of 3 shards are missing" in outcome.stderr
    shutil.copy(tiny_copy / "config.json", tmp_path / "alone.json")
    assert capacity(tmp_path / "alone.json", "--gpus", 4).exit_code == 0


def test_the_picture(capacity: Capacity, glm52: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokens.svg"
    outcome = capacity(glm52, "--svg", path)
    assert f"{path} written" in outcome.stderr
    text = path.read_text()
    assert "Tokens of KV cache: glm_moe_dsa on 8 x H200" in text
    assert "1.19M" in text
