"""One command per question, all on the same problems, timers, parity rule and records."""

import os

# JAX and torch share one GPU here: JAX must not take most of it at its first use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
