"""The page of a run: what it says, also when it knows nothing, and what it lets nobody say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from halfbyte.cli import main
from halfbyte.core import ScaledInput, UnitTime
from halfbyte.evals.report import (
    Divergence,
    EvalReport,
    Histogram,
    TextMetrics,
    WorstToken,
    checkpoint_fingerprint,
)
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.folder import REPORT_FILE
from halfbyte.report.output import Planned, RunTimes, read_output, write_run
from halfbyte.report.page import page

from .conftest import VERDICT, MakeOutput, linear

DIVERGENCE = Divergence(
    baseline="b",
    mean_kl=0.00654,
    median_kl=0.002,
    p99_kl=0.0709,
    top1_agreement=0.962,
    histogram=Histogram((1e-4, 1e-3, 1e-2), (0, 700, 290, 10)),
    worst=(WorstToken(3, 7, 3.5, "so\nit ", "is", 0.25, 0.5, "was", "is"),),
)
EVALUATION = EvalReport(
    "GLM-5.2-INT4", "f" * 64, TextMetrics("c" * 64, 2, 501, "float32", 1000, 2.0, DIVERGENCE)
)


class Reader(HTMLParser):
    """Text of a page by what it is in, and every element with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style"):
            return
        self.texts.append(data)
        if "td" in self._open or "th" in self._open:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return "".join(self.texts)


def maps_of(text: str) -> dict[str, Any]:
    """The data behind each map."""
    found = re.findall(r'<script type="application/json" data-of="(\w+)">(.*?)</script>', text)
    return {name: json.loads(data) for name, data in found}


def test_figures_of_the_page(make_output: MakeOutput) -> None:
    text = page(read_output(make_output(gate=VERDICT)), EVALUATION)
    read = Reader(text)
    for figure in (
        "750.0\xa0GB → 500.0\xa0GB",
        "66.7 % of the source",
        "92.2 GiB → 68.0 GiB on each of 8 GPUs",
        "0.00654 nats",
        "99 % of tokens below 0.0709",
        "top-1 agreement 96.20 %, perplexity 7.3891",
        "mean change -0.40 (-1.20 to +0.40) points",
        "the text was not measured",
        "median error 0.002, by rounding alone 0.004",
        "1 fell back (2.8 %)",
        "Of 12 routed experts the least used saw 0, the median 100, the most used 300; 3 saw none.",
        "Fell back from the method asked for: 1 to rtn: better on held-out tokens.",
    ):
        assert figure in read.text, figure
    assert ["INT4 g32", "big", "36", "700.0 GB", "400.0 GB", "80.0 %"] in read.rows
    worst = "model.layers.0.mlp.experts.0.down_proj"
    assert ["experts down_proj", "12", "0.002", "0.004", "0.0123", worst, "1"] in read.rows
    assert ["2", "12", "0.003", "0.006", "0.003", "0"] in read.rows
    assert ["2", "4", "0", "100", "300", "1"] in read.rows
    assert ["3.500", "so⏎it is", "50.0 → 25.0", "is → was"] in read.rows
    change = "-1.00 (-2.31 to +0.25)"
    row = ["glm_recall exact_match,none", "500", "94.00", "93.00", "9 : 4", change, "inconclusive"]
    assert row in read.rows


def test_maps_hold_every_expert(make_output: MakeOutput) -> None:
    lines = (linear(3, 0, "up_proj", error=0.5, tokens=7), linear(5, 2, "up_proj", error=0.25))
    maps = maps_of(page(read_output(make_output(linears=lines))))
    assert maps["error"]["rows"] == ["3", "5"]
    assert maps["error"]["columns"] == 3
    assert maps["error"]["hints"]["up_proj error"] == [0.5, None, None, None, None, 0.25]
    assert maps["tokens"]["hints"]["tokens"] == [7, None, None, None, None, 200]
    assert maps["tokens"]["hints"]["calibrated on"] == [
        "all-tokens", None, None, None, None, "blended",
    ]  # fmt: skip


def test_an_expert_far_out_makes_no_map(make_output: MakeOutput) -> None:
    lines = (linear(3, 999_999, "up_proj"), linear(4, 1, "up_proj"))
    text = page(read_output(make_output(linears=lines)))
    assert maps_of(text) == {}
    assert len(text) < 100_000


def test_a_section_without_data_says_how_to_get_it(make_output: MakeOutput) -> None:
    text = Reader(page(read_output(make_output()))).text
    for command in (
        "quantize gate fp8.json int4.json -o gate.json\n"
        "quantize report GLM-5.2-INT4 --gate gate.json",
        "quantize eval GLM-5.2-INT4 --text heldout.jsonl --baseline GLM-5.2-FP8 -o int4.json\n"
        "quantize report GLM-5.2-INT4 --eval int4.json",
        "What the run took is not in this folder",
    ):
        assert command in text
    assert "not measured" in text
    assert "not judged" in text


def test_planned_and_measured(make_output: MakeOutput) -> None:
    folder = make_output()
    units = (
        UnitTime("embedding", 1.0, 2 << 30, 0, {}),
        UnitTime("layers.0", 9.0, 3 << 30, 5 << 30, {"solve down": 6.0, "read": 1.0}),
    )
    planned = Planned(host=4 << 30, gpu=10 << 30, seconds=20.0, ranks=2)
    write_run(folder, RunTimes(12.5, 3 << 30, planned, units))
    read = Reader(page(read_output(folder)))
    assert ["host memory, peak", "4.0 GiB", "3.0 GiB", "75.0 %"] in read.rows
    assert ["GPU memory, peak", "10.0 GiB", "5.0 GiB", "50.0 %"] in read.rows
    assert ["time of all units", "20.0 s", "10.0 s", "50.0 %"] in read.rows
    assert ["solve down", "6.0 s", "60.0 %"] in read.rows
    assert ["other", "3.0 s", "30.0 %"] in read.rows
    assert "12.5 s from its last start in 2 processes; 20.0 s were planned." in read.text


def test_nothing_comes_from_elsewhere(make_output: MakeOutput) -> None:
    read = Reader(page(read_output(make_output(gate=VERDICT)), EVALUATION))
    links = [a[key] for _, a in read.elements for key in ("src", "href") if key in a]
    assert links == ["data:,", "https://huggingface.co/zai-org/GLM-5.2-FP8"]
    assert [tag for tag, _ in read.elements if tag in ("img", "iframe", "object", "form")] == []


def test_hostile_names_stay_text(make_output: MakeOutput) -> None:
    name = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u202e&amp;"
    folder = make_output()
    record = json.loads((folder / REPORT_FILE).read_text())
    record["origin"]["name"] = record["recipe"]["name"] = name
    record["warnings"], record["versions"] = [name], {name: name}
    for line in record["linears"]:
        line["name"] += name
        line["rung"] = line["scheme"] = line["fallback"] = name
    for rule in record["rules"]:
        rule["reason"] = rule["scheme"] = name
    (folder / REPORT_FILE).write_text(json.dumps(record))
    verdict = json.loads(json.dumps(VERDICT))
    verdict["reasons"], verdict["verdict"] = [name], name
    verdict["policy"]["name"] = verdict["rows"][0]["task"] = verdict["rows"][0]["verdict"] = name
    (folder / "gate.json").write_text(json.dumps(verdict))
    worst = WorstToken(1, 1, 1.0, name, name, 0.5, 0.5, name, name)
    divergence = Divergence("b", 1, 1, 1, 1, Histogram((1.0,), (1, 0)), (worst,))
    hostile = EvalReport(name, "f", TextMetrics("c", 1, 2, "float32", 1, 1.0, divergence))
    text = page(read_output(folder), hostile)
    read = Reader(text)
    assert [tag for tag, _ in read.elements if tag == "img"] == []
    assert not any(key.startswith("on") for _, a in read.elements for key in a)
    # The script and the data of its maps, no more.
    scripts = [a.get("type") for tag, a in read.elements if tag == "script"]
    assert scripts.count(None) == 1
    assert set(scripts) == {None, "application/json"}
    assert "\u202e" not in text
    shown = name.replace("\u202e", " ")
    assert shown in read.text
    assert maps_of(text)["tokens"]["hints"]["calibrated on"][0] == name


def test_inputs_that_awq_scaled(make_output: MakeOutput) -> None:
    inputs = tuple(
        ScaledInput(f"model.layers.{n}.post_attention_layernorm", 9, exponent, 0.8, 0.5, 4.0, 4, "")
        for n, exponent in enumerate((0.25, None, 0.5))
    )
    read = Reader(page(read_output(make_output(scaled=inputs))))
    row = ["post_attention_layernorm", "3", "2", "0.25", "0.8", "0.5", "4"]
    assert row in read.rows


def test_the_command_writes_a_page(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, saved = tmp_path / "out", tmp_path / "evaluation.json"
    assert main([str(tiny), "--to", "int4", "--method", "rtn", "-o", str(folder), "-q"]) == 0
    capsys.readouterr()
    fingerprint = checkpoint_fingerprint(open_checkpoint(folder))
    replace(EVALUATION, fingerprint=fingerprint).write(saved)
    assert main(["report", str(folder), "--eval", str(saved), "-q"]) == 0
    written = folder / "halfbyte_report.html"
    assert capsys.readouterr().out == f"{written}\n"
    assert written.read_text() == page(read_output(folder), EvalReport.read(saved))
    other = tmp_path / "other.html"
    assert main(["report", str(folder), "-o", str(other)]) == 0
    assert "not measured" in other.read_text()
    assert main(["report", str(folder), "-o", str(tmp_path)]) == 2
    assert main(["report", str(folder), "-o", str(tmp_path / "absent" / "x.html")]) == 1
    assert main(["report", str(folder), "--eval", str(folder / REPORT_FILE)]) == 1
    assert "the command line stores it there" not in other.read_text()  # it did
    EVALUATION.write(saved)
    capsys.readouterr()
    assert main(["report", str(folder), "--eval", str(saved)]) == 1
    assert f"not {fingerprint:.12}" in capsys.readouterr().err
