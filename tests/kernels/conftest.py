"""CUDA sources without a GPU: the same text, compiled by the host's C++ compiler."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from halfbyte.kernels import jit, w4a16

SHIM = Path(__file__).with_name("host_cuda.h")


class HostKernel:
    """Called as `halfbyte.kernels.jit.Kernel` is, with tensors in host memory."""

    def __init__(self, launcher: ctypes._NamedFuncPointer, shared_bytes: int) -> None:
        self._launcher = launcher
        self._launcher.restype = ctypes.c_bool
        self._shared_bytes = shared_bytes

    def __call__(
        self,
        grid: tuple[int, ...],
        threads: int,
        *arguments: torch.Tensor | int | float,
        cluster: bool = False,
        early: bool = False,
    ) -> None:
        assert not cluster, "a cluster needs several programs at once"
        values = [_argument(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        sizes = (ctypes.c_uint * 3)(*(*grid, 1, 1)[:3])
        assert self._launcher(sizes, threads, ctypes.c_size_t(self._shared_bytes), pointers), (
            f"wrote beyond the {self._shared_bytes} bytes of shared memory it asks for"
        )


def host_source(
    data: int, device: torch.device, element: int, sizes: tuple[int, int, int],
    strides: tuple[int, int], box: tuple[int, int, int], *, swizzle: bool = False,
) -> ctypes.Array[ctypes.c_long]:  # fmt: skip
    """A `Source` of host_instructions.h."""
    return (ctypes.c_long * 17)(element, *sizes, *strides, *box, swizzle, *[0] * 6, data)


def _argument(value: torch.Tensor | int | float) -> ctypes._SimpleCData[object]:
    if isinstance(value, ctypes.Array):
        return value
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_float(value)


HostKernels = Callable[..., HostKernel]


@pytest.fixture(scope="session")
def host_kernel(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    """Stands in for `halfbyte.kernels.jit.kernel`; compiles every source that is asked for."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the CUDA sources with")
    folder = tmp_path_factory.mktemp("host_cuda")
    libraries: dict[tuple[str, str, bool], ctypes.CDLL] = {}

    def library(source: str, instance: str, hopper: bool) -> ctypes.CDLL:
        code = (jit.SOURCES / f"{source}.cu").read_text()
        code = re.sub(r'#include "(\w+)\.cuh"', r'#include "host_\1.h"', code) + instance
        names = re.findall(
            r'^extern "C" __global__ void __launch_bounds__\(.*?\) (\w+)\(', code, re.M
        )
        names += ["run"] * bool(instance)
        launchers = "".join(f"\nHOST_LAUNCHER({name})" for name in names)
        path = folder / f"{source}-{len(libraries)}.cpp"
        path.write_text(
            re.sub(r"extern __shared__ .*memory.*", "", code).replace("extern __shared__", "extern")
            + launchers
        )
        subprocess.run(
            [
                compiler, "-std=c++20", "-O2", "-ffp-contract=off", "-fno-strict-aliasing",
                "-shared", "-fPIC", "-pthread", "-w", f"-DHOPPER={hopper:d}",
                "-I", str(SHIM.parent), "-include", str(SHIM), str(path),
                "-o", str(path.with_suffix(".so")),
            ],
            check=True,
        )  # fmt: skip
        return ctypes.CDLL(str(path.with_suffix(".so")))

    def kernel(
        source: str, name: str, shared_bytes: int = 0, instance: str = "", *, hopper: bool = True
    ) -> HostKernel:
        key = source, instance, hopper
        if key not in libraries:
            libraries[key] = library(*key)
        return HostKernel(getattr(libraries[key], f"launch_{name}"), shared_bytes)

    return kernel


@pytest.fixture
def int4_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `halfbyte.kernels.w4a16` run where there is no GPU, on the host's kernels."""
    if torch.cuda.is_available():
        return
    w4a16._named.cache_clear()
    monkeypatch.setattr(w4a16, "source", host_source)
    monkeypatch.setattr(w4a16, "kernel", request.getfixturevalue("host_kernel"))
    monkeypatch.setattr(w4a16, "_capability", lambda device: 8)  # a cluster needs programs at once
    monkeypatch.setattr(w4a16, "_processors", lambda device: 3)
    monkeypatch.setattr(w4a16, "_shared_bytes", lambda device: 232448)


@pytest.fixture
def earlier_gpu(
    int4_kernels: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels as they are for GPUs before Hopper, on the host."""
    if torch.cuda.is_available():
        pytest.skip("the code for earlier GPUs is not compiled for this one")
    made = functools.partial(request.getfixturevalue("host_kernel"), hopper=False)
    monkeypatch.setattr(w4a16, "kernel", made)


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Triton's interpreter take BF16 in a matrix product for the numbers it stands for.

    It keeps them as their 16 bits, which it would multiply as integers.
    """
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip(
        "triton.runtime.interpreter", reason="Triton is not installed; it comes with torch on Linux"
    )
    import numpy as np
    import triton.language as tl

    def values(handle):  # type: ignore[no-untyped-def]
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, total, *_):  # type: ignore[no-untyped-def]
        product = np.matmul(values(a), values(b), dtype=total.data.dtype)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
