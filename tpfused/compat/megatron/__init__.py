"""The names of ``megatron.core.tensor_parallel`` with Megatron-LM's signatures, computed by tpfused's layers.

Change the imports, ``tpfused.compat.megatron`` for ``megatron.core.tensor_parallel`` and its modules, or
``from tpfused.compat import megatron as tensor_parallel``, and keep the program. Megatron need not be installed; names
that are not here (its random states, its activation checkpoints, its autograd functions) are its own, if it is.
`FusedScaleMaskSoftmax` and `AttnMaskType`, which Megatron has elsewhere, are here too.

The tensor-parallel group is `tp_group`, else that of an initialised ``megatron.core.parallel_state``, else the default
group. Activations are ``[tokens, batch, hidden]``, and sequence parallelism splits the tokens. What is split must
divide by the number of ranks, as in Megatron.

What differs from Megatron's own:

- Gradients are complete when backward returns. Under sequence parallelism that includes the biases of row-parallel
  layers, so their attribute ``sequence_parallel`` is False: a later step that sums the gradients of parameters marked
  True leaves them alone.
- Weights are slices of one tensor drawn from torch's generator, so the number of ranks does not change the model. Seed
  the ranks of a group alike. With ``use_cpu_initialization`` they have the bits of Megatron's.
- The gradient of a column-parallel layer's bias is there whether its weight is trained or not.
- `vocab_parallel_cross_entropy` smooths labels over the whole vocabulary at every degree, and not over a rank's shard.
- A `RowParallelLinear` may split its input itself under sequence parallelism, and a layer's `sequence_parallel` stays
  what was asked for in a group of one rank. No layer keeps a `master_weight`.
- A label that is negative is ignored: loss and gradient are zero. One beyond the vocabulary raises, as does a token id.
- Under autocast a linear layer's output has autocast's dtype with a bias, too: Megatron's adds it afterwards, in the
  bias's own dtype, float32.
- Misuse raises `ValueError` or `TypeError`; where Megatron asserts, an error that is an `AssertionError`, too.
"""

from tpfused.compat.megatron import data as data
from tpfused.compat.megatron import inference_layers as inference_layers
from tpfused.compat.megatron import random as random
from tpfused.compat.megatron import utils as utils
from tpfused.compat.megatron.cross_entropy import vocab_parallel_cross_entropy
from tpfused.compat.megatron.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tpfused.compat.megatron.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from tpfused.compat.megatron.megatrons_own import names_of
from tpfused.compat.megatron.softmax import AttnMaskType, FusedScaleMaskSoftmax

__all__ = [
    "AttnMaskType",
    "ColumnParallelLinear",
    "FusedScaleMaskSoftmax",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "all_gather_last_dim_from_tensor_parallel_region",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "vocab_parallel_cross_entropy",
]

__getattr__ = names_of("megatron.core.tensor_parallel")
