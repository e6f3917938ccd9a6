"""Memory of the host that a GPU reads and writes by itself, beside other work."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

THREADS = 8


def lock_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Lock the pages of a large host tensor for as long as it lives, so that a GPU copies faster.

    torch's own page-locked memory comes in powers of two: 13 GB would take 17.
    """
    import torch

    # By many threads, whatever torch may use: the driver would ask for the pages with one.
    parts = tensor.view(-1).view(torch.uint8).tensor_split(THREADS)
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(torch.Tensor.zero_, parts))
    runtime = torch.cuda.cudart()
    place = tensor.data_ptr()
    if int(runtime.cudaHostRegister(place, tensor.nbytes, 0)) == 0:
        weakref.finalize(tensor, runtime.cudaHostUnregister, place)
    return tensor
