"""Plain rounding: each weight to the nearest code, on its own."""

from __future__ import annotations

import torch

from halfbyte.core import Scheme
from halfbyte.kernels.reference import nearest_codes


def round_to_nearest(weights: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes int8 [..., N, K] of `weights` float32 [..., N, K] for `scales` [..., N, groups].

    Half goes to even, as in compressed-tensors; what lies beyond the code range is clipped to it.
    """
    return nearest_codes(weights, scales, scheme.code_min, scheme.code_max)
