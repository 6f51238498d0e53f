"""What `test_context` runs on eight virtual devices of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import nsa_jax
from nsa_jax import Branches, context
from tests import context_worker as worker
from tests.context_worker import CASES, CONFIG, Case, axes_of
from tests.oracles import nsa

# By the mesh (data, context, heads) of each.
CHOSEN = {"zigzag": (2, 2, 2), "contiguous": (1, 8, 1), "packed": (1, 4, 2)}
TOKENS = P("data", "context", "heads")
SPECS = dict.fromkeys(("query", "gates"), TOKENS)
SPECS |= {name: P(None, *TOKENS) for name in ("key", "value")}


def gathered_again(name: str) -> int:
    """All-gathers of the backward pass: the keys and the values of each group of heads."""
    case, (_, _, heads) = CASES[name], CHOSEN[name]
    return (worker.KV_HEADS // heads if case.apart else 1) * 2 * (2 if case.separate else 1)


def segments(case: Case):
    if case.lengths is None:
        return None
    rows = nsa.Rows(case.length, case.length, case.lengths)
    return jnp.asarray(rows.tokens()[0][None].numpy(), jnp.int32)


def calls(case: Case, x, ids):
    """Output, compressed keys and indices of the rank's arrays `x`."""
    place = dict(context_axis="context", context_layout=case.layout)
    place |= dict(config=CONFIG, segment_ids=ids)
    key, value = (
        Branches(*x[name]) if case.separate else Branches.each(x[name][0])
        for name in ("key", "value")
    )
    params = worker.phi(case, x["key_weight"], x["value_weight"], jnp.asarray)
    pairs = zip((key.compressed, value.compressed), params, strict=True)
    compressed = tuple(context.compress(t, p, **place) for t, p in pairs)
    indices = context.select_blocks(x["query"], compressed[0], **place)
    out = nsa_jax.attention(
        x["query"],
        key if case.separate else key.selected,
        value if case.separate else value.selected,
        x["gates"],
        compressed=compressed if case.learned else None,
        block_indices=indices if case.given else None,
        **place,
    )
    return out, compressed[0][None], indices


def several(case: Case, shape: tuple[int, int, int]):
    """Results and gradients on a mesh of (data, context, heads)."""
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh(shape, ("data", "context", "heads"), axis_types=auto)
    shard = dict(context_layout=case.layout)
    own = lambda t, axis: context.shard_sequence(t, shape[1], axis=axis, **shard)
    x = {n: jnp.asarray(t) for n, t in worker.tensors(case).items()}
    x = {n: own(t, axes_of(n)[0]) if axes_of(n) else t for n, t in x.items()}
    do, ids = x.pop("do"), segments(case)
    place = dict(mesh=mesh, out_specs=(TOKENS, P("context", "data", None, "heads"), TOKENS))
    place["in_specs"] = {n: SPECS.get(n, P()) for n in x}, None
    if ids is not None:
        ids = own(ids, 1)
        place["in_specs"] = place["in_specs"][0], P(None, "context")
    local = lambda x, ids: calls(case, x, ids)

    def function(x):
        out, k_cmp, indices = jax.shard_map(local, **place)(x, ids)
        return out, (k_cmp[0], indices)

    @jax.jit
    def run(x, do):
        out, pull_back, others = jax.vjp(function, x, has_aux=True)
        return out, others, pull_back(do)[0]

    traced = run.trace(x, do)
    out, (k_cmp, indices), grads = traced.lower().compile()(x, do)
    found = {"out": out, "indices": indices} | {f"d {name}": t for name, t in grads.items()}
    put = lambda t, axis: context.unshard_sequence(
        t, shape[1], axis=axis, length=case.length, **shard
    )
    found = {n: put(t, axes_of(n)[0]) if axes_of(n) else t for n, t in found.items()}
    jaxprs = traced.jaxpr, jax.jit(function).trace(x).jaxpr
    again, once = (str(each).count("all_gather[") for each in jaxprs)
    return found | {"k_cmp": k_cmp}, again - once


def compared(name: str) -> tuple[dict[str, float], int]:
    """The largest difference of each quantity from torch on one device, relative to its largest
    entry, and the all-gathers of the backward pass.
    """
    case, differences = CASES[name], {}
    with worker.units(case):
        found, gathers = several(case, CHOSEN[name])
    for quantity, one in worker.run(case, worker.tensors(case)).items():
        one, many = np.asarray(one), found[quantity]
        many = np.asarray(many[:, : one.shape[1]] if quantity == "k_cmp" else many)
        assert many.shape == one.shape, (quantity, many.shape, one.shape)
        apart = np.abs(many - one).max() / max(np.abs(one).max(), 1e-3)
        differences[quantity] = float(apart)
    return differences, gathers
