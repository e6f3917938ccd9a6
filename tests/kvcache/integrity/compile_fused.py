"""Compiles the tracker's kernels for a Hopper GPU, which needs none. Run by a test as a program of
its own, since Triton either interprets or compiles in a process."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from halfbyte.kvcache.integrity import fused
from halfbyte.kvcache.integrity.launch import Launcher

WIDE = {"pages", "rows", "lengths", "slots", "counts"}
"""Tensors that engines have in int64; the others are the state's, in int32."""
NUMBERS = {"count", "each", "most", "most_pages", "batch", "row", "start"}


def compiled(launcher: Launcher, numbers: set[str] = NUMBERS, **constants: Any) -> int:
    """Bytes of machine code."""
    kernel = launcher.function
    signature = {
        name: "constexpr" if name in constants
        else "i32" if name in numbers
        else "*i64" if name in WIDE
        else "*i32"
        for name in kernel.arg_names
    }  # fmt: skip
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])


def main() -> None:
    for enforce in (True, False):
        for acquire in (True, False):
            how = {"ACQUIRE": acquire, "GIVEN": not acquire, "ENFORCE": enforce, "LANES": 128}
            print(compiled(fused._bump, **how))
        for ragged in (True, False):
            how = {"SIZE": 64, "RAGGED": ragged, "ENFORCE": enforce, "PITCH": 336}
            how["GENERATIONS"] = enforce
            how["LANES"] = 128 if ragged else 1
            print(compiled(fused._extend, NUMBERS | {"pages"}, **how))
        for writes in (0, 1, 3):
            print(compiled(fused._check, **checks(writes, enforce)))
    for bind in (True, False):
        print(compiled(fused._rows, BIND=bind, LANES=128))
    for ragged in (True, False):
        print(compiled(fused._prefix, RAGGED=ragged, LANES=128, PITCH=336))
    print(compiled(fused._generations, LANES=128))
    print(compiled(fused._share, LANES=128, PITCH=336))
    print(compiled(fused._report, PADDING=0, GENERATIONS=True, SIZE=64))
    print(compiled(fused._report, PADDING=-1, GENERATIONS=False, SIZE=16))


def checks(writes: int, enforce: bool) -> dict[str, Any]:
    return {
        "PADDING": 0, "SIZE": 64, "SLOTS": True, "WRITES": writes,
        "LANES": 4 if writes == 3 else 1, "GENERATIONS": writes == 1, "ENFORCE": enforce,
        "ENTRIES": 512, "PITCH": 336, "TABLE_PITCH": 21504, "COLUMNS": 335, "MOST": 335,
        "PARTS": 1 if writes else 2,
    }  # fmt: skip


if __name__ == "__main__":
    main()
