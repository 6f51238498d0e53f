"""Arguments that public functions refuse: of each call, what changes in it, and the sentence.

A row of `BOTH` is one of JAX and of torch. Arrays are written in NumPy, and are of the framework
that is called; what must be made by it (a cache, a tensor that is sparse) is a function of `World`.
A sentence is how the error begins, and "*" stands for anything.
"""

import itertools
import re
from functools import cached_property, partial

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
from nsa_torch import Branches, NSAConfig, PoolParams, RopeMLPParams, plan_runs

SMALL = NSAConfig(8, 4, 16, 4, window=10)
LIBRARIES = {"jax": nsa_jax, "torch": nsa_torch}
zeros = partial(np.zeros, dtype=np.float32)
STARTS, LENGTHS = [0, 4, 7], [12, 8]  # rows of 4 and of 3 new tokens


def ints(*numbers):
    return np.array(numbers, np.int32)


class World:
    """A framework, and calls that it does not refuse."""

    def __init__(self, framework):
        self.framework, self.library = framework, LIBRARIES[framework]
        self.xp = torch if framework == "torch" else jnp

    def given(self, x):
        """`x` with the arrays of this framework, and what is made by it."""
        if isinstance(x, np.ndarray):
            return self.xp.asarray(x)
        if isinstance(x, dict):
            return {name: self.given(each) for name, each in x.items()}
        if isinstance(x, tuple):
            found = [self.given(each) for each in x]
            return type(x)(*found) if hasattr(x, "_fields") else type(x)(found)
        return x(self) if callable(x) and not isinstance(x, type) else x

    def function(self, call):
        name = call.split()[0]
        return getattr(self.library, name, None) or getattr(self.pages(), name)

    def pages(self, **options):
        """Four pages of a cache."""
        options = {"config": SMALL, "dtype": self.xp.float32} | options
        return self.library.PagedCache(4, 2, 8, 8, **options)

    @cached_property
    def calls(self):
        """By name, the arguments that are arrays, and the others."""
        query, key = (zeros((2, 20, heads, 8)) for heads in (4, 2))
        gates = zeros((2, 20, 4, 3))
        tokens, config = {"query": query, "key": key, "value": key}, {"config": SMALL}
        means = zeros((2, 4, 2, 8))
        compressed = {"query": query, "compressed_key": means}
        lists = {"block_indices": np.full((2, 20, 2, 4), -1, np.int32)}
        rows = {"page_table": ints([0, 1], [2, 3]), "lengths": ints(*LENGTHS)}
        starts = {"cu_seqlens_q": ints(*STARTS)}
        one = {"page_table": ints([0, 1, 2]), "lengths": ints(37)}
        pages, window = zeros((4, 16, 2, 8)), {"block_size": 16}
        step = {"query": query[0, :1], "key_pages": pages, "value_pages": pages, **one}
        index = {"index_query": key, "index_key": key[:, :, 0]}
        index_step = {"index_query": query[0, :1], "index_key_pages": pages[:, :, 0]}
        new = {"key": key[0, :7], "value": key[0, :7]}
        sizes = {"kv_heads": 2, "key_width": 8, "value_width": 8, **config}
        found = {
            "attention": (tokens | {"gates": gates}, config),
            "explain": (tokens | {"gates": gates}, config),
            "attention of lists": (lists, tokens | {"gates": gates} | config),
            "cached_attention": (tokens | {"gates": gates}, {"cache": kept(2, 30)}),
            "compress": ({"x": key}, config),
            "select_blocks": (compressed, config),
            "compressed_attention": (compressed | {"compressed_value": means}, config),
            "selected_attention": (tokens | lists, config),
            "sliding_attention": (tokens, config),
            "index_blocks": (index, {"pool": 16, "num_selected": 2}),
            "paged_index_blocks": (index_step | one, {"pool": 16, "num_selected": 2}),
            "indexer_kl": (
                {"query": query, "key": key, "lse": zeros((2, 20, 4)), **index},
                lists | window,
            ),
            "block_attention": (tokens | lists, window),
            "paged_block_attention": (step | {"block_indices": ints([[0]])}, window),
            "append": ({"cache": World.pages, **new, **rows}, starts),
            "paged_attention": (
                {"query": query[0, :7], "gates": gates[0, :7], "cache": World.pages, **rows},
                starts,
            ),
            "init_cache": ({}, {"batch": 1, "capacity": 30, **sizes}),
            "PagedCache": ({}, {"num_pages": 4, **sizes}),
            "copy_pages": ({}, {"source": ints(0), "target": ints(1)}),
            "view": ({}, {"key_pages": pages, "value_pages": pages, **config}),
            "carve": ({}, {"memory": zeros(9999), **sizes}),
            "varlen_metadata": ({}, {"cu_seqlens": torch.tensor([0, 5, 20])}),
            "NSAConfig": ({}, {}),
            "NSAAttention": (
                {},
                {"dim": 16, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8},
            ),
            "plan_runs": ({}, {"starts": [0, 1], "lengths": [2], "page_size": 16}),
        }
        borders = {"cu_seqlens": np.array([0, 20])}
        packed = borders if self.framework == "torch" else {"segment_ids": ints(20 * [0])}
        metadata = self.library.varlen_metadata(**self.given(packed), **config)
        for name, (arrays, rest) in dict(itertools.islice(found.items(), 9)).items():
            if name not in ("cached_attention", "attention of lists"):
                arrays = {key: x[:1] for key, x in arrays.items()}
                found[f"{name} packed"] = arrays, rest | packed
                found[f"{name} with metadata"] = arrays, rest | {"varlen": metadata}
        return found

    def arguments(self, call):
        arrays, rest = self.calls[call]
        return self.given(arrays | rest)


def kept(*sizes, **options):
    """A cache of rows, in a row of a table."""
    options = {"config": SMALL} | options
    return lambda world: world.library.init_cache(*sizes, 2, 8, 8, **options)


def dtype(name):
    return lambda world: getattr(world.xp, name)


QUERY, KEY, GATES, MEANS = (
    zeros((2, *x)) for x in ((20, 4, 8), (20, 2, 8), (20, 4, 3), (4, 2, 8))
)
SWAPPED = {
    "query": zeros((1, 4, 20, 8)),
    "key": zeros((1, 2, 20, 8)),
    "value": zeros((1, 2, 20, 8)),
}
ORDER = (
    "*; tokens come before heads: query [B, T, H, D], key [B, S, Hkv, D], gates [B, T, H, 3]"
)
SHAPE = " must have shape (2, 20, 2, 8), got "
NAMED = "implementation must be one of * or None, got "
TWICE = "*must name a block once, got block 1 twice"
PAIRS = "made_with must be pairs of a name and a value that has a hash, *, got "


E4M3 = dtype("float8_e4m3fn")


def of_each(*blocks):
    """The list of each token."""
    return np.broadcast_to(ints(*blocks), (2, 20, 2, len(blocks))).copy()


LISTS, NARROW = of_each(0, 1, -1, -1), KEY[..., :4]
# As scaled_dot_product_attention takes them.
SWAPS = [
    (
        SWAPPED | {"gates": zeros((1, 4, 20, 3))},
        f"query must not be longer than key, got T=4 and S=2{ORDER}",
    ),
    (
        SWAPPED,
        f"gates must have shape (1, 4, 20, 3) for query (1, 4, 20, 8), got {ORDER}",
    ),
    (
        {"key": KEY.swapaxes(1, 2), "value": KEY.swapaxes(1, 2)},
        f"query heads must be a multiple of key heads, got 4 and 20{ORDER}",
    ),
]
BOTH = {
    "attention": [
        # One call of whole sequences; what `explain` takes too it refuses in the same words.
        ({"query": QUERY[0]}, "query must have 4 axes, got shape (20, 4, 8)"),
        (
            {"query": QUERY[:, :0], "gates": GATES[:, :0]},
            "query must not be empty, got shape (2, 0, 4, 8)",
        ),
        (
            {"query": QUERY.astype(np.int32)},
            "query must have dtype in ('float16', 'bfloat16', 'float32', 'float64'), got int32",
        ),
        (
            {"key": KEY.astype(np.float16)},
            "key must have the dtype of query, float32, got float16",
        ),
        ({"key": NARROW}, f"key{SHAPE}(2, 20, 2, 4)"),
        ({"key": KEY[:1]}, f"key{SHAPE}(1, 20, 2, 8)"),
        ({"key": zeros((2, 21, 2, 8))}, f"key{SHAPE}(2, 21, 2, 8)"),
        ({"value": KEY[:, :19]}, f"value{SHAPE}(2, 19, 2, 8)"),
        (
            {"key": KEY[:, :, :1]},
            f"key and value must have the same [B, S, Hkv], got (2, 20, 1) and (2, 20, 2){ORDER}",
        ),
        (
            {"key": zeros((2, 20, 3, 8))},
            f"query heads must be a multiple of key heads, got 4 and 3{ORDER}",
        ),
        (
            {"key": KEY[:, :9], "value": KEY[:, :9]},
            "query must not be longer than key, got T=20 and S=9",
        ),
        (
            {"key": NARROW, "value": Branches(KEY, KEY, KEY + 1)},
            f"key{SHAPE}(2, 20, 2, 4)",
        ),
        ({"key": Branches(KEY, NARROW, KEY)}, f"key.selected{SHAPE}(2, 20, 2, 4)"),
        (
            {"gates": GATES[..., :2]},
            f"gates must have shape (2, 20, 4, 3) for query (2, 20, 4, 8), got (2, 20, 4, 2{ORDER}",
        ),
        (
            {"gates": Branches(GATES[..., 0], GATES[:, :5, :, 0], GATES[..., 0])},
            "gates.selected must have shape (2, 20, 4), got (2, 5, 4)",
        ),
        ({"scale": -1.0}, "scale must be a positive number or None, got -1.0"),
        ({"scale": float("nan")}, "scale must be a positive number or None, got nan"),
        # All branches have the same tokens, heads and width of values.
        ({"key": Branches(KEY[:, :7], KEY, KEY)}, "key.compressed"),
        ({"value": Branches(KEY, KEY, KEY[:, :, :1])}, "*value.sliding"),
        (
            {
                x: Branches(zeros((2, 30, 2, 8)), *[zeros((2, 40, 2, 8))] * 2)
                for x in ("key", "value")
            },
            "key.compressed must have the [B, S, Hkv] of key.selected, (2, 40, 2), got (2, 30, 2)",
        ),
        (
            {x: Branches(KEY, KEY, KEY[:, :, :1]) for x in ("key", "value")},
            "key.sliding must have the [B, S, Hkv] of key.selected, (2, 20, 2), got (2, 20, 1)",
        ),
        (
            {"value": Branches(KEY, KEY, KEY[..., :1])},
            "value.sliding must have the [B, S, Hkv, Dv] of value.selected, (2, 20, 2, 8), got",
        ),
        (
            {"compressed": (MEANS[:, :3], MEANS[:, :3])},
            "compressed_key must have C=4 tokens for 20 keys, got 3",
        ),
        (
            {"compressed": (MEANS[..., :6], MEANS)},
            "compressed_key must have shape (2, 4, 2, 8), got (2, 4, 2, 6)",
        ),
        (
            {"compressed": (MEANS[:, :, :1], MEANS[:, :, :1])},
            "compressed_key must have shape (2, 4, 2, 8), got (2, 4, 1, 8)",
        ),
        (
            {"compressed": (MEANS, MEANS[..., :1])},
            "compressed_value must have shape (2, 4, 2, 8), got (2, 4, 2, 1)",
        ),
        (
            {"compressed": MEANS},
            "compressed must be a pair of arrays, compressed keys and values, got *",
        ),
        (
            {"compressed": (MEANS,) * 3},
            "compressed must be a pair of arrays, compressed keys and values, got 3 of them",
        ),
        (
            {"block_indices": zeros((2, 20, 2, 4))},
            "block_indices must have dtype in ('int32',), got float32",
        ),
        (
            {"block_indices": LISTS[..., :3]},
            "block_indices must have shape (2, 20, 2, 4), got (2, 20, 2, 3)",
        ),
        # Arguments are checked before an implementation is asked: this one has no float32.
        (
            {"implementation": "mosaic", "block_indices": LISTS[..., 0]},
            "block_indices must",
        ),
        # What no table of implementations can look up was a TypeError on a GPU.
        *[
            ({"implementation": x}, NAMED)
            for x in ("cuda", ["xla"], 7, Branches(["xla"], None, None))
        ],
        ({"block_indices": of_each(1, 1, -1, -1)}, TWICE),
        *SWAPS,
    ],
    "select_blocks": [
        ({"kv_len": 19}, "kv_len must be at least T=20, got 19"),
        (
            {"kv_len": 20.0},
            "kv_len must be an integer or an array of them, got 20.0",
        ),
        (
            {"kv_len": ints(20, 20, 20)},
            "kv_len must have shape () or (2,), got (3,)",
        ),
        (
            {"compressed_key": MEANS[:, :2]},
            "compressed_key must have C=4 tokens for 20 keys, got 2",
        ),
        ({"kv_len": ints(23, 24)}, "kv_len must be in 0..23, got 24"),
    ],
    "sliding_attention": [
        (
            {"kv_len": 21},
            "kv_len must be at most the keys there are, 20, got 21",
        ),
        (
            SWAPPED,
            f"query must not be longer than key, got T=4 and S=2{ORDER}",
        ),
        # Numbers that the host reads on a CPU.
        ({"kv_len": ints(20, 21)}, "kv_len must be in 0..20, got 21"),
        ({"kv_len": ints(-1, 20)}, "kv_len must be in 0..20, got -1"),
    ],
    "compress": [
        (
            {"params": 3},
            "params must be None, PoolParams, MLPParams or RopeMLPParams, got int",
        ),
        (
            {"params": RopeMLPParams(*map(zeros, ((8, 8), (64, 3), 3, (3, 8), 8, 8)))},
            "params.rates must have shape (4,), got (8,)",
        ),
        (
            {"params": PoolParams(zeros((4, 8)))},
            "params.weight must have shape (8, 8), got (4, 8)",
        ),
        ({"params": PoolParams(None)}, "params.weight must be a*, got NoneType"),
        (
            {"params": PoolParams(np.ones((8, 8), np.int32))},
            "params.weight must have dtype in *, got int32",
        ),
    ],
    "init_cache": [
        ({"dtype": dtype("int32")}, "dtype must be one of *, got 'int32'"),
    ],
    "PagedCache": [
        *[
            ({"dtype": dtype(x)}, f"dtype must be one of *float8_e4m3fn*, got {x}")
            for x in ("float8_e5m2", "int8")
        ],
        (
            {"dtype": E4M3, "compressed_dtype": E4M3},
            "compressed_dtype must be one of * in a cache of float8_e4m3fn",
        ),
        (
            {"dtype": dtype("float16"), "compressed_dtype": dtype("bfloat16")},
            "compressed_dtype must be the cache's where *float16, got bfloat16",
        ),
    ],
    "cached_attention": [
        ({"cache": None}, "cache must be one of init_cache, got NoneType"),
        (
            {"cache": "cache", "config": SMALL},
            "cache must be one of init_cache, got str",
        ),
        ({"value": NARROW}, f"value{SHAPE}(2, 20, 2, 4)"),
        (
            {"cache": kept(2, 30, config=NSAConfig()), "config": SMALL},
            "cache must be made with compress_block=8, got one with 32",
        ),
        (
            {"cache": kept(2, 30, config=NSAConfig(8, 2, 16, 4, window=10)), "config": SMALL},
            "cache must be made with compress_stride=4, got one with 2",
        ),
        ({"cache": kept(3, 30)}, "cache must be of batch 2, got 3"),
        (
            {"key": Branches(KEY, KEY, KEY + 1)},
            "*make it with init_cache(separate=True)",
        ),
        (
            {"compress_params": None},
            "compress_params must be a pair of parameters of compress, got NoneType",
        ),
        ({"made_with": 3}, f"{PAIRS}3"),
        ({"made_with": "rope"}, f"{PAIRS}'rope'"),
        *SWAPS,
    ],
    "append": [
        (
            {"key": zeros((0, 2, 8)), "value": zeros((0, 2, 8))},
            "tokens must be an int >= 1, got 0",
        ),
        (
            {"key": Branches(*zeros((3, 7, 2, 8)))},
            "key must be one array where the cache is not separate=True",
        ),
        (
            {"key": zeros((3, 2, 8)), "value": zeros((3, 2, 8)), "cu_seqlens_q": None},
            "key must have a multiple of 2 tokens",
        ),
        ({"cache": {"pages": 3}}, "cache must be a PagedCache, got dict"),
        (
            {"params": (None,)},
            "params must be a pair of parameters of compress, got 1 of them",
        ),
        ({"made_with": ("rope_base", 1e4)}, f"{PAIRS}('rope_base',"),
        ({"made_with": (("rope_base", [1]),)}, f"{PAIRS}(('rope_base', [1]),)"),
        ({"made_with": ((1, 2),)}, f"{PAIRS}((1, 2),)"),
        (
            {"cu_seqlens_q": ints(0, 0, 7), "lengths": ints(12, 5)},
            "lengths[1] must be 0 or count the 7 tokens of the row in this call, got 5",
        ),
        (
            {"page_table": ints([0, 1], [0, 3])},
            "page_table must give each row pages of its own *, got page 0 for rows 0 and 1",
        ),
        ({"cu_seqlens_q": ints(1, 4, 7)}, "cu_seqlens_q must begin with 0, got 1"),
    ],
    "paged_attention": [
        (
            {"query": zeros((7, 3, 8))},
            "query heads must be a multiple of the cache's heads, got 3 and 2",
        ),
        (
            {"max_seqlen_q": 3},
            "max_seqlen_q must be 4 at least, as the longest row of cu_seqlens_q has, got 3",
        ),
        (
            {
                "query": zeros((40, 4, 8)),
                "gates": zeros((40, 4, 3)),
                "cu_seqlens_q": ints(0, 0, 40),
                "lengths": ints(0, 40),
                "max_seqlen_q": 99,
            },
            "a row must not have more queries than tokens, 32 in the pages of its table, got 40",
        ),
        (
            {"cu_seqlens_q": ints(0, 0, 7), "lengths": ints(12, 5)},
            "lengths[1] must be 0 or count the 7 tokens of the row in this call, got 5",
        ),
        (
            {"cu_seqlens_q": ints(0, 8, 7)},
            "cu_seqlens_q must not decrease, got 7 after 8 at index 2",
        ),
    ],
    "selected_attention": [
        ({"kv_len": ints(20, 99)}, "kv_len must be in 0..20, got 99"),
        ({"block_indices": of_each(1, 0, -1, 1)}, TWICE),
    ],
    "compressed_attention": [
        ({"kv_len": ints(24, 2)}, "kv_len must be in 0..23, got 24"),
    ],
    "index_blocks": [
        (
            {"index_key": zeros((2, 5, 8)), "pool": 2, "entry": 4, "kv_len": ints(23, 24)},
            "kv_len must be in 0..23, got 24",
        ),
    ],
    "indexer_kl": [
        ({"block_indices": of_each(0, 1, 1)}, TWICE),
    ],
    "paged_block_attention": [
        ({"block_indices": ints([[1, 1]])}, TWICE),
        (
            {"block_indices": ints([[0, 2]]), "include": "tail"},
            "*must name a block once, got block 2 twice",
        ),
        (
            {"cu_seqlens_q": ints(0, 2)},
            "cu_seqlens_q must end with 1, the number of tokens, at most, got 2",
        ),
        (
            {"page_table": ints([0, 4, 1])},
            "page_table[0, 1] must be a page of the cache, 0..3, got 4",
        ),
    ],
    "paged_index_blocks": [
        (
            {"cu_seqlens_q": ints(0, 2)},
            "cu_seqlens_q must end with 1, the number of tokens, at most, got 2",
        ),
        (
            {"page_table": ints([0, 1, -1])},
            "page_table[0, 2] must be a page of the cache, 0..3, got -1",
        ),
    ],
    "copy_pages": [
        ({"target": ints(-1)}, "target must be in 0..3, got -1"),
        ({"source": ints(4)}, "source must be in 0..3, got 4"),
        (
            {"source": ints(0, 1) == 1, "target": ints(2, 3)},
            "source must have dtype in ('int32', 'int64'), got bool",
        ),
        ({"target": [1]}, "target must be a*, got list"),
        ({"target": ints(1, 2)}, "target must have shape (1,), got (2,)"),
    ],
    "NSAConfig": [
        ({"compress_stride": 0}, "compress_stride must be >= 1, got 0"),
        (
            {"compress_block": 24},
            "compress_block must be a multiple of compress_stride=16, got 24",
        ),
        (
            {"select_block": 40},
            "select_block must be a multiple of compress_stride=16, got 40",
        ),
        ({"select_block": 16}, "select_block must be >= compress_block=32, got 16"),
        (
            {"num_selected": 2},
            "num_selected must be >= num_initial + num_local = 3, got 2",
        ),
        ({"num_initial": -1}, "num_initial must be >= 0, got -1"),
        ({"num_local": -2}, "num_local must be >= 0, got -2"),
        ({"window": -1}, "window must be >= 0, got -1"),
        ({"window": 2.5}, "window must be an int, got 2.5"),
        ({"window": 2**31}, "window must be at most 2*30, got 2147483648"),
        ({"num_selected": True}, "num_selected must be an int, got True"),
        (
            {"num_selected": 0, "num_initial": 0, "num_local": 0},
            "num_selected must be >= 1, got 0",
        ),
    ],
}

TENSOR = torch.zeros(4, 16, 2, 8)
PAGES = TENSOR.numpy()
SPARSE = torch.zeros(2, 20, 2, 3, dtype=torch.int32).to_sparse()
EIGHT = {x: TENSOR.to(torch.float8_e4m3fn) for x in ("key_pages", "value_pages")}
SCALES = {"key_scale": zeros((4, 2, 16)), "value_scale": zeros((4, 2, 16))}
SCALED = EIGHT | SCALES
OF_FP8 = {"dtype": torch.float8_e4m3fn, "compressed_dtype": torch.bfloat16, "max_rows": 1}
IN_FP8 = {x: TENSOR[0, :7].bfloat16() for x in ("key", "value")}
IN_FP8 |= {"cache": lambda world: world.pages(**OF_FP8)}
numpy = lambda x: lambda _: x  # stays what it is
RUNS = "runs must be a list of Run, as plan_runs makes it, got "
# Where dtypes have the same name, it is not the dtype that is wrong.
OF_NUMPY = [
    ({x: numpy(y)}, f"{x} must be a torch tensor, got a numpy.ndarray")
    for x, y in (("query", QUERY), ("key", KEY), ("value", KEY), ("gates", GATES))
]
ONE = {
    "jax": {
        "attention": [
            (
                {"implementation": "cuda"},
                "implementation must be one of ('mosaic', 'triton', 'xla', 'reference') or None",
            ),
            (
                {"segment_ids": np.zeros((2, 19), np.int32)},
                "segment_ids must have shape (2, 20), got (2, 19)",
            ),
            (
                {"segment_ids": zeros((2, 20))},
                "segment_ids must have dtype in ('int32', 'int64', 'int16', 'int8'), got float32",
            ),
            (
                {"query": numpy(np.zeros(QUERY.shape))},
                "query must not be a NumPy array of float64: JAX makes float32 of it unless",
            ),
        ],
        "select_blocks": [
            (
                {"kv_len": 20, "segment_ids": np.zeros((2, 20), np.int32)},
                "kv_len must be None where segment_ids are given, got both",
            ),
        ],
        "compress": [
            (
                {"x": numpy(np.zeros(KEY.shape))},
                "x must not be a NumPy array of float64",
            ),
        ],
        "attention of lists": [
            *[
                (
                    {x: torch.zeros(2, 20, 4, 8)},
                    "*of JAX or NumPy, got a torch.Tensor of shape",
                )
                for x in ("query", "key", "value", "gates")
            ],
        ],
    },
    "torch": {
        "attention packed": [
            ({"cu_seqlens": zeros(2)}, "cu_seqlens must have dtype in "),
            ({"cu_seqlens": ints(0)}, "cu_seqlens must have num_seqs + 1 >= 2"),
            (
                {"key": zeros((1, 30, 2, 8)), "value": zeros((1, 30, 2, 8))},
                "query must be as long as key where cu_seqlens are given, got T=20 and S=30",
            ),
        ],
        "attention": [
            (
                {"cu_seqlens": ints(0, 0)},
                "query must be one row, B=1, where cu_seqlens are given, got B=2",
            ),
            (
                {"value": torch.zeros(2, 20, 2, 8, device="meta")},
                "value must be on the device of query, cpu, got meta",
            ),
            (
                {"block_indices": SPARSE},
                "block_indices must be dense, got torch.sparse_coo",
            ),
            (
                {"block_indices": numpy(LISTS)},
                "block_indices must be a torch tensor, got a",
            ),
            *OF_NUMPY,
        ],
        "select_blocks packed": [
            (
                {"kv_len": 20},
                "kv_len must be None where cu_seqlens are given, got both",
            ),
        ],
        "selected_attention": [
            (
                {"block_indices": SPARSE},
                "block_indices must be dense, got torch.sparse_coo",
            ),
        ],
        "attention with metadata": [
            (
                {
                    "varlen": nsa_torch.varlen_metadata(
                        torch.tensor([0, 5, 20]), device="meta", config=SMALL
                    )
                },
                "varlen must be on the device of query, cpu, got one on",
            ),
        ],
        "compress": [
            (
                {"params": PoolParams(torch.ones(8, 8).to_sparse())},
                "params.weight must be dense, got torch.sparse_coo",
            ),
        ],
        "varlen_metadata": [
            *[({"device": x}, f"device must be a device *, got {x!r}") for x in ("h", 1.5, [])],
            (
                {"cu_seqlens": torch.zeros(2).int().to("meta"), "device": "cpu"},
                "device must be that of cu_seqlens, meta, got cpu",
            ),
        ],
        "PagedCache": [
            ({"dtype": "float32"}, "dtype must be a torch.dtype, got 'float32'"),
            ({"device": "here"}, "device must be a device that torch has"),
        ],
        "append": [
            ({"implementation": "xla"}, "*mosaic, triton, torch or None, got 'xla'"),
            (
                IN_FP8,
                "a cache in fp8 made for max_rows=1 takes no more rows without slots, got 2",
            ),
            (
                IN_FP8 | {"key": TENSOR[0, :7]},
                "key must have the dtype of the cache, bfloat16",
            ),
            (IN_FP8 | {"key": EIGHT["key_pages"][0, :7]}, "key must have dtype in"),
            (
                {"value": TENSOR[0, :7].to("meta")},
                "value must be on the device of the cache",
            ),
        ],
        "view": [
            (
                {"key_pages": PAGES[:, :8], "value_pages": PAGES[:, :8]},
                "key_pages must have pages of select_block=16 tokens, got 8",
            ),
            (
                {"compressed_key": PAGES[:, :4]},
                "compressed_key and compressed_value must both be given",
            ),
            ({"value_pages": PAGES[:2]}, "selected_value must have shape (4, 16, 2, 8)"),
            (EIGHT, "*of float8_e4m3fn must have key_scale and value_scale"),
            (
                SCALED | {"key_scale": zeros((1, 2, 16))},
                "selected_key_scale must have shape (4, 2, 16)",
            ),
            (SCALED | {"key_scale": zeros(2)}, "key_scale must have 3 axes, got shape"),
            (
                {name: x.view(torch.uint8) for name, x in EIGHT.items()},
                "key_pages must have dtype in",
            ),
            (SCALES, "selected_key_scale must be None where pages are"),
            ({"key_pages": None}, "key_pages must be a torch tensor, got None"),
            ({"key_pages": [TENSOR]}, "key_pages must be a torch tensor, got list"),
            (
                {"key_pages": numpy(PAGES)},
                "key_pages must be a torch tensor, got a numpy.ndarray",
            ),
            (
                {"value_pages": numpy(PAGES)},
                "value_pages must be a torch tensor, got a numpy",
            ),
            (
                {"key_pages": TENSOR.to_sparse()},
                "key_pages must be dense, got torch.sparse_coo",
            ),
            (
                {"value_pages": TENSOR.to("meta")},
                "value_pages must be on the device of key_pages, cpu",
            ),
            (
                {"key_pages": PAGES[:0], "value_pages": PAGES[:0]},
                "num_pages must be an int >= 1, got 0",
            ),
            ({"key_pages": PAGES[..., :0]}, "key_width must be an int >= 1, got 0"),
            ({"value_pages": PAGES[..., :0]}, "value_width must be an int >= 1, got 0"),
            (
                {"compressed_key": 3, "compressed_value": 3},
                "compressed_key must be a torch tensor, got",
            ),
            (
                {"key_scale": 3, "value_scale": 3},
                "key_scale must be a torch tensor, got int",
            ),
            (
                SCALED | {"compressed_dtype": "x"},
                "compressed_dtype must be a torch.dtype, got 'x'",
            ),
            (SCALED | {"max_rows": 1.5}, "max_rows must be an int >= 1, got 1.5"),
        ],
        "carve": [
            ({"memory": zeros(3)}, "memory must have * elements, those of a page, got 3"),
            (
                {"memory": torch.zeros(999)[::2]},
                "memory must be contiguous, got strides",
            ),
            (
                {"memory": EIGHT["key_pages"].view(-1)},
                "memory must have dtype in *, got float8_e4m3fn",
            ),
            ({"memory": 3}, "memory must be a torch tensor, got int"),
            ({"memory": numpy(zeros(999))}, "memory must be a torch tensor, got a numpy"),
            ({"memory": zeros((2, 999))}, "memory must have 1 axes, got shape"),
            (
                {"memory": torch.zeros(999).to_sparse()},
                "memory must be dense, got torch.sparse_coo",
            ),
        ],
        "plan_runs": [
            (
                {"starts": [0, 1, 3], "lengths": [1, 1]},
                "*count the new tokens, got 1 with 2 new",
            ),
            (
                {"lengths": [1, 1]},
                "starts must have 3 entries, one more than lengths",
            ),
            (
                {"starts": [0, 5, 3], "lengths": [9, 9]},
                "starts must not descend, got 5, 3 at row 1",
            ),
            ({"starts": None}, "starts must be a list of ints, got None"),
            ({"starts": [0, 1.5]}, "starts must be a list of ints, got [0, 1.5]"),
            ({"starts": "ab"}, "starts must be a list of ints, got 'ab'"),
            ({"lengths": None}, "lengths must be a list of ints, got None"),
        ],
        "paged_attention": [
            ({"runs": [1, 2]}, f"{RUNS}[1"),
            ({"runs": 3}, f"{RUNS}3"),
        ],
        "NSAAttention": [
            ({"n_heads": 5}, "n_heads must be a multiple of n_kv_groups=2, got 5"),
            ({"d_k": 7}, "d_k must be even"),
            ({"phi": "conv"}, "phi must be one of"),
            ({"gate": "relu"}, "gate must be one of"),
            ({"gate_temp": 0.0}, "gate_temp must be a positive number, got 0.0"),
            ({"rope_scale": "2"}, "rope_scale must be a positive number, got '2'"),
            (
                {"rope_base": float("inf")},
                "rope_base must be a positive number, got inf",
            ),
            ({"l": 32.0}, "compress_block must be an int, got 32.0"),
            ({"l": 20}, "compress_block must be a multiple"),
            (
                {"gate_bias": (0, 0, 0)},
                "gate_bias must be None where gate='sigmoid', got",
            ),
            (
                {"gate": "head", "gate_bias": (0, 0)},
                "gate_bias must be three finite numbers, got (0, 0)",
            ),
            (
                {"gate": "head", "gate_bias": (0, float("nan"), 0)},
                "gate_bias must be three finite numbers, got",
            ),
            (
                {"gate": "head", "gate_hidden": 4},
                "gate_hidden must be None where gate='head', got 4",
            ),
            ({"kv": "one"}, "kv must be one of ('separate', 'shared'), got 'one'"),
            (
                {"kv": "shared", "phi": "mlp_rope"},
                "kv must be 'separate' where phi='mlp_rope'",
            ),
        ],
        "cached_attention": [
            *OF_NUMPY,
        ],
    },
}
ROWS = [
    (name, call, *row)
    for name in LIBRARIES
    for table in (BOTH, ONE[name])
    for call, rows in table.items()
    for row in rows
]
AT = [f"{name}-{call}-{sentence[:60]}" for name, call, _, sentence in ROWS]


def words(sentence):
    return re.escape(sentence).replace(r"\*", ".*")


@pytest.mark.parametrize(("framework", "call", "changes", "sentence"), ROWS, ids=AT)
def test_bad_arguments_are_named(framework, call, changes, sentence):
    """What `attention` refuses is not explained: the words are the same."""
    world = World(framework)
    arguments = world.arguments(call) | world.given(changes)
    with pytest.raises(ValueError, match=f"^{words(sentence)}") as wanted:
        world.function(call)(**arguments)
    of_explain = {"query", "key", "value", "gates", "config", "compressed", "implementation"}
    if call == "attention" and changes.keys() <= of_explain:
        with pytest.raises(ValueError) as error:
            world.library.explain(**arguments)
        assert str(error.value) == str(wanted.value)


WORLDS = {name: World(name) for name in LIBRARIES}
ARRAYS = [(name, call) for name, x in WORLDS.items() for call, (y, _) in x.calls.items() if y]


@pytest.mark.parametrize(("framework", "call"), ARRAYS)
def test_what_is_no_array(framework, call):
    """None, a number, and in torch a sparse tensor, in place of each argument that is an array."""
    world, arrays = WORLDS[framework], WORLDS[framework].calls[call][0]
    for name in arrays:
        good = world.arguments(call)
        optional = name == "block_indices" and len(arrays) == 1
        optional |= name == "gates" and call.startswith("explain")
        bad = [3] if optional else [None, 3]
        if isinstance(good[name], torch.Tensor):
            bad.append(good[name].to_sparse())
        for each in bad:
            with pytest.raises(ValueError, match=rf"^{name} must be (a|an|dense)\b.*, got "):
                world.function(call)(**good | {name: each})


OF_TORCH = "carve", "view", "plan_runs", "varlen_metadata", "NSAAttention"
# Wrong values of a kind; calls and their arguments of this kind.
OF_KINDS = {
    "an int >= 1": (
        (0, -6, True, 8.5, "8"),
        "init_cache batch capacity kv_heads key_width value_width",
        "PagedCache num_pages kv_heads key_width value_width max_rows",
        "carve kv_heads key_width value_width",
        "view max_rows",
        "plan_runs page_size",
        "paged_attention max_seqlen_q",
        "varlen_metadata total max_seqlen max_sequences",
        "NSAAttention dim n_heads n_kv_groups d_k d_v gate_hidden phi_hidden",
        "index_blocks pool entry",
        "paged_index_blocks pool",
        *(
            f"{x} block_size"
            for x in ("block_attention", "indexer_kl", "paged_block_attention")
        ),
    ),
    "a bool": (
        (1, "no", [True]),  # "no" would be true to each implementation
        "attention recompute",
        "NSAAttention bias",
        "varlen_metadata padded",
        *(f"{x} separate" for x in ("init_cache", "PagedCache", "carve", "view")),
    ),
    "an NSAConfig": (
        ({"l": 3}, 3),
        *(f"{x}_attention config" for x in (*Branches._fields, "cached")),
        *(f"{x} config" for x in ("attention", "explain", "compress", "select_blocks")),
        *(f"{x} config" for x in ("init_cache", "PagedCache", "view", "carve")),
        "varlen_metadata config",
    ),
}


@pytest.mark.parametrize("framework", LIBRARIES)
@pytest.mark.parametrize("kind", OF_KINDS)
def test_what_is_of_another_kind(kind, framework):
    world, (values, *rows) = WORLDS[framework], OF_KINDS[kind]
    for call, *names in map(str.split, rows):
        if framework == "jax" and call in OF_TORCH:
            continue
        for name, wrong in itertools.product(names, values):
            with pytest.raises(ValueError, match=f"^{name} must be {kind}, got "):
                world.function(call)(**world.arguments(call) | {name: wrong})


# The largest and the smallest that the host lets pass.
PASSING = [
    ("sliding_attention", {"kv_len": ints(0, 20)}),
    ("select_blocks", {"kv_len": ints(0, 23)}),
    ("attention of lists", {"block_indices": of_each(1, 0, -1, -1)}),
    ("paged_block_attention", {"block_indices": ints([[0, 1]]), "include": "tail"}),
    ("paged_attention", {"max_seqlen_q": 4}),
]


@pytest.mark.parametrize(
    ("call", "changes"), [*((x, {}) for x in WORLDS["torch"].calls), *PASSING]
)
def test_what_is_changed_above_is_good(call, changes):
    """Each row fails for its own reason: so does no call without what it changes."""
    world = WORLDS["torch"]
    world.function(call)(**world.arguments(call) | world.given(changes))
    if (world := WORLDS["jax"]).calls.get(call, ({}, {}))[0] and not changes:
        arguments = world.arguments(call)
        arrays = {x: y for x, y in arguments.items() if isinstance(y, jax.Array)}

        def run(arrays):
            world.function(call)(**arguments | arrays)

        jax.eval_shape(run, arrays)  # compiles nothing


def test_float64_of_numpy_where_jax_keeps_it():
    arrays = [np.zeros(x.shape) for x in (QUERY, KEY, KEY)]
    with pytest.raises(ValueError, match="query must not be a NumPy array of float64"):
        nsa_jax.explain(*arrays, config=SMALL)
    with jax.enable_x64(True):
        nsa_jax.explain(*arrays, config=SMALL)


def test_tensors_without_memory_of_their_own():
    """Ragged ones, and shards, of which every rank has a part."""
    world = WORLDS["torch"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh, ends = init_device_mesh("cpu", (2,)), torch.tensor([0, 15, 40])
        ragged = lambda x: torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), ends)
        shard = lambda x: DTensor.from_local(x, mesh, [Shard(0)])
        makers = {"dense, got torch.jagged": ragged, "a tensor of one rank, got a DTens": shard}
        for (words, make), call in itertools.product(makers.items(), ("attention", "compress")):
            good = world.arguments(call)
            for name in world.calls[call][0]:
                with pytest.raises(ValueError, match=f"^{name} must be {words}"):
                    world.function(call)(**good | {name: make(good[name])})
    finally:
        dist.destroy_process_group()


# A call that writes to a cache


FACTS = (("rope_base", 1e4),)
FP8 = {"dtype": torch.float8_e4m3fn, "compressed_dtype": torch.float32, "max_rows": 4}
KINDS = {"shared": {}, "separate": {"separate": True}, "fp8": FP8, "between others": None}
WRITING = [*itertools.product(("append", "paged_attention", "runs", "a step"), KINDS)]
WRITING += [("cached_attention", "shared"), ("cached_attention", "separate")]


def cache_of(call, kind):
    if kind == "between others":
        memory = torch.zeros(8, 2, 16, 2, 8)
        return nsa_torch.PagedCache.view(memory[:, 0], memory[:, 1], config=SMALL)
    world = WORLDS["torch"]
    if call == "cached_attention":
        return kept(2, 99, dtype=torch.float32, **KINDS[kind])(world)
    return world.pages(**KINDS[kind])


COUNTS, COUNTED = [0, 1, 22], [5, 21]  # a row of 4 tokens and one more, a prompt of 21


def written(call, kind, factor):
    """Arguments of a call that is not refused."""
    world, name = (
        WORLDS["torch"],
        call if "_" in call or call == "append" else "paged_attention",
    )
    given = world.arguments(name) | {"made_with": FACTS, "implementation": None}
    if name == "cached_attention":
        given |= {"new_lengths": torch.tensor([11, 4]), "compress_params": (None, None)}
    else:
        given |= {x: world.arguments("append")[x] for x in ("key", "value")} | {"params": None}
        given |= world.given({"lengths": ints(*COUNTED), "cu_seqlens_q": ints(*COUNTS)})
        tokens, count = given.keys() & {"query", "gates", "key", "value"}, 22
        if call == "a step":
            del given["cu_seqlens_q"]
            count = 2
        given |= {x: torch.ones(count, *given[x].shape[1:]) for x in tokens}
    given |= {"runs": plan_runs(COUNTS, COUNTED, 16)} if call == "runs" else {}
    given |= {"slots": torch.arange(2, dtype=torch.int32)} if kind == "fp8" else {}
    new = {x: torch.full_like(given[x], factor) for x in ("key", "value")}
    if kind == "separate":
        new = {x: Branches(y, y.clone(), y.clone()) for x, y in new.items()}
    return given | new


def wrong_tensors(name, x, gradients):
    """In place of `x`."""
    if isinstance(x, Branches):
        each = ((field, wrong_tensors(name, y, gradients)) for field, y in x._asdict().items())
        return [x._replace(**{field: wrong}) for field, found in each for wrong in found]
    found = [3, "x", [1], x.numpy(), x[None], torch.cat([x, x[:1]]), x[:0], x.bool()]
    found += [x.to_sparse(), x.to("meta")]
    if x.is_floating_point():
        found += [x[..., :-1], *([x.clone().requires_grad_()] if gradients else [])]
    return found + ([None, x.double(), x.half()] if name in ("query", "key", "value") else [])


def wrong_options(call):
    """Of each argument; those of `BOTH` and `ONE` are refused too."""
    pool, plan = PoolParams(torch.ones(8, 8)), plan_runs(COUNTS, COUNTED, 16)
    bad = torch.ones(8, 8, device="meta"), torch.zeros(4, 8), torch.ones(8, 8).to_sparse(), None
    params = [3, "ab", (3, 4), (pool, pool.weight), *((pool, PoolParams(x)) for x in bad)]
    arrays = torch.ones(2), (("a", torch.ones(2)),)
    wrong = {
        "made_with": [None, ("rope_base",), (("rope_base", 2),), *arrays],
        "implementation": ["fast", 3, ["sdpa"], "mosaic", "triton"],
    }
    if call == "cached_attention":
        lengths = [torch.tensor(x) for x in ([21, 3], [-1, 3])]
        wrong |= {"compress_params": params, "new_lengths": lengths}
    else:
        trained = PoolParams(torch.ones(8, 8, requires_grad=True))
        wrong |= {"params": [*params, (trained,) * 2]}
        numbers = {"page_table": ([0, 1], [99, 3]), "cu_seqlens_q": (0, 1, 30)}
        wrong |= {x: [torch.from_numpy(ints(*y))] for x, y in numbers.items()}
    if call != "append":
        wrong |= {"config": [3, NSAConfig()], "scale": ["x", True]}
    if call in ("paged_attention", "runs"):
        wrong |= {"max_seqlen_q": ["x", 2.5, True]}
        wrong["implementation"] += ["fa2"]
        others = plan_runs([0, 2, 22], COUNTED, 16), plan_runs(COUNTS, [1, 21], 16)
        narrow = [x._replace(columns=1) for x in plan]
        wrong |= {"runs": ["ab", [None], plan[:1], plan[1:], [], plan[::-1], narrow, *others]}
    wrong |= {"runs": [plan]} if call == "a step" else {}
    return [{name: x} for name, values in wrong.items() for x in values]


def state(cache):
    as_bytes = lambda x: x.contiguous().view(torch.uint8).numpy().tobytes()
    return {k: as_bytes(x) if torch.is_tensor(x) else x for k, x in vars(cache).items()}


@pytest.mark.parametrize(("call", "kind"), WRITING)
def test_a_refused_call_changes_nothing(call, kind):
    """Not a byte, nor what is known of the tokens; each is an error that the page names."""
    world, cache = WORLDS["torch"], cache_of(call, kind)
    function = getattr(nsa_torch, call, nsa_torch.paged_attention)
    function(**written(call, kind, 1) | {"cache": cache})
    given = written(call, kind, 2) | {"cache": cache}
    rows = (x for framework, name, x, _ in ROWS if (framework, name) == ("torch", call))
    wrong = [
        x for x in map(world.given, rows) if x.keys().isdisjoint(["cache", "key", "value"])
    ]
    for name, x in given.items():
        if isinstance(x, torch.Tensor | Branches):
            found = wrong_tensors(name, x, call != "cached_attention")
            wrong += [{name: each} for each in found]
    before = state(cache)
    for changes in (*wrong, *wrong_options(call)):
        with pytest.raises((ValueError, NotImplementedError)):
            function(**given | changes)
            pytest.fail(f"{changes} was not refused")
        assert state(cache) == before, changes
    function(**given)
    assert before.keys() == state(cache).keys() and before != state(cache)


def test_an_unknown_name_of_a_config():
    """The nearest field is proposed, that of a short name by its meaning."""
    for name, field in {
        "n_sel": "num_selected",
        "w": "window",
        "num_locals": "num_local",
    }.items():
        with pytest.raises(TypeError, match=f"^NSAConfig has no field '{name}'; pass {field}$"):
            NSAConfig(**{name: 4})
    seed = NSAConfig.from_seed(l=16, d=8, l_sel=32, n_sel=4, w=9)
    assert seed == NSAConfig(16, 8, 32, 4, window=9)
    with pytest.raises(ValueError, match="unknown name 'block'"):
        NSAConfig.from_seed(block=3)
    with pytest.raises(AttributeError, match="cannot assign to field 'window'"):
        NSAConfig().window = 3
