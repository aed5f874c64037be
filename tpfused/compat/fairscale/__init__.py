"""fairscale's ``fairscale.nn.model_parallel`` on tpfused's layers: the same names, signatures and results.

In a program's imports, write ``tpfused.compat.fairscale`` for ``fairscale.nn.model_parallel``; fairscale itself is not
needed. Where a program, or a library it uses, still calls fairscale's own ``initialize_model_parallel``, its groups are
found. Each module's docstring lists what is accepted without meaning, and what differs.
"""

from tpfused.compat.fairscale import utils as utils
from tpfused.compat.fairscale.cross_entropy import vocab_parallel_cross_entropy
from tpfused.compat.fairscale.initialize import (
    destroy_model_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    get_model_parallel_world_size,
    get_pipeline_parallel_group,
    get_pipeline_parallel_ranks,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from tpfused.compat.fairscale.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from tpfused.compat.fairscale.mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)
from tpfused.compat.fairscale.random import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed

__all__ = [
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "checkpoint",
    "copy_to_model_parallel_region",
    "destroy_model_parallel",
    "gather_from_model_parallel_region",
    "get_cuda_rng_tracker",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_ranks",
    "initialize_model_parallel",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "reduce_from_model_parallel_region",
    "scatter_to_model_parallel_region",
    "vocab_parallel_cross_entropy",
]
