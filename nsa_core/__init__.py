"""The code that both frameworks share. It describes a problem, checks arguments and chooses an
implementation. The subpackage `steps` has the steps of attention on kernels. This package
imports neither JAX nor torch.
"""

__version__ = "0.2.0"
