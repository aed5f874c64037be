"""What is not here is an installed megatron-core's own, module by module."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module


def names_of(module: str, here: str | None = None) -> Callable[[str], object]:
    """The ``__getattr__`` of the module here that stands for Megatron's `module`: its other names, private ones too.

    `here` is its name, if that is not Megatron's with this package for ``megatron.core.tensor_parallel``.
    """
    here = here or module.replace("megatron.core.tensor_parallel", "tpfused.compat.megatron")

    def get(name: str) -> object:
        if name.startswith("__"):  # Python's own question
            raise AttributeError(f"module {here!r} has no attribute {name!r}")
        try:
            return getattr(import_module(module), name)
        except ImportError as error:
            if error.name in ("megatron", "megatron.core"):
                why = "megatron-core, which is not installed: pip install megatron-core"
            else:
                why = f"{module}, which cannot be imported: {error}"
            raise AttributeError(f"{here} has no {name!r}: names that are not here come from {why}") from error
        except AttributeError:
            pass
        raise AttributeError(f"neither {here} nor the installed {module} has {name!r}")

    return get
