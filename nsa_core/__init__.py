"""The code that JAX and torch share. `nsa_core` describes the problem of a call, checks arguments
and chooses an implementation. The subpackage `steps` has the steps of attention on kernels.
`nsa_core` imports neither JAX nor torch.
"""

__version__ = "0.2.0"
