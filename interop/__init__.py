"""Exchanges arrays (`nsa_interop.dlpack`) and weights (`nsa_interop.weights`) between the
frameworks.

No part is imported here, so that a user of one does not load the others.
"""

from nsa_core import extras

extras.require("torch", "torch")
