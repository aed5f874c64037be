"""transformers' `generate` of a parallelized model.

Ranks that draw tokens apart would each go on from their own, and add what comes of them: they compare first.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from tpfused.agreement import by_rank
from tpfused.parameter import ParallelModule
from tpfused.random import state_of


def compare_draws(module: nn.Module) -> None:
    """Have the ranks compare how they will draw, where `module` has transformers' own `generate`."""
    of_transformers = any(base.__name__ == "GenerationMixin" for base in type(module).__mro__)
    if of_transformers and "generate" not in vars(module):
        module.generate = partial(_generate, module)


def _generate(model: nn.Module, *args, **kwargs) -> object:
    split = [module.group for module in model.modules() if isinstance(module, ParallelModule)]
    if split:
        group = max(split, key=lambda group: group.size)  # key-value heads may have a smaller one
        state = state_of(model.device) if _samples(model, *args, **kwargs) else None
        (first, state), *others = by_rank(state, group.process_group, "generate").items()
        apart = [(rank, other) for rank, other in others if other != state]
        if apart:
            rank, other = apart[0]
            if None in (state, other):
                drawing, other = (rank, first) if state is None else (first, rank)
                raise ValueError(
                    f"generate draws tokens on rank {drawing}, and none on rank {other}: do_sample differs"
                )
            raise ValueError(
                f"generate draws tokens, and the random generator of rank {rank} is in another state than that of "
                f"rank {first}: torch.manual_seed(the same on all ranks of the mesh) before"
            )
    return type(model).generate(model, *args, **kwargs)


def _samples(model: nn.Module, inputs=None, generation_config=None, *args, do_sample=None, **kwargs) -> bool:
    """Whether transformers will draw: what the call says, or else its configuration, or else the model's."""
    configs = generation_config, getattr(model, "generation_config", None)
    given = do_sample, *(getattr(config, "do_sample", None) for config in configs)
    return bool(next((each for each in given if each is not None), False))
