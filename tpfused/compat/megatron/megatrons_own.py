"""What is not here is an installed megatron-core's own, module by module."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module


def names_of(module: str) -> Callable[[str], object]:
    """The ``__getattr__`` of the module here that stands for Megatron's `module`: its other names, private ones too."""

    def get(name: str) -> object:
        if not name.startswith("__"):
            try:
                return getattr(import_module(module), name)
            except (ImportError, AttributeError):
                pass
        raise AttributeError(f"neither tpfused.compat.megatron nor an installed {module} has {name!r}")

    return get
