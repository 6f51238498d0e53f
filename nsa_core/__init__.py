"""What both frameworks share: what a problem is, checks, the choice of an implementation, and in
`steps` what runs it on kernels. Neither JAX nor torch is imported here.
"""

__version__ = "0.2.0"
