"""Commands that measure the library. Each command answers one question. They share problems,
timers, the parity rule and the format of records (`bench.harness`, `bench.judge`).
"""

import os

from nsa_core import extras

extras.require("bench", "matplotlib", "jinja2")

# JAX and torch share one GPU here: JAX must not take most of it at its first use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# JAX's CUDA plugin asks cuSPARSE for its version, which crashes where there is no GPU.
if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
