"""The activations and their derivatives, for any kernel's epilogue, on values already in float32 or float64."""

import triton
import triton.language as tl

ACTIVATIONS = {None: 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "silu": 4}

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
# tanh-GELU is x * sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3): one exponential, and no tanh, which the interpreter
# cannot run. For very negative x the exponential is infinite, and 1 / inf is the right 0.
_TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def activate(x, ACT: tl.constexpr):
    """`ACT` is a value of `ACTIVATIONS`."""
    if ACT == 1:
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif ACT == 2:
        return x / (1.0 + tl.exp(-(x + x * x * x * _CUBIC) * _TWO_SQRT_2_OVER_PI))
    elif ACT == 3:
        # Written so that NaN stays NaN.
        return tl.where(x < 0, 0.0, x)
    elif ACT == 4:
        return x / (1.0 + tl.exp(-x))
    else:
        return x


@triton.jit
def activate_and_derive(x, ACT: tl.constexpr):
    """The activation and its derivative at x, sharing their exponentials."""
    if ACT == 1:
        cdf = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
        return x * cdf, cdf + x * tl.exp(x * x * -0.5) * _INV_SQRT_2PI
    elif ACT == 2:
        s = 1.0 / (1.0 + tl.exp(-(x + x * x * x * _CUBIC) * _TWO_SQRT_2_OVER_PI))
        slope = (x * x * (3.0 * _CUBIC) + 1.0) * _TWO_SQRT_2_OVER_PI
        return x * s, s + x * s * (1.0 - s) * slope
    elif ACT == 3:
        return tl.where(x < 0, 0.0, x), tl.where(x > 0, x * 0 + 1, x * 0)
    elif ACT == 4:
        s = 1.0 / (1.0 + tl.exp(-x))
        return x * s, s + x * s * (1.0 - s)
    else:
        return x, x * 0 + 1
