"""Triton kernels, shape-generic, with the launch of each; imported only where CUDA is used."""
