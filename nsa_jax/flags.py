"""The flags of `nsa_core.flags`, which both frameworks share: importing this defines them."""

from nsa_core.flags import implementation, named, on_unsupported, thresholds

__all__ = ["implementation", "named", "on_unsupported", "thresholds"]
