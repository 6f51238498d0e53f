"""Official Triton kernels; only Triton is imported here."""
