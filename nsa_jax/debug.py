"""What a call does, a line an event: `nsa_core.debug`, which both frameworks share."""

from nsa_core.debug import EVENTS, enable

__all__ = ["EVENTS", "enable"]
