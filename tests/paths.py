"""Every path that computes the same: a few lines each, from a problem to results by name."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import nsa_jax
import nsa_torch
from tests.oracles.nsa import BRANCHES
from tests.problems import CASES, STEP_NAMES, Problem, array, moved


def same(x):
    return x


def negated(x: torch.Tensor) -> torch.Tensor:
    """Equal to `x`, in memory its negative."""
    return torch._neg_view(-x)


def of_torch(p: Problem, implementation, device="cpu", bit=same, **options) -> dict:
    leaves = [x.to(device).detach().requires_grad_() for x in p.leaves]
    out = nsa_torch.attention(
        *p.of(map(bit, leaves), nsa_torch.Branches),
        **in_torch(p, device),
        block_indices=None if p.block_indices is None else p.block_indices.to(device),
        implementation=implementation,
        **options,
    )
    grads = torch.autograd.grad(out, leaves, bit(p.weight.to(device)))
    return dict(zip(p.names, (out, *grads), strict=True))


def of_jax(p: Problem, implementation, gradients=True, **options) -> dict:
    blocks = None if p.block_indices is None else jnp.asarray(p.block_indices.numpy())
    attend = functools.partial(
        nsa_jax.attention, block_indices=blocks, implementation=implementation
    )

    def both(weight, *leaves):
        given = lambda *x: attend(*p.of(x, nsa_jax.Branches), **in_jax(p), **options)
        if not gradients:  # nothing is kept for them
            return (given(*leaves),)
        out, pull = jax.vjp(given, *leaves)
        return out, *pull(weight)

    found = jax.jit(both)(*map(to_jax, (p.weight, *p.leaves)))
    return dict(zip(p.names, found, strict=gradients))


def steps_of_torch(
    p, implementation, device="cpu", of_lse=True, only=(*BRANCHES, "scores")
) -> dict:
    """Of a `Problem` or of `Ragged` rows."""
    where, found = in_torch(p, device) | {"kv_len": moved(p.kv_len, device)}, {}
    where["implementation"] = implementation
    for branch, tensors in p.steps.items():
        if branch not in only:
            continue
        inputs = [x.to(device).detach() for x in tensors]
        leaves = [x.requires_grad_() for x in inputs[:3]]
        results = getattr(nsa_torch, f"{branch}_attention")(*inputs, **where)
        weights = [x.to(device) for x in (p.weight, p.lse_weight)]
        used = 1 + of_lse
        grads = torch.autograd.grad(results[:used], leaves, weights[:used])
        names = (f"{branch}.{x}" for x in STEP_NAMES)
        found |= dict(zip(names, (*results, *grads), strict=True))
    if "scores" in only:
        query, key, _ = (x.to(device) for x in p.steps["compressed"])
        found["block_indices"] = nsa_torch.select_blocks(query, key, **where)
    return found


def steps_of_jax(p, implementation, gradients=True, only=(*BRANCHES, "scores")) -> dict:
    def all_steps(steps, weights, kv_len):
        where = in_jax(p) | {"implementation": implementation, "kv_len": kv_len}
        query, key, _ = steps["compressed"]
        found = {}
        if "scores" in only:
            found["block_indices"] = nsa_jax.select_blocks(query, key, **where)
        for branch, tensors in steps.items():
            if branch not in only:
                continue
            step = getattr(nsa_jax, f"{branch}_attention")
            given = lambda *x, step=step, rest=tensors[3:]: step(*x, *rest, **where)
            if gradients:
                results, pull = jax.vjp(given, *tensors[:3])
                results = (*results, *pull(weights))
            else:
                results = given(*tensors[:3])
            found |= {f"{branch}.{x}": y for x, y in zip(STEP_NAMES, results, strict=False)}
        return found

    weights = to_jax(p.weight), to_jax(p.lse_weight)
    lengths = p.kv_len if p.kv_len is None else jnp.asarray(p.kv_len, jnp.int32)
    arrays = {branch: [*map(to_jax, tensors)] for branch, tensors in p.steps.items()}
    return jax.jit(all_steps)(arrays, weights, lengths)


def steps_of_fa2(p, device="cpu") -> dict:
    """Its index work alone: without a GPU the public functions refuse it."""
    from nsa_torch import fa2

    kv_len = p.case.S if p.kv_len is None else p.kv_len
    where, found = in_torch(p, device) | {"kv_len": kv_len}, {}
    for branch, tensors in p.steps.items():
        inputs = [x.detach() for x in tensors]
        leaves = [x.requires_grad_() for x in inputs[:3]]
        results = getattr(fa2, f"{branch}_attention")(*inputs, **where)
        grads = torch.autograd.grad(results[0], leaves, p.weight)
        names = (f"{branch}.{x}" for x in STEP_NAMES)
        found |= dict(zip(names, (*results, *grads), strict=True))
    return found


def cached(p: Problem, framework, device="cpu", **options) -> dict:
    """Through the dense cache."""
    api, convert = FRAMEWORKS[framework]
    case, made = p.case, {"config": p.case.config, "separate": p.case.own}
    where = {"device": device} if framework == "torch" else {}
    sizes = case.B, case.S, case.Hkv, case.D, case.Dv
    cache = api.init_cache(*sizes, **made, **where, dtype=convert(p.query, device).dtype)
    step = functools.partial(api.cached_attention, config=case.config, scale=case.scale)
    outs = []
    for _, new in pieces(p, framework, device):
        with torch.no_grad():
            out, cache = step(*new, cache, **options)
        outs.append(array(out))
    return {"out": np.concatenate(outs, axis=1)[:, -case.T :]}


def paged(p: Problem, framework, device="cpu", **options) -> dict:
    """Through pages in any order, to which tokens are appended before each piece is attended."""
    api, convert = FRAMEWORKS[framework]
    case, made = p.case, {"config": p.case.config, "separate": p.case.own}
    where = {"device": device} if framework == "torch" else {}
    width, rng, outs = -(-case.S // case.config.select_block), np.random.default_rng(0), []
    pages = rng.permutation(case.B * width + 2)[: case.B * width].reshape(case.B, width)
    table = convert(torch.from_numpy(pages).int(), device)
    sizes = case.B * width + 2, case.Hkv, case.D, case.Dv
    cache = api.PagedCache(*sizes, **made, **where, dtype=convert(p.query, device).dtype)
    for end, new in pieces(p, framework, device, flat=True):
        query, key, value, gates = new
        lengths = convert(torch.full((case.B,), end, dtype=torch.int32), device)
        with torch.no_grad():
            cache = api.append(cache, key, value, table, lengths) or cache
            at = cache, table, lengths
            out = api.paged_attention(query, gates, *at, scale=case.scale, **options)
        outs.append(array(out).reshape(case.B, -1, *out.shape[1:]))
    return {"out": np.concatenate(outs, axis=1)[:, -case.T :]}


def pieces(p: Problem, framework, device, flat=False):
    """Arguments of a prefill, of single tokens and of another piece, and where each ends; tokens
    before the first query have one that is 0. `flat`: tokens of all rows in one dimension.
    """
    api, convert = FRAMEWORKS[framework]
    query, *pairs, gates = p.leaves
    query, gates = (F.pad(x, (0, 0, 0, 0, p.case.S - p.case.T, 0)) for x in (query, gates))
    sizes = [0, p.case.config.compress_block + 1, 1, 1]
    bounds = [x for x in itertools.accumulate(sizes) if x < p.case.S]
    for begin, end in itertools.pairwise([*bounds, p.case.S]):
        new = [x[:, begin:end] for x in (query, *pairs, gates)]
        new = [convert(x.flatten(0, 1) if flat else x, device) for x in new]
        yield end, p.of(new, api.Branches)


def in_torch(p: Problem, device) -> dict:
    bounds = None
    if p.case.documents is not None:
        bounds = torch.tensor(np.cumsum([0, *p.case.documents]), device=device)
    return {"config": p.case.config, "scale": p.case.scale, "cu_seqlens": bounds}


def in_jax(p: Problem) -> dict:
    ids = None
    if p.case.documents is not None:
        ids = jnp.asarray(p.rows.tokens()[0][None].numpy(), jnp.int32)
    return {"config": p.case.config, "scale": p.case.scale, "segment_ids": ids}


def to_jax(x: torch.Tensor) -> jax.Array:
    return jnp.asarray(array(x), str(x.dtype).removeprefix("torch."))


FRAMEWORKS = {
    "torch": (nsa_torch, lambda x, device: x.to(device)),
    "jax": (nsa_jax, lambda x, device: to_jax(x)),
}


@dataclasses.dataclass(frozen=True)
class Path:
    """`whole`, `steps`: from a problem to results by name, None where there is none, and the names
    of `problems.CASES` that each takes; `fixtures`: what they run in.
    """

    whole: Callable[..., dict] | None
    cases: tuple[str, ...]
    steps: Callable[..., dict] | None = None
    cases_of_steps: tuple[str, ...] = ()
    fixtures: tuple[str, ...] = ()
    marks: tuple[pytest.MarkDecorator, ...] = ()
    of_lse: bool = True  # whether a log-sum-exp has a gradient


def torch_path(
    implementation, cases, cases_of_steps=None, how=None, device="cpu", **options
) -> Path:
    where = {"implementation": implementation, "device": device}
    whole = functools.partial(of_torch, **where, **how or {})
    of_lse = options.get("of_lse", True)
    steps = functools.partial(steps_of_torch, **where, of_lse=of_lse)
    alone = cases if cases_of_steps is None else cases_of_steps
    return Path(whole, cases, steps, alone, **options)


def jax_path(implementation, cases, cases_of_steps=None, gradients=True, **options) -> Path:
    how = {"implementation": implementation, "gradients": gradients}
    whole, steps = functools.partial(of_jax, **how), functools.partial(steps_of_jax, **how)
    alone = cases if cases_of_steps is None else cases_of_steps
    return Path(whole, cases, steps, alone, **options)


def cache_path(run, framework, *cases) -> Path:
    return Path(functools.partial(run, framework=framework), cases)


# Names of `problems.CASES`. XLA compiles each problem anew: the references have few of them.
EVERY = tuple(CASES)[: tuple(CASES).index("float16") + 1]
FEW = "fewer queries than keys", "few blocks of many", "empty documents", "bfloat16"
PARTS = "few blocks of many", "empty documents"
CACHED = "five heads a group", "few blocks of many", "windows and blocks alike"
PATHS = {
    "torch reference": torch_path("reference", PARTS, EVERY),
    "torch sdpa": torch_path("sdpa", EVERY),
    "torch sdpa in chunks": torch_path("sdpa", PARTS, FEW, fixtures=("in_chunks",)),
    "torch sdpa in long chunks": torch_path("sdpa", (), PARTS, fixtures=("long_chunks",)),
    "torch fa2": Path(None, (), steps_of_fa2, EVERY, fixtures=("fa2_on_a_cpu",), of_lse=False),
    "torch jax": torch_path("jax", PARTS, FEW),
    "torch cached": cache_path(cached, "torch", *CACHED),
    "torch paged": cache_path(paged, "torch", *CACHED),
    "jax reference": jax_path("reference", PARTS, (*FEW, "ties", "no compressed token")),
    "jax xla": jax_path("xla", (*EVERY, "many queries of a block"), EVERY),
    "jax xla in chunks": jax_path("xla", PARTS[:1], (), fixtures=("in_chunks",)),
    "jax xla token by token": jax_path("xla", PARTS[:1], (), fixtures=("token_by_token",)),
    "jax cached": cache_path(cached, "jax", CACHED[1]),
    "jax paged": cache_path(paged, "jax", CACHED[1]),
}
for name, implementation in (("sdpa", "sdpa"), ("reference", "reference"), ("jax", "jax")):
    PATHS[f"torch {name} negated"] = torch_path(
        implementation, ("one output",), (), how={"bit": negated}
    )
MOSAIC = (
    "kernel: three heads a group",
    "kernel: four heads a group",
    "kernel: documents",
    "kernel: wide",
    "kernel: no compressed token",
    "kernel: blocks in three tiles",
    "kernel: any blocks",
)
WITHOUT_GRADIENTS = (
    "kernel: documents before queries",
    "kernel: more slots than blocks",
    "kernel: no compressed token",
)
STEPS_OF_MOSAIC = (
    "kernel: one head a group",
    "kernel: fewer queries than keys",
    "kernel: long blocks",
    "kernel: large logits",
)
IN_PIECES = "kernel: documents", "kernel: blocks or nothing"
INTERPRETED = {"fixtures": ("interpreted",)}
PATHS |= {
    "jax mosaic": jax_path("mosaic", MOSAIC, (), **INTERPRETED),
    "jax mosaic without gradients": jax_path(
        "mosaic", WITHOUT_GRADIENTS, STEPS_OF_MOSAIC, gradients=False, **INTERPRETED
    ),
    "jax mosaic in pieces": jax_path(
        "mosaic", ("kernel: one output",), IN_PIECES, fixtures=("interpreted", "in_pieces")
    ),
}
GPU = {"device": "cuda", "marks": (pytest.mark.gpu,), "fixtures": ("large_chunks",)}
ON_GPU = [x for x in CASES if x.startswith("gpu: ")]
WHOLE_ON_GPU = "gpu: few blocks of many", "gpu: documents"
PATHS |= {
    "cuda torch sdpa": torch_path("sdpa", WHOLE_ON_GPU, ON_GPU, **GPU),
    "cuda torch fa2": torch_path("fa2", WHOLE_ON_GPU, ON_GPU, of_lse=False, **GPU),
    "cuda torch jax": torch_path("jax", WHOLE_ON_GPU, WHOLE_ON_GPU, **GPU),
    "cuda torch triton": torch_path(
        "triton", (), [x for x in ON_GPU if "any blocks" in x], **GPU
    ),
}
