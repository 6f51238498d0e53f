"""Attention on kernels step by step, forward and backward: a step describes kernels and hands them
to an `ArrayOps`, by which each framework runs them on its own arrays.
"""
