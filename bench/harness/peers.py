"""Kernels of other libraries, which `bench.compare --peers` compares with this library if the other
libraries are installed. Dense attention of `fa4` and `flash_attn` is also compared without
`--peers`.

| name | package on PyPI | content | branches |
|---|---|---|---|
| `fla` | flash-linear-attention | NSA in Triton | selected, sliding, all |
| `fa4` | flash-attn-4 | FlashAttention in CuTe, for Hopper and Blackwell | dense, sliding |
| `flash_attn` | flash-attn | FlashAttention-2's own kernels | dense, sliding |
| `cudnn_nsa` | nvidia-cudnn-frontend[cutedsl] | NSA in CuTe, forward only | selected |

The dense kernel `flash` of torch is torch's copy of FlashAttention-2 and needs no package. Packages
that are not on PyPI are `native-sparse-attention-triton`, in `peer_nsa_triton`, and `flash_nsa` and
`fsa`, in `peer_flash_nsa`.

`fla.ops.nsa` computes another function than this library. The compressed tokens of `fla.ops.nsa`
are means of whole selection blocks without overlap. With blocks of 64 tokens and a stride of 16
tokens, `fla.ops.nsa` has four times fewer compressed tokens than this library. All branches of
`fla.ops.nsa` share one array of keys. Attention to given blocks and the sliding window are the same
functions as in this library, so that the oracle judges these steps. Attention of all branches by
`fla` is not judged, and has no speed-up.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

from nsa_core.config import NSAConfig
from nsa_core.dispatch import Problem

from . import peer_flash_nsa, peer_nsa_triton, records
from .jobs import Job
from .records import Values

PACKAGES = {each.name: each for each in (peer_nsa_triton.LIBRARY, *peer_flash_nsa.LIBRARIES)}
NAMES = ("fla", *PACKAGES, "fa4", "flash_attn", "cudnn_nsa")
CUDNN = "nvidia-cudnn-frontend"
NO_GRADIENT = f"the NSA of {CUDNN} has no gradient"
# Packages for attention to all keys or to a window, and the lowest compute capability of each.
FLASH = {"fa4": ("flash-attn-4", (9, 0)), "flash_attn": ("flash-attn", (8, 0))}
LEAST_GROUP, WIDEST = 16, 256  # of parallel_nsa
JUDGED = "fla.ops.nsa with the given blocks; the time includes its pooling of keys and values"
SLIDING = "the window of flash_attn, which fla.ops.nsa calls"
WHOLE = (
    "not judged, since its semantics differ: compressed tokens, which determine the blocks, are "
    "means of {size} tokens without overlap (ours: of {block} tokens, every {stride}); all "
    "branches use the keys and values of the selected branch; groups have at least 16 heads"
)


def why_not(problem: Problem, branch: str) -> str | None:
    """Return the reason why `fla` cannot run the branch, or None. The function does not import the
    package.
    """
    group = problem.H // problem.Hkv
    if records.version("flash-linear-attention") is None:
        return "flash-linear-attention is not installed; install the extra peers"
    if problem.platform != "cuda":
        return f"fla.ops.nsa needs CUDA tensors, got {problem.platform}"
    if group < LEAST_GROUP or group & (group - 1):
        return (
            "fla.ops.nsa needs groups whose number of heads is a power of two and at least "
            f"{LEAST_GROUP}, got {group}"
        )
    if problem.D > WIDEST:
        return f"fla.ops.nsa needs D <= {WIDEST}, got {problem.D}"
    if branch != "selected" and records.version("flash-attn") is None:
        return (
            "fla.ops.nsa needs flash_attn for its sliding window; flash_attn is not installed"
        )
    return None


def named(listed: Sequence[str]) -> list[str]:
    """Return the names of libraries in texts, which separate names by commas.

    Raises:
      ValueError: There is no library with a name.
    """
    names = [name.strip() for text in listed for name in text.split(",")]
    if unknown := {*names} - {*NAMES}:
        raise ValueError(f"--peers must be in {NAMES}, got {', '.join(unknown)}")
    return names


def jobs(problem: Problem, branches, names: Sequence[str] = NAMES) -> Iterator[Job]:
    """Yield the rows of the libraries with these names, for the branches that each library
    supports.
    """
    for name in names:
        notes, refusal, call = _library(name, problem)
        for branch in (each for each in branches if each in notes):
            of_whole = functools.partial(call, "own", problem.config)
            yield Job(
                branch,
                name,
                unsupported=refusal(branch) or "",
                function=functools.partial(call, branch, problem.config),
                own=of_whole if name in PACKAGES else None,
                judged=(name, branch) != ("fla", "all"),
                library=True,
                note=notes[branch],
            )


def _library(
    name: str, problem: Problem
) -> tuple[dict[str, str], Callable[[str], str | None], Callable[..., Values]]:
    """Return a note for each branch that a library supports, a function that returns the reason why
    the library cannot run a branch, and the function of a branch, a config and arguments that runs
    the library.
    """
    if name == "fla":
        config = problem.config
        sizes = {"size": config.select_block}
        sizes |= {"block": config.compress_block, "stride": config.compress_stride}
        notes = {"selected": JUDGED, "sliding": SLIDING, "all": WHOLE.format(**sizes)}
        return notes, functools.partial(why_not, problem), _parallel
    if library := PACKAGES.get(name):
        about = f"{name} {records.version(name) or 'without a version'}"
        notes = {branch: f"{about}: {note}" for branch, note in library.notes.items()}
        refusal = functools.partial(library.why_not, problem)
        return notes, refusal, functools.partial(peer_nsa_triton.call, library)
    if name == "cudnn_nsa":
        refused = peer_nsa_triton.package_why_not(CUDNN, problem)
        reason = NO_GRADIENT if problem.requires_grad else refused
        about = f"{CUDNN} {records.version(CUDNN)}"
        notes = {"selected": f"{about}; the time includes counting each list's blocks"}
        return notes, lambda _: reason, _cudnn_selected
    package, _ = FLASH[name]
    notes = dict.fromkeys(("dense", "sliding"), f"{package} {records.version(package)}")
    return (
        notes,
        lambda _: flash_why_not(name, problem),
        functools.partial(_flash_call, name),
    )


def dense(problem: Problem, branches, named: Sequence[str]) -> Iterator[Job]:
    """Yield dense attention of the FlashAttention packages that can run the problem, except of the
    libraries in `named`, which have rows already.
    """
    able = [x for x in FLASH if x not in named and flash_why_not(x, problem) is None]
    yield from jobs(problem, {"dense"}.intersection(branches), able)


def flash_why_not(name: str, problem: Problem) -> str | None:
    """Return the reason why a FlashAttention package cannot run the problem, or None."""
    package, least = FLASH[name]
    if reason := peer_nsa_triton.package_why_not(package, problem):
        return reason
    if problem.capability is not None and problem.capability < least:
        return f"{package} needs compute capability {least} or more, got {problem.capability}"
    return None


def _flash_call(name: str, branch: str, config: NSAConfig, given: Values) -> Values:
    """Compute causal attention to all keys, or to the window of the sliding branch."""
    if name == "fa4":
        from flash_attn.cute import flash_attn_func
    else:
        from flash_attn import flash_attn_func

    how = {"window_size": (config.window - 1, 0)} if branch == "sliding" else {}
    found = flash_attn_func(given["query"], given["key"], given["value"], causal=True, **how)
    return {"out": found[0] if isinstance(found, tuple) else found}


def _cudnn_selected(branch: str, config: NSAConfig, given: Values) -> Values:
    """Attend to the given blocks. The empty slots of a list must be at its end."""
    import torch
    from cudnn.native_sparse_attention import selection_attention_wrapper

    query, key, value, lists = (
        given[name].flatten(0, 1) for name in ("query", "key", "value", "block_indices")
    )
    batch, length = given["query"].shape[:2]
    ends = peer_nsa_triton.bounds(given["query"])
    found = selection_attention_wrapper(
        *(query, key, value, lists, (lists >= 0).sum(-1, dtype=torch.int32), ends, ends),
        block_size=config.select_block,
        max_s_q=length,
        max_s_k=length,
        is_causal=True,
    )
    return {"out": found["o_tensor"].unflatten(0, (batch, length))}


def _parallel(branch: str, config: NSAConfig, given: Values) -> Values:
    """Compute a branch with `parallel_nsa`, or with the function that `parallel_nsa` calls for the
    window.
    """
    if branch == "sliding":
        return _flash_call("flash_attn", branch, config, given)
    from fla.ops.nsa import parallel_nsa

    key, value = given["key"], given["value"]
    sizes: Values = {
        "block_counts": config.num_selected,
        "block_size": config.select_block,
    }
    if branch == "selected":
        sizes["block_indices"] = given["block_indices"]
    else:
        key, value = key.selected, value.selected
        gates = zip(("g_cmp", "g_slc", "g_swa"), given["gates"].unbind(-1), strict=True)
        sizes |= {"window_size": config.window, **dict(gates)}
    return {"out": parallel_nsa(given["query"], key, value, **sizes)}
