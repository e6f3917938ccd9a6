"""Reading tensors: against safetensors' own reading and an independent float64 decoder."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from halfbyte.core import DTYPE_BYTES, Checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.formats import int4, shards
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.shards import TORCH_DTYPES, Checks, ShardReader
from halfbyte.formats.weights import logical_weights
from halfbyte.testing.architectures import ModelType
from halfbyte.testing.tiny import Source, write_checkpoint, write_sparse_shard, write_tiny

Q_A = "model.layers.0.self_attn.q_a_proj.weight"
NORM = "model.norm.weight"


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors as the safetensors library reads them."""
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def decoded_float64(folder: Path, block: int = 128) -> dict[str, torch.Tensor]:
    """Every logical weight in float64; each element looks up its scale by its own indices."""
    stored = stored_tensors(folder)
    decoded = {}
    for name, tensor in stored.items():
        if name.endswith(("_scale", "_scale_inv")):
            continue
        decoded[name] = tensor.to(torch.float64)
        for suffix in ("_scale", "_scale_inv"):
            scale = stored.get(name + suffix)
            if scale is None:
                continue
            channel = scale.shape == (tensor.shape[0], 1)
            row = torch.arange(tensor.shape[0])
            column = torch.arange(tensor.shape[1])
            row, column = (row, column * 0) if channel else (row // block, column // block)
            decoded[name] *= scale.to(torch.float64)[row[:, None], column[None, :]]
    return decoded


def assert_decodes(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    expected = decoded_float64(folder)
    weights = logical_weights(checkpoint)
    assert set(weights) == set(expected)
    with ShardReader(checkpoint) as reader:
        for name, stored in weights.items():
            value = reader.read_weight(stored)
            assert value.dtype == torch.float32
            assert torch.equal(value, expected[name].to(torch.float32)), name
            in_bf16 = reader.read_weight(stored, torch.bfloat16)
            assert torch.equal(in_bf16, value.to(torch.bfloat16)), name


# What is right


@pytest.mark.parametrize("source", ["fp8", "bf16", "ct-channel", "ct-block"])
@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "glm4_moe", "deepseek_v3"])
def test_each_source_decodes(tmp_path: Path, model_type: ModelType, source: Source) -> None:
    assert_decodes(write_tiny(tmp_path, model_type=model_type, source=source, experts=2))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("source", ["ct-channel", "ct-block"])
def test_transformers_and_compressed_tensors_decode_the_same(
    tmp_path: Path, source: Source
) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    checkpoint = open_checkpoint(write_tiny(tmp_path, source=source, experts=2))
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.bfloat16,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
    )
    theirs = {name: tensor.detach() for name, tensor in model.named_parameters()}
    weights = logical_weights(checkpoint)
    compared = 0
    with ShardReader(checkpoint) as reader:
        for name, stored in weights.items():
            if stored.encoding != "fp8" or ".layers.4." in name:  # no MTP layer in transformers
                continue
            module, _, projection = name.removesuffix(".weight").rpartition(".")
            if ".experts." in name:  # fused: gate above up, stacked by expert
                experts, _, number = module.rpartition(".")
                fused = theirs[f"{experts}.{'down_proj' if 'down' in name else 'gate_up_proj'}"]
                expected = fused[int(number)]
                if projection != "down_proj":
                    expected = expected.chunk(2)[projection == "up_proj"]
            else:
                expected = theirs[name]
            assert torch.equal(reader.read_weight(stored, torch.bfloat16), expected), name
            compared += 1
    assert compared == 4 * 5 + 3 * 2 + 3 + 3 * 9  # attention, indexers, dense, experts


def test_trained_checkpoint_decodes(testbed: Path) -> None:
    assert_decodes(testbed / "glm-nano-fp8")


def test_stored_tensors_are_those_of_safetensors(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    expected = stored_tensors(tiny)
    with ShardReader(checkpoint) as reader:
        for name, info in checkpoint.tensors.items():
            tensor = reader.read(info)
            assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
            assert tensor.is_contiguous()
            assert torch.equal(
                tensor.flatten().view(torch.uint8), expected[name].flatten().view(torch.uint8)
            )


def test_every_dtype(tmp_path: Path) -> None:
    assert set(TORCH_DTYPES) == set(DTYPE_BYTES)
    tensors = {}
    for name, dtype in TORCH_DTYPES.items():
        assert dtype.itemsize == DTYPE_BYTES[name]
        count = 6 * dtype.itemsize
        raw = torch.arange(count, dtype=torch.uint8) % 2 if name == "BOOL" else torch.arange(count)
        tensors[name] = raw.to(torch.uint8).view(dtype).reshape(2, 3)
    tensors["scalar"], tensors["none"] = torch.tensor(2.5), torch.empty(0, 3)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, {}, [tensors]))
    with ShardReader(checkpoint) as reader:
        for name, tensor in tensors.items():
            read = reader.read(checkpoint.tensors[name])
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert read.flatten().view(torch.uint8).tolist() == (
                tensor.flatten().view(torch.uint8).tolist()
            )


@pytest.mark.parametrize("rows", [(0, 96), (0, 1), (95, 96), (17, 40), (5, 5)])
def test_ranges_of_rows(tiny: Path, rows: tuple[int, int]) -> None:
    checkpoint = open_checkpoint(tiny)
    info = checkpoint.tensors[Q_A]
    with ShardReader(checkpoint) as reader, safe_open(tiny / info.shard, "pt") as file:
        expected = file.get_slice(Q_A)[rows[0] : rows[1]]
        part = reader.read(info, rows)
        assert part.shape == expected.shape == (rows[1] - rows[0], 128)
        assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("rows", [(-1, 4), (4, 3), (0, 97)])
def test_rows_that_are_not_there(tiny: Path, rows: tuple[int, int]) -> None:
    checkpoint = open_checkpoint(tiny)
    with ShardReader(checkpoint) as reader, pytest.raises(ValueError, match="not within"):
        reader.read(checkpoint.tensors[Q_A], rows)


def test_reads_that_come_back_short_are_continued(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux returns at most 2 GiB a call; here it returns 1000 bytes."""
    checkpoint = open_checkpoint(tiny)
    info = checkpoint.tensors[Q_A]
    with ShardReader(checkpoint) as reader:
        whole = reader.read(info)
        preadv = os.preadv
        monkeypatch.setattr(
            os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:1000]], offset)
        )
        assert torch.equal(reader.read(info).view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("group_size", [32, None])
def test_int4_decodes(tmp_path: Path, group_size: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (24, 64), dtype=torch.int8, generator=generator)
    groups = 64 // group_size if group_size else 1
    scales = torch.rand(24, groups, generator=generator).to(torch.bfloat16)
    scales[::2] *= -1  # as AutoRound writes them
    tensors = int4.stored(Q_A, int4.pack(codes), scales)
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group" if group_size else "channel",
        "group_size": group_size,
    }
    config = {"quantization_config": {"config_groups": {"group_0": {"weights": weights}}}}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, config, [tensors]))
    with ShardReader(checkpoint) as reader:
        value = reader.read_weight(logical_weights(checkpoint)[Q_A])
    expected = codes.double() * scales.double().repeat_interleave(64 // groups, dim=1)
    assert torch.equal(value, expected.to(torch.float32))


# Resources


def test_threads_share_a_reader(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one handle for three shards, threads keep evicting what others read."""
    monkeypatch.setattr(shards, "MAX_OPEN_SHARDS", 1)
    checkpoint = open_checkpoint(tiny)
    weights = list(logical_weights(checkpoint).values()) * 4
    with ShardReader(checkpoint) as reader:
        expected = [reader.read_weight(stored) for stored in weights]
        with ThreadPoolExecutor(8) as pool:
            values = list(pool.map(reader.read_weight, weights))
    assert all(torch.equal(value, other) for value, other in zip(values, expected, strict=True))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts handles in /proc")
def test_handles_are_bounded_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_OPEN_SHARDS", 4)
    checkpoint = open_checkpoint(write_tiny(tmp_path, shards=12))
    assert len(checkpoint.shards) == 12
    gc.collect()
    before = open_files()
    with ShardReader(checkpoint) as reader:
        for info in checkpoint.tensors.values():
            reader.read(info)
            assert open_files() <= before + 4
        assert open_files() == before + 4
    assert open_files() == before


@pytest.mark.skipif(sys.platform != "linux", reason="measures resident memory in Linux units")
def test_reading_holds_one_tensor_in_memory(tmp_path: Path) -> None:
    """A memory map of this 512 MiB shard would be resident at the end."""
    shapes = {f"t{i}": ("F32", (1 << 22,)) for i in range(32)}
    write_sparse_shard(tmp_path / "model.safetensors", shapes)
    (tmp_path / "config.json").write_text("{}")
    code = f"""
import resource
from halfbyte.formats.checkpoint import open_checkpoint
from halfbyte.formats.shards import ShardReader
checkpoint = open_checkpoint({str(tmp_path)!r})
with ShardReader(checkpoint) as reader:
    tensors = list(checkpoint.tensors.values())
    reader.read(tensors[0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for info in tensors:
        reader.read(info)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True
    )
    assert int(run.stdout) * 1024 < 40 << 20


# What is wrong


def refuses(folder: Path, name: str, *fragments: str, checkpoint: Checkpoint | None = None) -> None:
    checkpoint = checkpoint or open_checkpoint(folder)
    stored = logical_weights(checkpoint)[name]
    with ShardReader(checkpoint) as reader, pytest.raises(CheckpointError) as caught:
        reader.read_weight(stored)
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


def poke(folder: Path, name: str, index: int, value: bytes) -> str:
    """Overwrite element `index` of a stored tensor; the name of its shard."""
    info = open_checkpoint(folder).tensors[name]
    with (folder / info.shard).open("r+b") as file:
        file.seek(info.begin + index * len(value))
        file.write(value)
    return info.shard


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_in_an_fp8_weight(tiny_copy: Path, byte: int) -> None:
    shard = poke(tiny_copy, Q_A, 3 * 128 + 5, bytes([byte]))
    refuses(tiny_copy, Q_A, f"{Q_A} in {shard} decodes to nan at [3, 5]")


@pytest.mark.parametrize(("bits", "value"), [(0x7FC0, "nan"), (0x7F80, "inf"), (0xFF80, "-inf")])
def test_plain_weight_that_is_not_finite(tiny_copy: Path, bits: int, value: str) -> None:
    shard = poke(tiny_copy, NORM, 7, bits.to_bytes(2, "little"))
    refuses(tiny_copy, NORM, f"{NORM} in {shard} decodes to {value} at [7]")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(float("nan"), "nan"), (float("inf"), "inf"), (0.0, "0.0"), (-0.5, "-0.5")],
)
def test_scale_that_is_not_positive_and_finite(tiny_copy: Path, value: float, shown: str) -> None:
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    raw = torch.tensor([value]).view(torch.uint8).numpy().tobytes()
    shard = poke(tiny_copy, f"{name}_scale_inv", 1, raw)
    refuses(tiny_copy, name, f"{name}_scale_inv in {shard} decodes to {shown} at [1, 0]")


def test_product_that_overflows(tiny_copy: Path) -> None:
    raw = torch.tensor([1e38]).view(torch.uint8).numpy().tobytes()
    poke(tiny_copy, f"{Q_A}_scale_inv", 0, raw)
    refuses(tiny_copy, Q_A, Q_A, "inf at [")


def test_int4_shape_that_contradicts_its_columns(tmp_path: Path) -> None:
    codes, scales = torch.zeros(16, 64, dtype=torch.int8), torch.ones(16, 2, dtype=torch.bfloat16)
    tensors = int4.stored(Q_A, int4.pack(codes), scales)
    tensors[Q_A + "_shape"] = torch.tensor([16, 60])
    config = {
        "quantization_config": {
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}
        }
    }
    folder = write_checkpoint(tmp_path, config, [tensors])
    refuses(folder, Q_A, Q_A, "[16, 60]", "[16, 64]")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [truncate, grow, remove])
def test_shard_that_changes_after_opening(tiny_copy: Path, change: Callable[[Path], None]) -> None:
    checkpoint = open_checkpoint(tiny_copy)
    info = checkpoint.tensors[Q_A]
    change(tiny_copy / info.shard)
    refuses(
        tiny_copy, Q_A, f"{Q_A}, bytes {info.begin}..{info.end}", info.shard, checkpoint=checkpoint
    )


def test_shard_that_shrinks_while_it_is_open(tiny_copy: Path) -> None:
    checkpoint = open_checkpoint(tiny_copy)
    info = checkpoint.tensors[NORM]
    with ShardReader(checkpoint) as reader:
        reader.read(info)
        os.truncate(tiny_copy / info.shard, info.end - 3)
        with pytest.raises(CheckpointError, match=f"{NORM}, bytes .* it ends at byte"):
            reader.read(info)


def test_checks_wait_until_they_are_settled(tiny_copy: Path) -> None:
    """And name the first that was read, not the first in the file."""
    first, second = "model.layers.1.mlp.experts.1.up_proj", "model.layers.1.mlp.experts.0.up_proj"
    for name in (first, second):
        poke(tiny_copy, f"{name}.weight", 5, b"\x7f")
    checkpoint = open_checkpoint(tiny_copy)
    weights, checks = logical_weights(checkpoint), Checks()
    with ShardReader(checkpoint) as reader:
        sound = reader.read_weight(weights[NORM], checks=checks)
        for name in (first, second):
            read = reader.read_weight(weights[f"{name}.weight"], checks=checks)
            assert int(torch.isnan(read).sum()) == 1
        assert bool(torch.isfinite(sound).all())
        with pytest.raises(CheckpointError, match=rf"{first}.weight in .* to nan at \[0, 5\]"):
            checks.settle()
        checks.settle()  # of nothing
