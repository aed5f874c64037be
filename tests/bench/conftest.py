"""Kernels run in Triton's interpreter where there is no GPU."""

from tests import interpreter

interpreter.use_where_there_is_no_gpu()
