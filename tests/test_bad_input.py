"""Bad input is refused with a message that names the argument, what was expected, what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import nsa_jax
import nsa_torch
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
        "key must have the dtype of query, float32, got bfloat16",
    ),
    "key width": (
        lambda: attention(key=jnp.zeros((2, 20, 2, 4))),
        "key must have shape (2, 20, 2, 8), got (2, 20, 2, 4)",
    ),
    "key batch": (
        lambda: attention(key=jnp.zeros((1, 20, 2, 8))),
        "key must have shape (2, 20, 2, 8), got (1, 20, 2, 8)",
    ),
    "key length": (
        lambda: attention(key=jnp.zeros((2, 21, 2, 8))),
        "key must have shape (2, 20, 2, 8), got (2, 21, 2, 8)",
    ),
    "key heads": (
        lambda: attention(key=jnp.zeros((2, 20, 3, 8))),
        "query heads must be a multiple of key heads, got 4 and 3",
    ),
    "heads of keys and values": (
        lambda: attention(key=jnp.zeros((2, 20, 1, 8))),
        "key and value must have the same [B, S, Hkv], got (2, 20, 1) and (2, 20, 2)",
    ),
    "value length": (
        lambda: attention(value=jnp.zeros((2, 19, 2, 6))),
        "value must have shape (2, 20, 2, 6), got (2, 19, 2, 6)",
    ),
    "heads": (
        lambda: attention(key=jnp.zeros((2, 20, 3, 8)), value=jnp.zeros((2, 20, 3, 6))),
        "query heads must be a multiple of key heads, got 4 and 3",
    ),
    "T > S": (
        lambda: attention(key=K[:, :9], value=V[:, :9]),
        "query must not be longer than key, got T=20 and S=9",
    ),
    "heads before tokens": (
        lambda: attention(*(x.swapaxes(1, 2) for x in (Q, K, V, GATES))),
        "query must not be longer than key, got T=4 and S=2; tokens come before heads: "
        "query [B, T, H, D], key [B, S, Hkv, D], gates [B, T, H, 3]",
    ),
    "heads before tokens, gates not": (
        lambda: attention(*(x.swapaxes(1, 2) for x in (Q, K, V))),
        "gates must have shape (2, 4, 20, 3) for query (2, 4, 20, 8), got (2, 20, 4, 3); "
        "tokens come before heads: query [B, T, H, D], key",
    ),
    "heads before tokens of keys": (
        lambda: attention(key=K.swapaxes(1, 2), value=V.swapaxes(1, 2)),
        "query heads must be a multiple of key heads, got 4 and 20; tokens come before heads",
    ),
    "heads before tokens of both": (
        lambda: nsa_jax.sliding_attention(*(x.swapaxes(1, 2) for x in (Q, K, V)), config=SMALL),
        "query must not be longer than key, got T=4 and S=2; tokens come before heads",
    ),
    "one key, values of branches": (
        lambda: attention(key=K[..., :4], value=Branches(V, V, V + 1)),
        "key must have shape (2, 20, 2, 8), got (2, 20, 2, 4)",
    ),
    "float64 of NumPy": (
        lambda: attention(np.zeros(Q.shape)),
        "query must not be a NumPy array of float64: JAX makes float32 of it unless",
    ),
    "float64 of NumPy in a step": (
        lambda: nsa_jax.compress(np.zeros(K.shape), config=SMALL),
        "x must not be a NumPy array of float64",
    ),
    "gates": (
        lambda: attention(gates=GATES[..., :2]),
        "gates must have shape (2, 20, 4, 3) for query (2, 20, 4, 8), got (2, 20, 4, 2)",
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
    "compressed alone": (
        lambda: attention(compressed=SMALL_K[:1]),
        "compressed must be a pair of arrays, compressed keys and values, got ArrayImpl",
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
        "params must be None, PoolParams, MLPParams or RopeMLPParams, got int",
    ),
    "phi rates": (
        lambda: nsa_jax.compress(
            K,
            nsa_jax.RopeMLPParams(*(jnp.zeros(s) for s in ((8, 8), (64, 3), 3, (3, 8), 8, 8))),
            config=SMALL,
        ),
        "params.rates must have shape (4,), got (8,)",
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
        "value must have shape (2, 20, 2, 8), got (2, 20, 2, 6)",
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


def paged_step(library, zeros, cache=None, **options):
    lengths = np.array([20], np.int32)
    table, lengths = map(zeros.asarray, (np.arange(2, dtype=np.int32)[None], lengths))
    cache = cache or library.PagedCache(2, 2, 8, 8, config=SMALL, dtype=zeros.float32)
    x = zeros.zeros((20, 2, 8))
    return library.append(cache, x, x, table, lengths, **options)


def cached_step(api, xp, x, **options):
    return api.cached_attention(*x, api.init_cache(1, 30, 2, 8, 8, config=SMALL), **options)


BAD_CACHES = {
    "cache must be one of init_cache, got NoneType": lambda api, xp, x: api.cached_attention(
        *x, None
    ),
    "cache must be one of init_cache, got str": lambda api, xp, x: api.cached_attention(
        *x, "cache", config=SMALL
    ),
    "compress_params must be a pair of parameters of compress, got NoneType": (
        lambda api, xp, x: cached_step(api, xp, x, compress_params=None)
    ),
    "params must be a pair of parameters of compress, got 1 of them": (
        lambda api, xp, x: paged_step(api, xp, params=(None,))
    ),
    "made_with must be pairs of a name and a value that has a hash, .*, got 3": (
        lambda api, xp, x: cached_step(api, xp, x, made_with=3)
    ),
    "made_with must be pairs .*, got 'rope'": (
        lambda api, xp, x: cached_step(api, xp, x, made_with="rope")
    ),
    r"made_with must be pairs .*, got \('rope_base',": (
        lambda api, xp, x: paged_step(api, xp, made_with=("rope_base", 1e4))
    ),
    r"made_with must be pairs .*, got \(\('rope_base', \[1\]\),\)": (
        lambda api, xp, x: paged_step(api, xp, made_with=(("rope_base", [1]),))
    ),
    r"made_with must be pairs .*, got \(\(1, 2\),\)": (
        lambda api, xp, x: paged_step(api, xp, made_with=((1, 2),))
    ),
    "cache must be a PagedCache, got dict": (
        lambda api, xp, x: paged_step(api, xp, cache={"pages": 3})
    ),
    "separate must be a bool, got 'yes'": (
        lambda api, xp, x: api.PagedCache(2, 2, 8, 8, config=SMALL, separate="yes")
    ),
    "params.weight must be an array, got NoneType": lambda api, xp, x: api.compress(
        x[1], api.PoolParams(None), config=SMALL
    ),
    "params.weight must have dtype in .*, got int32": lambda api, xp, x: api.compress(
        x[1], api.PoolParams(xp.ones((8, 8), dtype=xp.int32)), config=SMALL
    ),
    "dtype must be one of .*, got int32": lambda api, xp, x: api.init_cache(
        1, 30, 2, 8, 8, config=SMALL, dtype=xp.int32
    ),
    "separate must be a bool, got 'no'": lambda api, xp, _: api.init_cache(
        1, 30, 2, 8, 8, config=SMALL, separate="no"
    ),
    "separate must be a bool, got 0": lambda api, xp, _: api.PagedCache(2, 2, 8, 8, separate=0),
}


@pytest.mark.parametrize("message", BAD_CACHES)
@pytest.mark.parametrize("library", [nsa_jax, nsa_torch], ids=["jax", "torch"])
def test_bad_caches_and_parameters(library, message):
    xp = torch if library is nsa_torch else jnp
    given = [xp.zeros((1, 20, *shape)) for shape in ((4, 8), (2, 8), (2, 8), (4, 3))]
    with pytest.raises(ValueError, match=f"^{message}"):
        BAD_CACHES[message](library, xp, given)


PAGES = torch.zeros(2, SMALL.select_block, 2, 8)


@pytest.mark.parametrize(
    "message, run",
    [
        (
            "separate must be a bool, got 'no'",
            lambda: nsa_torch.PagedCache.view(PAGES, PAGES, config=SMALL, separate="no"),
        ),
        (
            "max_rows must be an int >= 1, got 0",
            lambda: nsa_torch.PagedCache.view(PAGES, PAGES, config=SMALL, max_rows=0),
        ),
        (
            "separate must be a bool, got 'no'",
            lambda: nsa_torch.PagedCache.carve(PAGES.flatten(), 2, 8, 8, separate="no"),
        ),
        (
            "padded must be a bool, got 'no'",
            lambda: nsa_torch.varlen_metadata(torch.tensor([0, 9]), padded="no"),
        ),
    ],
)
def test_bad_flags_of_torch(message, run):
    with pytest.raises(ValueError, match=f"^{message}"):
        run()


TORCH = [torch.from_numpy(np.array(x)) for x in (Q, K, V, GATES)]


@pytest.mark.parametrize(
    "swapped, message",
    [
        ("qkvg", "query must not be longer than key, got T=4 and S=2"),
        ("qkv", r"gates must have shape \(2, 4, 20, 3\) for query \(2, 4, 20, 8\), got "),
        ("kv", "query heads must be a multiple of key heads, got 4 and 20"),
    ],
)
def test_heads_before_tokens_in_torch(swapped, message):
    """As scaled_dot_product_attention takes them."""
    pairs = zip("qkvg", TORCH, strict=True)
    given = [x.transpose(1, 2) if name in swapped else x for name, x in pairs]
    with pytest.raises(ValueError, match=f"{message}.*; tokens come before heads: query"):
        nsa_torch.attention(*given, config=SMALL)
    cache = nsa_torch.init_cache(2, 30, 2, 8, 6, config=SMALL)
    with pytest.raises(ValueError, match=f"{message}.*; tokens come before heads: query"):
        nsa_torch.cached_attention(*given, cache)


@pytest.mark.parametrize("recompute", [1, "no", None, [True]], ids=str)
def test_recompute_is_a_bool(recompute):
    """No implementation is asked first: "no" would be true to each of them."""
    for library, given in ((nsa_jax, (Q, K, V, GATES)), (nsa_torch, TORCH)):
        with pytest.raises(ValueError, match=r"^recompute must be a bool, got "):
            library.attention(*given, config=SMALL, recompute=recompute)


@pytest.mark.parametrize("given", [["xla"], 7, Branches(["xla"], None, None)], ids=str)
def test_names_of_implementations_are_words(given):
    """Not what cannot be looked up: on a GPU that was a TypeError."""
    for library, tensors in ((nsa_jax, (Q, K, V, GATES)), (nsa_torch, TORCH)):
        with pytest.raises(
            ValueError, match=r"implementation must be one of \(.*\) or None, got"
        ):
            library.attention(*tensors, config=SMALL, implementation=given)


def test_float64_of_numpy_where_jax_keeps_it():
    arrays = [np.asarray(x, np.float64) for x in (Q, K, V)]
    with pytest.raises(ValueError, match="query must not be a NumPy array of float64"):
        nsa_jax.explain(*arrays, config=SMALL)
    with jax.enable_x64(True):
        nsa_jax.explain(*arrays, config=SMALL)


def test_good_input_passes():
    """The defaults above are good: each case fails for its own reason."""
    assert jax.eval_shape(attention).shape == (2, 20, 4, 6)
    assert jax.eval_shape(select).shape == (2, 20, 2, 4)


def test_arrays_of_the_other_framework():
    """Where dtypes have the same name, it is not the dtype that is wrong."""
    theirs = [torch.from_numpy(np.array(x)) for x in (Q, K, V, GATES)]
    cache = nsa_torch.init_cache(2, 30, 2, 8, 6, config=SMALL)
    for i, name in enumerate(("query", "key", "value", "gates")):
        given = list(theirs)
        given[i] = np.asarray((Q, K, V, GATES)[i])
        for call in (
            lambda *x: nsa_torch.attention(*x, config=SMALL),
            lambda *x: nsa_torch.cached_attention(*x, cache),
        ):
            message = f"{name} must be a torch tensor, got a numpy.ndarray"
            with pytest.raises(ValueError, match=message):
                call(*given)
        given = [Q, K, V, GATES]
        given[i] = theirs[i]
        with pytest.raises(ValueError, match=r"of JAX or NumPy, got a torch.Tensor of shape"):
            nsa_jax.attention(*given, config=SMALL)


def good_calls(library):
    """By name: a function, its arrays, and what else it takes."""
    xp = torch if library is nsa_torch else jnp
    ints = lambda *shape: xp.zeros(shape, dtype=xp.int32)
    x, one = xp.zeros((1, 20, 4, 8)), xp.zeros((1, 20, 2, 8))
    given = {"query": x, "key": one, "value": one}
    whole = given | {"gates": xp.zeros((1, 20, 4, 3))}
    pages = {"page_table": ints(1, 2), "lengths": ints(1) + 1}
    cached = {"cache": library.PagedCache(4, 2, 8, 8, config=SMALL, dtype=xp.float32)} | pages
    means = xp.zeros((1, 4, 2, 8))
    compressed = {"query": x, "compressed_key": means}
    lists = {"block_indices": ints(1, 20, 2, 4) - 1}
    packed = (
        {"cu_seqlens": torch.tensor([0, 20])} if xp is torch else {"segment_ids": ints(1, 20)}
    )
    metadata = {"varlen": library.varlen_metadata(**packed, config=SMALL)}
    index = {"index_query": xp.zeros((1, 20, 2, 8)), "index_key": xp.zeros((1, 20, 8))}
    page, size = xp.zeros((4, 16, 2, 8)), {"block_size": 16}
    step = {"query": x[:, 0], "key_pages": page, "value_pages": page, **pages}
    index_step = {"index_query": one[:, 0], "index_key_pages": page[:, :, 0], **pages}
    config, pool = {"config": SMALL}, {"pool": 16, "num_selected": 2}
    found = {
        "index_blocks": (index, pool),
        "paged_index_blocks": (index_step, pool),
        "indexer_kl": ({"query": x, "key": one, "lse": xp.zeros((1, 20, 4)), **index}, {}),
        "block_attention": (given | lists, size),
        "paged_block_attention": (step | {"block_indices": ints(1, 2, 1)}, size),
        "append": ({"key": one[:, 0], "value": one[:, 0], **cached}, {}),
        "paged_attention": ({"query": x[:, 0], "gates": x[:, 0, :, :3], **cached}, {}),
    }
    for name, rest in (("", {}), (" packed", packed), (" with metadata", metadata)):
        found |= {
            f"attention{name}": (whole, config | rest),
            f"explain{name}": (whole, config | rest),
            f"compress{name}": ({"x": one}, config | rest),
            f"select_blocks{name}": (compressed, config | rest),
            f"compressed_attention{name}": (
                compressed | {"compressed_value": means},
                config | rest,
            ),
            f"selected_attention{name}": (given | lists, config | rest),
            f"sliding_attention{name}": (given, config | rest),
        }
    found["attention of lists"] = lists, whole | config
    cache = library.init_cache(1, 30, 2, 8, 8, config=SMALL)
    found["cached_attention"] = whole, {"cache": cache}
    return found


@pytest.mark.parametrize("name", good_calls(nsa_jax))
@pytest.mark.parametrize("library", [nsa_jax, nsa_torch], ids=["jax", "torch"])
def test_what_is_no_array(library, name):
    """None, a number, and in torch a sparse tensor, in place of each argument that is an array."""
    arrays, rest = good_calls(library)[name]
    function = getattr(library, name.split()[0])
    for argument, x in arrays.items():
        optional = argument == "block_indices" and len(arrays) == 1
        optional |= argument == "gates" and name.startswith("explain")
        bad = [3] if optional else [None, 3]
        if isinstance(x, torch.Tensor):
            bad.append(x.to_sparse())
        for each in bad:
            with pytest.raises(
                ValueError, match=rf"^{argument} must be (a|an|dense)\b.*, got "
            ):
                function(**arrays | {argument: each}, **rest)


def test_an_unknown_name_of_a_config():
    """The nearest field is proposed, that of a short name by its meaning."""
    for name, field in {
        "n_sel": "num_selected",
        "w": "window",
        "num_locals": "num_local",
    }.items():
        with pytest.raises(TypeError, match=f"^NSAConfig has no field '{name}'; pass {field}$"):
            NSAConfig(**{name: 4})


BAD_BESIDE = {
    "key.compressed": lambda zeros: {
        "key": Branches(zeros(1, 7, 2, 8), *[zeros(1, 20, 2, 8)] * 2)
    },
    "value.sliding": lambda zeros: {
        "value": Branches(*[zeros(1, 20, 2, 8)] * 2, zeros(1, 20, 1, 8))
    },
    "gates": lambda zeros: {"gates": zeros(1, 20, 4, 2)},
    "compressed_key": lambda zeros: {"compressed": (zeros(1, 1, 2, 8), zeros(1, 1, 2, 8))},
    # All branches have the same tokens, heads and width of values.
    "key.compressed must have": lambda zeros: {
        "key": Branches(zeros(1, 30, 2, 8), *[zeros(1, 40, 2, 8)] * 2),
        "value": Branches(zeros(1, 30, 2, 8), *[zeros(1, 40, 2, 8)] * 2),
    },
    "key.sliding must have": lambda zeros: {
        "key": Branches(*[zeros(1, 20, 2, 8)] * 2, zeros(1, 20, 1, 8)),
        "value": Branches(*[zeros(1, 20, 2, 8)] * 2, zeros(1, 20, 1, 8)),
    },
    "value.sliding must have": lambda zeros: {
        "value": Branches(*[zeros(1, 20, 2, 8)] * 2, zeros(1, 20, 2, 1))
    },
    "compressed_key must have shape": lambda zeros: {
        "compressed": (zeros(1, 4, 1, 8), zeros(1, 4, 1, 8))
    },
    "compressed_value must have shape": lambda zeros: {
        "compressed": (zeros(1, 4, 2, 8), zeros(1, 4, 2, 1))
    },
}


@pytest.mark.parametrize("name", BAD_BESIDE)
@pytest.mark.parametrize("library", [nsa_jax, nsa_torch], ids=["jax", "torch"])
def test_what_attention_refuses_is_not_explained(library, name):
    zeros = lambda *shape: (torch if library is nsa_torch else jnp).zeros(shape)
    given = {
        "query": zeros(1, 20, 4, 8),
        "key": zeros(1, 20, 2, 8),
        "value": zeros(1, 20, 2, 8),
    }
    given |= {"gates": zeros(1, 20, 4, 3), "config": SMALL}
    library.explain(**given)
    given |= BAD_BESIDE[name](zeros)
    with pytest.raises(ValueError, match=name) as wanted:
        library.attention(**given)
    with pytest.raises(ValueError, match=name) as error:
        library.explain(**given)
    assert str(error.value) == str(wanted.value)


@pytest.mark.parametrize("library", [nsa_jax, nsa_torch], ids=["jax", "torch"])
def test_arguments_are_checked_before_an_implementation_is_asked(library):
    make = torch if library is nsa_torch else jnp
    query, key = make.zeros((1, 20, 4, 8)), make.zeros((1, 20, 2, 8))
    given = query, key, key, make.zeros((1, 20, 4, 3))
    how = {"config": SMALL, "implementation": "mosaic"}  # which has no float32
    with pytest.raises(NotImplementedError):
        library.attention(*given, **how)
    with pytest.raises(ValueError, match="block_indices"):
        library.attention(*given, **how, block_indices=make.zeros((1, 20, 2)))


class Numbers:
    """Calls of a library with numbers that the host reads on a CPU."""

    def __init__(self, library):
        self.library = library
        self.xp = torch if library is nsa_torch else jnp

    def zeros(self, *shape):
        return self.xp.zeros(shape)

    def ints(self, *numbers):
        return self.xp.asarray(np.array(numbers, np.int32))

    @property
    def tokens(self):
        return self.zeros(2, 10, 4, 8), self.zeros(2, 20, 2, 8), self.zeros(2, 20, 2, 8)

    def lists(self, *blocks):
        """Each token's."""
        named = np.broadcast_to(np.array(blocks, np.int32), (2, 10, 2, len(blocks)))
        return self.xp.asarray(named.copy())

    def sliding(self, kv_len):
        return self.library.sliding_attention(*self.tokens, config=SMALL, kv_len=kv_len)

    def selected(self, lists, **options):
        return self.library.selected_attention(*self.tokens, lists, config=SMALL, **options)

    def select(self, name, kv_len):
        given = [self.zeros(2, 10, 4, 8)] + [self.zeros(2, 4, 2, 8)] * (1 + (name[0] == "c"))
        return getattr(self.library, name)(*given, config=SMALL, kv_len=kv_len)

    def attention(self, lists):
        gates = self.zeros(2, 10, 4, 3)
        options = {"config": SMALL, "block_indices": lists}
        return self.library.attention(*self.tokens, gates, **options)

    def loss(self, lists):
        query, key, _ = self.tokens
        index = self.zeros(2, 10, 2, 4), self.zeros(2, 20, 4)
        lse = self.zeros(2, 10, 4)
        return self.library.indexer_kl(query, key, lse, *index, lists, block_size=16)

    @property
    def cache(self):
        dtype = self.xp.float32
        return self.library.PagedCache(4, 2, 8, 8, config=SMALL, dtype=dtype)

    def attend(self, starts, lengths=(12, 8), count=7, **options):
        given = self.zeros(count, 4, 8), self.zeros(count, 4, 3), self.cache
        at = self.ints([0, 1], [2, 3]), self.ints(*lengths), self.ints(*starts)
        return self.library.paged_attention(*given, *at, **options)

    def append(self, starts, lengths=(12, 8), table=([0, 1], [2, 3])):
        new, at = self.zeros(7, 2, 8), (self.ints(*table), self.ints(*lengths))
        starts = self.ints(*starts)
        return self.library.append(self.cache, new, new, *at, cu_seqlens_q=starts)

    def blocks(self, lists=(0,), table=(0, 1, 2), starts=None, **options):
        pages = self.zeros(4, 16, 2, 8)
        given = self.zeros(1, 4, 8), pages, pages, self.ints(table), self.ints(37)
        starts = None if starts is None else self.ints(*starts)
        options |= {"block_size": 16, "cu_seqlens_q": starts}
        return self.library.paged_block_attention(*given, self.ints([lists]), **options)

    def index(self, table=(0, 1, 2), starts=None):
        given = self.zeros(1, 4, 8), self.zeros(4, 16, 8), self.ints(table), self.ints(37)
        starts = None if starts is None else self.ints(*starts)
        return self.library.paged_index_blocks(*given, pool=16, cu_seqlens_q=starts)


TWICE = r"must name a block once, got block 1 twice"
BAD_NUMBERS = {
    "sliding": (lambda n: n.sliding(n.ints(20, 21)), r"kv_len must be in 0\.\.20, got 21"),
    "sliding below": (
        lambda n: n.sliding(n.ints(-1, 20)),
        r"kv_len must be in 0\.\.20, got -1",
    ),
    "selected": (
        lambda n: n.selected(n.lists(0, -1, -1, -1), kv_len=n.ints(20, 99)),
        r"kv_len must be in 0\.\.20, got 99",
    ),
    "scores": (
        lambda n: n.select("select_blocks", n.ints(23, 24)),
        r"kv_len must be in 0\.\.23, got 24",
    ),
    "compressed": (
        lambda n: n.select("compressed_attention", n.ints(24, 2)),
        r"kv_len must be in 0\.\.23, got 24",
    ),
    "index": (
        lambda n: n.library.index_blocks(
            n.zeros(2, 4, 2, 8), n.zeros(2, 5, 8), pool=2, entry=4, kv_len=n.ints(23, 24)
        ),
        r"kv_len must be in 0\.\.23, got 24",
    ),
    "a block twice": (lambda n: n.selected(n.lists(1, 0, -1, 1)), TWICE),
    "a block twice in all": (lambda n: n.attention(n.lists(1, 1, -1, -1)), TWICE),
    "a block twice in the loss": (lambda n: n.loss(n.lists(0, 1, 1)), TWICE),
    "a block twice of pages": (lambda n: n.blocks((1, 1)), TWICE),
    "a block that the tail names too": (
        lambda n: n.blocks((0, 2), include="tail"),
        "must name a block once, got block 2 twice",
    ),
    "a row longer than said": (
        lambda n: n.attend((0, 4, 7), max_seqlen_q=3),
        "max_seqlen_q must be 4 at least, as the longest row of cu_seqlens_q has, got 3",
    ),
    "a row longer than its pages, and less than said": (
        lambda n: n.attend((0, 0, 40), lengths=(0, 40), count=40, max_seqlen_q=99),
        "a row must not have more queries than tokens, 32 in the pages of its table, got 40",
    ),
    "no row at all": (
        lambda n: n.attend((0, 4, 7), max_seqlen_q=0),
        "max_seqlen_q must be an int >= 1, got 0",
    ),
    "a page of two rows": (
        lambda n: n.append((0, 4, 7), table=([0, 1], [0, 3])),
        "page_table must give each row pages of its own .*, got page 0 for rows 0 and 1",
    ),
    "a length before the tokens of the call": (
        lambda n: n.append((0, 0, 7), lengths=(12, 5)),
        r"lengths\[1\] must be 0 or count the 7 tokens of the row in this call, got 5",
    ),
    "a row shorter than its queries": (
        lambda n: n.attend((0, 0, 7), lengths=(12, 5)),
        r"lengths\[1\] must be 0 or count the 7 tokens of the row in this call, got 5",
    ),
    "borders of queries": (
        lambda n: n.attend((0, 8, 7)),
        "cu_seqlens_q must not decrease, got 7 after 8 at index 2",
    ),
    "borders of new tokens": (
        lambda n: n.append((1, 4, 7)),
        "cu_seqlens_q must begin with 0, got 1",
    ),
    "borders of blocks": (
        lambda n: n.blocks(starts=(0, 2)),
        "cu_seqlens_q must end with 1, the number of tokens, at most, got 2",
    ),
    "borders of indices": (
        lambda n: n.index(starts=(0, 2)),
        "cu_seqlens_q must end with 1, the number of tokens, at most, got 2",
    ),
    "pages of blocks": (
        lambda n: n.blocks(table=(0, 4, 1)),
        r"page_table\[0, 1\] must be a page of the cache, 0\.\.3, got 4",
    ),
    "pages of indices": (
        lambda n: n.index(table=(0, 1, -1)),
        r"page_table\[0, 2\] must be a page of the cache, 0\.\.3, got -1",
    ),
    "a copy to no page": (
        lambda n: n.cache.copy_pages(n.ints(0), n.ints(-1)),
        r"target must be in 0\.\.3, got -1",
    ),
    "a copy of no page": (
        lambda n: n.cache.copy_pages(n.ints(4), n.ints(0)),
        r"source must be in 0\.\.3, got 4",
    ),
    "a copy by truth values": (
        lambda n: n.cache.copy_pages(n.ints(0, 1) == 1, n.ints(2, 3)),
        r"source must have dtype in \('int32', 'int64'\), got bool",
    ),
    "a copy to a list": (
        lambda n: n.cache.copy_pages(n.ints(0), [1]),
        "target must be a.*, got list",
    ),
    "a copy of one to two": (
        lambda n: n.cache.copy_pages(n.ints(0), n.ints(1, 2)),
        r"target must have shape \(1,\), got \(2,\)",
    ),
}


@pytest.mark.parametrize("name", BAD_NUMBERS)
@pytest.mark.parametrize("library", [nsa_jax, nsa_torch], ids=["jax", "torch"])
def test_bad_numbers_where_the_host_reads_them(library, name):
    run, message = BAD_NUMBERS[name]
    with pytest.raises(ValueError, match=message):
        run(Numbers(library))


@pytest.mark.parametrize("library", [nsa_jax, nsa_torch], ids=["jax", "torch"])
def test_good_numbers_pass(library):
    n = Numbers(library)
    n.sliding(n.ints(0, 20))
    n.select("select_blocks", n.ints(0, 23))
    n.attention(n.lists(1, 0, -1, -1))
    n.blocks((0, 1), include="tail")
    n.attend((0, 4, 7), max_seqlen_q=4)


def test_tensors_without_memory_of_their_own():
    """Sparse and ragged ones, and shards, of which every rank has a part."""
    dense = [torch.randn(2, 20, n, 8) for n in (4, 2, 2)] + [torch.randn(2, 20, 4, 3)]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        makers = {
            "dense, got torch.sparse_coo": torch.Tensor.to_sparse,
            "dense, got torch.jagged": lambda x: torch.nested.nested_tensor_from_jagged(
                x.flatten(0, 1), torch.tensor([0, 15, 40])
            ),
            "a tensor of one rank, got a DTensor": lambda x: DTensor.from_local(
                x, mesh, [Shard(0)]
            ),
        }
        for message, make in makers.items():
            for i, name in enumerate(("query", "key", "value", "gates")):
                given = [make(x) if j == i else x for j, x in enumerate(dense)]
                with pytest.raises(ValueError, match=f"^{name} must be {message}"):
                    nsa_torch.attention(*given, config=SMALL)
            with pytest.raises(ValueError, match=f"^x must be {message}"):
                nsa_torch.compress(make(dense[1]), config=SMALL)
    finally:
        dist.destroy_process_group()
