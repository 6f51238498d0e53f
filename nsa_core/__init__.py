"""The code that both frameworks share. It describes a problem, checks arguments and chooses an
implementation. `steps` has the steps on kernels. This package imports neither JAX nor torch.
"""

__version__ = "0.2.0"
