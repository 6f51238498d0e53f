"""Bad input is refused with a message that names the argument, what was expected, what came."""

import jax
import jax.numpy as jnp
import pytest

import nsa_jax
from nsa_jax import Branches, NSAConfig

SMALL = NSAConfig(8, 4, 16, 4, window=10)
Q, K, V = jnp.zeros((2, 20, 4, 8)), jnp.zeros((2, 20, 2, 8)), jnp.zeros((2, 20, 2, 6))
GATES = jnp.zeros((2, 20, 4, 3))
SMALL_K = jnp.zeros((2, 4, 2, 8))
INDICES = jnp.zeros((2, 20, 2, 4), jnp.int32)


def attention(query=Q, key=K, value=V, gates=GATES, config=SMALL, **options):
    return nsa_jax.attention(query, key, value, gates, config=config, **options)


def select(query=Q, key=SMALL_K, config=SMALL, **options):
    return nsa_jax.select_blocks(query, key, config=config, **options)


CASES = {
    "query not an array": (lambda: attention(query=3), "query must be an array, got int"),
    "query rank": (
        lambda: attention(query=Q[0]),
        "query must have 4 axes, got shape (20, 4, 8)",
    ),
    "no query": (
        lambda: attention(query=Q[:, :0], gates=GATES[:, :0]),
        "query must not be empty, got shape (2, 0, 4, 8)",
    ),
    "query dtype": (
        lambda: attention(query=Q.astype(jnp.int32)),
        "query must have dtype in ('float16', 'bfloat16', 'float32', 'float64'), got int32",
    ),
    "key dtype": (
        lambda: attention(key=K.astype(jnp.bfloat16)),
        "key.compressed must have the dtype of query, float32, got bfloat16",
    ),
    "key width": (
        lambda: attention(key=jnp.zeros((2, 20, 2, 4))),
        "key.compressed must have shape (2, 20, 2, 8), got (2, 20, 2, 4)",
    ),
    "key batch": (
        lambda: attention(key=jnp.zeros((1, 20, 2, 8))),
        "key.compressed must have shape (2, 20, 2, 8), got (1, 20, 2, 8)",
    ),
    "key length": (
        lambda: attention(key=jnp.zeros((2, 21, 2, 8))),
        "key.compressed must have shape (2, 20, 2, 8), got (2, 21, 2, 8)",
    ),
    "key heads": (
        lambda: attention(key=jnp.zeros((2, 20, 3, 8))),
        "query heads must be a multiple of key.compressed heads, got 4 and 3",
    ),
    "heads of keys and values": (
        lambda: attention(key=jnp.zeros((2, 20, 1, 8))),
        "key.compressed and value.compressed must have the same [B, S, Hkv], "
        "got (2, 20, 1) and (2, 20, 2)",
    ),
    "value length": (
        lambda: attention(value=jnp.zeros((2, 19, 2, 6))),
        "value.compressed must have shape (2, 20, 2, 6), got (2, 19, 2, 6)",
    ),
    "heads": (
        lambda: attention(key=jnp.zeros((2, 20, 3, 8)), value=jnp.zeros((2, 20, 3, 6))),
        "query heads must be a multiple of key.compressed heads, got 4 and 3",
    ),
    "T > S": (
        lambda: attention(key=K[:, :9], value=V[:, :9]),
        "query must not be longer than key.compressed, got T=20 and S=9",
    ),
    "gates": (
        lambda: attention(gates=GATES[..., :2]),
        "gates must have shape (2, 20, 4, 3), got (2, 20, 4, 2)",
    ),
    "gates of a branch": (
        lambda: attention(gates=Branches(GATES[..., 0], GATES[:, :5, :, 0], GATES[..., 0])),
        "gates.selected must have shape (2, 20, 4), got (2, 5, 4)",
    ),
    "branch of keys": (
        lambda: attention(key=Branches(K, K[..., :4], K)),
        "key.selected must have shape (2, 20, 2, 8), got (2, 20, 2, 4)",
    ),
    "config": (lambda: attention(config={"l": 3}), "config must be an NSAConfig, got dict"),
    "scale": (
        lambda: attention(scale=-1.0),
        "scale must be a positive number or None, got -1.0",
    ),
    "scale nan": (lambda: attention(scale=float("nan")), "scale must be a positive number"),
    "segment ids": (
        lambda: attention(segment_ids=jnp.zeros((2, 19), jnp.int32)),
        "segment_ids must have shape (2, 20), got (2, 19)",
    ),
    "segment ids dtype": (
        lambda: attention(segment_ids=jnp.zeros((2, 20))),
        "segment_ids must have dtype in ('int32', 'int64', 'int16', 'int8'), got float32",
    ),
    "compressed count": (
        lambda: attention(compressed=(SMALL_K[:, :3], SMALL_K[:, :3, :, :6])),
        "compressed_key must have C=4 tokens for 20 keys, got 3",
    ),
    "compressed width": (
        lambda: attention(compressed=(SMALL_K[..., :6], SMALL_K[..., :6])),
        "compressed_key must have shape (2, 4, 2, 8), got (2, 4, 2, 6)",
    ),
    "indices dtype": (
        lambda: attention(block_indices=INDICES.astype(jnp.float32)),
        "block_indices must have dtype in ('int32',), got float32",
    ),
    "indices shape": (
        lambda: attention(block_indices=INDICES[..., :3]),
        "block_indices must have shape (2, 20, 2, 4), got (2, 20, 2, 3)",
    ),
    "implementation": (
        lambda: attention(implementation="cuda"),
        "implementation must be one of ('mosaic', 'triton', 'xla', 'reference') or None, "
        "got 'cuda'",
    ),
    "kv_len short": (lambda: select(kv_len=19), "kv_len must be at least T=20, got 19"),
    "kv_len type": (
        lambda: select(kv_len=20.0),
        "kv_len must be an integer or an array of them, got 20.0",
    ),
    "kv_len shape": (
        lambda: select(kv_len=jnp.zeros((3,), jnp.int32)),
        "kv_len must have shape () or (2,), got (3,)",
    ),
    "kv_len beyond the keys": (
        lambda: nsa_jax.sliding_attention(Q, K, V, config=SMALL, kv_len=21),
        "kv_len must be at most the keys there are, 20, got 21",
    ),
    "kv_len with segments": (
        lambda: select(kv_len=20, segment_ids=jnp.zeros((2, 20), jnp.int32)),
        "kv_len must be None where segment_ids are given, got both",
    ),
    "compressed keys for T": (
        lambda: select(key=SMALL_K[:, :2]),
        "compressed_key must have C=4 tokens for 20 keys, got 2",
    ),
    "phi": (
        lambda: nsa_jax.compress(K, 3, config=SMALL),
        "params must be None, PoolParams or MLPParams, got int",
    ),
    "phi weight": (
        lambda: nsa_jax.compress(K, nsa_jax.PoolParams(jnp.zeros((4, 8))), config=SMALL),
        "params.weight must have shape (8, 8), got (4, 8)",
    ),
    "cache capacity": (
        lambda: nsa_jax.init_cache(1, 0, 2, 8, 6, config=SMALL),
        "capacity must be an int >= 1, got 0",
    ),
    "cache of another width": (
        lambda: nsa_jax.cached_attention(
            Q, K, V, GATES, nsa_jax.init_cache(2, 30, 2, 8, 8, config=SMALL), config=SMALL
        ),
        "value.compressed must have shape (2, 20, 2, 8), got (2, 20, 2, 6)",
    ),
    "cache of another block": (
        lambda: nsa_jax.cached_attention(
            Q, K, V, GATES, nsa_jax.init_cache(2, 30, 2, 8, 6, config=NSAConfig()), config=SMALL
        ),
        "cache must be made with compress_block=8, got one with 32",
    ),
    "cache of another stride": (
        lambda: nsa_jax.cached_attention(
            Q,
            K,
            V,
            GATES,
            nsa_jax.init_cache(2, 30, 2, 8, 6, config=NSAConfig(8, 2, 16, 4, window=10)),
            config=SMALL,
        ),
        "cache must be made with compress_stride=4, got one with 2",
    ),
    "cache without a config": (
        lambda: nsa_jax.init_cache(2, 30, 2, 8, 6, config={"l": 8}),
        "config must be an NSAConfig, got dict",
    ),
    "cache of another batch": (
        lambda: nsa_jax.cached_attention(
            Q, K, V, GATES, nsa_jax.init_cache(3, 30, 2, 8, 6, config=SMALL), config=SMALL
        ),
        "cache must be of batch 2, got 3",
    ),
    "branches in a shared cache": (
        lambda: nsa_jax.cached_attention(
            Q,
            Branches(K, K, K + 1),
            V,
            GATES,
            nsa_jax.init_cache(2, 30, 2, 8, 6, config=SMALL),
            config=SMALL,
        ),
        "make it with init_cache(separate=True)",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name):
    run, message = CASES[name]
    with pytest.raises(ValueError) as error:
        run()
    assert message in str(error.value)


def test_good_input_passes():
    """The defaults above are good: each case fails for its own reason."""
    assert jax.eval_shape(attention).shape == (2, 20, 4, 6)
    assert jax.eval_shape(select).shape == (2, 20, 2, 4)
