"""`NSAConfig` is in `nsa_core.config`; programs and pickles find it under this name too."""

from nsa_core.config import SEED_NAMES, NSAConfig

__all__ = ["SEED_NAMES", "NSAConfig"]
