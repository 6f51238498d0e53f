"""`Branches` is in `nsa_core.types`; programs and pickles find it under this name too."""

from nsa_core.types import RESIDUAL, Branches

__all__ = ["RESIDUAL", "Branches"]
