"""`LayerSpec` is in `nsa_core.layer`; programs and pickles find it under this name too."""

from nsa_core.layer import LayerSpec, Unnamed

__all__ = ["LayerSpec", "Unnamed"]
