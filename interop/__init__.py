"""Exchanges arrays (`nsa_interop.dlpack`) and weights (`nsa_interop.weights`) between the
frameworks.

`nsa_interop` does not import its modules, so a program loads only the modules that it imports. The
package also launches Mosaic kernels on torch tensors (`nsa_interop.launch`) and builds Mosaic
kernels ahead of time (`nsa_interop.build`).
"""

from nsa_core import extras

extras.require("torch", "torch")
