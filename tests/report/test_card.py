"""The model card: exact figures, a front matter that parses, and names that stay names."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from halfbyte.cli import app, insert_run, main
from halfbyte.core import Origin
from halfbyte.errors import CheckpointError, EvaluationError, OutputError
from halfbyte.evals.gate import GateRow, GateVerdict
from halfbyte.evals.policy import load_policy
from halfbyte.evals.statistics import Interval
from halfbyte.formats.folder import REPORT_FILE
from halfbyte.report.card import block, code, escape, model_card, write_card
from halfbyte.report.output import read_output
from halfbyte.testing.glm52 import glm52_config

from .conftest import ORIGIN, VERDICT, MakeOutput


def parsed(card: str) -> tuple[dict[str, Any], str]:
    """Front matter and body of a card."""
    empty, matter, body = card.split("---\n", 2)
    assert empty == ""
    return yaml.safe_load(matter), body


def test_front_matter_is_of_the_source_and_of_the_run(make_output: MakeOutput) -> None:
    matter, _ = parsed(model_card(read_output(make_output())))
    assert matter == {
        "license": "mit",
        "language": ["en", "zh"],
        "base_model": "zai-org/GLM-5.2-FP8",
        "base_model_revision": "0123456789abcdef0123456789abcdef01234567",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["compressed-tensors", "int4", "gptq", "halfbyte"],
    }


def test_the_hub_reads_the_front_matter(make_output: MakeOutput) -> None:
    data = ModelCard(model_card(read_output(make_output()))).data
    assert (data.license, data.base_model) == ("mit", "zai-org/GLM-5.2-FP8")
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.tags == ["compressed-tensors", "int4", "gptq", "halfbyte"]


def test_figures_of_the_card(make_output: MakeOutput) -> None:
    _, body = parsed(model_card(read_output(make_output())))
    lines = body.splitlines()
    assert "Licence: mit, that of the source." in lines
    assert "| all weights | 750.0 GB | 500.0 GB | 66.7 % |" in lines
    # 6 GB whole and an eighth of 744 GB; 12 GB and an eighth of 488 GB.
    assert round((6e9 + 744e9 / 8) / 2**30, 1) == 92.2
    assert "| on each of 8 GPUs | 92.2 GiB | 68.0 GiB | 73.7 % |" in lines
    assert "| INT4 g32 | 36 | 700.0 GB | 400.0 GB | big |" in lines
    assert "| BF16 | 5 | 50.0 GB | 100.0 GB | read by all tokens |" in lines
    # Medians over layers of 0.001, 0.002 and 0.003; the one that fell back is the worst.
    worst = "<code>model.layers.0.mlp.experts.0.down_proj</code>"
    assert f"| experts down_proj | 12 | 2.00e-03 | 4.00e-03 | 1.23e-02 | {worst} |" in lines
    assert "given up in 2.8 % of linears: 1 to rtn&#58; better on held-out tokens." in body
    assert "- 27 linears on their own tokens, topped up with others of the layer" in lines
    assert "- 9 linears on all tokens of the layer, for want of their own" in lines
    assert "tokens of its own had 0, the median 100, the one with the most 300; 3 had none" in body
    assert "Accuracy against the source has not been judged yet" in body
    assert "quantize card GLM-5.2-INT4 --gate gate.json" in lines


def test_commands_of_the_card(make_output: MakeOutput) -> None:
    _, body = parsed(model_card(read_output(make_output())))
    lines = body.splitlines()
    assert "vllm serve GLM-5.2-INT4 --tensor-parallel-size 8" in lines
    assert "python -m sglang.launch_server --model-path GLM-5.2-INT4 --tp-size 8" in lines
    assert "hf download zai-org/GLM-5.2-FP8 --revision " + str(ORIGIN.revision) in body
    assert (
        "quantize GLM-5.2-FP8 --to int4 --method gptq --recipe glm-5 --calibration text.jsonl"
        " --samples 256 --sequence-length 2048 --device cuda --dtype bfloat16 -o GLM-5.2-INT4"
    ) in lines


def test_commands_of_the_card_can_be_typed(make_output: MakeOutput) -> None:
    card = model_card(read_output(make_output()))
    lines = re.findall(r"^quantize .*$", card, re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        command, *words = insert_run(shlex.split(line)[1:])
        options = CliRunner().invoke(app, [command, "--help"], prog_name="quantize").stdout
        for word in words:
            if word.startswith("-"):
                assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", options), line


def test_a_verdict_becomes_a_table(make_output: MakeOutput) -> None:
    _, body = parsed(model_card(read_output(make_output(gate=VERDICT))))
    assert "Verdict: **inconclusive**, by the policy default: paired." in body
    assert "The mean may drop by 0.8 points, a task by 2." in body
    assert "Mean change in points: -0.40 (-1.20 to +0.40)." in body
    assert "- recall may drop by up to 2.31 points, 2 are allowed" in body.splitlines()
    assert "- the text was not measured" in body.splitlines()
    assert "points (90 % interval)" in body
    assert (
        "| glm_recall | exact_match,none | 500 | 94.00 | 93.00 | -1.00 (-2.31 to +0.25) "
        "| 9 : 4 | inconclusive |"
    ) in body.splitlines()
    assert "not been judged" not in body


def test_pools_of_the_card(make_output: MakeOutput) -> None:
    """GLM-5.2 as published and as planned; tests/kvcache has the figures from the other side."""
    folder = make_output(
        bytes_in=755_617_140_416,
        whole_in=1_877_050_560,
        bytes_out=450_904_205_312,
        whole_out=3_352_160_256,
    )
    # The config of these tests says nothing of layers.
    _, body = parsed(model_card(read_output(folder)))
    assert "Room for KV cache is not estimated: config.json has no num_hidden_layers." in body
    (folder / "config.json").write_text(json.dumps(glm52_config()))
    _, body = parsed(model_card(read_output(folder)))
    flags = "--tp-size 8 --kv-cache-dtype fp8_e4m3 --disaggregation-mode"
    assert (
        f"| prefill | GLM-5.2-FP8 | 89.5 GiB | 513,088 | <code>{flags} prefill</code> |"
    ) in body.splitlines()
    assert (
        f"| decode | GLM-5.2-INT4 | 55.2 GiB | 1,185,472 | <code>{flags} decode</code> |"
    ) in body.splitlines()
    assert "an FP8 cache of 54,728 bytes a token" in body
    assert "each on 8 x H200: prefill is bound by arithmetic and takes the source," in body
    assert "takes INT4, with room for 2.31 times the tokens." in body


TABLE = ("table", "thead", "tbody", "tr", "th", "td")


def test_a_verdict_as_the_gate_gives_it(make_output: MakeOutput, tmp_path: Path) -> None:
    row = GateRow(
        task="sums",
        metric="acc,none",
        decides=True,
        count=1000,
        baseline=Fraction(900),
        candidate=Fraction(880),
        lost=20,
        won=0,
        higher_is_better=True,
        change=Interval(-2.0, -2.75, -1.5),
        p_value=1e-6,
        verdict="fail",
        reason="sums drops",
    )
    path = tmp_path / "verdict.json"
    for policy, allowed in (
        ("default", "The mean may drop by 0.8 points, a task by 2."),
        ("article", "A task may drop by 0.8 points."),
    ):
        verdict = GateVerdict("fail", ("sums drops",), load_policy(policy), (row,))
        path.write_text(json.dumps(verdict.to_json()))
        card = model_card(read_output(make_output(policy), path))
        assert f"Verdict: **fail**, by the policy {policy}" in card
        assert allowed in card
        assert "| 1,000 | 90.00 | 88.00 | -2.00 (-2.75 to -1.50) | 20 : 0 | fail |" in card


HOSTILE = (
    "<script>alert(1)</script>",
    "a`b``c```d",
    "x | y | z",
    "line\nbreak\r\n---\nlicense: evil",
    "[click](javascript:alert(1))",
    "**bold** __also__ # head ~~gone~~ ![](x)",
    "a\u202eb\u2028c\x00d",
    "https://evil.example @everyone",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text(make_output: MakeOutput, name: str) -> None:
    """In every place that a source, a policy or a task can name."""
    folder = make_output()
    record = json.loads((folder / REPORT_FILE).read_text())
    record["origin"]["name"] = record["recipe"]["name"] = name
    record["warnings"] = [name]
    record["versions"][name] = name
    for line in (*record["linears"], *record["rules"]):
        line["scheme"] = name
    for rule in record["rules"]:
        rule["reason"] = name
    (folder / REPORT_FILE).write_text(json.dumps(record))
    verdict = json.loads(json.dumps(VERDICT))
    verdict["reasons"] = [name]
    verdict["policy"]["name"] = verdict["verdict"] = verdict["rows"][0]["task"] = name
    (folder / "gate.json").write_text(json.dumps(verdict))
    card = model_card(read_output(folder))
    matter, body = parsed(card)
    assert matter["license"] == "mit"
    prose = re.sub(r"(?ms)^(`{3,})shell\n.*?^\1$", "", body)
    assert "script>" not in prose
    assert "](javascript" not in prose
    assert "https://evil" not in prose
    assert not re.search(r"[\u202e\u2028\x00]", prose)
    assert "evil" not in matter.values()
    record["origin"]["license"] = record["settings"]["method"] = name
    (folder / REPORT_FILE).write_text(json.dumps(record))
    assert ModelCard(model_card(read_output(folder))).data.license == name
    rows = [line for line in prose.splitlines() if line.startswith("| ")]
    assert {line.count(" | ") for line in rows} <= {1, 3, 4, 5, 7}
    # Every fence that opens is closed: what follows the last is the table of versions.
    assert prose.count("```") == 0
    assert "| package | version |" in prose
    # And as a page that allows all HTML would show it: nothing but what cards are made of.
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(body)
    tags = set(re.findall(r"<(\w+)", rendered))
    assert tags <= {"h1", "h2", "p", "a", "code", "pre", "ul", "li", "strong", *TABLE}
    assert re.findall(r'href="([^"]*)"', rendered) == [
        "https://huggingface.co/zai-org/GLM-5.2-FP8",
    ]


def test_escaped_text_reads_as_it_was() -> None:
    assert escape("down_proj of GLM-5.2 (g32)") == "down_proj of GLM-5.2 (g32)"
    assert escape("_x_ <b>") == "&#95;x&#95; &#60;b&#62;"
    assert code("`|`") == "<code>&#96;&#124;&#96;</code>"
    assert block("echo ```") == "````shell\necho ```\n````\n"


def test_a_source_that_tells_nothing(make_output: MakeOutput) -> None:
    output = read_output(make_output())
    unknown = replace(output.report, origin=Origin("some model"))
    matter, body = parsed(model_card(replace(output, report=unknown)))
    assert not {"license", "base_model", "base_model_relation", "pipeline_tag"} & set(matter)
    assert "quantize 'some model' --to int4" in body
    assert "hf download" not in body
    assert "The folder of the source names no licence" in body


def test_a_card_of_somebody_else_is_not_replaced(make_output: MakeOutput) -> None:
    folder = make_output()
    card = folder / "README.md"
    card.write_text("# My own words\n")
    with pytest.raises(OutputError, match="not a card that halfbyte wrote") as refused:
        write_card(folder, read_output(folder))
    assert refused.value.hint == f"mv {card} {card}.old"
    write_card(folder, read_output(folder), replace=False)
    assert card.read_text() == "# My own words\n"
    card.unlink()
    assert main(["card", str(folder), "-q"]) == 0
    before = card.read_text()
    (folder / "gate.json").write_text(json.dumps(VERDICT))
    write_card(folder, read_output(folder), replace=False)
    assert card.read_text() == before
    write_card(folder, read_output(folder))
    assert "inconclusive" in card.read_text()


def test_what_is_no_output_is_refused(make_output: MakeOutput, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*halfbyte_report\.json"):
        read_output(tmp_path)
    folder = make_output()
    record = json.loads((folder / REPORT_FILE).read_text())
    record["linears"][0]["error"] = "<b>"
    (folder / REPORT_FILE).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="'<b>' is not a finite number"):
        read_output(folder)
    record["linears"][0]["error"] = 0.5
    for repo in ("a/b) <script>", "a/b\nc", "javascript:x", "../../x/y"):
        record["origin"]["repo"] = repo
        (folder / REPORT_FILE).write_text(json.dumps(record))
        with pytest.raises(CheckpointError, match="is not a repository"):
            read_output(folder)
    record["origin"]["repo"] = None
    record["linears"][0]["error"] = 10**400
    (folder / REPORT_FILE).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="is not a finite number"):
        read_output(folder)


def test_what_is_no_verdict_is_refused(make_output: MakeOutput, tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    for text, reason in (
        ("{", "not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"schema_version": 99}', "schema_version is 99, this version reads 1"),
        (json.dumps({**VERDICT, "rows": [{}]}), "'task'"),
    ):
        path.write_text(text)
        with pytest.raises(EvaluationError, match=reason):
            read_output(make_output(f"out{len(text)}"), path)
