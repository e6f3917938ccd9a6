"""A sound output passes, and each kind of damage is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.core import Settings, TensorInfo
from halfbyte.errors import CheckpointError
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.folder import REPORT_FILE, WORK_FOLDER
from halfbyte.quantize.pipeline import run
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe, recipe_names
from halfbyte.quantize.verify import Mismatch, VerifyResult, verify
from halfbyte.testing.tiny import write_tiny

from .damage import INDEX_FILE, believe, edit_json, edit_tensor, read

GATE = "model.layers.1.mlp.experts.0.gate_proj"
UP = "model.layers.1.mlp.experts.0.up_proj"


def quantized(source: Path, output: Path, recipe: str = "glm-5", **changes: Any) -> Path:
    settings = replace(Settings(method="rtn"), **changes)
    plan = make_plan(
        open_checkpoint(source), load_recipe(recipe), settings, max_shard_bytes=1_000_000
    )
    run(plan, output)
    return output


@pytest.fixture(scope="module")
def sound(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(tiny, tmp_path_factory.mktemp("verify") / "INT4")


@pytest.fixture
def output(sound: Path, tmp_path: Path) -> Path:
    """A sound output, to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "INT4"))


# Damage.


def set_item(index: tuple[int, ...], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[index] = value
        return tensor

    return change


def only(result: VerifyResult) -> Mismatch:
    assert len(result.mismatches) == 1, [str(m) for m in result.mismatches]
    assert "\n" not in str(result.mismatches[0])
    return result.mismatches[0]


# Sound outputs.


@pytest.mark.parametrize("recipe", recipe_names())
def test_sound_outputs_pass(tiny: Path, tmp_path: Path, recipe: str) -> None:
    folder = quantized(tiny, tmp_path / "INT4", recipe)
    result = verify(folder, tiny)
    assert result.mismatches == ()
    checkpoint = open_checkpoint(folder)
    assert (result.shards, result.tensors) == (len(checkpoint.shards), len(checkpoint.tensors))
    assert result.quantized == sum(n.endswith("weight_packed") for n in checkpoint.tensors)
    assert result.compared > result.quantized
    assert json.dumps(asdict(result))
    assert verify(folder).compared == 0


@pytest.mark.parametrize(("group_size", "search"), [(64, "mse"), ("channel", "minmax")])
def test_other_schemes_and_scales_pass(
    tiny: Path, tmp_path: Path, group_size: Any, search: Any
) -> None:
    settings = Settings(method="rtn", scale_search=search)
    plan = make_plan(open_checkpoint(tiny), load_recipe("glm-5", group_size), settings)
    run(plan, tmp_path / "INT4")
    assert verify(tmp_path / "INT4", tiny).mismatches == ()


def test_calibrated_output_passes(tiny: Path, tmp_path: Path) -> None:
    """GPTQ leaves the nearest codes, but stays within the bounds; starved experts are rounded."""
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    settings = Settings(samples=2, sequence_length=24)
    report = run(
        make_plan(open_checkpoint(tiny), load_recipe("glm-5"), settings),
        tmp_path / "INT4",
        tokens=tokens,
    )
    assert any(linear.error != linear.rtn_error for linear in report.linears)
    assert verify(tmp_path / "INT4", tiny).mismatches == ()


def test_bf16_and_tied_sources_pass(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", source="bf16", tied=True, shards=1)
    assert verify(quantized(source, tmp_path / "INT4"), source).mismatches == ()


def test_an_output_of_others_needs_no_report(output: Path, tiny: Path) -> None:
    (output / REPORT_FILE).unlink()
    result = verify(output, tiny)
    assert (result.mismatches, result.compared > 0) == ((), True)


def test_an_fp8_source_can_be_looked_at_too(tiny: Path) -> None:
    assert verify(tiny).mismatches == ()


def test_a_source_that_is_none_is_an_error(output: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        verify(output, tmp_path / "absent")


# Files.


def test_a_flipped_byte_is_found_by_its_hash_and_by_its_value(output: Path, tiny: Path) -> None:
    def flip(packed: torch.Tensor) -> torch.Tensor:
        packed[3, 2] ^= 0x70  # the second code of eight
        return packed

    edit_tensor(output, f"{GATE}.weight_packed", flip, rehash=False)
    shard = open_checkpoint(output).tensors[f"{GATE}.weight_packed"].shard
    mismatch = only(verify(output))
    assert (mismatch.kind, mismatch.name) == ("hash", shard)
    believe(output)
    assert verify(output).mismatches == ()  # without the source it cannot be known
    mismatch = only(verify(output, tiny))
    assert (mismatch.kind, mismatch.name) == ("value", f"{GATE}.weight")
    assert "1 codes are not the nearest, first at [3, 17]" in mismatch.message


def test_a_scale_missing_from_the_index(output: Path) -> None:
    edit_json(output / INDEX_FILE, lambda index: index["weight_map"].pop(f"{GATE}.weight_scale"))
    mismatch = only(verify(output))
    assert mismatch.kind == "folder"
    assert f"{GATE}.weight_scale, but the index does not name it" in mismatch.message


def test_a_truncated_shard(output: Path) -> None:
    shard = sorted(output.glob("*.safetensors"))[1]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    mismatch = only(verify(output))
    assert mismatch.kind == "folder"
    assert shard.name in mismatch.message


def test_a_missing_shard(output: Path) -> None:
    shard = sorted(output.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in only(verify(output)).message


def test_a_stray_shard(output: Path) -> None:
    shutil.copy(sorted(output.glob("*.safetensors"))[0], output / "extra.safetensors")
    mismatch = only(verify(output))
    assert (mismatch.kind, mismatch.name) == ("folder", "extra.safetensors")


def test_an_unfinished_run(output: Path) -> None:
    (output / WORK_FOLDER).mkdir()
    shutil.copy(sorted(output.glob("*.safetensors"))[0], output / "m.safetensors.partial")
    assert [m.name for m in verify(output).mismatches] == [WORK_FOLDER, "m.safetensors.partial"]


def test_an_mtp_layer_dropped_from_the_index(output: Path) -> None:
    mtp = mtp_tensors(output)
    edit_json(output / INDEX_FILE, lambda index: [index["weight_map"].pop(name) for name in mtp])
    mismatch = only(verify(output))
    assert mismatch.kind == "folder"
    assert "model.layers.4." in mismatch.message


def test_an_mtp_layer_dropped_from_index_and_shards(output: Path, tiny: Path) -> None:
    """What is left agrees with itself, and a server would start, but without its draft layer."""
    from safetensors.torch import load_file, save_file

    mtp = mtp_tensors(output)
    edit_json(output / INDEX_FILE, lambda index: [index["weight_map"].pop(name) for name in mtp])
    for path in {output / shard for shard in mtp.values()}:
        kept = {n: t for n, t in load_file(path).items() if n not in mtp}
        path.unlink()
        if kept:
            save_file(kept, path)
    (mismatch,) = (m for m in verify(output).mismatches if m.kind == "mtp")
    assert mismatch.name == "model.layers.4"
    absent = {m.name for m in verify(output, tiny).mismatches if "is absent" in m.message}
    assert absent == mtp.keys()


def mtp_tensors(folder: Path) -> dict[str, str]:
    """Tensors of the MTP layer and their shards."""
    tensors = open_checkpoint(folder).tensors
    return {n: t.shard for n, t in tensors.items() if n.startswith("model.layers.4.")}


def test_a_wrong_total_size(output: Path) -> None:
    edit_json(output / INDEX_FILE, lambda index: index["metadata"].update(total_size=5))
    assert "total_size is 5, the tensors take" in only(verify(output)).message


def test_a_report_that_is_none(output: Path) -> None:
    (output / REPORT_FILE).write_text("{}")
    assert only(verify(output)).kind == "report"


def test_a_shard_the_report_does_not_know(output: Path) -> None:
    edit_json(output / REPORT_FILE, lambda report: report["shards"].popitem())
    assert "is in the folder but not in the report" in only(verify(output)).message


# Values.


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_no_scale(output: Path, value: float) -> None:
    edit_tensor(output, f"{GATE}.weight_scale", set_item((5, 1), value))
    mismatch = only(verify(output))
    assert (mismatch.kind, mismatch.name) == ("value", f"{GATE}.weight")
    assert f"weight_scale holds {value}; expected a nonzero finite number" in mismatch.message


def test_a_scale_whose_sign_flipped(output: Path, tiny: Path) -> None:
    """INT4 has scales of either sign, so only the source tells which is right."""
    assert bool((read(output, f"{GATE}.weight_scale") < 0).any())
    edit_tensor(output, f"{GATE}.weight_scale", set_item((5, 1), -read_scale(output, (5, 1))))
    assert verify(output).mismatches == ()
    mismatch = only(verify(output, tiny))
    assert mismatch.name == f"{GATE}.weight"
    assert "codes are not the nearest, first at [5, " in mismatch.message


def read_scale(folder: Path, index: tuple[int, ...]) -> float:
    return float(read(folder, f"{GATE}.weight_scale")[index])


def test_a_negative_scale_of_fp8(tiny_copy: Path) -> None:
    edit_tensor(tiny_copy, f"{GATE}.weight_scale_inv", set_item((0, 0), -1.0), rehash=False)
    mismatch = only(verify(tiny_copy))
    assert "weight_scale_inv holds -1.0; expected a positive finite number" in mismatch.message


def test_a_plain_weight_that_is_not_finite(output: Path) -> None:
    edit_tensor(output, "model.norm.weight", set_item((7,), float("nan")))
    assert "model.norm.weight holds nan" in only(verify(output)).message


def test_scales_of_gate_and_up_swapped(output: Path, tiny: Path) -> None:
    gate, up = (read(output, f"{name}.weight_scale") for name in (GATE, UP))
    edit_tensor(output, f"{GATE}.weight_scale", lambda _: up)
    edit_tensor(output, f"{UP}.weight_scale", lambda _: gate)
    assert verify(output).mismatches == ()
    found = verify(output, tiny).mismatches
    assert {m.name for m in found} == {f"{GATE}.weight", f"{UP}.weight"}


def test_codes_of_gate_and_up_swapped_without_a_report(output: Path, tiny: Path) -> None:
    """Others' outputs may have moved codes, but not to those of another weight."""
    gate, up = (read(output, f"{name}.weight_packed") for name in (GATE, UP))
    edit_tensor(output, f"{GATE}.weight_packed", lambda _: up)
    edit_tensor(output, f"{UP}.weight_packed", lambda _: gate)
    (output / REPORT_FILE).unlink()
    found = verify(output, tiny).mismatches
    assert {m.name for m in found} == {f"{GATE}.weight", f"{UP}.weight"}
    assert all("times the rounding noise" in m.message for m in found)


def test_a_wrong_weight_shape(output: Path) -> None:
    edit_tensor(output, f"{GATE}.weight_shape", lambda shape: shape.flip(0))
    mismatch = only(verify(output))
    assert "weight_shape says [128, 64], weight_packed holds [64, 128]" in mismatch.message


def test_an_error_other_than_the_reported(output: Path, tiny: Path) -> None:
    def lie(report: dict[str, Any]) -> None:
        (linear,) = (line for line in report["linears"] if line["name"] == GATE)
        linear["weight_error"] *= 1.1

    edit_json(output / REPORT_FILE, lie)
    assert "the report says" in only(verify(output, tiny)).message


def test_a_copied_tensor_that_differs(output: Path, tiny: Path) -> None:
    edit_tensor(output, "model.norm.weight", set_item((7,), 3.0))
    mismatch = only(verify(output, tiny))
    assert mismatch.name == "model.norm.weight"
    assert "1 values differ, first at [7]: 3, expected " in mismatch.message


def test_a_dequantized_tensor_that_differs(output: Path, tiny: Path) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    edit_tensor(output, name, set_item((2, 3), 0.25))
    assert "1 values differ, first at [2, 3]: 0.25, expected " in only(verify(output, tiny)).message


def test_large_plain_tensors_are_compared_in_slices(
    output: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfbyte.quantize import compare

    monkeypatch.setattr(compare, "SLICE_BYTES", 1000)
    assert verify(output, tiny).mismatches == ()
    edit_tensor(output, "model.embed_tokens.weight", set_item((299, 5), 0.5))
    assert "first at [299, 5]: 0.5, expected " in only(verify(output, tiny)).message


# Config.


def test_a_group_size_that_the_scales_do_not_have(output: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        groups = config["quantization_config"]["config_groups"]
        groups["group_0"]["weights"]["group_size"] = 64

    edit_json(output / "config.json", change)
    mismatch = only(verify(output))
    assert mismatch.kind == "folder"
    assert "fits no group size" in mismatch.message


def test_an_ignore_list_that_sglang_misreads(output: Path, tiny: Path) -> None:
    """Checkpoint names alone: SGLang asks for gate_up_proj and for model.decoder."""
    tensors = open_checkpoint(output).tensors.values()
    linears = [t.name[:-7] for t in tensors if t.name.endswith(".weight") and len(t.shape) == 2]
    edit_json(
        output / "config.json",
        lambda config: config["quantization_config"].update(ignore=[*linears, "lm_head"]),
    )
    found = verify(output).mismatches
    assert {(m.kind, m.name) for m in found} == {("loader", "SGLang")}
    assert any("mlp.gate_up_proj" in m.message for m in found)
    assert any("model.decoder." in m.message for m in found)
    assert ("config", "config.json") in {(m.kind, m.name) for m in verify(output, tiny).mismatches}


def test_a_config_that_is_not_the_sources(output: Path, tiny: Path) -> None:
    edit_json(output / "config.json", lambda config: config.update(rms_norm_eps=1e-6))
    mismatch = only(verify(output, tiny))
    assert (mismatch.kind, mismatch.message) == (
        "config",
        "rms_norm_eps is 1e-06, in the source 1e-05",
    )


def test_a_config_that_is_malformed(output: Path) -> None:
    edit_json(output / "config.json", lambda config: config.update(num_hidden_layers="four"))
    assert "num_hidden_layers is 'four'" in only(verify(output)).message


def test_a_side_file_that_is_not_the_sources(output: Path, tiny: Path) -> None:
    (output / "tokenizer.json").write_text("{}")
    mismatch = only(verify(output, tiny))
    assert (mismatch.kind, mismatch.name) == ("folder", "tokenizer.json")


# Plan.


def test_a_tensor_too_many_and_one_too_few(output: Path, tiny: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    rename_tensor(output, name, name.replace("correction", "correctiom"))
    found = {(m.kind, m.name, m.message) for m in verify(output, tiny).mismatches}
    assert ("plan", name, "is absent, planned F32 [4]") in found
    assert ("plan", name, "is in the source but not in the output") in found
    other = name.replace("correction", "correctiom")
    assert ("plan", other, "is F32 [4], planned absent") in found
    assert ("plan", other, "has no source") in found


def rename_tensor(folder: Path, name: str, new: str) -> None:
    assert len(name) == len(new)
    info: TensorInfo = open_checkpoint(folder).tensors[name]
    path = folder / info.shard
    path.write_bytes(path.read_bytes().replace(name.encode(), new.encode(), 1))
    edit_json(
        folder / INDEX_FILE,
        lambda index: index["weight_map"].update({new: index["weight_map"].pop(name)}),
    )
    believe(folder)


def test_a_report_of_another_source(output: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", seed=1, shards=2)
    found = verify(output, other).mismatches
    assert ("report", REPORT_FILE) in {(m.kind, m.name) for m in found}
    assert sum(m.kind == "value" for m in found) > 10


def test_a_recipe_that_does_not_fit_the_source(output: Path, tiny: Path) -> None:
    edit_json(output / REPORT_FILE, lambda report: report["recipe"]["rules"].pop())
    edit_json(output / REPORT_FILE, lambda report: report["recipe"]["rules"].pop())
    found = verify(output, tiny).mismatches
    assert any("the plan cannot be made again: no rule" in m.message for m in found)


def test_what_could_not_be_checked_is_said(output: Path, tiny: Path) -> None:
    assert verify(output, tiny).notes == ()
    (output / REPORT_FILE).unlink()
    (note,) = verify(output, tiny).notes
    assert "hashes, plan" in note
    assert verify(tiny).notes[-1] == "no weight in it is INT4"
