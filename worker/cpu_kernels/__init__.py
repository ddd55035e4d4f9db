"""Kernels for CPUs, compiled by Numba: what attention and layers do between library products."""
