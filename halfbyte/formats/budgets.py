"""How much reading ahead and writing behind do at once, and may hold of host memory.

Without torch, so that a plan can count them.
"""

from __future__ import annotations

from halfbyte.core import Streams

DISK_THREADS = 4
"""Requests under way at once. One does not keep a fast disk busy."""
SHARDS_ON_DISK = 3
"""Shards of a repository that lie on the disk at once, when none of them is to be kept."""
PIECE = 16 << 20
"""What large tensors are copied and written in."""
COPYING = 1 << 28
"""Bytes of weights that may be on their way to a GPU: asked for, so they no longer count as read
ahead, but still in memory of the host."""


ON_CPU = Streams()
"""A CPU computes so much slower than disks read that two weights ahead suffice."""
ON_GPU = Streams(512 << 20, 512 << 20)
"""A GPU finishes an expert's weight in a millisecond, so what it has ahead must last as long as the
disk may stall."""
LAYERS_ON_GPU = Streams(3 << 29, 1 << 30)
"""A batch of experts is read while the one before it is solved, and written while the next is."""
LAYERS_ON_GPUS = Streams(2 << 30, 3 << 30)
"""What other GPUs have quantized comes at once, and is written while the layer goes on."""


def page_locked(size: int) -> int:
    """Bytes that torch takes for a buffer of `size` page-locked bytes: a power of two."""
    return 1 << (size - 1).bit_length() if size else 0
