"""Copies to and from a GPU beside what it computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class Transfers:
    """A GPU's second queue of work, for copies; on a CPU everything happens in the order of calls.

    What is made in one queue and used in the other is safe as long as each `follow`s or `wait`s
    where it has to, and tensors of the first queue that the second reads are `lent`.
    """

    def __init__(self, device: torch.device) -> None:
        # First in the queue of the GPU: each of its small steps would wait for a large product.
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None

    def __call__(self) -> AbstractContextManager[object]:
        """What is queued in a `with` block goes into the second queue."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def follow(self) -> None:
        """What the second queue gets from now on comes after all that the first has by now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def wait(self) -> None:
        """What the first queue gets from now on comes after all that the second has by now."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def lend(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory until the second queue has done what it has by now, and what it
        gets before the tensor is gone."""
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)
