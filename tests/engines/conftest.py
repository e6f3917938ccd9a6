"""Tests on the engines' own classes: `make test-engines` runs them, each in its environment.

Nothing is collected where the engine is not installed, as in `make test`.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

collect_ignore_glob = [f"test_{name}*.py" for name in ("sglang", "vllm") if find_spec(name) is None]

if find_spec("sglang") is not None:
    # torchvision's operators are built for torch with CUDA. It asks for these two when it is
    # imported, also with torch for the CPU; nothing here calls them.
    OPERATORS = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
