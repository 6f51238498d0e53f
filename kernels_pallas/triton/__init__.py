"""Kernels in official Triton. Modules here import only Triton."""
