"""Runs `flash_nsa` and `fsa`, two more packages of NSA in Triton, for `peers`. The steps and the
layouts are those of `peer_nsa_triton`.

`flash_nsa` is github.com/mdy666/Scalable-Flash-Native-Sparse-Attention, made for Hopper. Its class
`NSAHelper` holds the sizes of a problem, which must be set before each call. `flash_nsa` computes
the same results as this library, so that the oracle judges every branch. The package ranks block
scores in 16 bits. Its lists of blocks are not sorted, and empty slots have the number of blocks
instead of -1. `select_attn` reads as many slots as a query has visible blocks.

`fsa` is github.com/Relaxed-System-Lab/Flash-Sparse-Attention. It has its own function for given
blocks, with the arguments of `topk_sparse_attention`, and copies of native-sparse-attention-triton
for the other branches. The function adds up the results of blocks in bfloat16. Before the
exponential, it subtracts one score per key/value head instead of each query's greatest score, so
that large scores overflow.
"""

import functools

from nsa_core.config import NSAConfig
from nsa_core.dispatch import Problem

from . import peer_nsa_triton as steps

NOTES = {
    "compressed": steps.OUTPUT,
    "scores": "the time includes compressed attention, and sorting the lists of blocks",
    "selected": f"with the given blocks; the time includes filling empty slots; {steps.OUTPUT}",
    "all": steps.NOTES["all"],
}
FSA_NOTES = {
    "selected": "with the given blocks; the package's own module calls this function for up to 8 "
    "heads in a group, and a copy of native-sparse-attention-triton for more",
}


def why_not(package: str, problem: Problem, branch: str) -> str | None:
    """Return the reason why a package cannot run the branch, or None. If the package is missing,
    its row states so after the import, since the packages have no releases.
    """
    if reason := steps.arrays_why_not(package, problem):
        return reason
    if problem.D != problem.Dv:
        return f"{package} is called with D = Dv only, got D={problem.D}, Dv={problem.Dv}"
    if package == "fsa" and problem.config.select_block not in steps.BLOCKS:
        return f"fsa needs blocks of {steps.BLOCKS} keys, got {problem.config.select_block}"
    return steps.window_why_not(package, branch)


def _package(config: NSAConfig, x):
    """Return `flash_nsa`, set to the sizes of sequences `[B, T, ..]`."""
    import flash_nsa

    flash_nsa.NSAHelper.set_hyperparameters(
        kernel_size=config.compress_block,
        stride=config.compress_stride,
        block_size=config.select_block,
        window_size=config.window,
        top_n=config.num_selected,
        num_init_blocks=config.num_initial,
        num_local_blocks=config.num_local,
    )
    flash_nsa.NSAHelper.init_cu_seqlens(steps.bounds(x))
    return flash_nsa


def _attend_selected(config: NSAConfig, query, key, value, blocks):
    def function(query, key, value, lists, *_):
        lists = lists.masked_fill(lists < 0, config.num_blocks(length))
        return package.select_attn(query, key, value, lists)

    package, length = _package(config, query), query.shape[1]
    return steps.attend_lists(function, config, query, key, value, blocks)


def _attend_compressed(config: NSAConfig, query, key, value, most: int):
    package, (batch, length) = _package(config, query), query.shape[:2]
    queries, keys, values = map(steps.rows, (query, key, value))
    out, lse = package.compress_attn(queries, keys, values)
    chosen = None
    if most:
        lists, _ = package.slc_topk_indices(queries, keys, lse, maybe_efficient_version=True)
        lists = lists.sort().values
        lists = lists.masked_fill(lists == config.num_blocks(length), -1)
        chosen = steps.blocks_of(lists, batch, most)
    return out.unflatten(0, (batch, -1)), chosen


def _compress(config: NSAConfig, x):
    found = _package(config, x).mean_pooling(steps.rows(x))
    return found.unflatten(0, (x.shape[0], -1))


def _attend_fsa(config: NSAConfig, query, key, value, blocks):
    from fsa.ops import FSA_topk_sparse_attention

    return steps.attend_lists(FSA_topk_sparse_attention, config, query, key, value, blocks)


LIBRARIES = (
    steps.Package(
        "flash_nsa",
        NOTES,
        functools.partial(why_not, "flash_nsa"),
        _attend_selected,
        _attend_compressed,
        _compress,
    ),
    steps.Package("fsa", FSA_NOTES, functools.partial(why_not, "fsa"), _attend_fsa),
)
