"""The activations and their derivatives, for any kernel's epilogue, on values already in float32 or float64.

With `HALF`, for a result that is rounded to 16 bits, each takes one exponential and about eight multiply-adds. The
special-function unit gives a sixteenth of the multiply-adds' rate, so that an exponential and a division, or an erf,
would cost a matmul's epilogue more than everything else in it. All three smooth activations are

    act(x) = x - |x| q(|x|) for x > 0, else x q(|x|),   q(a) = 1 - Phi(a), or 1 - sigmoid(..),

and q falls from 1/2 to 0: ``q(a) = 2^P(a)`` with a polynomial P keeps the relative error of the left tail small, where
``1 + tanh`` and ``1 + erf`` cancel. The coefficients are minimax fits of ``log2 q`` up to 5.5 (erf) and 5 (tanh), where
q is below 5e-8 (of ``1 / (1 + e)`` for silu, which has a long tail); the largest relative errors of q are 2.5e-4 (erf),
4.2e-4 (tanh) and 3.0e-4 (silu), below half of float16's spacing. NaN stays, and of minus infinity nothing finite comes.
"""

import triton
import triton.language as tl

from tpfused.kernels.elementary import LOG2E, exp2

ACTIVATIONS = {None: 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
# tanh-GELU is x * sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3): one exponential, and no tanh, which the interpreter
# cannot run. For very negative x the exponential is infinite, and 1 / inf is the right 0.
_TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)
# Beyond these q is zero or (tanh) below 1e-27; the exponent of the second grows again after 11.
_ERF_END = tl.constexpr(16.0)
_TANH_END = tl.constexpr(10.0)
_SILU_END = tl.constexpr(100.0)


@triton.jit
def _tail(x, ACT: tl.constexpr):
    """-> a, q(a): a is |x|, clamped."""
    a = tl.abs(x)
    if ACT == 1:
        a = tl.minimum(a, _ERF_END)
        p = a * -2.3324960e-4 + 4.8697526e-3
        p = p * a - 4.4598922e-2
        p = p * a - 4.6968123e-1
        p = p * a - 1.1462607
        q = exp2(p * a - 1.0003591)
    elif ACT == 2:
        a = tl.minimum(a, _TANH_END)
        p = a * 2.3709917e-4 - 3.1396498e-3
        p = p * a + 8.2513606e-3
        p = p * a - 3.7692200e-2
        p = p * a - 4.8025829e-1
        p = p * a - 1.1420256
        q = exp2(p * a - 1.0006002)
    else:
        a = tl.minimum(a, _SILU_END)
        e = exp2(a * -LOG2E)
        p = e * 0.15224272 - 0.53285313
        p = p * e + 0.86589098
        p = p * e - 0.98483455
        q = (p * e + 0.99970263) * e
    return a, q


@triton.jit
def _activate_and_derive_half(x, ACT: tl.constexpr):
    a, q = _tail(x, ACT)
    cdf = tl.where(x > 0, 1.0 - q, q)
    signed = tl.where(x > 0, a, -a)
    if ACT == 1:
        slope = cdf + signed * exp2(a * a * (-0.5 * LOG2E) - 1.3257481)  # 2^-1.3257481 = 1 / sqrt(2 pi)
    elif ACT == 2:
        slope = cdf + signed * (q - q * q) * (a * a * (3.0 * _CUBIC * _TWO_SQRT_2_OVER_PI) + _TWO_SQRT_2_OVER_PI)
    else:
        slope = cdf + signed * (q - q * q)
    # Here, and in relu below, NaN stays NaN.
    return tl.where(x > 0, x - a * q, x * q), tl.where(x == x, slope, x)


@triton.jit
def activate(x, ACT: tl.constexpr, HALF: tl.constexpr = False):
    """`ACT` is a value of `ACTIVATIONS`."""
    value, _ = activate_and_derive(x, ACT, HALF)
    return value


@triton.jit
def derive(x, ACT: tl.constexpr, HALF: tl.constexpr = False):
    """The activation's derivative at x."""
    _, slope = activate_and_derive(x, ACT, HALF)
    return slope


@triton.jit
def activate_and_derive(x, ACT: tl.constexpr, HALF: tl.constexpr = False):
    """The activation and its derivative at x, sharing their exponentials. What is not used is not computed."""
    if HALF and (ACT == 1 or ACT == 2 or ACT == 4):
        return _activate_and_derive_half(x, ACT)
    elif ACT == 1:
        cdf = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
        return x * cdf, cdf + x * tl.exp(x * x * -0.5) * _INV_SQRT_2PI
    elif ACT == 2:
        s = 1.0 / (1.0 + tl.exp(-(x + x * x * x * _CUBIC) * _TWO_SQRT_2_OVER_PI))
        slope = (x * x * (3.0 * _CUBIC) + 1.0) * _TWO_SQRT_2_OVER_PI
        return x * s, s + x * s * (1.0 - s) * slope
    elif ACT == 3:
        return tl.where(x < 0, 0.0, x), tl.where(x > 0, 1.0, tl.where(x == x, 0.0, x))
    elif ACT == 4:
        s = 1.0 / (1.0 + tl.exp(-x))
        return x * s, s + x * s * (1.0 - s)
    else:
        return x, tl.where(x == x, 1.0, 1.0).to(x.dtype)
