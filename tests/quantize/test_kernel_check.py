"""Every INT4 linear is tried, on what it reads; a kernel that is wrong is caught and named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.calibration.data import token_windows
from halfbyte.calibration.routing import Routing
from halfbyte.core import Settings
from halfbyte.errors import UnsupportedModelError, UsageError
from halfbyte.evals.demo import FOLDER
from halfbyte.evals.model import load_model
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.rows import InMemory
from halfbyte.kernels import reference
from halfbyte.quantize import kernel_check, pipeline
from halfbyte.quantize.kernel_check import KernelRequest, KernelResult
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.products import Linear
from halfbyte.quantize.recipe import load_recipe
from halfbyte.quantize.verify import Mismatch, VerifyResult, verify
from halfbyte.testing.tiny import write_tiny

from .damage import edit_json, edit_tensor, read

TARGET = "model.layers.4.mlp.experts.7.up_proj"
LAYERS = frozenset({4})


@pytest.fixture(scope="module")
def tokens(nano: Path) -> torch.Tensor:
    return token_windows(FOLDER / "calibration.jsonl", nano, 4, 256, seed=0)


def checked(folder: Path, source: Path | None = None, **request: Any) -> VerifyResult:
    return verify(folder, source, kernels=KernelRequest(**request))


def products_of(result: VerifyResult) -> KernelResult:
    assert result.kernels is not None
    return result.kernels


def kernel_faults(result: VerifyResult) -> list[Mismatch]:
    return [m for m in result.mismatches if m.kind == "kernel"]


# Sound checkpoints.


@pytest.mark.parametrize("text", [False, True], ids=["normal", "text"])
def test_a_sound_checkpoint_passes(
    nano: Path, nano_int4: Path, tokens: torch.Tensor, text: bool
) -> None:
    result = checked(nano_int4, nano, tokens=tokens if text else None)
    assert (result.mismatches, result.notes) == ((), ())
    made = products_of(result)
    packed = [n for n in open_checkpoint(nano_int4).tensors if n.endswith(".weight_packed")]
    assert sorted(f"{c.name}.weight_packed" for c in made.linears) == sorted(packed)
    assert [c.name for c in made.experts] == [f"model.layers.{i}.mlp.experts" for i in range(2, 6)]
    assert "no GPU: this checks the bytes, not the kernels" in made.engine
    assert made.inputs == ("what linears read of 1,024 tokens of text" if text else made.inputs)
    for check in (*made.linears, *made.experts):
        assert check.error is not None
        assert check.error == pytest.approx(check.rounding, rel=1e-3)
        assert check.of_allowance is not None
        assert check.of_allowance <= 1
        assert (check.reached_by is not None) == text
    for check in made.linears:
        assert check.output_error is not None
        assert check.reported_error is not None
        about = 0.4 if text else 0.05
        assert check.output_error == pytest.approx(check.reported_error, rel=about)
    assert json.dumps(asdict(result), allow_nan=False)


def test_numbers_are_those_of_other_code(nano: Path, nano_gptq: Path) -> None:
    """compressed-tensors unpacks, and the blocks of the source are spread out by hand."""
    from compressed_tensors.compressors.pack_quantized.base import unpack_from_int32

    made = products_of(checked(nano_gptq, nano, layers=LAYERS))
    (check,) = (c for c in made.linears if c.name == TARGET)
    scales, shape = (read(nano_gptq, f"{TARGET}.weight_{part}") for part in ("scale", "shape"))
    codes = unpack_from_int32(
        read(nano_gptq, f"{TARGET}.weight_packed"), 4, torch.Size(shape.tolist())
    )
    weight = codes.double() * scales.double().repeat_interleave(32, 1)
    source = {n: t for path in nano.glob("*.safetensors") for n, t in load_file(path).items()}
    blocks = source[f"{TARGET}.weight_scale_inv"].double()
    spread = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    original = source[f"{TARGET}.weight"].double() * spread
    x = torch.randn(128, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() @ weight.T
    y = exact.bfloat16().double()
    wanted = x.double() @ original.T
    assert check.error == pytest.approx(float((y - exact).norm() / exact.norm()), rel=1e-4)
    assert check.output_error == pytest.approx(float((y - wanted).norm() / wanted.norm()), rel=1e-4)
    assert check.shape == tuple(weight.shape)


@torch.no_grad()
def test_inputs_are_what_transformers_modules_read(
    nano_gptq: Path, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def judged(linear: Linear, x: torch.Tensor) -> Any:
        seen.append(x)
        return JUDGED(linear, x)

    monkeypatch.setattr(Linear, "judged", judged)
    made = products_of(checked(nano_gptq, tokens=tokens, layers=LAYERS))
    by_name = dict(zip([c.name for c in made.linears], seen, strict=True))
    model = load_model(nano_gptq)
    inputs: list[torch.Tensor] = []
    model.model.layers[4].mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(tokens)
    rows = inputs[0].flatten(0, 1)
    for expert in range(12):
        gate, up = (
            by_name[f"model.layers.4.mlp.experts.{expert}.{x}_proj"] for x in ("gate", "up")
        )
        assert torch.equal(gate, up)
        nearest = torch.cdist(gate.double(), rows.double()).min(1).values
        assert bool((nearest < 5e-3 * gate.double().norm(dim=1)).all())
    # What down reads is what the INT4 gate and up of its expert make.
    mlp = model.model.layers[4].mlp.experts
    x = by_name["model.layers.4.mlp.experts.3.gate_proj"].float()
    g, u = (x @ mlp.gate_up_proj[3].T).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(g) * u
    found = by_name["model.layers.4.mlp.experts.3.down_proj"].float()
    assert float((found - expected).norm() / expected.norm()) < 0.01


JUDGED = Linear.judged


def test_recipes_with_plain_linears(nano: Path, tokens: torch.Tensor, tmp_path: Path) -> None:
    """Dense MLPs, too, on what they read; attention has none in INT4."""
    folder = tmp_path / "INT4"
    recipe = load_recipe("experts-and-dense")
    pipeline.run(make_plan(open_checkpoint(nano), recipe, Settings(method="rtn")), folder)
    result = checked(folder, nano, tokens=tokens)
    assert result.mismatches == ()
    made = products_of(result).linears
    plain = [c for c in made if ".experts." not in c.name]
    assert {c.layer for c in plain} >= {0, 1}
    assert all(c.reached_by == tokens.numel() for c in plain if c.layer != 5)


def test_a_scaled_source_is_compared_as_it_was_scaled(
    nano: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    folder, settings = tmp_path / "INT4", Settings(method="awq", samples=4, sequence_length=256)
    plan = make_plan(open_checkpoint(nano), load_recipe("glm-5"), settings)
    report = pipeline.run(plan, folder, tokens=tokens)
    assert any(scaled.exponent is not None for scaled in report.scaled)
    for request in ({}, {"tokens": tokens}):
        assert checked(folder, nano, **request).mismatches == ()


def test_an_expert_without_tokens_is_tried_with_the_layers() -> None:
    index = torch.tensor([[0, 2]] * 300 + [[1, 2]] * 5)
    weight = torch.ones(305, 2)
    dispatch = Routing(InMemory(torch.zeros(305, 8)), index, weight, 4).dispatch()

    def rows(expert: int) -> list[int]:
        return kernel_check._rows_for(dispatch, expert, 305).tolist()

    assert set(rows(0)) <= set(range(300))
    assert rows(1)[:5] == [300, 301, 302, 303, 304]  # its own come first
    assert all(len(set(rows(expert))) == 128 for expert in range(4))
    few = Routing(
        InMemory(torch.zeros(3, 8)), torch.zeros(3, 1, dtype=torch.long), weight[:3, :1], 2
    )
    assert [len(kernel_check._rows_for(few.dispatch(), e, 3)) for e in (0, 1)] == [3, 3]


def test_only_the_layers_asked_for(nano: Path, nano_rtn: Path, tokens: torch.Tensor) -> None:
    for request in ({}, {"tokens": tokens}):
        made = products_of(checked(nano_rtn, layers=frozenset({2, 5}), **request))
        assert {c.layer for c in made.linears} == {c.layer for c in made.experts} == {2, 5}
    whole = products_of(checked(nano_rtn, tokens=tokens))
    some = products_of(checked(nano_rtn, tokens=tokens, layers=frozenset({5})))
    # The layers before are run all the same.
    assert [c.reached_by for c in some.linears] == [
        c.reached_by for c in whole.linears if c.layer == 5
    ]


# Requests that cannot be met.


def test_a_layer_without_int4_linears(nano_rtn: Path) -> None:
    with pytest.raises(UsageError, match="layer 1 has no INT4 linear") as caught:
        checked(nano_rtn, layers=frozenset({1, 2}))
    assert caught.value.hint == "those that have are 2, 3, 4, 5"


def test_a_checkpoint_without_int4(nano: Path, tmp_path: Path) -> None:
    """A check of nothing would look as if all were well."""
    for folder in (nano, write_tiny(tmp_path / "tiny")):
        with pytest.raises(UsageError, match="no linear of the checkpoint is INT4"):
            checked(folder)


def test_text_needs_a_model_that_can_be_run(nano_rtn: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(nano_rtn, tmp_path / "INT4"))
    edit_json(folder / "config.json", lambda config: config.update(model_type="mamba"))
    with pytest.raises(UnsupportedModelError):
        checked(folder, tokens=torch.zeros(1, 8, dtype=torch.long))
    assert products_of(checked(folder)).linears  # numbers need none


def test_experts_that_no_launch_takes_are_said(nano_rtn: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(nano_rtn, tmp_path / "INT4"))
    edit_json(folder / "config.json", lambda config: config.update(hidden_act="gelu"))
    result = checked(folder, layers=LAYERS)
    assert products_of(result).experts == ()
    assert result.notes == (
        "experts of layer 4 were not checked in one launch: their activation is 'gelu', not silu",
    )


# Kernels that are wrong, for one linear alone.

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
LINEAR_INT4 = reference.linear_int4


def without_a_scale(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    dropped = scales.clone()
    dropped[:, 3] = 1
    return LINEAR_INT4(x, packed, dropped)


def a_neighbours_scale(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """In one row."""
    moved = scales.clone()
    moved[17, 3] = scales[17, 4]
    return LINEAR_INT4(x, packed, moved)


def without_the_last_row(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    y = LINEAR_INT4(x, packed, scales)
    y[:, -1] = 0
    return y


def with_a_row_unwritten(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    y = torch.empty(len(x), len(packed), dtype=x.dtype)
    y[:, 1:] = LINEAR_INT4(x, packed, scales)[:, 1:]
    return y


def high_nibble_first(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    pairs = packed.contiguous().view(torch.uint8)
    return LINEAR_INT4(x, (pairs << 4 | pairs >> 4).view(torch.int32), scales)


def rounded_weights(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Of other kernels, which round a code times a scale to the dtype of the activations."""
    weight = reference.decode_int4(packed, scales).to(x.dtype)
    return torch.nn.functional.linear(x.float(), weight.float()).to(x.dtype)


def wrong_only_for_many(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    y = LINEAR_INT4(x, packed, scales)
    return y.roll(1, 0) if len(x) > 16 else y


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (without_a_scale, "with 1 token the output of token 0"),
        (a_neighbours_scale, "row 17 is"),
        (without_the_last_row, "row 127 is 0, in float64"),
        (with_a_row_unwritten, "row 0 is nan, in float64"),
        (high_nibble_first, "with 1 token the output of token 0"),
        (rounded_weights, "with 1 token the output of token 0"),
        (wrong_only_for_many, "with 128 tokens the output of token"),
    ],
)
@pytest.mark.parametrize("text", [False, True], ids=["normal", "text"])
def test_a_wrong_kernel_is_caught_and_its_linear_named(
    nano_gptq: Path,
    tokens: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Product,
    message: str,
    text: bool,
) -> None:
    target = read(nano_gptq, f"{TARGET}.weight_packed")

    def product(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        same = packed.shape == target.shape and torch.equal(packed, target)
        return (wrong if same else LINEAR_INT4)(x, packed, scales)

    monkeypatch.setattr(reference, "linear_int4", product)
    result = checked(nano_gptq, layers=LAYERS, tokens=tokens if text else None)
    (fault,) = result.mismatches
    assert (fault.kind, fault.name) == ("kernel", TARGET)
    assert message in fault.message
    assert json.dumps(asdict(result), allow_nan=False)


def test_a_wrong_kernel_of_all_experts_names_their_layer(
    nano_gptq: Path, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reference.experts_int4

    def wrong(x: torch.Tensor, gate_up: Any, down: Any, chosen: Any, router: Any) -> torch.Tensor:
        return made(x, gate_up, down, chosen, router.masked_fill(chosen == 11, 0))

    monkeypatch.setattr(reference, "experts_int4", wrong)
    for request in ({}, {"tokens": tokens}):
        faults = checked(nano_gptq, layers=LAYERS, **request).mismatches
        assert [(m.kind, m.name) for m in faults] == [("kernel", "model.layers.4.mlp.experts")]


# Checkpoints that are wrong.


def test_bytes_that_changed_are_the_sources_business(
    nano: Path, nano_gptq: Path, tmp_path: Path
) -> None:
    """The product of what is stored is right, whatever is stored; the source tells."""
    folder = Path(shutil.copytree(nano_gptq, tmp_path / "INT4"))

    def flip(packed: torch.Tensor) -> torch.Tensor:
        packed[3, 2] ^= 0x70
        return packed

    edit_tensor(folder, f"{TARGET}.weight_packed", flip)
    assert checked(folder, layers=LAYERS).mismatches == ()
    (fault,) = checked(folder, nano, layers=LAYERS).mismatches
    assert (fault.kind, fault.name) == ("value", f"{TARGET}.weight")
    assert "code [3, 17]" in fault.message


@pytest.mark.parametrize("text", [False, True], ids=["normal", "text"])
def test_outputs_far_from_the_source(
    nano: Path, nano_gptq: Path, tokens: torch.Tensor, tmp_path: Path, text: bool
) -> None:
    folder = Path(shutil.copytree(nano_gptq, tmp_path / "INT4"))
    other = read(folder, f"{TARGET.replace('experts.7', 'experts.8')}.weight_packed")
    edit_tensor(folder, f"{TARGET}.weight_packed", lambda _: other)
    result = checked(folder, nano, layers=LAYERS, tokens=tokens if text else None)
    (fault,) = (m for m in result.mismatches if m.kind == "output")
    assert fault.name == TARGET
    assert "against the source, the report says 0.0" in fault.message
    assert not kernel_faults(result)


@pytest.mark.parametrize("text", [False, True], ids=["normal", "text"])
def test_a_scale_that_is_not_finite(
    nano_gptq: Path, tokens: torch.Tensor, tmp_path: Path, text: bool
) -> None:
    folder = Path(shutil.copytree(nano_gptq, tmp_path / "INT4"))

    def spoil(scales: torch.Tensor) -> torch.Tensor:
        scales[5, 1] = float("nan")
        return scales

    edit_tensor(folder, f"{TARGET}.weight_scale", spoil)
    result = checked(folder, layers=LAYERS, tokens=tokens if text else None)
    assert {m.name for m in result.mismatches if m.kind == "value"} == {f"{TARGET}.weight"}
    assert TARGET in {m.name for m in kernel_faults(result)}
    assert json.dumps(asdict(result), allow_nan=False)


def test_a_layer_before_that_cannot_be_run(
    nano_gptq: Path, tokens: torch.Tensor, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(nano_gptq, tmp_path / "INT4"))
    edit_tensor(folder, "model.layers.0.input_layernorm.weight", lambda t: t * math.inf)
    (fault,) = kernel_faults(checked(folder, layers=LAYERS, tokens=tokens))
    assert fault.name == "INT4"
    assert "stopped: model.layers.0.input_layernorm.weight" in fault.message
