"""Kernels in Triton. The modules of kernels import only Triton."""
