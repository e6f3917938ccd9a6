"""Compiles the CUDA sources of this package at first use, with the compiler that torch ships.

NVRTC turns a source under `cuda/` into machine code for the GPU at hand. The result is kept in a
cache folder under a name that holds the hash of all that went into it, so it is compiled once a
machine and never stale. The driver loads it; launches go to torch's current stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from halfbyte.env import cache_folder
from halfbyte.errors import DependencyError

SOURCES = Path(__file__).with_name("cuda")
_OPTIONS = ("--std=c++17",)


def kernel(source: str, name: str, shared_bytes: int = 0, instance: str = "") -> Kernel:
    """The function `name` of `cuda/<source>.cu` for the current device.

    `shared_bytes` of dynamic shared memory go to each program. `instance` is a line of code behind
    the source, which may make a function of a template. Raises DependencyError when torch comes
    without NVRTC, RuntimeError when the driver refuses the code.
    """
    return _kernel(source, name, shared_bytes, instance, torch.cuda.current_device())


@functools.cache
def _kernel(source: str, name: str, shared_bytes: int, instance: str, device: int) -> Kernel:
    return Kernel(_module(source, instance, device), name, shared_bytes)


class Kernel:
    """A function on the GPU, with so much shared memory."""

    def __init__(self, module: ctypes.c_void_p, name: str, shared_bytes: int) -> None:
        self._function = ctypes.c_void_p()
        self._shared_bytes = shared_bytes
        driver = _driver()
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
        # The limit is the function's, which all kernels of that name share: it only ever rises.
        most, limit = 8, ctypes.c_int()
        _check(driver.cuFuncGetAttribute(ctypes.byref(limit), most, self._function))
        if limit.value < shared_bytes:
            _check(driver.cuFuncSetAttribute(self._function, most, shared_bytes))

    def __call__(
        self,
        grid: tuple[int, ...],
        threads: int,
        *arguments: torch.Tensor | Source | int | float,
        cluster: bool = False,
        early: bool = False,
    ) -> None:
        """Launch on torch's current stream.

        Tensors go as pointers and must be contiguous, sources as they are, integers as C `int`,
        floats as C `float`.
        With `cluster` the programs along the second axis of the grid form a cluster. With `early`
        the kernel may begin before the one before it in the stream has ended: it waits itself for
        what that one writes.
        """
        values = [_argument(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        sizes = (*grid, 1, 1)[:3]
        attributes = (_Attribute * 2)()
        used = 0
        if cluster:
            attributes[used].name, attributes[used].value.cluster = _CLUSTER, (1, sizes[1], 1)
            used += 1
        if early:
            attributes[used].name, attributes[used].value.flag = _EARLY, 1
            used += 1
        stream = torch.cuda.current_stream().cuda_stream
        launch = _Launch(sizes, (threads, 1, 1), self._shared_bytes, stream, attributes, used)
        _check(_driver().cuLaunchKernelEx(ctypes.byref(launch), self._function, pointers, None))


Source = ctypes.Array[ctypes.c_char]
"""A `Source` of cuda/instructions.cuh."""


@functools.lru_cache(4096)
def source(
    data: int, device: torch.device, element: int, sizes: tuple[int, int, int],
    strides: tuple[int, int], box: tuple[int, int, int], *, swizzle: bool = False,
) -> Source:  # fmt: skip
    """A matrix at address `data`, for kernels to copy boxes of it.

    `element` is 2 or 8 bytes; `sizes` and `box` are in elements, the dimension whose elements
    follow each other first, `strides` of the others in bytes: multiples of 16, as `data` is.
    `swizzle` is for boxes of 128 bytes in the first dimension. GPUs without an engine for boxes
    get the address alone.
    """
    space = ctypes.create_string_buffer(_SOURCE_BYTES + 64)
    made = (ctypes.c_char * _SOURCE_BYTES).from_buffer(space, -ctypes.addressof(space) % 64)
    ctypes.c_uint64.from_buffer(made, _BOXES_BYTES).value = data
    if torch.cuda.get_device_capability(device) >= (9, 0):
        types, swizzle_128_bytes, promote_256_bytes = {2: 1, 8: 4}, 3, 3
        _check(
            _driver().cuTensorMapEncodeTiled(
                made, types[element], 3, ctypes.c_void_p(data), (ctypes.c_uint64 * 3)(*sizes),
                (ctypes.c_uint64 * 2)(*strides), (ctypes.c_uint32 * 3)(*box),
                (ctypes.c_uint32 * 3)(1, 1, 1), 0, swizzle_128_bytes * swizzle, promote_256_bytes,
                0,
            )
        )  # fmt: skip
    return made


_BOXES_BYTES, _SOURCE_BYTES = 128, 192
"""Of a CUtensorMap, at a multiple of 64 bytes, and of that and an address."""

_CLUSTER, _EARLY = 4, 6
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION and _PROGRAMMATIC_STREAM_SERIALIZATION."""


class _Value(ctypes.Union):
    _fields_ = (
        ("cluster", ctypes.c_uint * 3),
        ("flag", ctypes.c_int),
        ("size", ctypes.c_char * 64),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("name", ctypes.c_int), ("padding", ctypes.c_int), ("value", _Value))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


def _argument(
    value: torch.Tensor | Source | int | float,
) -> ctypes.c_void_p | ctypes.c_int | ctypes.c_float | Source:
    if isinstance(value, ctypes.Array):
        return value
    if isinstance(value, torch.Tensor):
        if not value.is_contiguous() or not value.is_cuda:
            raise ValueError(f"a kernel takes contiguous tensors on the GPU, not {value.shape}")
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_float(value)


def read_source(name: str) -> str:
    """The text of `cuda/<name>.cu`, with what it includes of that folder in its place."""

    def included(match: re.Match[str]) -> str:
        return (SOURCES / match[1]).read_text()

    return re.sub(
        r'^#include "(\w+\.cuh)"$', included, (SOURCES / f"{name}.cu").read_text(), flags=re.M
    )


@functools.cache
def _module(source: str, instance: str, device: int) -> ctypes.c_void_p:
    torch.cuda.current_stream(device)  # makes sure that the device has a context
    torch.zeros(1, device=f"cuda:{device}")
    major, minor = torch.cuda.get_device_capability(device)
    # The "a" allows what only this generation has: the tensor cores of four warps at once.
    architecture = f"sm_{major}{minor}" + "a" * (major == 9)
    image = compiled(f"{read_source(source)}\n{instance}".encode(), architecture)
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), image))
    return module


def compiled(code: bytes, architecture: str) -> bytes:
    """Machine code (cubin) of a CUDA C++ source, from the cache or freshly compiled into it."""
    options = (*_OPTIONS, f"--gpu-architecture={architecture}")
    compiler = _nvrtc()
    version = ctypes.c_int(), ctypes.c_int()
    _require(compiler.nvrtcVersion(*(ctypes.byref(part) for part in version)), compiler)
    recipe = repr((options, [part.value for part in version])).encode()
    digest = hashlib.sha256(recipe + b"\0" + code).hexdigest()
    path = cache_folder() / "kernels" / f"{digest}.cubin"
    if path.exists():
        return path.read_bytes()
    image = _compile(compiler, code, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may come to this at once; each writes its own file, and renaming is atomic.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(image)
    os.replace(partial, path)
    return image


def _compile(compiler: ctypes.CDLL, code: bytes, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    _require(
        compiler.nvrtcCreateProgram(ctypes.byref(program), code, b"halfbyte.cu", 0, None, None),
        compiler,
    )
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if compiler.nvrtcCompileProgram(program, len(options), flags):
            log = _read(compiler.nvrtcGetProgramLogSize, compiler.nvrtcGetProgramLog, program)
            raise AssertionError("NVRTC: " + log.decode(errors="replace").strip("\0"))
        return _read(compiler.nvrtcGetCUBINSize, compiler.nvrtcGetCUBIN, program)
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _read(size_of, read, program: ctypes.c_void_p) -> bytes:  # type: ignore[no-untyped-def]
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC: of the packages that came with torch, or of the system. A torch without CUDA takes any
    that is installed."""
    major = (torch.version.cuda or "*").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    folders = {Path(torch.__file__).parents[1] / "nvidia", *(Path(p) / "nvidia" for p in sys.path)}
    bundled = [str(f) for folder in sorted(folders) for f in sorted(folder.glob(f"*/lib/{name}"))]
    for path in bundled:
        # NVRTC opens its second half by name, which finds it only when it is loaded already.
        for half in sorted(Path(path).parent.glob(f"libnvrtc-builtins.so.{major}.*")):
            ctypes.CDLL(str(half), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(path)
    with contextlib.suppress(OSError):
        return ctypes.CDLL(name)
    raise DependencyError(
        f"{name}, the compiler of CUDA kernels, is not there",
        hint=f"pip install nvidia-cuda-nvrtc, for CUDA {major}",
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    """Raises RuntimeError for an error of the driver."""
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()} ({result})")


def _require(result: int, compiler: ctypes.CDLL) -> None:
    if result:
        compiler.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {compiler.nvrtcGetErrorString(result).decode()}")
