"""Mosaic kernels compiled ahead of time, kept on disk, launched without JAX.

description   a kernel in JSON: what another process builds, what a key is computed from
build         kernels to machine code, in child processes (`build_child`, `lowering`: JAX)
cubin         what a launch must know of a kernel's machine code
store         machine code on disk
driver        the CUDA driver
bound_kernel  a kernel bound to shapes, launched with addresses
sequence      several, as a CUDA graph where their addresses come again
loaded        what is loaded on each GPU, built first where it must be

Only the child processes import JAX, nothing imports torch.
"""
