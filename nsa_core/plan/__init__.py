"""The plan of a call consists of steps on numbered buffers.

The steps are traced before the call runs. `buffers` defines `Buffer`, `View`, `Launch`, `Derived`,
`Join` and `Plan`. `planner` defines `PlanOps`, the `ArrayOps` that records the operations of the
steps. `planner` also computes the offsets of the buffers that only kernels read.

A buffer represents one array: an argument, a result or an intermediate. If the same tensor is
passed as two arguments, the plan has two buffers with the same address.
"""
