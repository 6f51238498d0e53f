"""Implements an attention backend of vLLM and two operators. One operator appends tokens and
computes attention. The other operator convolves keys (`step.py`).

A block has `select_block` tokens of one layer. vLLM passes all blocks of a layer as `[B, Hkv,
N, C]`. The C elements per token and key/value head hold all data that NSA stores about a token:

    C = 3 (D + Dv) + (D + Dv) / d     keys and values of three branches, compressed ones; 1
                                      instead of 3 if the branches share keys and values

With `key_taps`, C also includes the projected keys that a block stores, divided by its tokens.

`PagedCache.carve` divides the memory of a layer into arrays over all blocks. All layers form one
cache group with one block table. The accounting, prefix hashes and block tables of vLLM therefore
cover all arrays of a layer.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout

from nsa_core.layer import LayerSpec
from nsa_torch.vllm.step import Step, elements_of_token

OP, CONVOLVE = "nsa_attend", "nsa_convolve"


class NSABuilder(AttentionMetadataBuilder[Step]):
    """Builds a `Step` from the metadata of vLLM, once per step for all layers."""

    # A step can be a CUDA graph if all rows have the same number of new tokens, 1 to 8.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Rows with few tokens come first in a batch.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        return Step.of(common_attn_metadata, self.kv_cache_spec.block_size)


class NSABackend(AttentionBackend):
    """The attention backend that vLLM asks for the shape of the cache and for the builder. The
    backend has no implementation class, since layers with NSA are not instances of `Attention` of
    vLLM.
    """

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto"]  # noqa: RUF012
    select_block = 64  # the value for the model in this process

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError(
            "NSA layers run the attention operator of nsa_torch.vllm, but vLLM asked this backend "
            "for an implementation; do not select this backend by hand"
        )

    @staticmethod
    def get_builder_cls():
        return NSABuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None):
        return [cls.select_block]

    @classmethod
    def supported_kv_cache_layouts(cls):
        return (KVCacheLayout.LBHNC,)  # all blocks of a layer are in one piece of memory

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # `runs` are computed from bounds on the host

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # a block's bytes are not contiguous


def cache_spec(spec: LayerSpec, dtype: torch.dtype) -> FullAttentionSpec:
    """Make vLLM's description of a layer's cache."""
    return FullAttentionSpec(
        block_size=spec.config.select_block,
        num_kv_heads=spec.n_kv_groups,
        head_size=spec.d_k,
        head_size_v=spec.d_v,
        dtype=dtype,
        state_content_bytes=elements_of_token(spec) * dtype.itemsize,
    )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, gates: Tensor, out: Tensor, layer_name: str
) -> None:
    """Write the attention of `query` [N, H, D] to `out` [N, H, Dv]. Key and value are `[3, N,
    Hkv, .]`, or `[1, ..]` if the branches share them. The gates are `[N, H, 3]`.
    """
    context = get_forward_context()
    steps, layer = context.attn_metadata, context.no_compile_layers[layer_name]
    if steps is None:  # vLLM is measuring memory
        out.zero_()
        query.new_empty(layer.gathered)
        return
    (attention,), step = layer.attention, steps[layer_name]
    params = attention.compress_params()
    step.attend(layer.pages, attention.spec, params, query, key, value, gates, out)


def _convolve(key: Tensor, out: Tensor, layer_name: str) -> None:
    """Write the convolved keys of `key` [N, columns] to `out`."""
    context = get_forward_context()
    steps, layer = context.attn_metadata, context.no_compile_layers[layer_name]
    if steps is None:  # vLLM is measuring memory
        out.zero_()
        return
    (attention,), page = layer.attention, NSABackend.select_block
    steps[layer_name].convolve(attention.key_conv, key, layer.newest_keys, page, out)


def _writes_nothing(*arguments: Any) -> None:
    """Do nothing. This function replaces the two operators of this module while torch traces
    them.
    """


direct_register_custom_op(OP, _attend, mutates_args=["out"], fake_impl=_writes_nothing)
direct_register_custom_op(CONVOLVE, _convolve, mutates_args=["out"], fake_impl=_writes_nothing)
