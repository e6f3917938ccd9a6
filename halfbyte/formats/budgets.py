"""Bytes of host memory that reading ahead and writing behind may take, by what computes.

Without torch, so that a plan can count them. A CPU computes so much slower than disks read that
two weights ahead suffice; a GPU finishes an expert's weight in a millisecond, so what it has ahead
must last as long as the disk may stall.
"""

from __future__ import annotations

from collections.abc import Mapping

READ_AHEAD: Mapping[str, int] = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Bytes read and not yet asked for."""
WRITE_BEHIND: Mapping[str, int] = {"cpu": 32 << 20, "cuda": 512 << 20}
"""Bytes handed to the writer and not yet in the file."""
PIECE = 16 << 20
"""What large tensors are copied and written in."""


def budget(budgets: Mapping[str, int], device: str) -> int:
    """`device` is "cpu" or "cuda:<n>"."""
    return budgets[device.partition(":")[0]]
