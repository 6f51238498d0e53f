"""The parameters of compression are in `nsa_core.compress_params`; programs and pickles find them
under this name too."""

from nsa_core.compress_params import CompressParams, MLPParams, PoolParams, RopeMLPParams

__all__ = ["CompressParams", "MLPParams", "PoolParams", "RopeMLPParams"]
