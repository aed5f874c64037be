"""Kernels run in Triton's interpreter where there is no GPU, which has to be chosen before a kernel is defined."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
