"""Compiles Mosaic kernels ahead of time, stores them on disk and launches them without JAX. The
modules are:

description   a kernel in JSON, for keys and for the processes that build it
build         kernels to machine code, in child processes (`build_child`, `lowering`: JAX)
cubin         launch parameters of a kernel's machine code
store         machine code on disk
driver        the CUDA driver
bound_kernel  a kernel bound to shapes, launched with addresses
sequence      several bound kernels, as a CUDA graph if their addresses repeat
loaded        the kernels that are loaded on each GPU, built first if necessary

Only the child processes import JAX. No module imports torch.
"""
