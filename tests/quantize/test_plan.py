"""Plans: published sizes of the real GLM-5.2, other architectures, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfbyte.calibration.runner import expert_batches
from halfbyte.core import (
    DTYPE_BYTES,
    Checkpoint,
    MemoryBudget,
    MemoryEstimate,
    OutputTensor,
    Placement,
    Plan,
    Recipe,
    Rule,
    Scheme,
    Settings,
)
from halfbyte.errors import CheckpointError, RecipeError, UsageError
from halfbyte.formats.budgets import COPYING, LAYERS_ON_GPU, LAYERS_ON_GPUS, ON_CPU, ON_GPU
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.int4 import output_tensors
from halfbyte.formats.layout import lay_out_shards
from halfbyte.quantize.memory import TORCH, disk_bytes, estimate_memory
from halfbyte.quantize.plan import make_plan
from halfbyte.quantize.recipe import load_recipe, recipe_names
from halfbyte.ranks import Ranks
from halfbyte.testing.glm52 import write_glm52
from halfbyte.testing.tiny import Source, write_tiny

RTN = Settings(method="rtn")
INT4 = Scheme(4, 32)
REST = Rule(".*", "dequantize", "r")
GIB = 2**30


@pytest.fixture(scope="module")
def glm52(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Headers of the real checkpoint."""
    return open_checkpoint(write_glm52(tmp_path_factory.mktemp("glm") / "GLM-5.2-FP8"))


@pytest.fixture(scope="module")
def default_plan(glm52: Checkpoint) -> Plan:
    return make_plan(glm52, load_recipe("glm-5"), Settings())


def plan_of(folder: Path, recipe: str | Recipe = "glm-5", **changes: Any) -> Plan:
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    return make_plan(open_checkpoint(folder), chosen, replace(RTN, **changes))


def outputs(plan: Plan) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {o.name: (o.dtype, o.shape) for t in plan.tensors for o in t.outputs}


# The real GLM-5.2.


def test_source_is_as_published(glm52: Checkpoint) -> None:
    assert len(glm52.tensors) == 118_629
    assert len(glm52.shards) == 141
    assert glm52.nbytes == 755_617_140_416
    assert len(glm52.config["quantization_config"]["modules_to_not_convert"]) == 541


def test_default_recipe_gives_the_published_size(default_plan: Plan) -> None:
    assert round(default_plan.checkpoint.nbytes / 1e9, 1) == 755.6
    assert round(default_plan.bytes_out / 1e9, 1) == 450.9
    assert round(default_plan.checkpoint.nbytes / GIB, 1) == 703.7
    assert round(default_plan.bytes_out / GIB, 1) == 419.9


def test_group_size_128_gives_the_derived_size(glm52: Checkpoint) -> None:
    plan = make_plan(glm52, load_recipe("glm-5", 128), Settings())
    assert round(plan.bytes_out / 1e9, 1) == 416.5


def test_fp8_rest_gives_the_derived_size_and_names_the_flag_of_sglang(glm52: Checkpoint) -> None:
    plan = make_plan(glm52, load_recipe("glm-5-fp8-rest"), Settings())
    assert round(plan.bytes_out / 1e9, 1) == 434.1
    (warning,) = plan.warnings
    assert warning.startswith("SGLang: ")
    assert "--disable-shared-experts-fusion" in warning


def test_default_plan_has_nothing_to_warn_of(default_plan: Plan) -> None:
    assert default_plan.warnings == ()


def test_units_are_the_layers_in_order(default_plan: Plan) -> None:
    names = [unit.name for unit in default_plan.units]
    assert names == ["embedding", *(f"layers.{i}" for i in range(79)), "head"]
    assert [u.kind for u in default_plan.units[-3:]] == ["layer", "mtp", "head"]
    assert sum(t.action == "quantize" for t in default_plan.units[-2].tensors) == 768
    assert sum(t.action == "quantize" for t in default_plan.tensors) == 76 * 768


def test_shards_hold_every_output_once_in_model_order(default_plan: Plan) -> None:
    expected = [o.name for t in default_plan.tensors for o in t.outputs]
    assert [name for shard in default_plan.shards for name in shard.offsets] == expected
    assert max(shard.nbytes for shard in default_plan.shards) < 5.01e9


def test_disk_covers_shards_and_the_state_of_two_layers(default_plan: Plan) -> None:
    state = 2 * 256 * 2048 * 6144 * 4
    assert default_plan.disk == sum(s.nbytes for s in default_plan.shards) + state


def test_memory_is_far_below_the_model(default_plan: Plan) -> None:
    memory = default_plan.memory
    assert memory.host == sum(memory.detail.values())
    assert memory.host < 64e9
    settings = Settings(device="cuda", dtype="bfloat16")
    on_gpu = estimate_memory(default_plan.units, settings, default_plan.checkpoint.config)
    assert on_gpu.gpu + on_gpu.host == sum(on_gpu.detail.values())
    assert 0 < on_gpu.gpu < 64e9
    assert on_gpu.placement == Placement(experts_at_once=37, streams=LAYERS_ON_GPU)
    at_most = MemoryBudget(gpu=int(40e9))
    less = estimate_memory(default_plan.units, settings, default_plan.checkpoint.config, at_most)
    assert 0 < less.gpu < 40e9
    assert on_gpu.host < 5.1e9  # 5.3 GB were measured


def test_a_budget_of_memory_decides_where_things_are(default_plan: Plan) -> None:
    settings = Settings(device="cuda", dtype="bfloat16", samples=512)
    model = default_plan.checkpoint.config

    def within(gigabytes: float) -> MemoryEstimate:
        return estimate_memory(
            default_plan.units, settings, model, MemoryBudget(gpu=int(gigabytes * 1e9))
        )

    hidden = 512 * 2048 * 6144 * 2
    fast, middle, small = within(100), within(40), within(25)
    assert fast.placement.states == "device"
    assert (middle.placement.states, middle.placement.inputs) == ("host", "device")
    assert not middle.placement.experts_on_host
    assert small.placement.experts_on_host
    assert fast.placement.experts_at_once > small.placement.experts_at_once > 4
    assert middle.host - fast.host == hidden
    for estimate, most in ((fast, 100e9), (middle, 40e9), (small, 25e9)):
        assert estimate.gpu <= most
    smallest = within(8)
    assert (smallest.placement.states, smallest.placement.inputs) == ("host", "host")
    assert smallest.host - small.host == hidden
    assert smallest.gpu <= 8e9
    with pytest.raises(UsageError, match=r"--max-gpu-memory 3\.7 GiB is too little, .* 4\.1 GiB"):
        within(4)


def test_what_has_no_room_in_memory_lies_on_the_disk(default_plan: Plan) -> None:
    settings = Settings(device="cuda", dtype="bfloat16", samples=512)
    model = default_plan.checkpoint.config
    hidden = 512 * 2048 * 6144 * 2
    in_memory = disk_bytes(settings, model, Placement(1))
    for device, limits, inputs, more in (
        ("cuda", MemoryBudget(24 * GIB, 8 * GIB), "device", hidden),
        ("cuda", MemoryBudget(12 * GIB, 8 * GIB), "disk", 2 * hidden),
        ("cpu", MemoryBudget(host=28 * GIB), "device", hidden),
        ("cpu", MemoryBudget(host=16 * GIB), "disk", 2 * hidden),
    ):
        placed = replace(settings, device=device)
        memory = estimate_memory(default_plan.units, placed, model, limits)
        assert (memory.placement.states, memory.placement.inputs) == ("disk", inputs)
        assert memory.host <= (limits.host or 0)
        assert memory.gpu <= (limits.gpu or 0)
        assert disk_bytes(placed, model, memory.placement) == in_memory + more


@pytest.mark.parametrize(
    ("ranks", "own_sequences", "own_experts", "at_once"), [(2, 128, 128, 32), (3, 128, 86, 29)]
)
def test_ranks_share_sequences_and_experts(
    default_plan: Plan, ranks: int, own_sequences: int, own_experts: int, at_once: int
) -> None:
    """But each has the experts' input of all tokens, and in the end all quantized experts."""
    settings = Settings(device="cuda", dtype="bfloat16")
    model, units = default_plan.checkpoint.config, default_plan.units
    dealt = Ranks(0, ranks).shares(len(batches := expert_batches(256, 2048)))
    rows = [sum(b.stop - b.start for b in batches[s.start : s.stop]) for s in dealt]
    assert max(rows) == own_sequences
    assert max(map(len, Ranks(0, ranks).shares(256))) == own_experts

    sequence, packed = 2048 * 6144 * 2, 3 * 6144 * 2048 * 9 // 16
    alone = estimate_memory(units, settings, model)
    shared = estimate_memory(units, settings, model, ranks=ranks)
    assert shared.ranks == ranks
    assert alone.detail["hidden states"] == alone.detail["experts' input"] == 256 * sequence
    assert shared.detail["hidden states"] == own_sequences * sequence
    assert shared.detail["experts' input"] == 256 * sequence
    assert shared.detail["quantized experts"] == own_experts * packed
    # Four batches of 32 are 128, three of 29 nearly 86; seven of 37 nearly 256.
    assert (alone.placement.experts_at_once, shared.placement.experts_at_once) == (37, at_once)
    of_one = alone.detail["experts in work"] / 37
    assert shared.detail["experts in work"] == pytest.approx(at_once * of_one, abs=1)
    saved = (256 - own_sequences) * sequence + (256 - own_experts) * packed
    saved += alone.detail["experts in work"] - shared.detail["experts in work"]
    assert alone.gpu - shared.gpu == saved
    # With nothing else on the GPU, the exchange is the peak: the own part beside the whole.
    least = estimate_memory(units, settings, model, MemoryBudget(gpu=int(10e9)), ranks)
    both = (256 + own_sequences) * sequence
    assert least.detail["experts' input"] == both
    assert least.gpu == both + least.detail["routing"]
    assert least.detail["hidden states in host memory"] == both
    waiting = (256 + own_experts) * packed
    assert least.detail["experts in host memory"] == waiting * 4 // 3


def test_streams_are_narrow_where_host_memory_is(default_plan: Plan) -> None:
    settings = Settings(device="cuda", dtype="bfloat16")
    model, units = default_plan.checkpoint.config, default_plan.units
    free = estimate_memory(units, settings, model)
    assert free.placement.streams == LAYERS_ON_GPU
    narrow = estimate_memory(units, settings, model, MemoryBudget(host=free.host - 1))
    assert narrow.placement.streams == ON_GPU
    assert narrow.host < 4e9 < free.host
    assert narrow.gpu == free.gpu
    assert estimate_memory(units, settings, model, ranks=2).placement.streams == LAYERS_ON_GPUS


def test_memory_of_a_data_free_run_counts_what_is_on_its_way(default_plan: Plan) -> None:
    model = default_plan.checkpoint.config
    on_gpu = estimate_memory(default_plan.units, Settings(method="rtn", device="cuda:1"), model)
    assert on_gpu.host == TORCH["cuda"] + ON_GPU.read_ahead + COPYING + ON_GPU.write_behind
    # Ten linears of an expert, or one of attention, four times in float32.
    assert 4 * 4 * 6144 * 16384 <= on_gpu.gpu < 3e9
    on_cpu = estimate_memory(default_plan.units, Settings(method="rtn"), model)
    assert on_cpu.gpu == 0
    assert on_cpu.detail["read ahead"] == ON_CPU.read_ahead
    assert on_cpu.host < 1.5e9
    one = estimate_memory(default_plan.units[-1:], Settings(method="rtn"), model)
    assert one.detail["written behind"] == ON_CPU.write_behind
    none = estimate_memory((), Settings(method="rtn"), model)
    assert none.host == TORCH["cpu"]


def test_planning_never_imports_torch(glm52: Checkpoint) -> None:
    code = (
        "import sys\n"
        "from halfbyte.core import Settings\n"
        "from halfbyte.formats.checkpoint import open_checkpoint\n"
        "from halfbyte.quantize.plan import make_plan\n"
        "from halfbyte.quantize.recipe import load_recipe\n"
        f"checkpoint = open_checkpoint({str(glm52.path)!r})\n"
        "plan = make_plan(checkpoint, load_recipe('glm-5'), Settings())\n"
        "print(plan.bytes_out, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("450904205312 []\n", "")


# Decisions in detail, on the tiny checkpoint.


def test_outputs_of_the_default_recipe(tiny: Path) -> None:
    plan = plan_of(tiny)
    stored = outputs(plan)
    source = plan.checkpoint.tensors
    expert = "model.layers.1.mlp.experts.0.down_proj"
    rows, columns = source[f"{expert}.weight"].shape
    assert stored[f"{expert}.weight_packed"] == ("I32", (rows, columns // 8))
    assert stored[f"{expert}.weight_scale"] == ("BF16", (rows, columns // 32))
    assert stored[f"{expert}.weight_shape"] == ("I64", (2,))
    attention = "model.layers.1.self_attn.o_proj.weight"
    assert source[attention].dtype == "F8_E4M3"
    assert stored[attention] == ("BF16", source[attention].shape)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert stored[bias] == ("F32", source[bias].shape)
    assert not any(name.endswith("scale_inv") for name in stored)
    assert plan.bytes_out == sum(shard.nbytes - len(shard.header) for shard in plan.shards)


def test_kept_fp8_is_renamed_and_nothing_else(tiny: Path) -> None:
    plan = plan_of(tiny, "glm-5-fp8-rest")
    stored, source = outputs(plan), plan.checkpoint.tensors
    module = "model.layers.1.self_attn.kv_a_proj_with_mqa"
    scale = source[f"{module}.weight_scale_inv"]
    assert stored[f"{module}.weight"] == ("F8_E4M3", source[f"{module}.weight"].shape)
    assert stored[f"{module}.weight_scale"] == (scale.dtype, scale.shape)
    assert stored["model.layers.0.self_attn.indexer.wk.weight"][0] == "BF16"
    (tensor,) = (t for t in plan.tensors if t.module == module)
    assert (tensor.action, list(tensor.source.parts)) == ("copy", ["weight", "scale"])


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("source", ["fp8", "bf16", "ct-channel", "ct-block"])
def test_every_recipe_fits_every_source(tmp_path: Path, model_type: Any, source: Source) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    folder = write_tiny(tmp_path / "t", model_type=model_type, source=source)
    for recipe in recipe_names():
        plan = plan_of(folder, recipe)
        QuantizationConfig.model_validate(plan.quantization_config)
        layers = [f"layers.{i}" for i in range(5)]
        units = dict.fromkeys(unit.name.partition(" part ")[0] for unit in plan.units)
        assert list(units) == ["embedding", *layers, "head"]
        quantized = {t.name for t in plan.tensors if t.action == "quantize"}
        experts = {t.name for t in plan.tensors if ".experts." in t.name}
        assert experts <= quantized
        assert (quantized == experts) == (recipe != "experts-and-dense")
        # SGLang fuses shared experts in GLM-4.x whatever their precision.
        warned = model_type == "glm4_moe" and recipe != "experts-and-dense"
        flags = ["--disable-shared-experts-fusion" in warning for warning in plan.warnings]
        assert flags == ([True] if warned else [])


def test_kimi_with_a_vision_part(tmp_path: Path) -> None:
    folder = write_kimi(tmp_path)
    plan = plan_of(folder)
    assert plan.warnings == ()
    assert [u.name for u in plan.units] == [
        "embedding",
        *(f"layers.{i}" for i in range(4)),
        "head",
        "other",
    ]
    assert {t.action for t in plan.units[-1].tensors} == {"copy"}
    assert plan.quantization_config is not None
    assert plan.quantization_config["ignore"][-3:] == [
        "language_model.lm_head",
        "re:mm_projector.*",
        "re:vision_tower.*",
    ]


def write_kimi(folder: Path) -> Path:
    """The tiny DeepSeek-V3 as the language model of a larger one, as Kimi-K2.5 is stored."""
    import torch
    from safetensors.torch import load_file, save_file

    source = write_tiny(folder / "text", model_type="deepseek_v3", mtp=False, shards=1)
    tensors = load_file(source / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    for name in ("vision_tower.blocks.0.wqkv.weight", "mm_projector.linear_1.weight"):
        renamed[name] = torch.zeros(8, 8, dtype=torch.bfloat16)
    target = folder / "kimi"
    target.mkdir()
    save_file(renamed, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    quantization = config.pop("quantization_config")
    whole = {"model_type": "kimi_k25", "text_config": config, "quantization_config": quantization}
    (target / "config.json").write_text(json.dumps(whole))
    return target


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    plan = plan_of(write_tiny(tmp_path / "t", tied=True))
    assert not any("lm_head" in name for name in outputs(plan))
    assert plan.quantization_config is not None
    assert plan.quantization_config["ignore"][-1] == "lm_head"


def test_already_int4_is_copied_or_refused(tmp_path: Path, tiny: Path) -> None:
    first = plan_of(tiny)
    folder = write_headers(tmp_path / "int4", first, [o for t in first.tensors for o in t.outputs])
    again = plan_of(folder)
    assert {t.action for t in again.tensors} == {"copy"}
    assert outputs(again) == outputs(first)
    assert again.quantization_config == first.quantization_config
    with pytest.raises(RecipeError, match="stored as INT4 g32, the recipe asks for INT4 g64"):
        plan_of(folder, load_recipe("glm-5", 64))


def write_headers(folder: Path, plan: Plan, tensors: list[OutputTensor]) -> Path:
    """A checkpoint of these tensors with the plan's config and without data."""
    folder.mkdir()
    (shard,) = lay_out_shards(tensors, 2**40)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(shard.header)
        file.truncate(shard.nbytes)
    config = dict(plan.checkpoint.config) | {"quantization_config": plan.quantization_config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_copying_everything_keeps_an_fp8_model(tiny: Path) -> None:
    plan = plan_of(tiny, Recipe("same", "", (Rule(".*", "copy", "r"),)))
    assert plan.bytes_out == plan.checkpoint.nbytes
    assert plan.quantization_config is not None
    assert plan.quantization_config["format"] == "float-quantized"


def test_dequantizing_everything_leaves_no_config(tiny: Path) -> None:
    plan = plan_of(tiny, Recipe("plain", "", (Rule(".*", "dequantize", "r"),)))
    assert plan.quantization_config is None
    assert {t.outputs[0].dtype for t in plan.tensors} == {"BF16", "F32"}


# Warnings and refusals.


def test_group_size_must_divide(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "t", moe_intermediate=96)
    with pytest.raises(RecipeError, match=r"down_proj\.weight has 96 .*columns.*64"):
        plan_of(folder, load_recipe("glm-5", 64))


def test_dropping_the_mtp_layer_is_warned_of(tiny: Path) -> None:
    drop = Rule(r"model\.layers\.4\..*", "drop", "r")
    experts = load_recipe("glm-5").rules[0]
    (warning,) = plan_of(tiny, Recipe("m", "", (drop, experts, REST))).warnings
    assert "of the MTP layer are dropped" in warning


def test_an_announced_but_absent_mtp_layer_is_warned_of(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "t", mtp=False)
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (warning,) = plan_of(folder).warnings
    assert "announces 1 MTP layer" in warning


def test_few_calibration_tokens_are_warned_of(tiny: Path) -> None:
    few = plan_of(tiny, method="gptq", samples=1, sequence_length=64).warnings
    assert few == (
        "an expert will see 32 calibration tokens on average, fewer than its 128 input features; "
        "more --samples would help",
    )
    assert plan_of(tiny, method="gptq", samples=4, sequence_length=64).warnings == ()


def test_windows_longer_than_the_model_was_made_for_are_warned_of(tiny: Path) -> None:
    (warning,) = plan_of(tiny, method="gptq", samples=4, sequence_length=1025).warnings
    assert "windows of 1,025 tokens are longer than the 1,024" in warning
    assert plan_of(tiny, method="rtn", sequence_length=1025).warnings == ()


def test_what_only_sglang_cannot_load_is_a_warning(tiny: Path, tmp_path: Path) -> None:
    """Latent projections that are INT4 already, as others have published them."""
    first = plan_of(tiny)
    tensors: list[OutputTensor] = []
    for t in first.tensors:
        is_latent = t.module.endswith(("q_a_proj", "kv_a_proj_with_mqa"))
        tensors += output_tensors(t.name, t.source.shape, INT4) if is_latent else t.outputs
    tensors.sort(key=lambda o: -DTYPE_BYTES[o.dtype])  # alignment, for one shard
    plan = plan_of(write_headers(tmp_path / "int4", first, tensors), "glm-5-fp8-rest")
    refused = (
        "is stored as INT4 g32, and the server refuses it: "
        "fused_qkv_a_proj_with_mqa cannot be INT4 g32"
    )
    assert plan.warnings == (
        "SGLang: model.layers.0.self_attn.fused_qkv_a_proj_with_mqa (and 3 more such modules) "
        + refused,
        f"SGLang: model.decoder.self_attn.fused_qkv_a_proj_with_mqa {refused}",
    )


def test_a_router_kept_fp8_loads_nowhere(tmp_path: Path) -> None:
    """No server asks the config about the router: it must be a plain weight."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = write_tiny(tmp_path / "t", shards=1)
    tensors = load_file(folder / "model.safetensors")
    gate = "model.layers.1.mlp.gate.weight"
    tensors[gate] = tensors[gate].to(torch.float8_e4m3fn)
    tensors[f"{gate}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RecipeError, match=r"neither server could .* vLLM: .*mlp\.gate"):
        plan_of(folder)


def test_config_counts_must_be_numbers(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "t")
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": "four"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_hidden_layers is 'four'"):
        plan_of(folder)


# Fingerprint.


def test_fingerprint_follows_what_decides_the_bytes(tiny: Path, tmp_path: Path) -> None:
    import shutil

    base = plan_of(tiny)
    assert plan_of(tiny).fingerprint == base.fingerprint
    moved = shutil.copytree(tiny, tmp_path / "moved")
    assert plan_of(moved).fingerprint == base.fingerprint
    changed = [
        plan_of(tiny, seed=1),
        plan_of(tiny, load_recipe("glm-5", 64)),
        plan_of(tiny, "glm-5-fp8-rest"),
        plan_of(write_tiny(tmp_path / "other", experts=3)),
        make_plan(base.checkpoint, base.recipe, RTN, max_shard_bytes=100_000),
    ]
    assert len({plan.fingerprint for plan in (base, *changed)}) == 1 + len(changed)


def test_scheme_of_the_plan_is_the_rules(tiny: Path) -> None:
    plan = plan_of(tiny)
    for tensor in plan.tensors:
        rule = plan.recipe.rules[tensor.rule]
        assert tensor.scheme == (rule.scheme if tensor.action == "quantize" else None)
        assert tensor.scheme in (None, INT4)
