"""Makes a layer's cache in the memory of vLLM, and runs a step from the metadata of vLLM. The
module does not import vLLM. Tests can therefore run the same code on recorded metadata without
vLLM.
"""

from typing import Any, NamedTuple, Self

from torch import Tensor

from kernels_pallas.triton.decode_descriptions import QUERIES
from nsa_core.layer import LayerSpec
from nsa_core.paged_runs import GATHERED_KEYS, Run, fills_pages_of_others, plan_runs
from nsa_core.types import Branches
from nsa_torch.key_convolution import KeyConvolution
from nsa_torch.paged import PagedCache, block_elements, carve_blocks
from nsa_torch.paged_attend import paged_attention


class Step(NamedTuple):
    """The data of a step that is the same for all layers.

    Attributes:
      page_table, lengths, starts, runs: As in `paged_attention`, with `starts` for
        `cu_seqlens_q`. If `starts` is None, all rows have the same small number of new tokens,
        which determines all shapes.
      tokens: The total number of new tokens of all rows.
    """

    page_table: Tensor
    lengths: Tensor
    starts: Tensor | None
    runs: list[Run] | None
    tokens: int

    @classmethod
    def of(cls, metadata: Any, block_size: int) -> Self:
        """Build a step. Boundaries and lengths are read from copies on the host, not from the
        device.

        Args:
          metadata: vLLM's `CommonAttentionMetadata`.
          block_size: number of tokens per block.
        """
        m, count = metadata, metadata.max_query_len
        at, tokens = (m.block_table_tensor, m.seq_lens), m.num_actual_tokens
        lengths = m.seq_lens_cpu_upper_bound.tolist()[: m.num_reqs]
        if count <= QUERIES and count * m.num_reqs == tokens:
            if not fills_pages_of_others(count, lengths, block_size):
                return cls(*at, None, None, tokens)
        starts = m.query_start_loc_cpu.tolist()[: m.num_reqs + 1]
        runs = plan_runs(starts, lengths, block_size)
        return cls(*at, m.query_start_loc, runs, tokens)

    def convolve(
        self, convolution: KeyConvolution, key: Tensor, newest: Tensor, page: int, out: Tensor
    ) -> None:
        """Convolve the keys `key` [N, columns] of a layer's new tokens and write the convolved keys
        to `out`. `newest` and `page` are as in `KeyConvolution.in_pages`.
        """
        n, at = self.tokens, (self.page_table, self.lengths, self.starts)
        out[:n] = convolution.in_pages(key[:n], newest, page, *at)
        out[n:].zero_()

    def attend(
        self,
        pages: PagedCache,
        spec: LayerSpec,
        params: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: Tensor,
        out: Tensor,
    ) -> None:
        """Append the new tokens of a layer to `pages`. Compute attention of the new tokens to all
        tokens, and write the result to `out`. The shapes are as in the operator that `backend.py`
        registers.
        """
        n = self.tokens
        keys, values = (
            Branches(*x[:, :n].unbind()) if spec.separate else x[0, :n] for x in (key, value)
        )
        out[:n] = paged_attention(
            query[:n],
            gates[:n],
            pages,
            self.page_table,
            self.lengths,
            self.starts,
            key=keys,
            value=values,
            params=params,
            made_with=spec.cached,
            runs=self.runs,
        )
        out[n:] = 0


def elements_of_token(spec: LayerSpec) -> int:
    """Return the number of elements that NSA stores per token and key/value head, including
    compressed tokens, rounded up.
    """
    return -(-block_elements(spec) // (spec.n_kv_groups * spec.config.select_block))


def pages_in(memory: Tensor, spec: LayerSpec) -> tuple[PagedCache, Tensor]:
    """Make a layer's cache in the blocks `[B, Hkv, N, C]` of vLLM. Return the cache, and the
    projected keys of the newest tokens (`carve_blocks`).

    Raises:
      ValueError: Blocks do not have `select_block` tokens or the layer's number of heads, or
        are too small for the data that NSA stores per token.
    """
    wanted = spec.n_kv_groups, spec.config.select_block, elements_of_token(spec)
    found = tuple(memory.shape[1:])
    if found[:2] != wanted[:2] or found[2] < wanted[2]:
        raise ValueError(
            f"blocks must have {wanted[0]} key/value heads, {wanted[1]} tokens (select_block) and "
            f"at least {wanted[2]} elements per token, got {found}"
        )
    return carve_blocks(memory.view(-1), len(memory), spec)


def gathered_elements(spec: LayerSpec, longest: int) -> int:
    """Return the maximum number of elements that a step copies from pages. `longest` is the
    maximum number of tokens per row.
    """
    block = spec.config.select_block
    keys = max(GATHERED_KEYS, -(-longest // block) * block)
    each = (2 if spec.separate else 1) * keys + keys // spec.config.compress_stride
    return each * spec.n_kv_groups * (spec.d_k + spec.d_v)
