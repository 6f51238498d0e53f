"""`paged_attention` on Triton kernels that read the pages."""

from nsa_jax import triton_decode
from nsa_torch.triton_ops import TRITON_OPS as OPS


def attention(inputs, max_seqlen_q=None, implementation=None):
    """The output of `paged.Inputs` of 1 to 8 queries a row; the rest is for other rows."""
    return attention_with_indices(inputs)[0]


def attention_with_indices(inputs):
    """The same, and the blocks that each query chose: int32 `[N, Hkv, n]`."""
    return triton_decode.attention(
        OPS,
        inputs.query,
        inputs.gates,
        inputs.cache,
        inputs.page_table,
        inputs.lengths,
        inputs.scale,
    )
