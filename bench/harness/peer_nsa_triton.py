"""Runs native-sparse-attention-triton, another NSA in Triton, for `peers`. `peer_flash_nsa` runs
more packages by the same steps.

The package is github.com/XunhaoLai/native-sparse-attention-triton. The module
`native_sparse_attention` of the package has the same name as modules of other packages. The package
has a function for each step except the window. The arrays of the package are packed rows: batch and
tokens are one axis, and `cu_seqlens` has the starts of the sequences.

| branch | functions of `native_sparse_attention.ops` | arrays in the package |
|---|---|---|
| compressed | `compressed_attention`, `topk=0` | `[B * T, H, D]`, compressed `[B * C, Hkv, D]` |
| scores | `compressed_attention`, which attends too | blocks int32 `[Hkv, B * T, n]` |
| selected | `topk_sparse_attention` | `[B * T, .., D]`, blocks |
| all | `avgpool_compress`, and the functions above | |

The functions of the package compute the same results as this library, so that the oracle judges
every branch and attention of all branches:

- A compressed token is the mean of `l` tokens, and a compressed token begins every `d` tokens.
  Queries at or after the last of its `l` tokens can attend to a compressed token.
- Block scores follow Eq. 9, and are summed over the heads of a group.
- The first `init_blocks` blocks and the last `local_blocks` blocks are forced. The last forced
  block is the query's own block.
- Blocks ascend, with -1 at the end. The scale is `D**-0.5`.

The window runs on flash_attn with `w` keys (the package's own layer uses one more key). This
library computes the gated sum. No function returns a log-sum-exp.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nsa_core.config import NSAConfig
from nsa_core.dispatch import Problem
from nsa_core.types import Branches

from . import records

NAME = PACKAGE = "native-sparse-attention-triton"
WIDEST, BLOCKS = 128, (32, 64, 128, 256)
OUTPUT = "only the output, since the package returns no log-sum-exp"
NOTES = {
    "compressed": OUTPUT,
    "scores": "one call computes compressed attention and the blocks, and the time includes both",
    "selected": f"with the given blocks; {OUTPUT}",
    "all": "its compression, compressed, scores and selected; flash_attn's window of w keys "
    "(its module's has w + 1); the gated sum is ours",
}


class Package(NamedTuple):
    """Another NSA in Triton, with the functions of this module that call it."""

    name: str  # in `--peers`, and of the package
    notes: Mapping[str, str]  # a note for each branch that the package supports
    why_not: Callable[[Problem, str], str | None]
    attend_selected: Callable[..., Any]
    # These functions are needed if `notes` has other branches than `selected`.
    attend_compressed: Any = None
    compress: Any = None


def package_why_not(package: str, problem: Problem, source: str = "") -> str | None:
    """Return the reason why a package for CUDA and 16 bits cannot run the problem, or None.
    `source` states where the package can be found.
    """
    if records.version(package) is None:
        return f"{package} is not installed{source}"
    return arrays_why_not(package, problem)


def arrays_why_not(package: str, problem: Problem) -> str | None:
    """Return the reason why functions for CUDA and 16 bits cannot run the problem, or None."""
    if problem.platform != "cuda":
        return f"{package} needs CUDA tensors, got {problem.platform}"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"{package} needs float16 or bfloat16, got {problem.dtype}"
    return None


def window_why_not(package: str, branch: str) -> str | None:
    """Return the reason why attention of all branches has no sliding window, or None."""
    if branch == "all" and records.version("flash-attn") is None:
        return f"{package} needs flash_attn for the sliding window; flash_attn is not installed"
    return None


def why_not(problem: Problem, branch: str) -> str | None:
    """Return the reason why the package cannot run the branch, or None. The function does not
    import the package.
    """
    config = problem.config
    source = f": pip install git+https://github.com/XunhaoLai/{PACKAGE}"
    if reason := package_why_not(PACKAGE, problem, source):
        return reason
    if problem.D != problem.Dv:
        return f"{PACKAGE} needs D = Dv, got D={problem.D}, Dv={problem.Dv}"
    if problem.D > WIDEST:
        return f"{PACKAGE} documents D <= {WIDEST}, got {problem.D}"
    if branch != "compressed" and config.select_block not in BLOCKS:
        return f"{PACKAGE} needs blocks of {BLOCKS} keys, got {config.select_block}"
    if branch != "selected" and config.num_compressed(problem.S) == 0:
        return (
            f"{PACKAGE} needs at least one compressed token, but {problem.S} tokens have none"
        )
    return window_why_not(PACKAGE, branch)


def rows(x):
    """Reshape `[B, T, heads, width]` to `[B * T, heads, width]`."""
    return x.flatten(0, 1)


def bounds(x):
    """Return `cu_seqlens` of the sequences in `[B, T, ..]`."""
    import torch

    batch, length = x.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=x.device) * length


def _attend_compressed(config: NSAConfig, query, key, value, most: int):
    """Compute compressed attention `[B, T, H, D]`, and select `most` blocks `[B, T, Hkv, n]`. If
    `most` is 0, the second result is None.
    """
    from native_sparse_attention.ops import compressed_attention

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package warns if 0 blocks are requested
        out, chosen = compressed_attention(
            *map(rows, (query, key, value)),
            config.compress_block,
            config.compress_stride,
            config.select_block,
            most,
            bounds(query),
            bounds(key),
            query.shape[1],
            key.shape[1],
            init_blocks=config.num_initial,
            local_blocks=config.num_local,
        )
    batch = query.shape[0]
    return out.unflatten(0, (batch, -1)), None if chosen is None else blocks_of(
        chosen, batch, most
    )


def blocks_of(chosen, batch: int, most: int):
    """Convert the blocks `[Hkv, B * T, min(n, N)]` to the form of this library,
    `[B, T, Hkv, n]`.
    """
    import torch

    chosen = torch.nn.functional.pad(chosen, (0, most - chosen.shape[-1]), value=-1)
    return chosen.transpose(0, 1).unflatten(0, (batch, -1)).contiguous()


def _attend_selected(config: NSAConfig, query, key, value, blocks):
    from native_sparse_attention.ops import topk_sparse_attention

    return attend_lists(topk_sparse_attention, config, query, key, value, blocks)


def attend_lists(function, config: NSAConfig, query, key, value, blocks):
    """Attend to the given blocks with `topk_sparse_attention`, or a function with the same
    arguments.
    """
    out = function(
        *map(rows, (query, key, value)),
        rows(blocks).transpose(0, 1).contiguous(),
        config.select_block,
        bounds(query),
    )
    return out.unflatten(0, (query.shape[0], -1))


def _compress(config: NSAConfig, x):
    """Return the compressed tokens, which are means, `[B, C, Hkv, D]`."""
    from native_sparse_attention.ops import avgpool_compress

    sizes = config.compress_block, config.compress_stride
    found, _ = avgpool_compress(rows(x), None, bounds(x), *sizes)
    return found.unflatten(0, (x.shape[0], -1))


LIBRARY = Package(NAME, NOTES, why_not, _attend_selected, _attend_compressed, _compress)


def call(
    package: Package, branch: str, config: NSAConfig, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Compute a branch. `own` computes the compressed keys and the blocks of attention of all
    branches."""
    attend_selected, attend_compressed, compress = package[3:]
    query, most = given["query"], config.num_selected
    if branch == "compressed":
        pair = given["compressed_key"], given["compressed_value"]
        return {"out": attend_compressed(config, query, *pair, 0)[0]}
    if branch == "scores":
        key = given["compressed_key"]
        return {"indices": attend_compressed(config, query, key, key, most)[1]}
    keys = given["key"]
    if branch == "own":
        key = compress(config, keys.compressed)
        return {"key": key, "blocks": attend_compressed(config, query, key, key, most)[1]}
    values = given["value"]
    if branch == "selected":
        blocks = given["block_indices"]
        return {"out": attend_selected(config, query, keys, values, blocks)}
    from flash_attn import flash_attn_func

    from nsa_torch.chunks import combine

    pair = compress(config, keys.compressed), compress(config, values.compressed)
    compressed, chosen = attend_compressed(config, query, *pair, most)
    blocks = given.get("block_indices", chosen)
    selected = attend_selected(config, query, keys.selected, values.selected, blocks)
    window = config.window - 1, 0
    arrays = query, keys.sliding, values.sliding
    sliding = flash_attn_func(*arrays, causal=True, window_size=window)
    outputs = Branches(compressed, selected, sliding)
    return {"out": combine(outputs, Branches(*given["gates"].unbind(-1)))}
