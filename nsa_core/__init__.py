"""Shared by both frameworks: the description of a problem, checks, the choice of an implementation,
and in `steps` the steps on kernels. This package imports neither JAX nor torch.
"""

__version__ = "0.2.0"
