"""Triton kernels, one operation a file: the launcher, its torch.library operator, and its autograd formula."""
