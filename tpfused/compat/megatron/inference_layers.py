"""Megatron-LM's layers of its inference engine: an installed megatron-core's own."""

from tpfused.compat.megatron.megatrons_own import names_of

__getattr__ = names_of("megatron.core.tensor_parallel.inference_layers")
