"""The plan of a call consists of steps on numbered buffers. It is traced before the call runs.

    buffers    Buffer, View, Launch, Derived, Join, Plan
    planner    PlanOps, the `ArrayOps` that records the operations of the steps, and the offsets of
               the buffers that only kernels read

A buffer represents one argument or one result. If the same tensor is passed as two arguments,
it is two buffers with the same address.
"""
