"""The plan of a call: its steps on numbered buffers, traced before it runs.

    buffers    Buffer, View, Launch, Derived, Join, Plan
    planner    PlanOps, the `ArrayOps` that records the operations of the steps, and the offsets of
               the buffers that only kernels read

A buffer represents one argument or one result. If the same tensor is passed as two arguments,
it is two buffers with the same address.
"""
