"""Checks the arguments of public functions. Each error names the argument, the rule and the value.

The checks read only the `shape` and the `dtype` of an array, so that both frameworks can use
them. A caller that has read the values of an array passes them to `numbers` or `borders`.
"""

import itertools
import math
import numbers as kinds
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nsa_core.cache_contents import Contents
from nsa_core.compress_params import MLPParams, PoolParams, RopeMLPParams
from nsa_core.config import NSAConfig
from nsa_core.types import Branches

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int32", "int64", "int16", "int8")
LAYOUT = "tokens come before heads: query [B, T, H, D], key [B, S, Hkv, D], gates [B, T, H, 3]"

# The length of each axis, where None means any length.
type Axes = Sequence[int | None]


def dtype_name(x) -> str:
    """Return the name of a JAX, NumPy or torch dtype, such as `float32`."""
    return str(x.dtype).removeprefix("torch.")


def array(name: str, x, axes: int | Axes, dtypes=FLOATS, **like) -> None:
    """Check that `x` is an array with the given axes, or number of axes, and one of the dtypes.
    If `like` names another array, `x` must have the dtype of that array.
    """
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{name} must be an array, got {type(x).__name__}")
    rank, got = axes if isinstance(axes, int) else len(axes), tuple(x.shape)
    if len(got) != rank:
        raise ValueError(f"{name} must have {rank} axes, got shape {got}")
    dtype = dtype_name(x)
    if dtype not in dtypes:
        raise ValueError(f"{name} must have dtype in {dtypes}, got {dtype}")
    if dtype == "float64" and type(x).__module__ == "numpy":
        # Modules are looked up only for such arrays. torch.compile would otherwise trace the
        # look-up, and assume that no further modules are loaded.
        jax = sys.modules.get("jax")
        if not (jax and jax.config.jax_enable_x64):
            raise ValueError(
                f"{name} must not be a NumPy array of float64, which JAX converts to float32; set "
                "jax_enable_x64, or pass float32"
            )
    for other, y in like.items():
        if x.dtype != y.dtype:
            raise ValueError(
                f"{name} must have the dtype of {other}, {dtype_name(y)}, got {dtype}"
            )
    if not isinstance(axes, int):
        shape(name, x, axes)


def shape(name: str, x, axes: Axes) -> None:
    """Check that `x` has the given axes. The number of axes has already been checked."""
    got = tuple(x.shape)
    expected = tuple([y if want is None else want for want, y in zip(axes, got, strict=True)])
    if got != expected:
        raise ValueError(f"{name} must have shape {expected}, got {got}")


def queries(query, name: str = "query", rank: int = 4) -> None:
    """Check that queries have `rank` axes, by default `[B, T, H, D]`, that they are floating
    point, and that they are not empty.
    """
    array(name, query, rank)
    if 0 in query.shape:
        raise ValueError(f"{name} must not be empty, got shape {tuple(query.shape)}")


def configuration(config) -> None:
    if not isinstance(config, NSAConfig):
        raise ValueError(f"config must be an NSAConfig, got {type(config).__name__}")


def in_dtype_of_query(config: NSAConfig, what: str) -> None:
    """Check that `config` asks for products in the dtype of the query. `what` names the function
    that supports no other dtype.
    """
    if config.compute_dtype is not None:
        raise NotImplementedError(
            f"{what} computes in the dtype of the query, got "
            f"compute_dtype={config.compute_dtype!r}, which supports only whole sequences"
        )


def scaling(scale, name: str = "scale") -> None:
    if scale is not None:
        positive(name, scale, " or None")


def positive(name: str, value, otherwise: str = "") -> None:
    """Check that `value` is a finite and positive number."""
    number = isinstance(value, kinds.Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number{otherwise}, got {value!r}")


def heads(query, key, name: str = "key") -> None:
    if key.shape[2] < 1 or query.shape[2] % key.shape[2]:
        raise ValueError(
            f"query heads must be a multiple of {name} heads, "
            f"got {query.shape[2]} and {key.shape[2]}; {LAYOUT}"
        )


def named(key: Branches, value: Branches) -> list[tuple[str, str, Any, Any]]:
    """Return keys and values with their names.

    Keys and values that all branches share are listed once, and separate keys and values are listed
    once per branch.
    """

    def names(kind, each):
        one = each.compressed is each.selected is each.sliding
        return [kind if one else f"{kind}.{branch}" for branch in Branches._fields]

    found = list(zip(names("key", key), names("value", value), key, value, strict=True))
    return found[:1] if found[0][:2] == ("key", "value") else found


def same_in_branches(key: Branches, value: Branches) -> None:
    """Check that all branches have the same numbers of tokens and heads, and values of the same
    width.
    """
    axes = {"key": (key, "[B, S, Hkv]", 3), "value": (value, "[B, S, Hkv, Dv]", 4)}
    for kind, (each, words, count) in axes.items():
        expected = tuple(each.selected.shape[:count])
        for branch, x in each._asdict().items():
            if x is not each.selected and tuple(x.shape[:count]) != expected:
                raise ValueError(
                    f"{kind}.{branch} must have the {words} of {kind}.selected, {expected}, "
                    f"got {tuple(x.shape[:count])}"
                )


def attention(
    query, key, value, config, segment_ids, scale, key_name="key", value_name="value"
) -> None:
    """Check `query` [B, T, H, D], `key` [B, S, Hkv, D] and `value` [B, S, Hkv, Dv] with T <=
    S.
    """
    configuration(config)
    queries(query)
    batch, tokens, _, width = query.shape
    array(key_name, key, (batch, None, None, width), query=query)
    array(value_name, value, 4, query=query)
    heads(query, key, key_name)
    ours, theirs = tuple(key.shape[:3]), tuple(value.shape[:3])
    if ours != theirs:
        # If possible, the message names the array whose number of tokens is wrong.
        if theirs[1] == tokens != ours[1]:
            shape(key_name, key, (*theirs, None))
        if ours[1] == tokens != theirs[1]:
            shape(value_name, value, (*ours, None))
        raise ValueError(
            f"{key_name} and {value_name} must have the same [B, S, Hkv], "
            f"got {ours} and {theirs}; {LAYOUT}"
        )
    if tokens > key.shape[1]:
        raise ValueError(
            f"query must not be longer than {key_name}, got T={tokens} and "
            f"S={key.shape[1]}; {LAYOUT}"
        )
    segments(segment_ids, *key.shape[:2])
    scaling(scale)


def gates(
    gates,
    query,
    apart: Callable[[Any], Sequence[Any]] = lambda x: [x[..., i] for i in range(3)],
) -> Branches:
    """Check gates and return them as `Branches` of `[B, T, H]`. The function `apart` splits gates
    that are one array `[B, T, H, 3]`.
    """
    queries(query)
    expected = tuple(query.shape[:3])
    if isinstance(gates, Branches):
        for name, gate in gates._asdict().items():
            array(f"gates.{name}", gate, expected)
        return gates
    array("gates", gates, 4)
    if tuple(gates.shape) != (*expected, 3):
        raise ValueError(
            f"gates must have shape {(*expected, 3)} for query {tuple(query.shape)}, "
            f"got {tuple(gates.shape)}; {LAYOUT}"
        )
    return Branches(*apart(gates))


def segments(segment_ids, batch: int, length: int | None) -> None:
    if segment_ids is not None:
        array("segment_ids", segment_ids, (batch, length), INTEGERS)


def length(
    kv_len, query, segment_ids, capacity: int | None = None, name="kv_len", least=None
) -> None:
    """Check `kv_len`: an int from T (or `least`) to capacity, or an array `[]` or `[B]`."""
    if kv_len is None:
        return
    if segment_ids is not None:
        raise ValueError(f"{name} must be None if segment_ids are given, got both")
    if isinstance(kv_len, bool) or not isinstance(kv_len, int):
        if not hasattr(kv_len, "shape"):
            raise ValueError(f"{name} must be an int or an array of ints, got {kv_len!r}")
        if tuple(kv_len.shape) not in ((), (query.shape[0],)):
            raise ValueError(
                f"{name} must have shape () or ({query.shape[0]},), got {tuple(kv_len.shape)}"
            )
        array(name, kv_len, len(kv_len.shape), ("int32", "int64"))
        return
    bound, words = (query.shape[1], "T=") if least is None else (least, "")
    if kv_len < bound:
        raise ValueError(f"{name} must be at least {words}{bound}, got {kv_len}")
    if capacity is not None and kv_len > capacity:
        raise ValueError(f"{name} must be at most the number of keys, {capacity}, got {kv_len}")


def numbers(name: str, found: np.ndarray, least: int, most: int) -> None:
    """Check that each number is at least `least` and at most `most`."""
    for x in found[(found < least) | (found > most)].flat:
        raise ValueError(f"{name} must be in {least}..{most}, got {x}")


def borders(name: str, found: Sequence[int], length: int) -> None:
    """Check the boundaries of the sequences in a row of `length` tokens."""
    if found[0] != 0:
        raise ValueError(f"{name} must begin with 0, got {found[0]}")
    for i, (before, border) in enumerate(itertools.pairwise(found), 1):
        if border < before:
            raise ValueError(
                f"{name} must not decrease, got {border} after {before} at index {i}"
            )
    if found[-1] > length:
        raise ValueError(
            f"{name} must end with at most {length}, the number of tokens, got {found[-1]}"
        )


def most_tokens(config: NSAConfig, compressed: int) -> int:
    """Return the largest sequence length that has the given number of compressed tokens."""
    return compressed * config.compress_stride + config.compress_block - 1


def scoring(query, compressed_key, config, kv_len, segment_ids, scale):
    """Check the arguments of functions that have only compressed keys. Return `kv_len`, which
    defaults to T, or None if `segment_ids` is given.
    """
    configuration(config)
    queries(query)
    batch, tokens, _, width = query.shape
    array("compressed_key", compressed_key, (batch, None, None, width), query=query)
    heads(query, compressed_key, "compressed_key")
    scaling(scale)
    length(kv_len, query, segment_ids)
    kv_len = tokens if kv_len is None else kv_len
    if segment_ids is not None:
        segments(segment_ids, batch, None)
        kv_len = segment_ids.shape[1]
        if kv_len < tokens:
            raise ValueError(
                f"segment_ids must have at least T={tokens} tokens per row, got {kv_len}"
            )
    _count(compressed_key, config, kv_len)
    return None if segment_ids is not None else kv_len


def pair(
    given, name: str = "compressed", what: str = "arrays, compressed keys and values"
) -> tuple[Any, Any]:
    """Check that `given` is a pair, with one entry for keys and one entry for values."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        got = f"{len(given)} of them" if isinstance(given, tuple | list) else None
        raise ValueError(f"{name} must be a pair of {what}, got {got or type(given).__name__}")
    return given[0], given[1]


def phi_pair(params, key, value, config, name: str) -> None:
    """Check a pair of parameters of `compress`, each as the function `phi` does."""
    for one, x in zip(pair(params, name, "parameters of compress"), (key, value), strict=True):
        phi(one, x, config)


def compressed(query, compressed_key, compressed_value, config, kv_len, value=None) -> None:
    """Check compressed keys `[B, C, Hkv, D]` and values `[B, C, Hkv, Dv]`. If `kv_len` is an int,
    `C` must be `config.num_compressed(kv_len)`.

    value: `[B, S, Hkv, Dv]`, the values of the other branches, or None.
    """
    array("compressed_key", compressed_key, 4, query=query)
    array("compressed_value", compressed_value, 4, query=query)
    kv_heads, value_width = (compressed_value if value is None else value).shape[2:]
    expected = query.shape[0], None, kv_heads, query.shape[3]
    shape("compressed_key", compressed_key, expected)
    shape("compressed_value", compressed_value, (*compressed_key.shape[:3], value_width))
    heads(query, compressed_key, "compressed_key")
    _count(compressed_key, config, kv_len)


def _count(compressed_key, config, kv_len) -> None:
    if not isinstance(kv_len, int):
        return
    expected, got = config.num_compressed(kv_len), compressed_key.shape[1]
    if got != expected:
        raise ValueError(
            f"compressed_key must have C={expected} tokens for {kv_len} keys, got {got}"
        )


def indices(block_indices, query, key, config) -> None:
    """Check block indices, int32 `[B, T, Hkv, n]`."""
    expected = (*query.shape[:2], key.shape[2], config.num_selected)
    array("block_indices", block_indices, expected, ("int32",))


def phi(params, x, config) -> None:
    """Check that parameters of `compress` fit windows of `l` tokens of `x` [B, S, Hkv, D]."""
    configuration(config)
    block, width = config.compress_block, x.shape[3]
    if isinstance(params, PoolParams):
        array("params.weight", params.weight, (block, width))
    elif isinstance(params, MLPParams | RopeMLPParams):
        if isinstance(params, RopeMLPParams):
            even("the width of x", width)
        array("params.b1", params.b1, 1)
        (hidden,) = params.b1.shape
        w1, w2 = (block * width, hidden), (hidden, width)
        expected = (block, width), w1, (hidden,), w2, (width,), (width // 2,)
        for name, axes in zip(params._fields, expected, strict=False):
            array(f"params.{name}", getattr(params, name), axes)
    elif params is not None:
        raise ValueError(
            "params must be None, PoolParams, MLPParams or RopeMLPParams, "
            f"got {type(params).__name__}"
        )


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be a bool, got {value!r}")


def even(name: str, value: int) -> None:
    """Check that a width is even, since columns are rotated in pairs."""
    if value % 2:
        raise ValueError(f"{name} must be even for the rotary embedding, got {value}")


def one_of(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {known}, got {value!r}")


def sizes(least: int = 1, /, **values: int) -> None:
    """Check that each size is an int of at least `least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, kinds.Integral) or value < least:
            raise ValueError(f"{name} must be an int >= {least}, got {value!r}")


def cached(query, key, value, cache, config, compress_params, scale) -> NSAConfig:
    """Check that new tokens `[B, T, Hkv, .]` of each branch fit a cache of either framework, and
    that its contents fit `config`. Return `config`, which defaults to the config of the cache.
    """
    if not hasattr(cache, "length"):
        raise ValueError(f"cache must be a result of init_cache, got {type(cache).__name__}")
    if config is None:
        config = cache.config
    else:
        configuration(config)
        in_dtype_of_query(config, "a cache")
        names = "compress_block", "compress_stride"
        ours, theirs = (
            [(x, getattr(each, x)) for x in names] for each in (config, cache.config)
        )
        Contents(theirs).with_facts(ours)
    kept = cache.selected_key
    for *names, k, v in named(key, value):
        attention(query, k, v, config, None, scale, *names)
        shape(names[0], k, (*query.shape[:2], *kept.shape[2:]))
        shape(names[1], v, (*k.shape[:3], cache.selected_value.shape[3]))
    if kept.shape[0] != query.shape[0]:
        raise ValueError(
            f"cache must have batch {query.shape[0]}, the same as query, got {kept.shape[0]}"
        )
    if kept.dtype != query.dtype:
        raise ValueError(
            f"cache must have the dtype of query, {dtype_name(query)}, got "
            f"{dtype_name(kept)}; make the cache with init_cache(.., dtype={query.dtype})"
        )
    own = key.sliding is not key.selected or value.sliding is not value.selected
    if own and cache.sliding_key is None:
        raise ValueError(
            "the selected and the sliding branch of this cache have the same keys and values, got "
            "Branches; init_cache(separate=True) makes a cache with keys and values per branch"
        )
    phi_pair(compress_params, key.compressed, value.compressed, config, "compress_params")
    return config
