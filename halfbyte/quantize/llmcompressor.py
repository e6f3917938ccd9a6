"""llm-compressor's own GPTQ solver behind our types: a user's alternative, and a test's oracle."""

from __future__ import annotations

import importlib.metadata

import torch

from halfbyte.core import Scheme
from halfbyte.errors import CalibrationError, DependencyError

VERSION = "0.14.0.1"
"""The solver is not public interface, so only the release it was read in is called."""


def gptq(
    weights: torch.Tensor,
    hessians: torch.Tensor,
    scales: torch.Tensor,
    scheme: Scheme,
    *,
    dampening: float = 0.01,
    block_size: int = 128,
) -> tuple[torch.Tensor, tuple[str | None, ...]]:
    """Codes int8 [B, N, K] and, per Hessian, None or the fallback "rtn".

    Arguments as for `halfbyte.quantize.gptq`, with the Hessians [H, K, K] in place of the factor;
    columns are ordered as llm-compressor does by default ("static"). Raises DependencyError when
    llm-compressor is missing or another release, CalibrationError when what it returns is not on
    the grid that the scales span.
    """
    _require_version()
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    shared = hessians.shape[0], -1
    grouped = scheme.group_size is not None
    arguments = QuantizationArgs(
        num_bits=scheme.bits,
        type="int",
        symmetric=True,
        strategy="group" if grouped else "channel",
        group_size=scheme.group_size if grouped else None,
        actorder="static",
    )
    scale = scales.float().reshape(*shared, scales.shape[-1])
    # It works in the tensors it is given, hence the copies.
    result: tuple[torch.Tensor, ...] = quantize_weight(
        weights.reshape(*shared, weights.shape[-1]).clone(),
        hessians.clone(),
        scale,
        torch.zeros_like(scale),
        None,
        arguments,
        blocksize=block_size,
        percdamp=dampening,
    )
    values, _, failed = result
    by_group = values.unflatten(-1, (scales.shape[-1], -1))
    codes = (by_group / scale.unsqueeze(-1)).round()
    off_grid = (codes * scale.unsqueeze(-1) != by_group) | (
        (codes < scheme.code_min) | (codes > scheme.code_max)
    )
    if bool(off_grid.any()):
        raise CalibrationError(
            f"llm-compressor's solver returned {int(off_grid.sum())} of {off_grid.numel()} "
            "values that are not a code times its scale",
            hint="use our own solver: --engine halfbyte",
        )
    fallbacks = tuple("rtn" if failure else None for failure in failed.tolist())
    return codes.to(torch.int8).reshape(weights.shape), fallbacks


def _require_version() -> None:
    try:
        found = importlib.metadata.version("llmcompressor")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found != VERSION:
        raise DependencyError(
            f"--engine llmcompressor needs llmcompressor {VERSION}, "
            + (f"found {found}" if found else "which is not installed"),
            hint=f"pip install llmcompressor=={VERSION}, or use --engine halfbyte",
        )
