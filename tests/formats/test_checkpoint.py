"""Opening checkpoints: what is right, and one clear error for each way to be wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open

from halfbyte.core import Checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.formats.checkpoint import open_checkpoint, read_header
from halfbyte.testing.tiny import edit_header, write_safetensors, write_sparse_shard, write_tiny

FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
BIG = "lm_head.weight"  # BF16 [320, 128], the first tensor of the first shard by name


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def refuses(folder: Path, pattern: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=pattern) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return caught.value


# What is right


def assert_agrees_with_safetensors(checkpoint: Checkpoint) -> None:
    seen = set()
    for shard, size in checkpoint.shards.items():
        path = checkpoint.path / shard
        assert size == path.stat().st_size
        raw = path.read_bytes()
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                info, tensor = checkpoint.tensors[name], file.get_tensor(name)
                seen.add(name)
                assert (info.name, info.shard, info.shape) == (name, shard, tuple(tensor.shape))
                assert info.dtype == file.get_slice(name).get_dtype()
                stored = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                assert raw[info.begin : info.end] == stored
    assert seen == set(checkpoint.tensors)


def test_tensors_are_those_that_safetensors_finds(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    assert_agrees_with_safetensors(checkpoint)
    assert checkpoint.model_type == "glm_moe_dsa"
    assert checkpoint.nbytes == json.loads((tiny / INDEX).read_text())["metadata"]["total_size"]
    assert list(checkpoint.shards) == sorted(checkpoint.shards)


def test_trained_checkpoint(testbed: Path) -> None:
    checkpoint = open_checkpoint(testbed / "glm-nano-fp8")
    assert_agrees_with_safetensors(checkpoint)
    assert checkpoint.nbytes == 11925512


def test_single_shard_needs_no_index(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, shards=1)
    assert not (folder / INDEX).exists()
    checkpoint = open_checkpoint(str(folder))
    assert list(checkpoint.shards) == ["model.safetensors"]
    assert_agrees_with_safetensors(checkpoint)


def test_hub_cache_layout_of_symlinks(tiny: Path, tmp_path: Path) -> None:
    """`hf download` into the cache makes snapshots of links to ../../blobs."""
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    blobs = shutil.copytree(tiny, tmp_path / "blobs")
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("..", "..", "blobs", blob.name))
    assert open_checkpoint(snapshot).tensors == open_checkpoint(tiny).tensors


def test_side_files_travel_and_weights_do_not(tiny_copy: Path) -> None:
    expected = open_checkpoint(tiny_copy).side_files
    assert expected == (
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    )
    for name in ("LICENSE", "merges.txt", "tokenizer.model", "tokenization_kimi.py"):
        (tiny_copy / name).write_text("x")
    for name in (
        "README.md",
        ".gitattributes",
        ".hidden.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "halfbyte_report.json",
        "optimizer.pt",
        "extra.safetensors",
    ):
        (tiny_copy / name).write_text("x")
    (tiny_copy / "figures.json").mkdir()
    added = {"LICENSE", "merges.txt", "tokenizer.model", "tokenization_kimi.py"}
    assert set(open_checkpoint(tiny_copy).side_files) == {*expected, *added}


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    write_safetensors(
        tmp_path / "model.safetensors",
        {"none": torch.empty(0, 7), "scalar": torch.tensor(1.5), "one": torch.ones(1)},
    )
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert {n: (t.shape, t.nbytes) for n, t in checkpoint.tensors.items()} == {
        "none": ((0, 7), 0),
        "scalar": ((), 4),
        "one": ((1,), 4),
    }


def test_opening_does_not_import_torch(tiny: Path) -> None:
    code = (
        "import sys; from halfbyte.formats.checkpoint import open_checkpoint; "
        "from halfbyte.formats.weights import logical_weights; import halfbyte.formats.int4; "
        f"logical_weights(open_checkpoint({str(tiny)!r})); "
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_a_huge_shard_costs_only_its_header(tmp_path: Path) -> None:
    shapes = {f"model.layers.{i}.w": ("F8_E4M3", (1 << 20, 1 << 16)) for i in range(20)}
    write_sparse_shard(tmp_path / "model.safetensors", shapes)
    (tmp_path / "config.json").write_text("{}")
    tracemalloc.start()
    checkpoint = open_checkpoint(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert checkpoint.nbytes == 20 << 36
    assert peak < 1 << 20


# What is wrong: the folder and the index


def test_no_folder(tmp_path: Path) -> None:
    refuses(tmp_path / "absent", "is not a folder")


def test_no_config(tiny_copy: Path) -> None:
    (tiny_copy / "config.json").unlink()
    refuses(tiny_copy, r"no config\.json")


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("", "not valid JSON"),
        ('{"model_type": "a", "model_type": "b"}', "'model_type' occurs twice"),
        ("[" * 100_000, "not valid JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
    ids=["cut", "list", "empty", "duplicate", "deep", "long number"],
)
def test_bad_config(tiny_copy: Path, text: str, pattern: str) -> None:
    (tiny_copy / "config.json").write_text(text)
    refuses(tiny_copy, f"config.json.*{pattern}")


def test_config_that_is_not_utf8(tiny_copy: Path) -> None:
    (tiny_copy / "config.json").write_bytes(b'{"model_type": "\xff"}')
    refuses(tiny_copy, r"config\.json is not valid JSON")


@pytest.mark.parametrize("name", ["config.json", INDEX, FIRST])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_folders_and_pipes_in_the_place_of_files(
    tiny_copy: Path, name: str, make: Callable[[Path], None]
) -> None:
    (tiny_copy / name).unlink()
    make(tiny_copy / name)
    refuses(tiny_copy, f"{name}.* is not a file|missing.*{name}")


def test_missing_shard(tiny_copy: Path) -> None:
    (tiny_copy / SECOND).unlink()
    error = refuses(tiny_copy, f"1 of 3 shards are missing.*{SECOND}")
    assert "hf download" in str(error.hint)


def test_several_shards_without_an_index(tiny_copy: Path) -> None:
    (tiny_copy / INDEX).unlink()
    refuses(tiny_copy, f"3 safetensors files.*no {INDEX}")


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refuses(tmp_path, "no safetensors")
    (tmp_path / "pytorch_model.bin").write_text("x")
    refuses(tmp_path, "only pickled weights")


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "/tmp/outside.safetensors",
        "sub/inside.safetensors",
        "..\\outside.safetensors",
        "C:outside.safetensors",
        ".hidden.safetensors",
        "..",
        "",
        "pytorch_model.bin",
        "line\nbreak.safetensors",
        "\ud800.safetensors",
    ],
)
def test_index_that_leaves_the_folder(tiny_copy: Path, name: str) -> None:
    shutil.copy(tiny_copy / FIRST, tiny_copy.parent / "outside.safetensors")
    edit_json(tiny_copy / INDEX, lambda index: index["weight_map"].update({BIG: name}))
    refuses(tiny_copy, "not a .safetensors file name inside the folder")


@pytest.mark.parametrize("value", [None, 3, ["a"], {"a": "b"}])
def test_index_of_wrong_types(tiny_copy: Path, value: Any) -> None:
    edit_json(tiny_copy / INDEX, lambda index: index["weight_map"].update({BIG: value}))
    refuses(tiny_copy, "must map tensor names to file names")
    edit_json(tiny_copy / INDEX, lambda index: index.update(weight_map=value))
    if not isinstance(value, dict):
        refuses(tiny_copy, "no weight_map object")


def test_index_names_a_tensor_that_no_header_has(tiny_copy: Path) -> None:
    edit_json(tiny_copy / INDEX, lambda index: index["weight_map"].update(ghost=FIRST))
    refuses(tiny_copy, f"places 'ghost' in {FIRST}, whose header lacks it")


def test_header_has_a_tensor_that_the_index_does_not_name(tiny_copy: Path) -> None:
    edit_json(tiny_copy / INDEX, lambda index: index["weight_map"].pop(BIG))
    refuses(tiny_copy, f"{FIRST} holds {BIG}, but the index does not name it")


def test_index_and_header_disagree_on_the_shard(tiny_copy: Path) -> None:
    edit_json(tiny_copy / INDEX, lambda index: index["weight_map"].update({BIG: SECOND}))
    refuses(tiny_copy, f"{FIRST} holds {BIG}, but the index places it in {SECOND}")


def test_index_beside_another_whole_model(tiny_copy: Path) -> None:
    """transformers would load model.safetensors, vLLM the shards of the index."""
    shutil.copy(tiny_copy / FIRST, tiny_copy / "model.safetensors")
    refuses(tiny_copy, "both model.safetensors.index.json and a model.safetensors")


# What is wrong: a header


def test_truncated_shard(tiny_copy: Path) -> None:
    size = (tiny_copy / FIRST).stat().st_size
    os.truncate(tiny_copy / FIRST, size - 1)
    refuses(tiny_copy, f"{FIRST}: .* but the file has {size - 1} bytes")


def test_shard_truncated_within_its_header(tiny_copy: Path) -> None:
    os.truncate(tiny_copy / FIRST, 100)
    refuses(tiny_copy, f"{FIRST} declares a header of [0-9]+ bytes; the file has 100")
    os.truncate(tiny_copy / FIRST, 5)
    refuses(tiny_copy, f"{FIRST} is 5 bytes long")
    os.truncate(tiny_copy / FIRST, 0)
    refuses(tiny_copy, f"{FIRST} is 0 bytes long")


def test_shard_with_bytes_after_the_data(tiny_copy: Path) -> None:
    with (tiny_copy / FIRST).open("ab") as file:
        file.write(b"x")
    refuses(tiny_copy, f"{FIRST}: data ends at byte [0-9]+, but the file has [0-9]+")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**9, 100_000_001])
def test_header_larger_than_the_file_is_never_read(tiny_copy: Path, length: int) -> None:
    path = tiny_copy / FIRST
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    tracemalloc.start()
    refuses(tiny_copy, f"declares a header of {length} bytes")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_header_longer_than_the_safetensors_limit(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    (tmp_path / "config.json").write_text("{}")
    refuses(tmp_path, "a header may take 100000000")


def entry(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[BIG].update(changes)


def shift(name: str, begin: int, end: int) -> Callable[[dict[str, Any]], None]:
    def edit(header: dict[str, Any]) -> None:
        first, last = header[name]["data_offsets"]
        header[name]["data_offsets"] = [first + begin, last + end]

    return edit


@pytest.mark.parametrize(
    ("edit", "pattern"),
    [
        (entry(dtype="F4"), "dtype 'F4'; known are"),
        (entry(dtype=7), "dtype 7; known are"),
        (entry(dtype=["F32"]), "dtype .'F32'.; known are"),
        (entry(shape=[320, 127]), r"BF16 \[320, 127\], 81280 bytes.*span 81920"),
        (entry(shape=[-320, -128]), "whole numbers"),
        (entry(shape=[320.0, 128]), "whole numbers"),
        (entry(shape=[True, 40960]), "whole numbers"),
        (entry(shape=["320", "128"]), "whole numbers"),
        (entry(shape="ab"), "whole numbers|is not dtype, shape and data_offsets"),
        (entry(shape={}), "both must be lists"),
        (entry(shape=None), "is not dtype, shape and data_offsets"),
        (entry(shape=[2**63, 0]), "whole numbers"),
        (entry(shape=[2**62] * 64), "span 81920"),
        (entry(shape=[1] * 65), "at most 64 long"),
        (entry(data_offsets=[0]), "is not dtype, shape and data_offsets"),
        (entry(data_offsets=[0, 1, 2]), "is not dtype, shape and data_offsets"),
        (entry(data_offsets=5), "is not dtype, shape and data_offsets"),
        (entry(data_offsets=[81920, 0]), "span -81920"),
        (entry(data_offsets=[-81920, 0]), "whole numbers"),
        (entry(data_offsets=[10**30, 10**30 + 81920]), "whole numbers"),
        (entry(data_offsets=[10**15, 10**15 + 81920]), "gap"),
        (shift(BIG, 8, 8), "overlaps|leaves a gap after"),
        (lambda header: header.update({BIG: []}), "is not dtype, shape and data_offsets"),
        (lambda header: header.update({BIG: None}), "is not dtype, shape and data_offsets"),
        (lambda header: header.update({"": header.pop(BIG)}), "'' is not a tensor name"),
        (lambda header: header.update({"a\x1b[2J": header.pop(BIG)}), "is not a tensor name"),
        (lambda header: header.update({"\ud800": header.pop(BIG)}), "is not a tensor name"),
        (lambda header: header.pop(BIG), "gap|ends at byte"),
        (lambda header: header.update(twin=header[BIG]), "overlaps"),
        (lambda header: header.clear(), "data ends at byte"),
    ],
)
def test_damaged_header(
    tiny_copy: Path, edit: Callable[[dict[str, Any]], None], pattern: str
) -> None:
    edit_header(tiny_copy / FIRST, edit)
    refuses(tiny_copy, f"^{re.escape(FIRST)}.*({pattern})")


def test_empty_tensor_with_dimensions_that_no_memory_holds(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(2), "b": torch.empty(0)})
    (tmp_path / "config.json").write_text("{}")
    edit_header(
        tmp_path / "model.safetensors", lambda header: header["b"].update(shape=[0, 2**62, 4])
    )
    refuses(tmp_path, "model.safetensors: b is F32")


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{", b"\xff\xfe{}", b"[" * 5000])
def test_header_that_is_not_an_object(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_header(path)


def test_tensor_named_twice_in_a_header(tmp_path: Path) -> None:
    one = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = f"{{{one},{one}}}".encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    (tmp_path / "config.json").write_text("{}")
    refuses(tmp_path, "the key 'a' occurs twice")


def test_checkpoint_without_tensors(tmp_path: Path) -> None:
    write_sparse_shard(tmp_path / "model.safetensors", {})
    (tmp_path / "config.json").write_text("{}")
    refuses(tmp_path, "holds no tensors")


# Any header at all

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(0, 64)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["F32", "F8_E4M3", "BOOL", "F64"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
tensor_entry = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "U8", "BF16", "X"]) | junk},
    optional={
        "shape": st.lists(st.integers(-1, 6), max_size=3) | junk,
        "data_offsets": st.lists(st.integers(-4, 64), min_size=2, max_size=2) | junk,
    },
)


def opens_or_explains(folder: Path) -> None:
    """A valid Checkpoint or one CheckpointError; any other exception fails the test."""
    checkpoint, message = None, ""
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError as error:
        message = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert (checkpoint is None) == bool(message)
    assert "\n" not in message
    if checkpoint:
        assert checkpoint.nbytes < sum(checkpoint.shards.values())
        assert all(0 <= t.begin <= t.end for t in checkpoint.tensors.values())


@given(header=st.dictionaries(st.text(max_size=6), tensor_entry | junk, max_size=3), data=st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_json_header_opens_or_is_explained(
    tmp_path: Path, header: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(header).encode()
    size = data.draw(st.integers(0, 64))
    (tmp_path / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + bytes(size)
    )
    (tmp_path / "config.json").write_text("{}")
    opens_or_explains(tmp_path)


@given(data=st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_damage_to_a_good_header_opens_or_is_explained(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})
    (tmp_path / "config.json").write_text("{}")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        begin = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(begin, min(begin + 12, len(content))))
        content[begin:end] = data.draw(
            st.binary(max_size=12)
            | st.sampled_from([b"-", b"9" * 30, b"[", b"{", b'"', b",", b"1e9", b"null", b"0"])
        )
    path.write_bytes(content)
    opens_or_explains(tmp_path)


@given(field=st.sampled_from(["dtype", "shape", "data_offsets", "", "twin"]), value=junk)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_value_in_a_good_header_opens_or_is_explained(
    tmp_path: Path, field: str, value: Any
) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})
    (tmp_path / "config.json").write_text("{}")
    if field == "twin":
        edit_header(path, lambda header: header.update({"c": value}))
    elif field:
        edit_header(path, lambda header: header["a"].update({field: value}))
    else:
        edit_header(path, lambda header: header.update(a=value))
    opens_or_explains(tmp_path)
