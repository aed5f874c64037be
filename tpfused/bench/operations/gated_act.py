"""``act(gate) * up`` of a SwiGLU or GEGLU layer, in three layouts."""

from dataclasses import replace
from functools import partial

import torch

from tpfused import reference
from tpfused.bench.case import (
    Case,
    Setting,
    Variant,
    Work,
    call_of,
    copy_floor,
    exact_of,
    optional,
    variants_of,
)

SUMMARY = "act(gate) * up; floor: a copy of 3 (fwd) or 5 (bwd) values a result"
VALUES = {"fwd": 3, "bwd": 5}
LIGER = {"silu": "liger_swiglu", "gelu_tanh": "liger_geglu"}


def case(rows: int, features: int, activation: str, layout: str, direction: str, quick: bool = False) -> Case:
    variants = ("ours", "eager", "compile", *(["liger"] if layout == "separate" else []))
    work = partial(build, rows=rows, features=features, activation=activation, layout=layout, direction=direction)
    return Case("gated_act", f"{rows}x{features} {activation} {layout}", direction, variants, work, quick)


def build(setting: Setting, rows: int, features: int, activation: str, layout: str, direction: str) -> Work:
    from tpfused.kernels.gated_act import gated_act

    def separate(gate, up):
        return reference.activate(gate, activation) * up

    eager = {
        "packed": lambda both: reference.gated_act(both, activation),
        "halves": lambda both: separate(*both.chunk(2, dim=-1)),
        "separate": separate,
    }[layout]
    ours = partial(gated_act, activation=activation, packed=layout == "packed")
    shapes = [(rows, features)] * 2 if layout == "separate" else [(rows, 2 * features)]
    inputs = [setting.random(*shape) for shape in shapes]
    grad = setting.random(rows, features)

    variants = variants_of(direction, {"ours": ours, "eager": eager, "compile": setting.compile(eager)}, inputs, grad)
    if direction == "bwd":
        variants["ours"] = replace(variants["ours"], fallback=_operator(inputs, grad, activation, layout))
    liger = optional("liger_kernel.transformers.functional", LIGER[activation])
    if liger is not None and layout == "separate":
        # Its backward writes the gradients over the inputs: copies of its own, whose values change from call to call.
        note = "overwrites its inputs" if direction == "bwd" else ""
        variants["liger"] = Variant(call_of(direction, liger, [x.clone() for x in inputs], grad), note=note)
    moved = VALUES[direction] * grad.numel() * grad.element_size()
    exact = exact_of(direction, eager, inputs, grad)
    return Work(variants, exact, copy_floor(moved, setting.device), moved)


def _operator(inputs, grad, activation, layout):
    """The registered backward, with autograd left out."""
    from tpfused.kernels.activations import ACTIVATIONS

    gate, up = (*inputs, None)[:2]

    def call():
        grads = torch.ops.tpfused.gated_act_backward(gate, up, grad, layout != "halves", ACTIVATIONS[activation])
        return grads[: len(inputs)]

    return call


CASES = [
    case(8192, 3584, activation, layout, direction, quick=(activation, layout) == ("silu", "packed"))
    for activation in ("silu", "gelu_tanh")
    for layout in ("packed", "halves", "separate")
    for direction in ("fwd", "bwd")
]
