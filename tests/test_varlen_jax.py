"""Packed rows whose metadata is made once for all layers (`nsa_jax.varlen_metadata`)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

import nsa_jax
from kernels_pallas.mosaic import capability
from nsa_core.layer import LayerSpec
from nsa_jax.nn import NSAAttention
from tests.inputs import SMALL

S = 60
ROWS = {
    "documents": [[0] * 12 + [1] * 29 + [2] * 19, [5] * 60],
    "padding": [[-1] * 9 + [0] * 20 + [-1] * 3 + [1] * 28, [0] + [1] * 50 + [-1] * 9],
    "the same id again": [[0] * 30 + [1] * 5 + [0] * 25, [3, 2] * 30],
}


def leaves():
    """Query, key, value, gates."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(2, S, n, 16) for n in (4, 2, 2)] + [(2, S, 4, 3)]
    return [jax.random.normal(k, x) for k, x in zip(keys, shapes, strict=True)]


def ids_of(name):
    return jnp.array(ROWS[name], jnp.int32)


def made_layer():
    sizes = {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 10}
    spec = LayerSpec(dim=16, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, **sizes)
    return NSAAttention(spec, rngs=nnx.Rngs(0))


def gradients(inputs, **packed):
    def total(*inputs):
        out = nsa_jax.attention(*inputs, config=SMALL, **packed)
        return jnp.square(out).sum(), out

    (_, out), grads = jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True)(*inputs)
    return [out, *grads]


def same(one, two):
    return all(bool((x == y).all()) for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("name", ROWS)
def test_as_segment_ids(name, implementation):
    ids, inputs = ids_of(name), leaves()
    how = {"implementation": implementation}
    run = jax.jit(functools.partial(gradients, **how))
    meta = nsa_jax.varlen_metadata(ids, config=SMALL, max_segments=60, max_seqlen=60)
    assert same(run(inputs, varlen=meta), run(inputs, segment_ids=ids))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_the_same_blocks_at_any_place(implementation):
    """Of a document alone, and of the same between others."""

    def chosen(inputs, **packed):
        query, key = inputs
        packed |= {"config": SMALL}
        compressed = nsa_jax.compress(key, **packed)
        return nsa_jax.select_blocks(query, compressed, **packed, implementation=implementation)

    document, others = ([x[i : i + 1] for x in leaves()[:2]] for i in range(2))
    alone = chosen(document)
    row = [jnp.concatenate([y[:, :37], x, y], 1) for x, y in zip(document, others, strict=True)]
    ids = jnp.repeat(jnp.arange(3), jnp.array([37, S, S]))[None]
    found = chosen(row, varlen=nsa_jax.varlen_metadata(ids, config=SMALL))
    assert (found[:, 37 : 37 + S] == alone).all()


def test_every_function_takes_it():
    query, key, value, _ = leaves()
    ids, found = ids_of("padding"), []
    for packed in (
        {"segment_ids": ids},
        {"varlen": nsa_jax.varlen_metadata(ids, config=SMALL, max_seqlen=50)},
    ):
        packed |= {"config": SMALL}
        pair = [nsa_jax.compress(x, **packed) for x in (key, value)]
        scored = nsa_jax.select_blocks(query, pair[0], **packed)
        found.append([*pair, scored])
        found[-1] += nsa_jax.compressed_attention(query, *pair, **packed)
        found[-1] += nsa_jax.selected_attention(query, key, value, scored, **packed)
        found[-1] += nsa_jax.sliding_attention(query, key, value, **packed)
        nsa_jax.explain(query, key, value, **packed)
    assert same(*found)


def test_kernels_take_it():
    """Traced for them, mapped over and with gradients: what follows from the ids is worked out
    once, and not again in the backward pass.
    """
    inputs = [x.astype(jnp.bfloat16)[None] for x in leaves()]
    ids = ids_of("documents")[None]

    def total(packed, *inputs):
        how = {"implementation": "mosaic", "config": SMALL, **packed}
        return nsa_jax.attention(*inputs, **how).astype(jnp.float32).sum()

    def counted(name):
        def step(ids, *inputs):
            make = jax.vmap(functools.partial(nsa_jax.varlen_metadata, config=SMALL))
            packed = {name: make(ids) if name == "varlen" else ids}
            mapped = jax.vmap(jax.grad(total, argnums=(1, 2, 3, 4)))
            return mapped(packed, *inputs)

        with capability.interpreted(InterpretGPUParams()):
            return str(jax.make_jaxpr(step)(ids, *inputs)).count("cummax")

    assert counted("varlen") == 2 and counted("segment_ids") > 4


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_made_once_outside_of_layers(again):
    """Of layers in a scan, checkpointed too, a step works out once where tokens stand."""
    x = jax.random.normal(jax.random.key(0), (2, S, 16))
    layer = made_layer()
    config, ids = layer.spec.config, ids_of("documents")

    def step(x, **packed):
        body = lambda x, _: (layer(x, **packed)[0], None)
        body = jax.checkpoint(body) if again else body
        return jnp.square(jax.lax.scan(body, x, None, length=3)[0]).sum()

    def once(x, ids):
        return step(x, varlen=nsa_jax.varlen_metadata(ids, config=config))

    bare = lambda x, ids: step(x, segment_ids=ids)
    one, two = (jax.jit(jax.grad(each)) for each in (once, bare))
    assert jnp.allclose(one(x, ids), two(x, ids), atol=1e-6)
    # Positions are a running maximum: in no loop, or in each of them.
    counts = [str(jax.make_jaxpr(each)(x, ids)).count("cummax") for each in (one, two)]
    assert counts[0] == 2 and counts[1] > 4  # of positions, and of windows


def test_bad_input():
    ids, inputs = ids_of("documents"), leaves()
    meta = nsa_jax.varlen_metadata(ids, config=SMALL)
    refused = lambda match: pytest.raises(ValueError, match=match)
    call = lambda *inputs, **options: nsa_jax.attention(
        *inputs, **{"config": SMALL, "varlen": meta} | options
    )
    with refused("segment_ids must be None where varlen is given, got both"):
        call(*inputs, segment_ids=ids)
    with refused("varlen must be what nsa_jax.varlen_metadata returns"):
        call(*inputs, varlen=ids)
    with refused("varlen must be made with NSAConfig"):
        call(*inputs, config=nsa_jax.NSAConfig())
    with refused(r"varlen must be of rows \(1, 60\), got \(2, 60\)"):
        call(*(x[:1] for x in inputs))
    with refused("config must be an NSAConfig, got dict"):
        nsa_jax.varlen_metadata(ids, config={})
    with refused("segment_ids must have"):
        nsa_jax.varlen_metadata(ids[0], config=SMALL)
    for name, least in (("max_segments", 3), ("max_seqlen", 60)):
        nsa_jax.varlen_metadata(ids, config=SMALL, **{name: least})
        with refused(f"{name} must be {least} at least, as segment_ids have, got {least - 1}"):
            nsa_jax.varlen_metadata(np.asarray(ids), config=SMALL, **{name: least - 1})
        for wrong in (0, True, 1.5, "8"):
            with refused(f"{name} must be an int of at least 1, got {wrong!r}"):
                nsa_jax.varlen_metadata(ids, config=SMALL, **{name: wrong})
    layer = made_layer()
    with refused("varlen must be made with"):
        layer(jnp.zeros((2, S, 16)), varlen=nsa_jax.varlen_metadata(ids))
