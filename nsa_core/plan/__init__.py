"""The plan of a call: its steps on numbered buffers, traced before it runs.

    buffers    Buffer, View, Launch, Derived, Join, Plan
    planner    PlanOps, the `ArrayOps` that records the operations of the steps, and the offsets of
               the buffers that only kernels read

A buffer is a role of an argument or of a result. Two arguments that are one tensor are two buffers
with one address.
"""
