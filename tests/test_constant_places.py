"""JAX: where tokens are written may be known as a program is compiled; the result is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from nsa_core.config import NSAConfig
from nsa_jax import Branches

CONFIG = NSAConfig(8, 4, 8, 4, 1, 2, 12)
HEADS, WIDTH = 2, 16


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def pages(length):
    """A token is appended to a row; what it does not finish is written nowhere."""
    # The last page of the pool, where a place behind the end would be moved, is the row's second.
    table, lengths = jnp.array([[0, 3, 2, 1]]), jnp.array([length])
    cache = nsa_jax.PagedCache(4, HEADS, WIDTH, WIDTH, config=CONFIG, dtype=jnp.float32)
    cache = nsa_jax.append(
        cache, *[drawn(32, HEADS, WIDTH, seed=s) for s in (1, 2)], table, 32 + 0 * lengths
    )
    new = [drawn(1, HEADS, WIDTH, seed=s) for s in (3, 4)]
    return nsa_jax.append, (cache, *new), (table, lengths)


def rows(length):
    """A token more in a contiguous cache, whose length is known."""
    options = {"config": CONFIG, "dtype": jnp.float32, "separate": True}
    cache = nsa_jax.init_cache(1, 32, HEADS, WIDTH, WIDTH, **options)
    branches = [Branches(*3 * (drawn(1, 30, HEADS, WIDTH, seed=s),)) for s in (1, 2)]
    gates, query = drawn(1, 30, 2 * HEADS, 3), drawn(1, 30, 2 * HEADS, WIDTH)
    cache = nsa_jax.cached_attention(query, *branches, gates, cache, implementation="xla")[1]
    cache = cache._replace(length=jnp.array([length - 1], jnp.int32))
    new = [Branches(*3 * (drawn(1, 1, HEADS, WIDTH, seed=s),)) for s in (3, 4)]

    def step(query, key, value, gates, cache):
        return nsa_jax.cached_attention(query, key, value, gates, cache, implementation="xla")

    return step, (query[:, :1], *new, gates[:, :1]), (cache,)


def documents(length):
    """A packed row of one window, and its gradient."""
    ids = jnp.where(jnp.arange(11) < length % 11, 0, 1)[None]

    def means(x, ids):
        def total(x):
            return jnp.sum(nsa_jax.compress(x, config=CONFIG, segment_ids=ids) ** 2)

        return jax.value_and_grad(total)(x)

    return means, (drawn(1, 11, HEADS, WIDTH),), (ids,)


def copies(length):
    """A page copied to another."""
    cache = nsa_jax.PagedCache(4, HEADS, WIDTH, WIDTH, config=CONFIG, dtype=jnp.float32)
    cache = jax.tree.map(lambda x: drawn(*x.shape), cache)
    return nsa_jax.PagedCache.copy_pages, (cache,), (jnp.array([1]), jnp.array([length % 4]))


CASES = [(pages, 13), (pages, 16), (rows, 16), (documents, 18), (copies, 18)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("case", "length"), CASES)
def test_places_known_to_the_compiler(case, length, device):
    function, arguments, constants = case(length)
    known = jax.jit(lambda *given: function(*given, *constants))(*arguments)
    given = jax.jit(function)(*arguments, *constants)
    for a, b in zip(jax.tree.leaves(known), jax.tree.leaves(given), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # sums are in another order


def test_a_page_beyond_the_pool_is_none():
    function, (cache,), (source, _) = copies(13)
    found = jax.jit(function)(cache, source, jnp.array([7]))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a, b)
