"""Checks the arguments of public functions: shapes and dtypes with `nsa_core.validate`, then
devices and packed rows.
"""

import numbers
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_core import block_lists, debug, validate
from nsa_core.types import Branches
from nsa_torch.batch_tables import sizes_of, tables_of
from nsa_torch.plain import TENSORS

FEWEST = 8  # minimum number of sequences for which tables have space


def tensors(at=None, name_of_at="query", /, **given):
    """Check that each argument is a plain tensor on the device of `at`. If `at` is None, all
    arguments must be on the device of the first argument. Each field of a `Branches` and of
    compressor parameters is checked in the same way.
    """
    for name, each in _each(given):
        if not isinstance(each, Tensor):
            module = type(each).__module__.partition(".")[0]
            kind = f"a {module}." if hasattr(each, "dtype") else ""
            raise ValueError(f"{name} must be a torch tensor, got {kind}{type(each).__name__}")
        _whole(name, each)
        if at is None:
            at, name_of_at = each, name
        if each.device != at.device:
            raise ValueError(
                f"{name} must be on the device of {name_of_at}, {at.device}, got {each.device}"
            )


def present(**given):
    """Return the arguments that are not None."""
    return {name: x for name, x in given.items() if x is not None}


def _each(given):
    """Return the names and values of arguments. A container, such as `Branches`, has one entry
    per field."""
    found = []
    for name, x in given.items():
        if isinstance(x, tuple) and hasattr(x, "_asdict"):
            found += [(f"{name}.{field}", each) for field, each in x._asdict().items()]
        else:
            found.append((name, x))
    return found


def _whole(name: str, x: Tensor) -> None:
    if x.layout is not torch.strided:
        raise ValueError(
            f"{name} must be dense (torch.strided), got {x.layout}; pack rows of several lengths "
            "into one row with cu_seqlens"
        )
    if torch.compiler.is_compiling() or type(x) in TENSORS:
        return
    if hasattr(x, "to_local"):
        raise ValueError(
            f"{name} must be a local tensor, got a {type(x).__name__}; pass its to_local() if the "
            "local part has whole rows or heads, or if context_mesh splits the tokens"
        )


def tokens(
    query,
    key,
    value,
    config,
    cu_seqlens,
    scale,
    key_name="key",
    value_name="value",
    length=None,
):
    """Check the numbers of tokens of query and key. If query and key have only the tokens of one
    rank, `length` is the number of tokens of the whole sequence.
    """
    tensors(**{"query": query, key_name: key, value_name: value})
    validate.attention(query, key, value, config, None, scale, key_name, value_name)
    packed_keys(cu_seqlens, query, key, length)


def packed_keys(cu_seqlens, query, key, length=None):
    """Check that `cu_seqlens` fits the queries and keys. `length` is the same as in `tokens`."""
    if cu_seqlens is not None and query.shape[1] != key.shape[1]:
        raise ValueError(
            "query must be as long as key if cu_seqlens are given, "
            f"got T={query.shape[1]} and S={key.shape[1]}"
        )
    packed(cu_seqlens, query, "query", length)


def attention(
    query,
    key,
    value,
    compressed_tokens,
    block_indices,
    cu_seqlens,
    config,
    scale,
    length=None,
):
    """Check the tensors of `functional.attention` except the gates. `key` and `value` are
    `Branches`. `length` is the same as in `tokens`.
    """
    for *names, k, v in validate.named(key, value):
        tokens(query, k, v, config, cu_seqlens, scale, *names, length=length)
        if length is not None and k.shape[1] != query.shape[1]:
            raise ValueError(
                f"{names[0]} must have as many tokens as query if context_mesh is given, "
                f"got {k.shape[1]} and {query.shape[1]}"
            )
    validate.same_in_branches(key, value)
    if compressed_tokens is not None:
        pair = validate.pair(compressed_tokens)
        count = key.selected.shape[1] if length is None else length
        compressed(query, *pair, config, count, value.selected)
    if block_indices is not None:
        indices(block_indices, query, key.selected, config)


def gates(gates, query) -> Branches:
    """Check gates and split them by branch, as `validate.gates` does. An eager call splits the
    gates with `unbind`, whose gradient is a single stack. A compiled call does not use `unbind`,
    since the compiled call would save the views in addition to the gates. With saved views, the
    backward pass of Inductor would overwrite gates that Inductor still reads.
    """
    if torch.compiler.is_compiling():
        return validate.gates(gates, query)
    return validate.gates(gates, query, lambda x: x.unbind(-1))


def packed(cu_seqlens, x, name, length=None):
    if cu_seqlens is None:
        return
    borders_array(cu_seqlens, "cu_seqlens", x, name)
    if x.shape[0] != 1:
        raise ValueError(
            f"{name} must be one row, B=1, if cu_seqlens are given, got B={x.shape[0]}"
        )
    borders(cu_seqlens, x.shape[1] if length is None else length)


def borders_array(cu_seqlens, name="cu_seqlens", *at):
    """Check the shape and dtype of the boundaries `cu_seqlens`, not their values. `at` has the
    same meaning as in `tensors`.
    """
    tensors(*at, **{name: cu_seqlens})
    validate.array(name, cu_seqlens, 1, ("int32", "int64"))
    if cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{name} must have num_seqs + 1 >= 2 entries, got {cu_seqlens.shape[0]}"
        )


def borders(cu_seqlens, length, name="cu_seqlens"):
    """Check the values of the boundaries `cu_seqlens` if the host reads them. Boundaries of a
    `VarlenMetadata` have already been checked.
    """
    if tables_of(cu_seqlens) is not None or not is_read(cu_seqlens):
        return
    validate.borders(name, cu_seqlens.tolist(), length)


def read(x: Tensor) -> Any:
    """Return the values of an argument as a numpy array, or None if the host does not read them."""
    return x.detach().cpu().numpy() if is_read(x) else None


def within(name: str, x: Tensor, least: int, most: int) -> None:
    """Check that the values of an argument are from `least` to `most`, if the host reads them."""
    if isinstance(x, Tensor) and (found := read(x)) is not None:
        validate.numbers(name, found, least, most)


def distinct(block_indices: Tensor) -> None:
    """Raise an error if a list contains a block twice, provided that the host reads the lists."""
    if (found := read(block_indices)) is not None:
        block_lists.refuse_repeated(found)


def may_be_padded(cu_seqlens: Tensor, length: int) -> bool:
    """Return whether some tokens of a packed row may belong to no sequence. If the host does not
    know the boundaries, return True.
    """
    if tables_of(cu_seqlens) is not None:
        return sizes_of(cu_seqlens)[1]
    return not is_read(cu_seqlens) or int(cu_seqlens[-1]) < length


def is_read(x: Tensor, wait: bool = False) -> bool:
    """Return whether the host reads the values of an argument. The host reads values if it need
    not wait for the device, if `nsa_core.debug` is on, or if the caller permits waiting (`wait`).
    The host never reads tensors without values, or tensors that are traced, compiled, transformed
    or captured.
    """
    if torch.compiler.is_compiling() or not (x.device.type == "cpu" or debug.on or wait):
        return False
    if type(x) not in TENSORS or torch._C._len_torch_dispatch_stack() or x.is_meta:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._C._get_tracing_state():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def clamped(cu_seqlens: Tensor | None, length: int) -> Tensor | None:
    """Return valid boundaries, so that no kernel reads outside the row. The first boundary is 0,
    and each boundary is at least the previous one and at most `length`. In eager mode the last
    boundary is repeated until there are `room(sequences)` sequences. The repetition gives calls
    with different numbers of sequences the same signature.

    Raises:
      ValueError: The same as in `borders`.
    """
    if tables_of(cu_seqlens) is not None or not isinstance(cu_seqlens, Tensor):
        return cu_seqlens
    if torch.compiler.is_compiling():
        return held(cu_seqlens, length)
    # A model passes the result to dozens of calls. This function then returns its argument
    # unchanged. Only the result is marked, since the caller's tensors must not get attributes.
    if getattr(cu_seqlens, "clamped_to", None) == length:
        return cu_seqlens
    borders_array(cu_seqlens)
    borders(cu_seqlens, length)
    found = held(cu_seqlens, length, room(cu_seqlens.shape[0] - 1))
    setattr(found, "clamped_to", length)  # noqa: B010, torch's stubs have no such name
    return found


def room(sequences: int) -> int:
    """Return the number of sequences for which tables are allocated if a row has `sequences`
    sequences."""
    return max(FEWEST, 1 << (sequences - 1).bit_length())


def held(cu_seqlens: Tensor, length: int, sequences: int | None = None) -> Tensor:
    """Return valid boundaries of a row of `length` tokens, padded to `sequences` sequences."""
    ends = cu_seqlens[1:].clamp(0, length).cummax(0).values
    found = F.pad(ends, (1, 0))
    if sequences is None or sequences == ends.shape[0]:
        return found
    return torch.cat([found, found[-1:].expand(sequences - ends.shape[0])])


def length(kv_len, query, cu_seqlens, capacity, most=None):
    """Check `kv_len`. `most` is the maximum of `kv_len` if the maximum differs from
    `capacity`."""
    if cu_seqlens is not None and kv_len is not None:
        raise ValueError("kv_len must be None if cu_seqlens are given, got both")
    if hasattr(kv_len, "dtype") and not isinstance(kv_len, numbers.Integral):
        tensors(query, kv_len=kv_len)
    validate.length(kv_len, query, None, capacity)
    if isinstance(kv_len, Tensor):
        if (limit := capacity if most is None else most) is not None:
            within("kv_len", kv_len, 0, limit)
    return capacity if kv_len is None else kv_len


def scoring(query, compressed_key, config, kv_len, cu_seqlens, scale):
    tensors(query=query, compressed_key=compressed_key)
    validate.scoring(query, compressed_key, config, kv_len, None, scale)
    packed(cu_seqlens, query, "query")
    most = validate.most_tokens(config, compressed_key.shape[1])
    kv_len = length(kv_len, query, cu_seqlens, None, most)
    return query.shape[1] if kv_len is None else kv_len


def compressed(query, compressed_key, compressed_value, config, kv_len, value=None):
    tensors(query, compressed_key=compressed_key, compressed_value=compressed_value)
    validate.compressed(query, compressed_key, compressed_value, config, kv_len, value)


def indices(block_indices, query, key, config):
    tensors(query, block_indices=block_indices)
    validate.indices(block_indices, query, key, config)
    distinct(block_indices)


def parameters(params, x, name_of_x):
    """Check the parameters of `compress`, which must be on the device of `x`, and return their
    tensors.
    """
    found = []
    for one in params:
        if one is not None:
            tensors(x, name_of_x, params=one)
            found += one
    return found


def device(given) -> torch.device:
    """Return the device for new tensors. If `given` is None, return torch's default device."""
    try:
        return torch.empty(0, device=given).device
    except (TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device must be None or a device that torch finds, got {given!r}"
        ) from error
