"""Compiling CUDA sources at run time, with a compiler that is none."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte.errors import DependencyError
from halfbyte.kernels import jit

CODE = b"extern void f();"


class FakeCompiler:
    """NVRTC's functions; machine code is the source in capitals, with the options behind it."""

    def __init__(self, version: tuple[int, int] = (13, 0), log: str = "") -> None:
        self.version = version
        self.log = log
        """What is wrong with every source; nothing by default."""
        self.result = 0
        """What `nvrtcVersion` returns."""
        self.compiled: list[bytes] = []
        self.destroyed = 0

        def text(result: int) -> bytes:
            return f"error {result}".encode()

        self.nvrtcGetErrorString = text  # a function, which can be given a result type

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.version
        return self.result

    def nvrtcCreateProgram(self, program: Any, code: bytes, *_: Any) -> int:
        program._obj.value = 1
        self.source = code
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:
        assert len(options) == count
        self.image = self.source.upper() + b" " + b" ".join(options)
        self.compiled.append(self.source)
        return 6 if self.log else 0

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(self.log) + 1
        return 0

    def nvrtcGetProgramLog(self, program: Any, buffer: Any) -> int:
        ctypes.memmove(buffer, self.log.encode() + b"\0", len(self.log) + 1)
        return 0

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:
        size._obj.value = len(self.image)
        return 0

    def nvrtcGetCUBIN(self, program: Any, buffer: Any) -> int:
        ctypes.memmove(buffer, self.image, len(self.image))
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        self.destroyed += 1
        return 0


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCompiler:
    fake = FakeCompiler()
    monkeypatch.setattr(jit, "_nvrtc", lambda: fake)
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    return fake


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "kernels").iterdir())


def test_a_source_is_compiled_once(compiler: FakeCompiler, tmp_path: Path) -> None:
    image = jit.compiled(CODE, "sm_90")
    assert image == b"EXTERN VOID F(); --std=c++17 --gpu-architecture=sm_90"
    (file,) = cached(tmp_path)
    assert file.read_bytes() == image
    assert len(file.stem) == 64
    assert file.suffix == ".cubin"
    assert jit.compiled(CODE, "sm_90") == image
    assert (compiler.compiled, compiler.destroyed) == ([CODE], 1)


def test_all_that_goes_into_it_is_in_its_name(compiler: FakeCompiler, tmp_path: Path) -> None:
    jit.compiled(CODE, "sm_90")
    jit.compiled(CODE + b" ", "sm_90")
    jit.compiled(CODE, "sm_100")
    compiler.version = (13, 1)
    jit.compiled(CODE, "sm_90")
    assert len(compiler.compiled) == len(cached(tmp_path)) == 4


def test_a_crash_before_the_rename_leaves_nothing_that_is_read(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            jit.compiled(CODE, "sm_90")
    (partial,) = cached(tmp_path)
    assert partial.name.endswith(f".{os.getpid()}.partial")
    partial.write_bytes(b"half")
    image = jit.compiled(CODE, "sm_90")
    assert image.startswith(b"EXTERN")
    (file,) = cached(tmp_path)
    assert file.read_bytes() == image


def test_what_the_compiler_says_is_in_the_error(compiler: FakeCompiler, tmp_path: Path) -> None:
    compiler.log = "halfbyte.cu(3): error: expected a ;"
    with pytest.raises(AssertionError, match=r"NVRTC: halfbyte\.cu\(3\): error: expected a ;$"):
        jit.compiled(CODE, "sm_90")
    assert compiler.destroyed == 1
    assert not (tmp_path / "cache").exists()


def test_a_compiler_that_fails_says_why(compiler: FakeCompiler) -> None:
    compiler.result = 7
    with pytest.raises(RuntimeError, match="NVRTC: error 7"):
        jit.compiled(CODE, "sm_90")


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """CUDA 13 of which nothing is installed; the folder is where packages would be."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(jit.sys, "path", [])
    return tmp_path


def test_a_missing_compiler_is_named_with_its_package(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str, **_: Any) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(DependencyError, match=r"^libnvrtc\.so\.13, the compiler of CUDA") as caught:
        jit._nvrtc.__wrapped__()
    assert caught.value.hint == "pip install nvidia-cuda-nvrtc, for CUDA 13"


def test_the_compiler_beside_torch_is_loaded_behind_its_other_half(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = nowhere / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    names = ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"]
    for name in names:
        (folder / name).touch()
    loaded: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path, **_: loaded.append(path) or path)
    assert jit._nvrtc.__wrapped__() == str(folder / "libnvrtc.so.13")
    assert loaded == [str(folder / name) for name in names]


def test_arguments_are_pointers_ints_and_floats() -> None:
    assert jit._argument(3).value == 3
    assert isinstance(jit._argument(3), ctypes.c_int)
    assert isinstance(jit._argument(0.5), ctypes.c_float)
    with pytest.raises(ValueError, match="contiguous tensors on the GPU"):
        jit._argument(torch.zeros(2, 3))


class FakeDriver:
    """A driver with one function, which may have the shared memory that was asked for last."""

    def __init__(self) -> None:
        self.allowed = 48 << 10
        self.launched: list[int] = []

    def cuModuleGetFunction(self, function: Any, *_: Any) -> int:
        function._obj.value = 1
        return 0

    def cuFuncGetAttribute(self, value: Any, attribute: int, _: Any) -> int:
        assert attribute == 8
        value._obj.value = self.allowed
        return 0

    def cuFuncSetAttribute(self, _: Any, attribute: int, value: int) -> int:
        assert attribute == 8
        self.allowed = value
        return 0

    def cuLaunchKernelEx(self, launch: Any, *_: Any) -> int:
        launch = launch._obj
        self.launched.append(launch.shared_bytes)
        self.grid, self.threads = tuple(launch.grid), tuple(launch.threads)
        self.attributes = [
            (found.name, tuple(found.value.cluster) if found.name == 4 else found.value.flag)
            for found in launch.attributes[: launch.attribute_count]
        ]
        return 0 if launch.shared_bytes <= self.allowed else 1


def test_kernels_of_one_function_keep_their_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(jit, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    large, small = (jit.Kernel(ctypes.c_void_p(), "f", size) for size in (90_000, 70_000))
    for kernel in (large, small):
        kernel((1,), 128, 1)
    assert driver.launched == [90_000, 70_000]


def test_a_launch_says_what_the_driver_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(jit, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    kernel = jit.Kernel(ctypes.c_void_p(), "f", 64)
    kernel((5,), 128, 1)
    assert (driver.grid, driver.threads, driver.attributes) == ((5, 1, 1), (128, 1, 1), [])
    kernel((5, 4, 3), 32, 1, cluster=True, early=True)
    assert driver.grid == (5, 4, 3)
    # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert driver.attributes == [(4, (1, 4, 1)), (6, 1)]


def test_a_source_includes_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jit, "SOURCES", tmp_path)
    (tmp_path / "a.cu").write_text('int a;\n#include "b.cuh"\nint c;\n')
    (tmp_path / "b.cuh").write_text("int b;\n")
    assert jit.read_source("a") == "int a;\nint b;\n\nint c;\n"
