"""Compiles Mosaic kernels ahead of time, stores them on disk and launches them without JAX.

| module                    | task                                                                 |
|---------------------------|----------------------------------------------------------------------|
| `description`             | describes a kernel in JSON, for keys and for processes that build it |
| `build`                   | builds kernels to machine code in child processes                    |
| `build_child`, `lowering` | compile a kernel in a child process, with JAX                        |
| `cubin`                   | describes the launch parameters of a kernel's machine code           |
| `store`                   | stores machine code on disk                                          |
| `driver`                  | calls the CUDA driver                                                |
| `bound_kernel`            | binds a kernel to shapes, and launches the kernel with addresses     |
| `sequence`                | launches several bound kernels, as a CUDA graph if addresses repeat  |
| `loaded`                  | loads kernels on each GPU, and builds missing kernels first          |

Only the child processes import JAX. No module imports torch.
"""
