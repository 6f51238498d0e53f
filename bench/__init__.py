"""Commands that measure the library. Each command answers one question. The commands share
problems, timers, the parity rule and the format of records (`bench.harness`, `bench.judge`).
"""

import os

from nsa_core import extras

extras.require("bench", "matplotlib", "jinja2")

# JAX and torch share one GPU. JAX must not allocate most of its memory at the first use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# JAX's CUDA plugin asks cuSPARSE for its version. Without a GPU, this crashes.
if not any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"))):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
