"""From a checkpoint to a `Checkpoint`, reading nothing but headers.

A safetensors file is 8 bytes (little-endian length of the header), a JSON object that gives
each tensor's dtype, shape and byte range, and then the data, without gaps or overlaps
(https://github.com/huggingface/safetensors#format). Input is not trusted: every size is
checked against the file before anything is allocated, and no name leaves the folder.

What is asked of a folder is asked of a repository, too: `formats.hub` has the same checks made of
what the Hub lists and of headers that it reads over the network.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from halfbyte.core import DTYPE_BYTES, Checkpoint, TensorInfo
from halfbyte.errors import CheckpointError
from halfbyte.formats.folder import (
    CONFIG_FILE,
    GATE_FILE,
    INDEX_FILE,
    REPORT_FILE,
    RUN_FILE,
)

SINGLE_FILE = "model.safetensors"

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""
MAX_COUNT = 2**63 - 1
MAX_DIMENSIONS = 64

SIDE_SUFFIXES = frozenset({".jinja", ".json", ".model", ".py", ".tiktoken", ".txt"})
SIDE_NAMES = frozenset({"LICENSE", "LICENSE.md", "NOTICE"})
PICKLE_SUFFIXES = frozenset({".bin", ".ckpt", ".pt", ".pth"})


class Header(NamedTuple):
    """What a shard says of itself."""

    tensors: Mapping[str, TensorInfo]
    """In the order of their data."""
    nbytes: int
    """Size of the file."""


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Describe the checkpoint in folder `path` by its config, index and shard headers alone.

    The index and the headers must agree in both directions. A lone `model.safetensors` needs
    no index. Raises `CheckpointError` for anything missing, damaged or contradictory.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    config = read_json_object(folder / CONFIG_FILE)
    present = {entry.name for entry in folder.iterdir() if entry.is_file()}
    weight_map = None
    if (folder / INDEX_FILE).exists():
        weight_map = read_weight_map(folder / INDEX_FILE)
    names = shard_names(str(folder), weight_map, present)
    headers = {shard: read_header(folder / shard) for shard in names}
    tensors, shards = merged(str(folder), weight_map, headers)
    return Checkpoint(folder, config, tensors, shards, side_files(present))


def merged(
    place: str, weight_map: Mapping[str, str] | None, headers: Mapping[str, Header]
) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """All tensors of a checkpoint at `place`, and its shards with their sizes.

    Raises `CheckpointError` when index and headers disagree, or when there are no tensors.
    """
    tensors: dict[str, TensorInfo] = {}
    for shard, header in headers.items():
        if weight_map is not None:
            _require_agreement(weight_map, shard, header.tensors)
        tensors |= header.tensors
    if weight_map is not None and len(tensors) != len(weight_map):
        name = next(name for name in weight_map if name not in tensors)
        raise CheckpointError(
            f"the index places {_shown(name)} in {weight_map[name]}, whose header lacks it "
            f"({len(weight_map)} tensors in the index, {len(tensors)} in the headers)"
        )
    if not tensors:
        raise CheckpointError(f"{place} holds no tensors")
    return tensors, {shard: header.nbytes for shard, header in headers.items()}


def read_header(path: Path) -> Header:
    """The header of a file. Raises `CheckpointError` as `parse_header` does."""
    try:
        with path.open("rb") as file:
            # From the start on, and in order, as a file is read.
            size = os.fstat(file.fileno()).st_size
            return parse_header(path.name, size, lambda begin, end: file.read(end - begin))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def parse_header(shard: str, size: int, read: Callable[[int, int], bytes]) -> Header:
    """The header of a shard of `size` bytes; `read` gives its bytes from a first to a last.

    Raises `CheckpointError` unless the byte ranges of its tensors tile the file exactly.
    """
    if size < 8:
        raise CheckpointError(f"{shard} is {size} bytes long, too short for a header")
    length = int.from_bytes(read(0, 8), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{shard} declares a header of {length} bytes; the file has {size}, "
            f"and a header may take {MAX_HEADER_BYTES}",
            hint="the shard is truncated or not safetensors; download it again",
        )
    start = 8 + length
    header = _parse_object(read(8, start), shard)
    header.pop("__metadata__", None)
    tensors = [_tensor_info(name, entry, shard, start) for name, entry in header.items()]
    tensors.sort(key=attrgetter("begin", "end"))
    _require_tiling(tensors, shard, start, size)
    return Header({tensor.name: tensor for tensor in tensors}, size)


def _tensor_info(name: str, entry: Any, shard: str, start: int) -> TensorInfo:
    """Check one header entry by itself. Offsets in the header count from `start`."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        integers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(
            f"{shard}: the header entry of {_shown(name)} is not dtype, shape and data_offsets"
        ) from None
    if not name or not name.isprintable():
        raise CheckpointError(f"{shard}: {_shown(name)} is not a tensor name")
    if type(dtype) is not str or dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{shard}: {name} has dtype {_shown(dtype)}; known are {', '.join(DTYPE_BYTES)}"
        )
    # Bounded before they are multiplied: a product of huge numbers takes forever.
    if (
        type(shape) is not list
        or len(shape) > MAX_DIMENSIONS
        or {*map(type, integers)} != {int}
        or min(integers) < 0
        or max(integers) > MAX_COUNT
    ):
        raise CheckpointError(
            f"{shard}: {name} has shape {_shown(shape)} and data_offsets {_shown([begin, end])}; "
            f"both must be lists of whole numbers from 0 to 2**63-1, at most {MAX_DIMENSIONS} long"
        )
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    # An empty tensor has no bytes to bound its other dimensions, so those are bounded here.
    if expected != end - begin or (expected == 0 and math.prod(filter(None, shape)) > MAX_COUNT):
        raise CheckpointError(
            f"{shard}: {name} is {dtype} {_shown(shape)}, {_shown(expected)} bytes, "
            f"but its data_offsets {_shown([begin, end])} span {_shown(end - begin)}"
        )
    return TensorInfo(name, dtype, tuple(shape), shard, start + begin, start + end)


def _require_tiling(tensors: Iterable[TensorInfo], shard: str, start: int, size: int) -> None:
    """Byte ranges, sorted, must cover the data from `start` to `size` without gap or overlap."""
    position, previous = start, "the header"
    for tensor in tensors:
        if tensor.begin != position:
            fault = "overlaps" if tensor.begin < position else "leaves a gap after"
            raise CheckpointError(
                f"{shard}: {tensor.name} at bytes {tensor.begin}..{_shown(tensor.end)} {fault} "
                f"{previous}, which ends at {position}"
            )
        if tensor.end > size:
            raise CheckpointError(
                f"{shard}: {tensor.name} ends at byte {_shown(tensor.end)}, "
                f"but the file has {size} bytes",
                hint="the shard is truncated; download it again",
            )
        position, previous = tensor.end, tensor.name
    if position != size:
        raise CheckpointError(f"{shard}: data ends at byte {position}, but the file has {size}")


def read_weight_map(index: Path) -> Mapping[str, str]:
    """Tensor name -> shard. Raises `CheckpointError` for names that are no file of the folder."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{INDEX_FILE} has no weight_map object")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{INDEX_FILE}: weight_map must map tensor names to file names")
    for shard in set(weight_map.values()):
        if not _is_shard_name(shard):
            raise CheckpointError(
                f"{INDEX_FILE} names the shard {_shown(shard)}, "
                "which is not a .safetensors file name inside the folder"
            )
    return weight_map


def shard_names(
    place: str, weight_map: Mapping[str, str] | None, present: Collection[str]
) -> list[str]:
    """The shards of a checkpoint at `place`, where the files `present` are; a lone
    `model.safetensors` needs no index. Raises `CheckpointError` when one of them is missing."""
    if weight_map is None:
        names = [SINGLE_FILE]
    else:
        names = sorted(set(weight_map.values()))
        if SINGLE_FILE in present and SINGLE_FILE not in names:
            raise CheckpointError(
                f"{place} holds both {INDEX_FILE} and a {SINGLE_FILE} that the index does not name",
                hint="loaders differ in which one they take; move the wrong one away",
            )
    _require_shards(place, names, present)
    return names


def _is_shard_name(name: str) -> bool:
    return (
        name.isprintable()
        and name.endswith(".safetensors")
        and not name.startswith(".")
        and not {"/", "\\", ":"} & set(name)
    )


def _require_shards(place: str, names: list[str], present: Collection[str]) -> None:
    missing = [name for name in names if name not in present]
    if not missing:
        return
    if names == [SINGLE_FILE]:
        shards = [name for name in sorted(present) if name.endswith(".safetensors")]
        pickles = [name for name in sorted(present) if Path(name).suffix in PICKLE_SUFFIXES]
        if shards:
            raise CheckpointError(
                f"{place} holds {len(shards)} safetensors files ({shards[0]}, ...) "
                f"but no {INDEX_FILE}",
                hint=f"download {INDEX_FILE} as well",
            )
        if pickles:
            raise CheckpointError(
                f"{place} holds only pickled weights ({pickles[0]}), "
                "which can run code when read, so they are never opened",
                hint="convert the checkpoint to safetensors with its own tools first",
            )
        raise CheckpointError(f"{place} holds no safetensors files")
    raise CheckpointError(
        f"{len(missing)} of {len(names)} shards are missing from {place}, first {missing[0]}",
        hint="resume the download: hf download REPO --local-dir DIR",
    )


def _require_agreement(
    weight_map: Mapping[str, str], shard: str, found: Mapping[str, TensorInfo]
) -> None:
    for name in found:
        if weight_map.get(name) != shard:
            where = f"places it in {weight_map[name]}" if name in weight_map else "does not name it"
            raise CheckpointError(f"{shard} holds {name}, but the index {where}")


def read_json_object(path: Path) -> dict[str, Any]:
    """A file with one JSON object. Raises `CheckpointError` for anything else."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is not a file of at most {MAX_HEADER_BYTES} bytes")
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return _parse_object(text, path.name)


def _parse_object(text: bytes, file: str) -> dict[str, Any]:
    """Parse a JSON object in which no key occurs twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for i, key in enumerate(keys) if key in keys[:i])
            raise CheckpointError(f"{file}: the key {_shown(twice)} occurs twice")
        return result

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {_shown(parsed)}")
    return parsed


def side_files(present: Iterable[str]) -> tuple[str, ...]:
    """Files that belong to the model besides its weights.

    Python files are among them: the tokenizer of Kimi-K2 is one. They are copied, never run.
    """
    return tuple(
        sorted(
            name
            for name in present
            if (Path(name).suffix in SIDE_SUFFIXES or name in SIDE_NAMES)
            and name not in (CONFIG_FILE, REPORT_FILE, RUN_FILE, GATE_FILE)
            and not name.endswith(".index.json")
            and not name.startswith(".")
        )
    )


def _shown(value: Any, limit: int = 80) -> str:
    """A value from the file, short and in one line, fit for a message."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # integers of thousands of digits do not print
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= limit else text[: limit - 3] + "..."
