"""Exchanges arrays (`nsa_interop.dlpack`) and weights (`nsa_interop.weights`) between the
frameworks.

`nsa_interop` imports neither module, so that a program that needs one of them does not load the
other. The package also launches Mosaic kernels on torch tensors (`nsa_interop.launch`) and builds
them ahead of time (`nsa_interop.build`).
"""

from nsa_core import extras

extras.require("torch", "torch")
