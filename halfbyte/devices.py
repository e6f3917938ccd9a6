"""Which device computes, and in which dtype, when the user leaves it to us."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from halfbyte.errors import DependencyError


def resolve_device(option: str) -> str:
    """`auto`, `cpu`, `cuda` or `cuda:<n>` to the device that is there: "cpu" or "cuda:<n>".

    Raises DependencyError for a GPU that this machine, or this build of torch, does not have.
    """
    import torch

    count = torch.cuda.device_count()
    if option == "auto":
        return "cuda:0" if count else "cpu"
    device = _numbered(option)
    if device != "cpu" and int(device.removeprefix("cuda:")) >= count:
        raise DependencyError(
            f"--device {option}: torch {torch.__version__} sees {count} GPUs",
            hint="use --device auto, or install a CUDA build of torch",
        )
    return device


def expected_device(option: str) -> str:
    """What `resolve_device` will say, as far as it can be told without importing torch."""
    if option == "auto":
        gpus = Path("/proc/driver/nvidia/gpus")
        return "cuda:0" if gpus.is_dir() and any(gpus.iterdir()) else "cpu"
    return _numbered(option)


def cpu_threads(device: str) -> int | None:
    """Threads torch computes with on the CPU (`OMP_NUM_THREADS`, or the cores); None on a GPU."""
    import torch

    return torch.get_num_threads() if device == "cpu" else None


def resolve_dtype(option: str, device: str) -> Literal["float32", "bfloat16"]:
    """`auto`, `float32` or `bfloat16` to the dtype of activations: bfloat16 where GPUs have it."""
    if option == "bfloat16" or (option == "auto" and device != "cpu"):
        return "bfloat16"
    return "float32"


def _numbered(option: str) -> str:
    return "cuda:0" if option == "cuda" else option
