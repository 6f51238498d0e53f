"""The plan of a call consists of steps on numbered buffers. The steps are traced before the call
runs.

    buffers    Buffer, View, Launch, Derived, Join, Plan
    planner    PlanOps, the `ArrayOps` that records the operations of the steps, and the offsets of
               the buffers that only kernels read

A buffer represents one array: an argument, a result or an intermediate. If the same tensor is
passed as two arguments, the plan has two buffers with the same address.
"""
