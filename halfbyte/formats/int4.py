"""INT4 `pack-quantized`, the storage format of compressed-tensors that vLLM and SGLang read.

A linear `<module>.weight` [N, K] becomes `<module>.weight_packed` I32 [N, K/8],
`<module>.weight_scale` BF16 [N, groups] and `<module>.weight_shape` I64 [2]. Symmetric only,
so there is no zero point. Pure functions: tensors in, tensors out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from halfbyte.core import OutputTensor, Scheme
from halfbyte.errors import CheckpointError, RecipeError

if TYPE_CHECKING:
    import torch

PACK_FACTOR = 8
"""Codes in one int32."""


def output_tensors(name: str, shape: tuple[int, ...], scheme: Scheme) -> tuple[OutputTensor, ...]:
    """The tensors that weight `name` [N, K] is stored as.

    Raises `RecipeError` when the scheme cannot store it: not a linear, not 4 bits, K not a
    multiple of 8 or of the group size.
    """
    if scheme.bits != 4 or len(shape) != 2 or not name.endswith(".weight"):
        raise RecipeError(
            f"{name} {list(shape)} cannot be stored as {scheme}: "
            "pack-quantized INT4 takes the two-dimensional weight of a linear"
        )
    rows, columns = shape
    for divisor, what in (
        (PACK_FACTOR, "codes of an int32"),
        (scheme.columns_per_group(columns), "columns of a group"),
    ):
        if columns % divisor:
            raise RecipeError(
                f"{name} has {columns} columns, which the {divisor} {what} do not divide",
                hint="choose a group size that divides it, or leave this tensor unquantized",
            )
    module = name.removesuffix(".weight")
    return (
        OutputTensor(f"{module}.weight_packed", "I32", (rows, columns // PACK_FACTOR)),
        OutputTensor(f"{module}.weight_scale", scheme.scale_dtype, (rows, scheme.groups(columns))),
        OutputTensor(f"{module}.weight_shape", "I64", (2,)),
    )


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes int8 [..., N, K], of one weight or of several, as int32 [..., N, K/8] on their device.

    Raises `ValueError` when they leave -8..7: a wrapped code would be a silent error of half the
    range.
    """
    if codes.is_cuda:
        from halfbyte.kernels.codes import pack_codes

        packed, outside = pack_codes(codes)
        if not outside:
            return packed
    from halfbyte.kernels.reference import pack_int4

    low, high = (int(bound) for bound in codes.aminmax())
    if low < -8 or high > 7:
        raise ValueError(f"codes span {low}..{high}, outside of -8..7")
    return pack_int4(codes)


def stored(name: str, packed: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """The stored tensors of weight `name` of packed codes int32 [N, K/8] and scales [N, groups],
    keyed by their full names."""
    import torch

    module = name.removesuffix(".weight")
    rows, words = packed.shape
    return {
        f"{module}.weight_packed": packed,
        f"{module}.weight_scale": scales,
        f"{module}.weight_shape": torch.tensor([rows, PACK_FACTOR * words], dtype=torch.int64),
    }


def unpack(
    tensors: Mapping[str, torch.Tensor], scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [N, K] and scales [N, groups] of one weight; the inverse of `stored`.

    `tensors` has the keys weight_packed, weight_scale and weight_shape. Raises
    `CheckpointError` when the three contradict each other or the scheme.
    """
    from halfbyte.kernels.reference import unpack_int4

    packed, scales = tensors["weight_packed"], tensors["weight_scale"]
    rows, columns = packed.shape[0], PACK_FACTOR * packed.shape[1]
    if tensors["weight_shape"].tolist() != [rows, columns]:
        raise CheckpointError(
            f"weight_shape says {tensors['weight_shape'].tolist()}, but weight_packed "
            f"{list(packed.shape)} holds {[rows, columns]}"
        )
    if tuple(scales.shape) != (rows, scheme.groups(columns)):
        raise CheckpointError(
            f"weight_scale has shape {list(scales.shape)}, but {scheme} on {[rows, columns]} "
            f"needs {[rows, scheme.groups(columns)]}"
        )
    return unpack_int4(packed, columns), scales


def quantization_args(scheme: Scheme) -> dict[str, Any]:
    """The `weights` entry of a config group: only the six keys that every reader knows.

    `actorder` is left out even when the solver orders columns: codes are stored in natural
    order, and some readers take its mere presence for a permuted layout.
    """
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if scheme.group_size is None else "group",
        "group_size": scheme.group_size,
        "dynamic": False,
    }
