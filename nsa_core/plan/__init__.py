"""What a call does, known before it is made: its steps on numbered buffers.

    buffers    Buffer, View, Launch, Derived, Join, Plan
    planner    PlanOps, the `ArrayOps` of the steps that notes what they ask
    workspace  offsets of the buffers that only kernels read

A buffer is a role of an argument or of a result. Two arguments that are one tensor are two buffers
with one address.
"""
