"""How a product is timed on the GPU, and held against float64 before."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from halfbyte.devices import resolve_device
from halfbyte.errors import DependencyError, HalfbyteError
from halfbyte.kernels.decode_time import Format
from halfbyte.kernels.fp8 import FP8
from halfbyte.kernels.jit import kernel

CACHE_BYTES = 256 << 20
"""More than a GPU caches."""
MOST_COPIES = 64
READ_BYTES = 4 << 30
"""What the speed of memory is measured with."""

Run = Callable[[int], torch.Tensor]
"""A product with the weights, or the routing, of that number."""


class Timer(Protocol):
    """Tells how long a run takes when `count` of them, numbered from 0, follow each other."""

    def __call__(self, run: Run, count: int) -> float:
        """In microseconds, of one."""


def graph_time(run: Run, count: int, repeat: int = 21) -> float:
    """The median over replays of a CUDA graph of all runs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(count):
            run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            run(i)
    graph.replay()
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return float(statistics.median(times))


@dataclass(frozen=True)
class Bench:
    """Where and how to measure. On a CPU plain torch stands in for the kernels of experts."""

    device: torch.device
    group_size: int | None = 32
    """Of INT4 weights; None for a scale to a row."""
    timer: Timer = graph_time
    cache_bytes: int = CACHE_BYTES
    read_bytes: int = READ_BYTES

    def copies(self, nbytes: float) -> int:
        """So many that together they are larger than the cache."""
        return max(1, min(MOST_COPIES, -(-self.cache_bytes // max(1, int(nbytes)))))

    def bandwidth(self) -> float:
        """Bytes a second of reading memory."""
        many = torch.ones(self.read_bytes // 4, dtype=torch.int32, device=self.device)
        return many.nbytes / self.timer(lambda _: read_all(many), 1) * 1e6

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normal values, made a matrix at a time: in float32 they take four times the memory."""
        made = torch.empty(shape, dtype=dtype, device=self.device)
        for part in made.flatten(0, -3) if made.dim() > 2 else (made,):
            part.copy_(torch.randn(part.shape, device=self.device))
        return made


def read_all(many: torch.Tensor) -> torch.Tensor:
    """Numbers that depend on every bit of `many` int32 [n], n a multiple of four, as fast as memory
    gives it."""
    if many.device.type == "cpu":
        return many.sum()
    processors = torch.cuda.get_device_properties(many.device).multi_processor_count
    parts = torch.empty(8 * processors, dtype=torch.int32, device=many.device)
    kernel("memory", "read_all")((len(parts),), 512, many, many.numel() // 4, parts)
    return parts


def decode_device(option: str) -> torch.device:
    """The GPU that `--device` means. Raises DependencyError where there is none, or one without
    FP8."""
    device = torch.device(resolve_device(option))
    if device.type != "cuda":
        raise DependencyError(
            f"decode time is measured on a GPU, and --device {option} is the CPU here",
            hint="run it where torch sees a GPU; `quantize env` lists them",
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise DependencyError(
            f"{torch.cuda.get_device_name(device)} has compute capability"
            f" {capability[0]}.{capability[1]}; FP8 products take 8.9",
            hint="use a GPU of the Ada or Hopper generation, or a later one",
        )
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def dtype_of(form: Format) -> torch.dtype:
    """Of activations beside weights of this format."""
    return FP8 if form == "fp8" else torch.bfloat16


def check_product(what: str, y: torch.Tensor, exact: torch.Tensor, limit: float) -> None:
    """Raises HalfbyteError for a result that is further from float64 than `limit`, relative."""
    error = float((y.double() - exact).norm() / exact.norm())
    if not error < limit:
        raise HalfbyteError(
            f"{what}: the result is off by {error:.2g} of its size, where {limit:.2g} may be"
            " rounding; its time would mean nothing",
            hint="report it with the versions that `quantize env` lists",
        )
