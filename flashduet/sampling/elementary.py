"""log and exp that give the same bits everywhere.

Library versions differ in the last bit between a SIMD loop and its scalar tail, between builds
and between machines, so a token's noise would depend on where in an array it was computed, and a
moved session could change its text. Here only IEEE 754 basic operations are used (+ - * /, rounding
to integer, integer operations on the bits); those are exactly rounded by every implementation, and
each is its own NumPy call, so none can be fused with the next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# ln 2 in two parts (fdlibm's split): k * LN2_HIGH is exact for every exponent k.
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")

# Bits of sqrt(1/2) and of 1.0: adding the difference moves the binade border from 1 to sqrt(1/2).
_BITS_SQRT_HALF = 0x3FE6A09E00000000
_BITS_ONE = 0x3FF0000000000000
_MANTISSA = 0x000FFFFFFFFFFFFF

# atanh series of log: log(m) = 2s (1 + s^2/3 + s^4/5 + ...), s = (m-1)/(m+1), |s| <= 0.1716.
# The first term left out is below 2^-60 of the sum.
_LOG_TERMS = tuple(1.0 / (2 * i + 1) for i in range(10, 0, -1))

# Taylor series of exp on |r| <= ln(2)/2; the first term left out is below 2^-57.
_EXP_TERMS = (
    1.0 / 6227020800.0,
    1.0 / 479001600.0,
    1.0 / 39916800.0,
    1.0 / 3628800.0,
    1.0 / 362880.0,
    1.0 / 40320.0,
    1.0 / 5040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
)


def log(x: FloatArray) -> FloatArray:
    """Natural logarithm of positive normal float64 values, within 2 units in the last place."""
    shifted = x.view(np.int64) + (_BITS_ONE - _BITS_SQRT_HALF)
    exponent = ((shifted >> 52) - 1023).astype(np.float64)
    mantissa = ((shifted & _MANTISSA) + _BITS_SQRT_HALF).view(np.float64)
    f = mantissa - 1.0
    s = f / (f + 2.0)
    z = s * s
    series = np.full_like(z, _LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        series *= z
        series += term
    series *= z
    # log(m) = 2s + 2s z (1/3 + ...), summed from the small parts up.
    twice = s + s
    return exponent * _LN2_HIGH + (twice + (twice * series + exponent * _LN2_LOW))


def exp(x: FloatArray) -> FloatArray:
    """e to the power of x for x in [-700, 700], within 2 units in the last place."""
    k = np.rint(x * _LOG2_E)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    series = np.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        series *= r
        series += term
    # 2^k from its bits; a product with a power of two is exact.
    return series * ((k.astype(np.int64) + 1023) << 52).view(np.float64)
