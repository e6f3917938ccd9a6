"""Compiles the tracker's kernels for a Hopper GPU, which needs none. Run by a test as a program of
its own, since Triton either interprets or compiles in a process."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from halfbyte.kvcache.integrity import fused

WIDE = {"pages", "rows", "lengths", "slots", "items", "lefts"}
"""Tensors that engines have in int64; the others are the state's, in int32."""
NUMBERS = {"count", "total", "each", "most", "pitch", "table_pitch", "columns", "parts", "batch"}


def compiled(kernel: Any, numbers: set[str] = NUMBERS, **constants: Any) -> int:
    """Bytes of machine code."""
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
            how = {"SIZE": 64, "RAGGED": ragged, "ENFORCE": enforce, "LANES": 128}
            print(compiled(fused._extend, NUMBERS | {"pages"}, **how))
        for writes in (0, 1, 3):
            print(compiled(fused._check, **checks(writes, enforce)))
    print(compiled(fused._report, PADDING=0, GENERATIONS=True, SIZE=64))
    # Triton makes a constant of each number that is 1.
    bump = {"ACQUIRE": True, "GIVEN": False, "ENFORCE": True, "LANES": 128}
    print(compiled(fused._bump, **bump, count=1, most=1))
    extend = {"SIZE": 1, "RAGGED": False, "ENFORCE": True, "LANES": 128}
    print(compiled(fused._extend, NUMBERS, **extend, total=1, each=1, pages=1, most=1))
    print(compiled(fused._check, **checks(1, True), parts=1, columns=1, most=1, table_pitch=1))
    print(compiled(fused._report, PADDING=-1, GENERATIONS=False, SIZE=16, batch=1))


def checks(writes: int, enforce: bool) -> dict[str, Any]:
    return {
        "PADDING": 0, "SIZE": 64, "SLOTS": True, "WRITES": writes,
        "LANES": 4 if writes == 3 else 1, "GENERATIONS": writes == 1, "ENFORCE": enforce,
        "ENTRIES": 512,
    }  # fmt: skip


if __name__ == "__main__":
    main()
