"""Plans: which module of a model gets which style, written by the user or known for an architecture."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from tpfused.parallel.convert import LEAVE_SHARDED, STYLES, torn, why_not
from tpfused.parallel.lora import is_lora, styles_of_parts

_DECODER = {
    "embed_tokens": "vocab_embedding",
    "layers.*.self_attn": "attention",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise_kv",
    "layers.*.self_attn.v_proj": "colwise_kv",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "lm_head": "vocab_head",
}

# By `config.model_type` of transformers.
ARCHITECTURES = {
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": {
        **_DECODER,
        # Norms of each head's features, between the projections and the attention.
        "layers.*.self_attn.q_norm": "replicate_sum",
        "layers.*.self_attn.k_norm": "replicate_sum",
    },
    "gpt2": {
        "wte": "vocab_embedding",
        "h.*.attn": "attention",
        "h.*.attn.c_attn": "fused_qkv",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
        "lm_head": "vocab_head",
    },
    "bert": {
        "embeddings.word_embeddings": "vocab_embedding",
        "layer.*attention.self": "attention",  # crossattention too
        "layer.*attention.self.query": "colwise",
        "layer.*attention.self.key": "colwise",
        "layer.*attention.self.value": "colwise",
        "layer.*attention.output.dense": "rowwise",
        "layer.*.intermediate.dense": "colwise",
        "layer.*.output.dense": "rowwise",
        "cls.predictions.decoder": "vocab_head",
    },
}

# The classes whose loss can be computed from sharded logits; the others' heads are gathered.
SHARDED_LOSS = {
    "BertForMaskedLM",
    "BertLMHeadModel",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
}


def auto_plan(model: nn.Module) -> dict[str, str]:
    """The plan of a transformers model of a known architecture, as `parallelize` takes it.

    Raises:
        ValueError: another architecture, or modules inside its layers that the plan does not place (cross attention,
            adapters); names them and shows a plan to start from.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    plan = ARCHITECTURES.get(model_type, {})
    names = [name for name, _ in model.named_modules()]
    plan = {pattern: style for pattern, style in plan.items() if any(matches(name, pattern) for name in names)}
    if not any(base.__name__ in SHARDED_LOSS for base in type(model).__mro__):
        plan = {pattern: "colwise_gather" if style == "vocab_head" else style for pattern, style in plan.items()}
    placed = match(model, plan)
    # What is computed between layers that split and layers that join is of this rank's part of the features: a
    # parameter there has a part of its gradient on each rank.
    between = {name.rpartition(".")[0] for name, style in placed.items() if style in LEAVE_SHARDED}
    missed: dict[str, str] = {}  # name -> class
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own and name in between:
            raise ValueError(
                f"plan='auto' does not know {', '.join(own)} of {name}, a {type(module).__name__} of a known "
                f"architecture: it would be whole on each rank, between layers that are split, and its gradient a part"
            )
        splits = any(param.ndim > 1 for param in own.values()) or (own and name.rpartition(".")[0] in between)
        if name not in placed and splits and (not plan or pattern_of(name) != name):
            missed[name] = type(module).__name__
    if missed:
        raise ValueError(_unplaced(model, model_type, plan, missed))
    return plan


def resolve_plan(model: nn.Module, plan: str | Mapping[str, str]) -> Mapping[str, str]:
    """The styles by patterns that the user's `plan` stands for: `auto_plan`'s for "auto".

    Raises:
        TypeError: neither "auto" nor a mapping of names.
        ValueError: an unknown style; and as `auto_plan`.
    """
    if isinstance(plan, str) and plan == "auto":
        return auto_plan(model)
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan must be 'auto' or a dict of styles by module patterns, not {plan!r}")
    if odd := [pattern for pattern in plan if not isinstance(pattern, str)]:
        raise TypeError(f"plan's patterns are names of modules, not {odd}")
    for pattern, style in plan.items():
        if name := _name_of(style):
            raise ValueError(
                f"the plan's styles are names, and {pattern!r} has a {type(style).__name__} object: write {name!r}, or "
                f"keep parallelize_module and give it tpfused.parallel.styles.Style({name!r})"
            )
    unknown = [style for style in plan.values() if not isinstance(style, str) or style not in STYLES]
    if unknown:
        raise ValueError(f"unknown styles {unknown}; there are {', '.join(STYLES)}")
    return plan


def _name_of(style: object) -> str | None:
    """What `parallelize` calls a style of torch's `parallelize_module`; None where it has none like it."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from tpfused.parallel.styles import Style

    if isinstance(style, Style):
        return style.name
    if isinstance(style, ColwiseParallel):
        return "colwise_gather" if all(layout.is_replicate() for layout in style.output_layouts) else "colwise"
    return "rowwise" if isinstance(style, RowwiseParallel) else None


def match(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The style of each module that some pattern of the plan matches; of a LoRA layer, those of its parts.

    A module that stands in several places may be named by any of them, and is called by the first.

    Raises:
        ValueError: a pattern that matches nothing, or two that give one module different styles; a LoRA layer that
            cannot have the style.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names = list(modules)
    first = {id(module): name for name, module in reversed(modules.items())}
    found: dict[str, str] = {}
    unused = []
    for pattern, style in plan.items():
        matched = [name for name in names if matches(name, pattern)]
        if not matched:
            near = get_close_matches(pattern.rpartition(".")[2], {name.rpartition(".")[2] for name in names}, 3)
            unused.append(f"{pattern!r}" + (f" (is there: {', '.join(map(repr, near))})" if near else ""))
        for name in dict.fromkeys(first[id(modules[name])] for name in matched):
            if found.setdefault(name, style) != style:
                raise ValueError(f"two patterns of the plan match {name}: its style is {found[name]!r} or {style!r}")
    if unused:
        raise ValueError(f"patterns of the plan that match no module of {type(model).__name__}: {', '.join(unused)}")
    of_parts = {
        name: styles_of_parts(name, modules[name], style) for name, style in found.items() if is_lora(modules[name])
    }
    for name, styles in of_parts.items():
        del found[name]
        found = styles | found  # where the plan names a part itself, that counts
    return found


def matches(name: str, pattern: str) -> bool:
    """A pattern (``*`` stands for anything) matches a module's whole name, or the end of it after a dot."""
    return fnmatchcase(f".{name}", f"*.{pattern}") or name == pattern


def pattern_of(name: str) -> str:
    """What a module and those in the same place of other layers match: ``h.3.mlp`` -> ``h.*.mlp``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _pattern_of_these_only(name: str, these: Collection[str], names: Iterable[str]) -> str:
    """The most general pattern that matches the module and, of all `names`, only others of `these`: in a
    `Sequential`, not the activation beside a linear layer."""
    parent, _, last = name.rpartition(".")
    general = pattern_of(name), f"{pattern_of(parent)}.{last}" if parent else name
    only = (pattern for pattern in general if all(each in these for each in names if matches(each, pattern)))
    return next(only, name)


def _unplaced(model: nn.Module, model_type: str | None, plan: dict[str, str], missed: Mapping[str, str]) -> str:
    known = f"{type(model).__name__}" + (f" (model_type {model_type!r})" if model_type else "")
    names = [name for name, _ in model.named_modules()]
    patterns: dict[str, set[str]] = {}  # -> the classes that stand there
    for name, kind in missed.items():
        patterns.setdefault(_pattern_of_these_only(name, missed, names), set()).add(kind)
    start, whole = _start(model, plan, patterns)
    lines = [f"plan='auto' knows no place for {len(patterns)} modules of {known}:"]
    lines += [f"  {pattern}: {', '.join(sorted(classes))}" for pattern, classes in patterns.items()]
    lines += [
        f"Architectures it knows: {', '.join(ARCHITECTURES)}. For another one write a plan. This one is right, if not "
        f"fast, unless a module computes with another's weights; then let a pair that follow each other be 'colwise' "
        f"and 'rowwise', to gather nothing between them:",
        "plan = {",
    ]
    lines += [f"    {pattern!r}: {style!r}," for pattern, style in start.items()]
    lines += [f"    # whole on each rank: {reason}" for reason in whole]
    return "\n".join([*lines, "}"])


def _start(model: nn.Module, plan: Mapping[str, str], patterns: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """`plan` with those of the patterns whose modules can be split such that inputs and outputs stay whole on each
    rank; and why the others are not in it."""
    modules = dict(model.named_modules())
    start, whole = dict(plan), []
    for pattern in patterns:
        matched = [module for name, module in modules.items() if matches(name, pattern)]
        embeds = any(isinstance(module, nn.Embedding) for module in matched)
        splits = any(param.ndim > 1 for module in matched for param in module.parameters(recurse=False))
        style = "vocab_embedding" if embeds else "colwise_gather" if splits else "replicate_sum"
        reason = next(filter(None, (why_not(pattern, module, style) for module in matched)), None)
        if reason is None:
            start[pattern] = style
        else:
            whole.append(reason)
    while names := torn(modules, match(model, start)):
        for name in names:
            for pattern in [pattern for pattern in start if matches(name, pattern)]:
                del start[pattern]
                whole.append(f"{name} shares a parameter with {', '.join(n for n in names if n != name)}")
    return start, whole
