"""What a bug report needs to know about a machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

from halfbyte import __version__

PACKAGES = (
    "torch",
    "transformers",
    "compressed-tensors",
    "llmcompressor",
    "safetensors",
    "huggingface_hub",
    "lm-eval",
    "numpy",
)
"""Packages whose version can change a result or the way it fails."""


def environment_record() -> dict[str, Any]:
    """Versions, GPUs and variables that a bug report needs. Imports torch."""
    import torch

    return {
        "halfbyte": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith("HALFBYTE_")},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
