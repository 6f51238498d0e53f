"""Between the frameworks: arrays (`interop.dlpack`) and weights (`interop.weights`).

No part is imported here, so that a user of one does not load the others.
"""

from nsa_core import extras

extras.require("torch", "torch")
