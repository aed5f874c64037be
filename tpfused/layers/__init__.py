"""Tensor-parallel layers as nn.Modules."""
