"""INT4 pack-quantized against golden bytes and compressed-tensors' own compressor."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings

from halfbyte.core import OutputTensor, QuantizedWeight, Scheme
from halfbyte.errors import CheckpointError, RecipeError
from halfbyte.formats.int4 import output_tensors, pack, quantization_args, stored, unpack
from halfbyte.kernels.reference import dequantize_int4

NAME = "model.layers.3.mlp.experts.0.up_proj.weight"
MODULE = "model.layers.3.mlp.experts.0.up_proj"
SCHEMES = [Scheme(group_size=size) for size in (32, 64, 128, None)]


def quantized(rows: int, columns: int, scheme: Scheme, seed: int = 0) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (rows, columns), dtype=torch.int8, generator=generator)
    scales = torch.rand(rows, scheme.groups(columns), generator=generator) * 0.1 + 0.001
    return QuantizedWeight(codes, scales.to(torch.bfloat16), error=0.0)


def as_stored(weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    return stored(NAME, pack(weight.codes), weight.scales)


def local(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{MODULE}."): tensor for name, tensor in tensors.items()}


def test_stored_bytes_are_the_published_ones() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8)[None]
    scales = torch.tensor([[1.0]], dtype=torch.bfloat16)
    tensors = local(stored(NAME, pack(codes), scales))
    assert list(tensors) == ["weight_packed", "weight_scale", "weight_shape"]
    written = {key: t.flatten().view(torch.uint8).numpy().tobytes() for key, t in tensors.items()}
    assert written["weight_packed"].hex() == "1032547698badcfe"
    assert written["weight_scale"].hex() == "803f"
    assert written["weight_shape"].hex() == "0100000000000000" + "1000000000000000"


@given(
    scheme=st.sampled_from(SCHEMES),
    rows=st.integers(1, 12),
    blocks=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_compressed_tensors_writes_and_reads_the_same(
    scheme: Scheme, rows: int, blocks: int, seed: int
) -> None:
    shape = (rows, 128 * blocks)
    weight = quantized(*shape, scheme, seed)
    ours = local(as_stored(weight))
    theirs_scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**quantization_args(scheme))
    )
    in_bf16 = dequantize_int4(weight.codes, weight.scales, torch.bfloat16)

    read = PackedQuantizationCompressor.decompress(ours, theirs_scheme)
    assert torch.equal(read["weight"], in_bf16)
    # Dividing the exact product by its scale gives the code back, so theirs must write ours.
    exact = dequantize_int4(weight.codes, weight.scales)
    state = {"weight": exact, "weight_scale": weight.scales.float()}
    written = PackedQuantizationCompressor.compress(state, theirs_scheme)
    assert torch.equal(written["weight_packed"], ours["weight_packed"])
    assert torch.equal(written["weight_shape"], ours["weight_shape"])
    assert written["weight_shape"].dtype == ours["weight_shape"].dtype

    codes, scales = unpack(ours, scheme)
    assert torch.equal(codes, weight.codes)
    assert torch.equal(scales, weight.scales)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_planned_outputs_are_what_is_stored(scheme: Scheme) -> None:
    shape = (24, 256)
    planned = output_tensors(NAME, shape, scheme)
    written = as_stored(quantized(*shape, scheme))
    spelling = {torch.int32: "I32", torch.bfloat16: "BF16", torch.int64: "I64"}
    assert planned == tuple(
        OutputTensor(name, spelling[tensor.dtype], tuple(tensor.shape))
        for name, tensor in written.items()
    )


def test_the_published_size_of_an_expert_matrix() -> None:
    """0.5625 bytes a weight at group 32, and 16 bytes of shape."""
    outputs = output_tensors(NAME, (2048, 6144), Scheme(group_size=32))
    assert sum(o.nbytes for o in outputs) == 2048 * 6144 * 0.5625 + 16


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_config_has_the_six_keys_every_reader_knows(scheme: Scheme) -> None:
    arguments = quantization_args(scheme)
    assert set(arguments) == {
        "num_bits",
        "type",
        "symmetric",
        "strategy",
        "group_size",
        "dynamic",
    }
    parsed = QuantizationArgs(**arguments)  # refuses unknown keys and contradictions
    assert (parsed.num_bits, parsed.symmetric, parsed.group_size) == (4, True, scheme.group_size)
    assert parsed.strategy == ("group" if scheme.group_size else "channel")
    assert parsed.actorder is None


@pytest.mark.parametrize(
    ("name", "shape", "group_size", "numbers"),
    [
        (NAME, (16, 192), 128, ["192", "128"]),
        (NAME, (16, 20), 4, ["20", "8"]),
        (NAME, (16, 36), None, ["36", "8"]),
        (NAME, (4, 16, 64), 32, ["4, 16, 64"]),
        ("model.norm.weight", (64,), 32, ["64"]),
        ("model.layers.0.mlp.gate.e_score_correction_bias", (8, 64), 32, ["bias"]),
    ],
)
def test_what_cannot_be_stored_is_refused_with_both_numbers(
    name: str, shape: tuple[int, ...], group_size: int | None, numbers: list[str]
) -> None:
    with pytest.raises(RecipeError) as caught:
        output_tensors(name, shape, Scheme(group_size=group_size))
    assert name in str(caught.value)
    assert all(number in str(caught.value) for number in numbers)


def test_eight_bits_are_refused() -> None:
    with pytest.raises(RecipeError, match="INT8 g32"):
        output_tensors(NAME, (16, 64), Scheme(bits=8, group_size=32))


@pytest.mark.parametrize("code", [-9, 8])
def test_codes_out_of_range_are_refused_not_wrapped(code: int) -> None:
    weight = quantized(2, 32, Scheme(group_size=32))
    weight.codes[1, 5] = code
    with pytest.raises(ValueError, match=str(code)):
        pack(torch.stack([torch.zeros_like(weight.codes), weight.codes]))


def test_contradicting_parts_are_refused() -> None:
    scheme = Scheme(group_size=32)
    tensors = local(as_stored(quantized(4, 64, scheme)))
    with pytest.raises(CheckpointError, match=r"\[4, 63\].*\[4, 64\]"):
        unpack(tensors | {"weight_shape": torch.tensor([4, 63])}, scheme)
    with pytest.raises(CheckpointError, match=r"\[4, 2\].*\[4, 1\]"):
        unpack(tensors, Scheme(group_size=None))
