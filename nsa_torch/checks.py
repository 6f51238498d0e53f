"""Checks of public arguments: those of `nsa_jax.validate`, and torch's devices and packing."""

from torch import Tensor

from nsa_jax import validate


def tokens(query, key, value, config, cu_seqlens, scale, key_name="key", value_name="value"):
    validate.attention(query, key, value, config, None, scale, key_name, value_name)
    devices(query, {"query": query})
    devices(query, {key_name: key, value_name: value})
    if cu_seqlens is not None and query.shape[1] != key.shape[1]:
        raise ValueError(
            "query must be as long as key where cu_seqlens are given, "
            f"got T={query.shape[1]} and S={key.shape[1]}"
        )
    packed(cu_seqlens, query, "query")


def packed(cu_seqlens, x, name):
    if cu_seqlens is None:
        return
    validate.array("cu_seqlens", cu_seqlens, 1, ("int32", "int64"))
    if cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must have num_seqs + 1 >= 2 entries, got {cu_seqlens.shape[0]}"
        )
    if x.shape[0] != 1:
        raise ValueError(
            f"{name} must be one row, B=1, where cu_seqlens are given, got B={x.shape[0]}"
        )
    devices(x, {"cu_seqlens": cu_seqlens})


def length(kv_len, query, cu_seqlens, capacity):
    if cu_seqlens is not None and kv_len is not None:
        raise ValueError("kv_len must be None where cu_seqlens are given, got both")
    validate.length(kv_len, query, None, capacity)
    if isinstance(kv_len, Tensor):
        devices(query, {"kv_len": kv_len})
    return capacity if kv_len is None else kv_len


def scoring(query, compressed_key, config, kv_len, cu_seqlens, scale):
    validate.scoring(query, compressed_key, config, kv_len, None, scale)
    devices(query, {"query": query})
    packed(cu_seqlens, query, "query")
    devices(query, {"compressed_key": compressed_key})
    kv_len = length(kv_len, query, cu_seqlens, None)
    return query.shape[1] if kv_len is None else kv_len


def compressed(query, compressed_key, compressed_value, config, kv_len):
    validate.compressed(query, compressed_key, compressed_value, config, kv_len)
    tensors = {"compressed_key": compressed_key, "compressed_value": compressed_value}
    devices(query, tensors)


def indices(block_indices, query, key, config):
    validate.indices(block_indices, query, key, config)
    devices(query, {"block_indices": block_indices})


def devices(query, tensors):
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
        if tensor.device != query.device:
            raise ValueError(
                f"{name} must be on the device of query, {query.device}, got {tensor.device}"
            )
