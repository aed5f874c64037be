"""LoRA layers of peft (Hu et al., 2021): a plan names the linear layer, and its style becomes one for each part.

Such a layer computes ``base_layer(x) + lora_B(lora_A(dropout(x)))``. Where the outputs are split, those of `lora_B` are
split in the same way; where the inputs are, those of `lora_A`. The other of the two, of few rows or columns, is whole.
"""

from __future__ import annotations

from torch import nn

_FROM_WHOLE = ("colwise", "colwise_gather", "colwise_kv", "fused_gate_up", "fused_qkv")


def is_lora(module: nn.Module) -> bool:
    # By name: peft need not be installed.
    return type(module).__module__.startswith("peft.tuners.lora.") and hasattr(module, "base_layer")


def styles_of_parts(name: str, module: nn.Module, style: str) -> dict[str, str]:
    """What the style of a LoRA layer is for each of its parts, by their names.

    Raises:
        ValueError: a style, or a variant of LoRA, that has no such parts.
    """
    variants = [type(variant).__name__ for variant in getattr(module, "lora_variant", {}).values()]
    if variants or style not in (*_FROM_WHOLE, "rowwise"):
        raise ValueError(f"{name}: a LoRA layer of peft ({', '.join(variants) or 'plain'}) cannot be {style!r}")
    a, b = ("replicate", style) if style in _FROM_WHOLE else (style, "replicate")
    adapters = list(module.lora_A)
    return {
        f"{name}.base_layer": style,
        **{f"{name}.lora_A.{adapter}": a for adapter in adapters},
        **{f"{name}.lora_B.{adapter}": b for adapter in adapters},
    }


def layer_of(name: str, modules: dict[str, nn.Module]) -> str:
    """The name of the LoRA layer that a module is a part of; of another module, its own."""
    parts = name.split(".")
    return next((outer for i in (1, 2) if (outer := ".".join(parts[:-i])) in modules and is_lora(modules[outer])), name)
