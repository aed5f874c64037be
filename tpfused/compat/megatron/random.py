"""Megatron-LM's random states and activation checkpoints: an installed megatron-core's own."""

from tpfused.compat.megatron.megatrons_own import names_of

__getattr__ = names_of("megatron.core.tensor_parallel.random")
