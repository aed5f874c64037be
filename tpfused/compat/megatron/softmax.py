"""Megatron-LM's softmax of attention scores: ``megatron.core.fusions.fused_softmax`` and the masks' kinds."""

from tpfused.compat.megatron.megatrons_own import names_of
from tpfused.layers.softmax import AttnMaskType as AttnMaskType
from tpfused.layers.softmax import FusedScaleMaskSoftmax as FusedScaleMaskSoftmax

__getattr__ = names_of("megatron.core.fusions.fused_softmax", here=__name__)
