"""Mosaic kernels compiled ahead of time, kept on disk, launched without JAX.

description   a kernel in JSON: what another process builds, what a key is made of
sources       the code that a kernel's machine code follows from, and its hash
build         kernels to machine code, in child processes (`build_child`, `lowering`: JAX)
plugin        the compiler in JAX's CUDA plugin
cubin         what a launch must know of a kernel's machine code
store         machine code on disk
driver        the CUDA driver
bound_kernel  a kernel bound to shapes, launched with addresses

Only the child processes import JAX, nothing imports torch.
"""
