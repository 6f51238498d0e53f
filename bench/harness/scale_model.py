"""Computes the traffic and the time of attention to one sequence on R devices. The module also
predicts the time on more devices.

A device receives `moved(R)` bytes. Keys and values of each head are gathered once in the forward
pass and once in the backward pass, in their own dtype. A reduce-scatter sums the gradients of keys
and values in float32.

    moved(R)    = (R - 1)/R * S Hkv (D + Dv) * itemsize              forward
    moved(R)    = (R - 1)/R * S Hkv (D + Dv) * (2 itemsize + 4)      forward and backward

The time `link(R)` of the transport follows from `moved(R)`. Nothing hides the transport of the
first head. The transport of each other head overlaps the computation of the head before it.

    compute(R)  = compute(1) / R * balance
    link(R)     = moved(R) / bandwidth
    exposed(R)  = link(R) / Hkv + max(0, link(R) - compute(R)) * (Hkv - 1) / Hkv
    time(R)     = compute(R) + exposed(R)

`bandwidth` and `balance` come from the row with the most devices.
"""

from collections.abc import Callable, Iterable, Sequence

import ml_dtypes

from .records import Values

FLOAT32 = 4


def moved_bytes(row: Values, devices: int) -> float:
    """Return the bytes that a device receives in one call of the problem `row` on `devices`."""
    itemsize = ml_dtypes.finfo(row["dtype"]).bits // 8
    columns = row["S"] * row["Hkv"] * (row["D"] + row["Dv"])
    times = itemsize if row["mode"] == "forward" else 2 * itemsize + FLOAT32
    return (devices - 1) / devices * columns * times


def fitted(rows: Sequence[Values]) -> Callable[..., float] | None:
    """Return a function `ms(devices, bandwidth)` that predicts the time of a call, from the rows of
    one problem. Return None unless there are rows on one and on several devices.

    `bandwidth` in bytes per second replaces the measured bandwidth. A row on several devices must
    have `compute_ms`, the time of the slowest device, and `transport_ms`.
    """
    one = alone(rows)
    several = [x for x in rows if x["devices"] > 1 and x["ms"] and x["transport_ms"]]
    if one is None or not several:
        return None
    last = max(several, key=lambda x: x["devices"])
    # Time of the slowest device divided by an equal share of the time on one device.
    balance = last["compute_ms"] * last["devices"] / one
    measured = moved_bytes(last, last["devices"]) / (last["transport_ms"] / 1e3)

    def ms(devices: int, bandwidth: float | None = None) -> float:
        if devices == 1:
            return one
        compute, heads = one / devices * balance, last["Hkv"]
        link = moved_bytes(last, devices) / (bandwidth or measured) * 1e3
        return compute + link / heads + max(0.0, link - compute) * (heads - 1) / heads

    return ms


def problem(row: Values) -> tuple:
    """Return the fields of a row that all rows of the same problem share."""
    names = "framework", "mode", "layout", "S", "H", "Hkv", "D", "Dv"
    return *(row[name] for name in names), *row.get("documents", ())


def by_problem(rows: Iterable[Values]) -> dict[tuple, list[Values]]:
    found: dict[tuple, list[Values]] = {}
    for row in rows:
        found.setdefault(problem(row), []).append(row)
    return found


def alone(rows: Iterable[Values]) -> float | None:
    """Return the newest time on one device among `rows`, or None."""
    found = [x["ms"] for x in rows if x["devices"] == 1 and x.get("ms")]
    return found[-1] if found else None
