"""Computes the useful FLOPs and the compulsory memory traffic of a branch. The module also has
the peak rates of devices, with which impossible times are detected.

Assumptions:
  - A visible (query, key) pair costs `2 D` FLOPs for the logit and `2 Dv` for the value. The
    softmax, the gates, the compression and the top-n are not counted.
  - The selected branch reads `min(n, existing blocks)` blocks, including the query's own block
    (`num_local >= 1`). Of the query's own block, only the keys up to the query count.
  - Backward consists of five products with `3 * 2 D + 2 * 2 Dv` FLOPs per (query, key) pair: the
    logits once more, dV, dP, dQ and dK. The selection of blocks has no gradient.
  - `all` is the sum of the branches. The scores use the logits of the compressed branch.
  - Traffic: every input is read once and every output is written once. The float32 lse and the
    int32 indices count as outputs. Repeated reads are not useful traffic.
"""

import dataclasses

import numpy as np

from nsa_core.config import NSAConfig


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of one measurement. `nsa_core.types` explains the letters."""

    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    itemsize: int  # number of bytes of one element


@dataclasses.dataclass(frozen=True)
class Cost:
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Limits:
    """The rates of dense tensor-core products in FLOP/s and the memory bandwidth in bytes/s of a
    device, from the data sheet of the vendor.
    """

    flops_16bit: float
    flops_32bit: float  # TF32, the fastest rate that float32 inputs may use
    bytes_per_s: float


# If several names match a device, the longest is used.
LIMITS = {
    "H100 80GB HBM3": Limits(989e12, 495e12, 3.35e12),
    "H100 PCIe": Limits(756e12, 378e12, 2.0e12),
    "H200": Limits(989e12, 495e12, 4.8e12),
    "A100": Limits(312e12, 156e12, 2.04e12),
}


def visible_pairs(branch: str, T: int, S: int, config: NSAConfig) -> int:
    """Return the number of visible (query, key) pairs of one head of one sequence. Compressed
    tokens count as keys.
    """
    position = np.arange(S - T, S, dtype=np.int64)
    if branch in ("compressed", "scores"):
        block, stride = config.compress_block, config.compress_stride
        seen = np.where(position >= block - 1, (position - block + 1) // stride + 1, 0)
    elif branch == "selected":
        size = config.select_block
        whole = np.minimum(config.num_selected, position // size + 1) - 1
        seen = whole * size + position % size + 1
    elif branch == "sliding":
        seen = np.minimum(config.window, position + 1)
    else:  # dense
        seen = position + 1
    return int(seen.sum())


def cost(branch: str, shape: Shape, config: NSAConfig, *, backward: bool = False) -> Cost:
    """Return the useful FLOPs and compulsory bytes of one forward call, or of forward and
    backward.
    """
    if branch == "all":
        parts = ("compressed", "selected", "sliding")
        flops = sum(cost(part, shape, config, backward=backward).flops for part in parts)
        return Cost(flops, _traffic("dense", shape, config, backward))
    pairs = visible_pairs(branch, shape.T, shape.S, config) * shape.B * shape.H
    width = 2 * shape.D if branch == "scores" else 2 * (shape.D + shape.Dv)
    flops = pairs * width
    if backward and branch != "scores":
        flops += pairs * (6 * shape.D + 4 * shape.Dv)
    return Cost(flops, _traffic(branch, shape, config, backward and branch != "scores"))


def _traffic(branch: str, shape: Shape, config: NSAConfig, backward: bool) -> int:
    rows = shape.B * shape.T * shape.H
    query, out, lse = rows * shape.D, rows * shape.Dv, 4 * rows
    keys = shape.S
    if branch in ("compressed", "scores"):
        keys = config.num_compressed(shape.S)
    elif branch == "sliding":
        keys = min(shape.S, shape.T + max(config.window - 1, 0))
    elif branch == "selected":
        keys = min(shape.S, shape.T * config.num_selected * config.select_block)
    key, value = (shape.B * keys * shape.Hkv * width for width in (shape.D, shape.Dv))
    indices = 4 * shape.B * shape.T * shape.Hkv * config.num_selected
    if branch == "scores":
        return shape.itemsize * (query + key) + indices
    once = shape.itemsize * (query + key + value + out) + lse
    once += indices if branch == "selected" else 0
    # The backward pass reads all of these arrays and the cotangent, and writes a gradient for
    # each input.
    again = once + shape.itemsize * (out + query + key + value)
    return once + again if backward else once


def limits(device: str) -> Limits | None:
    """Return the limits of the device with this driver name, or None if they are not known."""
    return LIMITS.get(_known(device) or "")


def _known(device: str) -> str | None:
    return max((name for name in LIMITS if name in device), key=len, default=None)


def impossible(cost: Cost, time_ms: float, device: str, itemsize: int) -> str | None:
    """Return the reason why a time is impossible on this device. Return None if the time is
    possible or if the device is not known.
    """
    known = _known(device)
    if known is None:
        return None
    limits, seconds = LIMITS[known], time_ms / 1e3
    peak = limits.flops_16bit if itemsize <= 2 else limits.flops_32bit
    for done, most, unit, scale in (
        (cost.flops, peak, "TFLOP/s", 1e12),
        (cost.bytes, limits.bytes_per_s, "GB/s", 1e9),
    ):
        if done / seconds > most:
            rate, limit = done / seconds / scale, most / scale
            return f"{rate:.0f} {unit} is impossible on {known}, whose limit is {limit:.0f}"
    return None
