"""What the Triton kernels of this package share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest_integer(x):  # type: ignore[no-untyped-def]
    """Float32 below 2^22 in magnitude rounded to an integer, half to even."""
    # 1.5 x 2^23: at that size float32 has no fraction bits left.
    return (x + 12582912.0) - 12582912.0


@triton.jit
def nearest_tf32(x):  # type: ignore[no-untyped-def]
    """Float32 rounded to what TF32 holds, half to even; finite numbers only.

    Matrix units cut off what does not fit, which would bias every product toward zero.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & -8192
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def nearest_bfloat16(x):  # type: ignore[no-untyped-def]
    """Float32 rounded to what bfloat16 holds, half to even; finite numbers only."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)
