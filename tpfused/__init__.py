"""Tensor-parallel PyTorch layers. The names below are public; each is imported when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tpfused.checkpoint import full_state_dict as full_state_dict
    from tpfused.checkpoint import load_full_state_dict as load_full_state_dict
    from tpfused.explanation import explain as explain
    from tpfused.generation import vocab_parallel_argmax as vocab_parallel_argmax
    from tpfused.grad_norm import clip_grad_norm_ as clip_grad_norm_
    from tpfused.kernels.softmax import scale_mask_softmax as scale_mask_softmax
    from tpfused.layers.attention import ParallelAttention as ParallelAttention
    from tpfused.layers.cache import KVCache as KVCache
    from tpfused.layers.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from tpfused.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from tpfused.layers.linear import RowParallelLinear as RowParallelLinear
    from tpfused.layers.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
    from tpfused.layers.mlp import ParallelGatedMLP as ParallelGatedMLP
    from tpfused.layers.mlp import ParallelMLP as ParallelMLP
    from tpfused.layers.softmax import FusedScaleMaskSoftmax as FusedScaleMaskSoftmax
    from tpfused.layers.transformer import ParallelTransformer as ParallelTransformer
    from tpfused.layers.transformer import ParallelTransformerBlock as ParallelTransformerBlock
    from tpfused.layers.transformer import TransformerConfig as TransformerConfig
    from tpfused.overlap.all_gather_matmul import all_gather_matmul as all_gather_matmul
    from tpfused.overlap.communicator import check_alive as check_alive
    from tpfused.overlap.communicator import set_timeout as set_timeout
    from tpfused.overlap.matmul_all_gather import column_matmul as column_matmul
    from tpfused.overlap.matmul_all_gather import matmul_all_gather as matmul_all_gather
    from tpfused.overlap.matmul_all_reduce import matmul_all_reduce as matmul_all_reduce
    from tpfused.overlap.matmul_reduce_scatter import matmul_reduce_scatter as matmul_reduce_scatter
    from tpfused.overlap.tiers import deterministic as deterministic
    from tpfused.overlap.tiers import tier as tier
    from tpfused.parallel.parallelize import parallelize as parallelize
    from tpfused.random import rank_rng as rank_rng
    from tpfused.sharded import load_sharded as load_sharded
    from tpfused.sharded import save_sharded as save_sharded

# Name -> the module that defines it. (The imports above say the same to type checkers, which run no code.)
_HOME = {
    "ColumnParallelLinear": "tpfused.layers.linear",
    "FusedScaleMaskSoftmax": "tpfused.layers.softmax",
    "KVCache": "tpfused.layers.cache",
    "ParallelAttention": "tpfused.layers.attention",
    "ParallelGatedMLP": "tpfused.layers.mlp",
    "ParallelMLP": "tpfused.layers.mlp",
    "ParallelTransformer": "tpfused.layers.transformer",
    "ParallelTransformerBlock": "tpfused.layers.transformer",
    "RowParallelLinear": "tpfused.layers.linear",
    "TransformerConfig": "tpfused.layers.transformer",
    "VocabParallelEmbedding": "tpfused.layers.embedding",
    "all_gather_matmul": "tpfused.overlap.all_gather_matmul",
    "check_alive": "tpfused.overlap.communicator",
    "clip_grad_norm_": "tpfused.grad_norm",
    "column_matmul": "tpfused.overlap.matmul_all_gather",
    "deterministic": "tpfused.overlap.tiers",
    "explain": "tpfused.explanation",
    "full_state_dict": "tpfused.checkpoint",
    "load_full_state_dict": "tpfused.checkpoint",
    "load_sharded": "tpfused.sharded",
    "matmul_all_gather": "tpfused.overlap.matmul_all_gather",
    "matmul_all_reduce": "tpfused.overlap.matmul_all_reduce",
    "matmul_reduce_scatter": "tpfused.overlap.matmul_reduce_scatter",
    "parallelize": "tpfused.parallel.parallelize",
    "rank_rng": "tpfused.random",
    "save_sharded": "tpfused.sharded",
    "scale_mask_softmax": "tpfused.kernels.softmax",
    "set_timeout": "tpfused.overlap.communicator",
    "tier": "tpfused.overlap.tiers",
    "vocab_parallel_argmax": "tpfused.generation",
    "vocab_parallel_cross_entropy": "tpfused.layers.loss",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'tpfused' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOME})
