"""The code that JAX and torch share. It describes the problem of a call, checks arguments and
chooses an implementation. The subpackage `steps` has the steps of attention on kernels. This
package imports neither JAX nor torch.
"""

__version__ = "0.2.0"
