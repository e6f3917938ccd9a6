"""A report as a run of a small model would leave it, put together by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfbyte.core import LinearReport, Origin, RuleOutcome, RunReport, Settings
from halfbyte.formats.folder import CONFIG_FILE, GATE_FILE, REPORT_FILE
from halfbyte.quantize.recipe import load_recipe, recipe_to_dict

ORIGIN = Origin(
    name="GLM-5.2-FP8",
    repo="zai-org/GLM-5.2-FP8",
    revision="0123456789abcdef0123456789abcdef01234567",
    license="mit",
    pipeline_tag="text-generation",
    library_name="transformers",
    language=("en", "zh"),
)


def linear(layer: int, expert: int, leaf: str, **changes: Any) -> LinearReport:
    """A line of a report: errors grow with the layer, tokens with the expert."""
    line = LinearReport(
        name=f"model.layers.{layer}.mlp.experts.{expert}.{leaf}",
        scheme="INT4 g32",
        error=0.001 * (layer + 1),
        rtn_error=0.002 * (layer + 1),
        weight_error=0.01,
        tokens=100 * expert,
        rung="blended" if expert else "all-tokens",
        fallback=None,
        smallest_scale=0.001,
        mean_scale=0.004,
        largest_scale=0.02,
        peak=6.5,
    )
    return replace(line, **changes)


def report(layers: int = 3, experts: int = 4, **changes: Any) -> RunReport:
    """Of so many layers of routed experts, one of whose linears fell back."""
    linears = [
        linear(layer, expert, leaf)
        for layer in range(layers)
        for expert in range(experts)
        for leaf in ("down_proj", "gate_proj", "up_proj")
    ]
    linears[0] = replace(linears[0], fallback="rtn: better on held-out tokens", error=0.0123)
    made = RunReport(
        output="GLM-5.2-INT4",
        fingerprint="f" * 64,
        settings=Settings(calibration_sha256="c" * 64, device="cuda:0", dtype="bfloat16"),
        recipe=recipe_to_dict(load_recipe("glm-5")),
        source="5" * 64,
        versions={"halfbyte": "0.1.0", "torch": "2.13.0"},
        origin=ORIGIN,
        rules=(
            RuleOutcome("x", "quantize", "INT4 g32", len(linears), 7 * 10**11, 4 * 10**11, "big"),
            RuleOutcome("y", "dequantize", None, 5, 5 * 10**10, 10**11, "read by all tokens"),
        ),
        bytes_in=750_000_000_000,
        bytes_out=500_000_000_000,
        whole_in=6_000_000_000,
        whole_out=12_000_000_000,
        shards={"model-00001-of-00001.safetensors": "a" * 64},
        linears=tuple(linears),
        scaled=(),
        warnings=(),
    )
    return replace(made, **changes)


VERDICT: dict[str, Any] = {
    "schema_version": 1,
    "verdict": "inconclusive",
    "candidate": "c" * 64,
    "reasons": ["recall may drop by up to 2.31 points, 2 are allowed"],
    "remarks": ["the text was not measured"],
    "policy": {
        "name": "default",
        "description": "paired",
        "rule": "paired",
        "margin": 0.8,
        "task_margin": 2.0,
        "confidence": 0.95,
    },
    "mean_change_points": {"estimate": -0.4, "low": -1.2, "high": 0.4},
    "rows": [
        {
            "task": "glm_recall",
            "metric": "exact_match,none",
            "decides": True,
            "verdict": "inconclusive",
            "count": 500,
            "baseline": 470,
            "candidate": 465,
            "delta_points": -1,
            "lost": 9,
            "won": 4,
            "change_points": {"estimate": -1.0, "low": -2.31, "high": 0.25},
            "p_value": 0.13,
            "adjusted_p": 0.13,
        }
    ],
}

CONFIG = {
    "model_type": "glm_moe_dsa",
    "num_attention_heads": 64,
    "moe_intermediate_size": 2048,
    "num_nextn_predict_layers": 1,
}

MakeOutput = Callable[..., Path]


def write_output(folder: Path, gate: Any = None, **changes: Any) -> Path:
    """Write a folder with a report, a config and perhaps a verdict, without weights."""
    folder.mkdir()
    (folder / REPORT_FILE).write_text(json.dumps(report(**changes).to_json()))
    (folder / CONFIG_FILE).write_text(json.dumps(CONFIG))
    if gate is not None:
        (folder / GATE_FILE).write_text(json.dumps(gate))
    return folder


@pytest.fixture
def make_output(tmp_path: Path) -> MakeOutput:
    """`write_output` into a folder of this test."""

    def make(name: str = "GLM-5.2-INT4", gate: Any = None, **changes: Any) -> Path:
        return write_output(tmp_path / name, gate, **changes)

    return make
