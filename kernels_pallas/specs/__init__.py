"""Descriptions of the Mosaic kernels: static sizes, arguments, results. No JAX is imported."""
