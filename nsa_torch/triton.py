"""The implementation `triton` in torch, which runs all steps on Triton kernels on NVIDIA GPUs from
Ampere on. A new sequence length causes no compilation. A CUDA graph can capture a call if the layer
has run before. If compressed tokens are means, torch computes the means.
"""

import types

from nsa_core.array_ops import derived, like
from nsa_core.steps import triton_attention
from nsa_torch.compress import compress, gradient_of_means
from nsa_torch.kernel_path import KernelPath


def _means_of(ops, key, value, params):
    borders, config = _borders(params), params.config
    return [ops.derive(_means, x, *borders, config=config)[0] for x in (key, value)]


def _gradients(ops, compressed, others, length, params):
    """Return the gradients of tokens, as in `nsa_core.steps.mosaic_compress`."""
    borders, found = _borders(params), []
    static = {"length": length, "config": params.config, "packed": bool(borders)}
    for i, grad in enumerate(compressed):
        arrays = grad, *borders, *(pair[i] for pair in others)
        found += ops.derive(_of_tokens, *arrays, **static)
    return found


def _borders(params):
    borders = params.layout.cu_seqlens
    return () if borders is None else (borders,)


@derived(
    lambda x, *borders, config: [
        like(x, x.shape[0], config.num_compressed(x.shape[1]), *x.shape[2:])
    ]
)
def _means(ops, x, *borders, config):
    return [compress(x, config=config, cu_seqlens=borders[0] if borders else None)]


@derived(lambda x, *rest, length, **static: [like(x, x.shape[0], length, *x.shape[2:])])
def _of_tokens(ops, x, *rest, length, config, packed):
    """Compute the gradients of tokens by adding the gradients from their means and from the other
    branches.
    """
    borders = rest[0] if packed else None
    others = rest[packed:]
    means = gradient_of_means(x, length, config=config, cu_seqlens=borders)
    return [sum([*others[1:], means], others[0]) if others else means]


COMPRESSION = types.SimpleNamespace(means=_means_of, gradients=_gradients)
PATH = KernelPath(
    "triton", triton_attention.STEPS._replace(compression=COMPRESSION), masks=True
)
compressed_attention = PATH.compressed_attention
selected_attention = PATH.selected_attention
sliding_attention = PATH.sliding_attention
select_blocks = PATH.select_blocks
attention = PATH
