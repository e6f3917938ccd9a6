"""Every kernel that is launched compiles with NVRTC, which refuses what host compilers allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfbyte.errors import DependencyError
from halfbyte.kernels import jit, w4a16

HOPPER, EARLIER = "sm_90a", "sm_80"


def kernels() -> Iterator[tuple[str, str, str]]:
    """Source, the line behind it, and the architecture."""
    for architecture in (HOPPER, EARLIER):
        for source in sorted(path.stem for path in jit.SOURCES.glob("*.cu")):
            yield source, "", architecture
        yield "w4a16", "ADD_EXPERTS(Element::bfloat16)", architecture
        tiles = {
            "dense": w4a16._DENSE_TILES,
            "gate_up": w4a16._GATE_UP_TILES,
            "down": w4a16._DOWN_TILES,
        }
        for entry, chosen in tiles.items():
            for number, tile in enumerate(chosen):
                fits = tile if architecture == HOPPER else replace(tile, wide=False)
                dtype = (torch.bfloat16, torch.float16)[number % 2]
                scales = (4, 2, 1)[number % 3]
                yield "w4a16", fits.instance(entry, dtype, scales), architecture


def test_nvrtc_compiles_every_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    try:
        jit._nvrtc()
    except DependencyError:
        pytest.skip("no NVRTC; it comes with torch for CUDA, or with nvidia-cuda-nvrtc")
    for source, instance, architecture in kernels():
        image = jit.compiled(f"{jit.read_source(source)}\n{instance}".encode(), architecture)
        assert image.startswith(b"\x7fELF"), (source, instance, architecture)
        assert not instance or b".text.run" in image
