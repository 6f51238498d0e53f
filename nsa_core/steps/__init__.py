"""The steps of attention on kernels, forward and backward. A step describes kernels and passes
them to an `ArrayOps`, which runs them on the arrays of a framework.
"""
