"""Between the frameworks: arrays (`interop.dlpack`) and weights (`interop.weights`).

Nothing is imported here, so that a user of one part does not load the others.
"""
