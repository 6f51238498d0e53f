"""Describes the Mosaic kernels by static sizes, arguments and results.

No module of `specs` imports JAX.
"""
