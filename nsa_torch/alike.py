"""What a public call decides, once for all calls like it: checks, choice, list of launches.

All of it follows from the key of the call: the signature of its tensors (`nsa_torch.replay`),
which of them want a gradient, its other arguments, and what is in force about choices. A call
that anything else has a say in, a mode or a transform, has no key and decides anew.
"""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_core import debug, policy
from nsa_core.config import NSAConfig
from nsa_core.types import Branches
from nsa_interop import launch
from nsa_torch import replay
from nsa_torch.dispatch import Chosen
from nsa_torch.replay import TENSORS, Alike, LruCache, Pair

KERNELS = ("mosaic", "triton")  # implementations whose steps follow from signatures
NAMES = frozenset({type(None), str, Branches})
NUMBERS = frozenset({type(None), int, float})


class Decided(NamedTuple):
    """Of calls alike."""

    chosen: Chosen
    replayed: Alike | Pair  # the second where a gradient is wanted


DECIDED: LruCache[Decided] = LruCache()


class Key(NamedTuple):
    """Of a call; `gradient`: whether autograd records it."""

    value: Hashable
    tensors: list[Tensor]
    gradient: bool


def key_of(
    given: Iterable[Any], config: Any, scale: Any, recompute: Any, implementation: Any
) -> Key | None:
    """The key of a call, or None.

    Args:
      given: its tensors, None or several together in place of one.
    """
    if type(config) is not NSAConfig or type(recompute) is not bool:
        return None
    if type(scale) not in NUMBERS or type(implementation) not in NAMES or debug.on:
        return None
    flat: list[Any] = []
    tensors: list[Tensor] = []
    for x in given:
        kind = type(x)
        if kind in TENSORS:
            flat.append(x)
            tensors.append(x)
        elif x is None:
            flat.append(None)
        elif kind is tuple or kind is Branches:
            flat += (kind, len(x), *x)
            tensors += x
        else:
            return None
    if not tensors or any(type(x) not in TENSORS for x in tensors):
        return None
    if tensors[0].device.type not in replay.DEVICE_TYPES:
        return None
    if replay.recording() or not replay.plain(()):
        return None
    wanted = [x.requires_grad for x in tensors] if torch.is_grad_enabled() else []
    gradient = True in wanted
    value = (
        replay.signature(flat),
        # Of the storage too, since choice asks for it.
        *[x.storage_offset() % launch.ALIGNMENT for x in tensors],
        *(wanted if gradient else ()),
        config,
        scale,
        recompute,
        implementation,
        policy.in_force(),
    )
    return Key(value, tensors, gradient)
