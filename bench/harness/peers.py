"""Other people's NSA beside ours, where it is installed: `bench.compare --peers fla`.

`fla` is flash-linear-attention (`fla.ops.nsa`, PyPI: flash-linear-attention; torch, Triton). It
computes something else than this library: its compressed tokens are means of whole selection
blocks, without overlap, so with 64/16 there are four times fewer of them, and one array of keys
serves all branches. Attention to given blocks and the sliding window are the same function, and
are judged by the same oracle; the whole is not, and has no speed-up.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from bench.harness.jobs import Job
from nsa_jax.dispatch import Problem

NAMES = ("fla",)
LEAST_GROUP, WIDEST = 16, 256  # of parallel_nsa
JUDGED = "fla.ops.nsa on the blocks given; it pools keys and values all the same"
SLIDING = "flash_attn's window, which fla.ops.nsa calls"
WHOLE = (
    "not judged, its own semantics: compressed tokens are means of {size} tokens without "
    "overlap (ours: of {block}, one each {stride}), which choose the blocks; keys and values "
    "of the selected branch serve all three; groups of 16 heads at least"
)


def why_not(problem: Problem, branch: str) -> str | None:
    """Why `fla` cannot run the branch, or None. Asks without importing it."""
    group = problem.H // problem.Hkv
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed (extra peers)"
    if problem.platform != "cuda":
        return f"fla.ops.nsa needs CUDA tensors, got {problem.platform}"
    if group < LEAST_GROUP or group & (group - 1):
        return (
            f"fla.ops.nsa needs a power of two of at least {LEAST_GROUP} heads per group, "
            f"got {group}"
        )
    if problem.D > WIDEST:
        return f"fla.ops.nsa needs D <= {WIDEST}, got {problem.D}"
    if branch != "selected" and importlib.util.find_spec("flash_attn") is None:
        return "fla.ops.nsa needs flash_attn for its sliding window, and it is not installed"
    return None


def jobs(problem: Problem, branches) -> Iterator[Job]:
    """The rows of `fla`: the branches that it has, in order."""
    config = problem.config
    sizes = {"size": config.select_block}
    sizes |= {"block": config.compress_block, "stride": config.compress_stride}
    calls = {"selected": _selected, "sliding": _sliding, "all": _whole}
    notes = {"selected": JUDGED, "sliding": SLIDING, "all": WHOLE.format(**sizes)}
    for branch in (name for name in branches if name in calls):
        yield Job(
            branch,
            "fla",
            unsupported=why_not(problem, branch) or "",
            function=calls[branch](config),
            judged=branch != "all",
            library=True,
            note=notes[branch],
        )


def _selected(config):
    def call(given: Mapping[str, Any]) -> dict[str, Any]:
        from fla.ops.nsa import parallel_nsa

        out = parallel_nsa(
            given["query"],
            given["key"],
            given["value"],
            block_indices=given["block_indices"],
            block_counts=config.num_selected,
            block_size=config.select_block,
        )
        return {"out": out}

    return call


def _sliding(config):
    def call(given: Mapping[str, Any]) -> dict[str, Any]:
        from flash_attn import flash_attn_func

        window = config.window - 1, 0
        arrays = given["query"], given["key"], given["value"]
        return {"out": flash_attn_func(*arrays, causal=True, window_size=window)}

    return call


def _whole(config):
    def call(given: Mapping[str, Any]) -> dict[str, Any]:
        from fla.ops.nsa import parallel_nsa

        compressed, selected, sliding = given["gates"].unbind(-1)
        out = parallel_nsa(
            given["query"],
            given["key"].selected,
            given["value"].selected,
            g_cmp=compressed,
            g_slc=selected,
            g_swa=sliding,
            block_counts=config.num_selected,
            block_size=config.select_block,
            window_size=config.window,
        )
        return {"out": out}

    return call
