"""The steps of attention on kernels, forward and backward. A step describes kernels and passes
them to an `ArrayOps`, with which each framework runs them on its arrays.
"""
