"""A linear layer with its activation in the matmul's epilogue, and the matmul that the activation's derivative ends."""

from functools import partial

import torch
from torch.nn import functional as F

from tpfused import reference
from tpfused.bench.case import Case, Floor, Setting, Variant, Work, call_of, exact_of, variants_of

SUMMARY = "act(x @ w.T + bias), and (dy @ w) * act'(pre) (dgrad_act); floor: the bare matmuls"
SHAPES = [(8192, 4096, 3584), (8192, 8192, 7168), (2048, 4096, 3584)]


def case(m: int, k: int, n: int, activation: str, mode: str, quick: bool = False) -> Case:
    """`mode` is "fwd" (inference), "training" (forward that also writes the pre-activation) or "fwd+bwd"."""
    variants = ("ours", "triton", "eager", "compile")
    if mode == "fwd" and activation == "gelu_tanh":
        variants += ("cublaslt",)
    name = f"M{m} K{k} N{n} {activation}" + (" training" if mode == "training" else "")
    direction = "fwd" if mode == "training" else mode
    work = partial(build, m=m, k=k, n=n, activation=activation, mode=mode)
    return Case("linear_act", name, direction, variants, work, quick)


def dgrad_case(m: int, k: int, n: int, activation: str, quick: bool = False) -> Case:
    work = partial(build_dgrad, m=m, k=k, n=n, activation=activation)
    return Case(
        "linear_act", f"dgrad_act M{m} K{k} N{n} {activation}", "bwd", ("ours", "eager", "compile"), work, quick
    )


def build(setting: Setting, m: int, k: int, n: int, activation: str, mode: str) -> Work:
    from tpfused.kernels.linear_act import linear_act

    x, weight, bias = setting.random(m, k), setting.random(n, k) * k**-0.5, setting.random(n)
    grad = setting.random(m, n)

    def eager(x, weight, bias):
        return reference.activate(F.linear(x, weight, bias), activation)

    functions = {
        "ours": lambda x, weight, bias: linear_act(x, weight, bias, activation),
        "triton": lambda x, weight, bias: linear_act(x, weight, bias, activation, backend="triton"),
        "eager": eager,
        "compile": setting.compile(eager),
    }
    inputs = [x, weight, bias]
    variants = variants_of(mode, functions, inputs, grad)
    if mode == "fwd" and activation == "gelu_tanh":
        epilogue = lambda x, weight, bias: torch._addmm_activation(bias, x, weight.t(), use_gelu=True)  # noqa: E731
        variants["cublaslt"] = Variant(call_of("fwd", epilogue, inputs))
    flops = 2 * m * k * n
    exact = exact_of(mode, eager, inputs, grad)
    if mode == "fwd+bwd":
        floor = Floor("3 matmuls", lambda: (F.linear(x, weight), grad @ weight, grad.t() @ x))
        return Work(variants, exact, floor, 3 * flops, "TFLOP/s")
    return Work(variants, exact, Floor("matmul", lambda: F.linear(x, weight)), flops, "TFLOP/s")


def build_dgrad(setting: Setting, m: int, k: int, n: int, activation: str) -> Work:
    from tpfused.kernels.linear_act import dgrad_act

    dy, weight, pre = setting.random(m, k), setting.random(k, n) * k**-0.5, setting.random(m, n)
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}[activation]

    def eager(dy, weight, pre):
        dpre = torch.ops.aten.gelu_backward(dy @ weight, pre, approximate=approximate)
        return dpre, dpre.sum(0)

    functions = {
        "ours": lambda dy, weight, pre: dgrad_act(dy, weight, pre, activation),
        "eager": eager,
        "compile": setting.compile(eager),
    }
    inputs = [dy, weight, pre]
    return Work(
        variants_of("fwd", functions, inputs),  # a backward as it stands: autograd has no part in it
        exact_of("fwd", eager, inputs),
        Floor("matmul", lambda: dy @ weight),
        2 * m * k * n,
        "TFLOP/s",
    )


def _quick(shape: tuple[int, int, int], activation: str) -> bool:
    return shape == SHAPES[0] and activation == "gelu_tanh"


CASES = [
    case(*shape, activation, mode, quick=_quick(shape, activation))
    for shape in SHAPES
    for activation in ("gelu", "gelu_tanh")
    for mode in ("fwd", "training", "fwd+bwd")
] + [
    dgrad_case(*shape, activation, quick=_quick(shape, activation))
    for shape in SHAPES
    for activation in ("gelu", "gelu_tanh")
]
