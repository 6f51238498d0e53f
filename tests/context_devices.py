"""What `test_context` runs on eight virtual devices of JAX, in a process of its own.

    python -m tests.context_devices zigzag packed

prints one JSON line a case: the largest difference of each quantity from torch on one device,
relative to its largest entry.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import nsa_jax
from nsa_core import context_layout as layouts
from nsa_jax import Branches, context
from tests import context_worker as worker
from tests.context_worker import CASES, MUTATED, Case, tensors

# By the mesh (data, context, heads) of each.
CHOSEN = {
    "zigzag": (2, 2, 2),
    "contiguous": (1, 8, 1),
    "odd-chunks": (1, 4, 1),
    "packed": (1, 4, 2),
}
SPECS = {"query": P("data", "context", "heads"), "gates": P("data", "context", "heads")}
SPECS |= {name: P(None, "data", "context", "heads") for name in ("key", "value")}
SPECS |= {"do": SPECS["query"], "segments": P(None, "context")}


def gathered_again(name: str) -> int:
    """All-gathers of the backward pass: the keys and the values of each group of heads."""
    case, (_, _, heads) = CASES[name], CHOSEN[name]
    return (worker.KV_HEADS // heads if case.apart else 1) * 2 * (2 if case.separate else 1)


def segments(case: Case):
    if case.lengths is None:
        return None
    ids = np.full((1, case.length), -1, np.int32)
    ends = np.cumsum(case.lengths)
    for number, (length, end) in enumerate(zip(case.lengths, ends, strict=True)):
        ids[:, end - length : end] = number
    return jnp.asarray(ids)


def calls(case: Case, x, ids, place):
    """Output, compressed keys and indices of the arrays `x`."""
    options = dict(config=case.config, segment_ids=ids)
    key, value = (
        Branches(*x[name]) if case.separate else Branches.each(x[name][0])
        for name in ("key", "value")
    )
    compress, select = nsa_jax.compress, nsa_jax.select_blocks
    if place:
        compress, select = context.compress, context.select_blocks
    params = worker.phi(case, x["key_weight"], x["value_weight"], jnp.asarray)
    pairs = zip((key.compressed, value.compressed), params, strict=True)
    compressed = tuple(compress(t, p, **options, **place) for t, p in pairs)
    indices = select(x["query"], compressed[0], **options, **place)
    out = nsa_jax.attention(
        x["query"],
        key if case.separate else key.selected,
        value if case.separate else value.selected,
        x["gates"],
        compressed=compressed if case.learned else None,
        block_indices=indices if case.given else None,
        recompute=case.recompute,
        **options,
        **place,
    )
    return out, compressed[0], indices


def with_gradients(function, x):
    """`function` of `x` gives output and others; besides, the gradients of all of `x`."""

    @jax.jit
    def run(x, do):
        out, pull_back, others = jax.vjp(function, x, has_aux=True)
        return out, others, pull_back(do)[0]

    do = x.pop("do")
    traced, forward = run.trace(x, do), jax.jit(function).trace(x)
    out, (k_cmp, indices), grads = traced.lower().compile()(x, do)
    gathers = [str(each).count("all_gather[") for each in (traced.jaxpr, forward.jaxpr)]
    return {
        "gathers": gathers[0] - gathers[1],
        "out": out,
        "k_cmp": k_cmp,
        "indices": indices,
    } | {f"d {name}": grad for name, grad in grads.items()}


def axis_of(name: str) -> int:
    return 2 if name.removeprefix("d ") in ("key", "value") else 1


def several(case: Case, shape: tuple[int, int, int]):
    """On a mesh of (data, context, heads)."""
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh(shape, ("data", "context", "heads"), axis_types=auto)
    place = dict(context_axis="context", context_layout=case.layout)
    shard = dict(context_layout=case.layout)
    whole = {n: jnp.asarray(t) for n, t in tensors(case).items()}
    x = {
        n: t
        if n.endswith("_weight")
        else context.shard_sequence(t, shape[1], axis=axis_of(n), **shard)
        for n, t in whole.items()
    }
    ids = segments(case)
    if ids is not None:
        ids = context.shard_sequence(ids, shape[1], **shard)
    specs = {n: SPECS.get(n, P()) for n in x if n != "do"}
    compressed = P("data", None, "heads")

    def function(x):
        def local(x, ids):
            out, k_cmp, indices = calls(case, x, ids, place)
            return out, k_cmp[None], indices

        out, k_cmp, indices = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, None if ids is None else SPECS["segments"]),
            out_specs=(SPECS["query"], P("context", *compressed), SPECS["query"]),
        )(x, ids)
        return out, (k_cmp[0], indices)

    found = with_gradients(function, x)
    return {
        n: t if n in ("gathers", "k_cmp") or n.endswith("_weight")
        else context.unshard_sequence(t, shape[1], axis=axis_of(n), length=case.length, **shard)
        for n, t in found.items()
    }  # fmt: skip


def differences(found, expected):
    apart = {}
    for name, one in expected.items():
        one = np.asarray(one)
        many = np.asarray(found[name][:, : one.shape[1]] if name == "k_cmp" else found[name])
        assert many.shape == one.shape, (name, many.shape, one.shape)
        apart[name] = float(np.abs(many - one).max() / max(np.abs(one).max(), 1e-3))
    return apart


def told(name: str, shape, case: Case) -> None:
    with worker.changed(layouts, "UNIT_BYTES", 1 if case.apart else layouts.UNIT_BYTES):
        found = several(case, shape)
    expected = worker.run(case, tensors(case))
    line = {"case": name, "gathers": found.pop("gathers")} | differences(found, expected)
    print(json.dumps(line), flush=True)


def main() -> None:
    names = sys.argv[1:]
    for name in names:
        if name in CHOSEN:
            told(name, CHOSEN[name], CASES[name])
    if "mutant" not in names:
        return
    layouts.chunk_places = lambda size, layout: list(range(2 * size))
    told("mutant order", (1, 4, 2), MUTATED)


if __name__ == "__main__":
    main()
