"""What a quantization took and did: the one JSON file that each row's process leaves behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from halfbyte.quantize.pipeline import peak_host_bytes


@dataclass(frozen=True)
class Cost:
    """Of one quantization, from the first weight read to the last byte written."""

    seconds: float
    peak_host_bytes: int
    peak_gpu_bytes: int | None
    """As torch's allocator counts; None where the GPU was not used."""
    tokens_sha256: str | None
    """`text_sha256` of the calibration windows; None for a method that uses none."""
    solved: int | None
    """Linears for which the method reported a result of its own; None where it reports none."""
    fallbacks: Mapping[str, int]
    """What linears fell back to -> how many did."""

    @classmethod
    def now(
        cls,
        *,
        seconds: float,
        tokens_sha256: str | None,
        solved: int | None,
        fallbacks: Mapping[str, int],
    ) -> Self:
        """With the peaks of this process so far."""
        import torch

        gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return cls(seconds, peak_host_bytes(), gpu or None, tokens_sha256, solved, fallbacks)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        record: dict[str, Any] = json.loads(path.read_text())
        return cls(**record)
