"""The processes that share a run, one to a GPU, as `torchrun` starts them.

All compute, rank 0 reports. What they exchange goes through here, and in an order that does not
depend on how many there are. Without `torchrun` there is one rank and nothing to exchange.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halfbyte.env import torchrun
from halfbyte.errors import RankError

if TYPE_CHECKING:
    import torch

PATIENCE = datetime.timedelta(days=1)
"""How long a rank waits for the others, which may have more left to do when a run is resumed. One
that has ended is not waited for: `torchrun` then ends all."""
_PIECE_BYTES = 1 << 28
"""Of host memory that passes through a GPU at a time."""


def even_parts(total: int, count: int) -> list[range]:
    """`total` things in order, in `count` parts as even as whole things can be."""
    return [range(total * i // count, total * (i + 1) // count) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the run. Exchanges raise RankError when another has ended."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that reports, and makes the shards a model."""
        return self.rank == 0

    def shares(self, total: int) -> list[range]:
        """`total` things dealt to the ranks in order, as evenly as whole things can be."""
        return even_parts(total, self.count)

    def complete(self, tensor: torch.Tensor, shares: Sequence[range]) -> None:
        """Give every rank all rows of `tensor`; each has filled in those of its share."""
        for rank, share in enumerate(shares):
            self.broadcast(tensor[share.start : share.stop], rank)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give every rank what rank `source` has in `tensor`, which is contiguous."""
        if self.count == 1 or tensor.numel() == 0:
            return
        import torch
        import torch.distributed as dist

        # As bytes, since not every library that moves them knows every dtype.
        data = tensor.view(-1).view(torch.uint8)
        with _explained():
            if data.is_cpu and dist.get_backend() == "nccl":
                for piece in data.split(_PIECE_BYTES):
                    moved = piece.cuda()
                    dist.broadcast(moved, src=source)
                    piece.copy_(moved)
            else:
                dist.broadcast(data, src=source)

    def everyone(self, value: Any) -> list[Any]:
        """What each rank has for `value`, in the order of ranks."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.count
        with _explained():
            dist.all_gather_object(values, value)
        return values

    def of_first(self, value: Any) -> Any:
        """What rank 0 has for `value`."""
        if self.count == 1:
            return value
        import torch.distributed as dist

        values = [value]
        with _explained():
            dist.broadcast_object_list(values, src=0)
        return values[0]


def local_device(device: str) -> str:
    """The GPU of this rank, where a run asks for GPUs."""
    launch = torchrun()
    if launch is None or not device.startswith("cuda"):
        return device
    return f"cuda:{launch.local_rank}"


@contextmanager
def joined(device: str, *, tensors: bool = True) -> Iterator[Ranks]:
    """Join the other ranks for a while; alone when `torchrun` started none.

    Without `tensors` to exchange a GPU has no part in it, and the end of a rank is noticed at once.
    """
    if torchrun() is None:
        yield Ranks()
        return
    import torch
    import torch.distributed as dist

    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu and tensors else "gloo", timeout=PATIENCE)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise RankError(
            f"another process of the run has ended, or is not heard of: {reason}",
            hint="its own message says why; what is finished is kept: repeat the command with "
            "--resume",
        ) from error
