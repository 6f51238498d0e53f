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
from tests.problems import CASES, STEP_NAMES, Problem, array


def of_torch(p: Problem, implementation, device="cpu", **options) -> dict:
    leaves = [x.to(device).requires_grad_() for x in p.leaves]
    out = nsa_torch.attention(
        *p.of(leaves, nsa_torch.Branches),
        **in_torch(p, device),
        block_indices=None if p.block_indices is None else p.block_indices.to(device),
        implementation=implementation,
        **options,
    )
    grads = torch.autograd.grad(out, leaves, p.weight.to(device))
    return dict(zip(p.names, (out, *grads), strict=True))


def of_jax(p: Problem, implementation, **options) -> dict:
    blocks = None if p.block_indices is None else jnp.asarray(p.block_indices.numpy())
    attend = functools.partial(
        nsa_jax.attention, block_indices=blocks, implementation=implementation
    )

    def both(weight, *leaves):
        given = lambda *x: attend(*p.of(x, nsa_jax.Branches), **in_jax(p), **options)
        out, pull = jax.vjp(given, *leaves)
        return out, *pull(weight)

    found = jax.jit(both)(*map(to_jax, (p.weight, *p.leaves)))
    return dict(zip(p.names, found, strict=True))


def steps_of_torch(p: Problem, implementation, device="cpu") -> dict:
    where, found = in_torch(p, device), {}
    if p.case.documents is None:
        where["kv_len"] = p.case.S
    for branch, tensors in p.steps.items():
        inputs = [x.to(device) for x in tensors]
        leaves = [x.requires_grad_() for x in inputs[:3]]
        step = getattr(nsa_torch, f"{branch}_attention")
        results = step(*inputs, **where, implementation=implementation)
        weights = [x.to(device) for x in (p.weight, p.lse_weight)]
        grads = torch.autograd.grad(results, leaves, weights)
        names = (f"{branch}.{x}" for x in STEP_NAMES)
        found |= dict(zip(names, (*results, *grads), strict=True))
    query, key, _ = (x.to(device) for x in p.steps["compressed"])
    chosen = nsa_torch.select_blocks(query, key, **where, implementation=implementation)
    return found | {"block_indices": chosen}


def steps_of_jax(p: Problem, implementation) -> dict:
    where = in_jax(p) | {"implementation": implementation}
    if p.case.documents is None:
        where["kv_len"] = p.case.S

    def all_steps(steps, weights):
        query, key, _ = steps["compressed"]
        found = {"block_indices": nsa_jax.select_blocks(query, key, **where)}
        for branch, tensors in steps.items():
            step = getattr(nsa_jax, f"{branch}_attention")
            given = lambda *x, step=step, rest=tensors[3:]: step(*x, *rest, **where)
            results, pull = jax.vjp(given, *tensors[:3])
            names = (f"{branch}.{x}" for x in STEP_NAMES)
            found |= dict(zip(names, (*results, *pull(weights)), strict=True))
        return found

    weights = to_jax(p.weight), to_jax(p.lse_weight)
    return jax.jit(all_steps)({x: [*map(to_jax, y)] for x, y in p.steps.items()}, weights)


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
    """`whole`, `steps`: from a problem to results by name, None where there is none; `cases`: those
    of `problems.CASES` that it takes; `fixtures`: what it runs in.
    """

    whole: Callable[[Problem], dict]
    steps: Callable[[Problem], dict] | None
    cases: tuple[str, ...]
    fixtures: tuple[str, ...] = ()
    marks: tuple[pytest.MarkDecorator, ...] = ()


def both(whole, steps, implementation, *cases, **options) -> Path:
    given = functools.partial(whole, implementation=implementation, **options.pop("how", {}))
    alone = steps and functools.partial(steps, implementation=implementation)
    return Path(given, alone, cases, **options)


# Names of `problems.CASES`.
EVERY = tuple(x for x in CASES if not x.startswith("kernels: "))
# Of the dense caches and of pages: means, single tokens, keys of each branch.
CACHED = "five heads a group", "few blocks of many", "windows and blocks alike"
OF_TORCH, OF_JAX = (of_torch, steps_of_torch), (of_jax, steps_of_jax)
PATHS = {
    "torch reference": both(*OF_TORCH, "reference", *EVERY),
    "torch sdpa": both(*OF_TORCH, "sdpa", *EVERY),
    "torch jax": both(of_torch, None, "jax", "documents", "fewer queries than keys"),
    "jax reference": both(*OF_JAX, "reference", *EVERY),
    "jax xla": both(*OF_JAX, "xla", *EVERY),
    "torch cached": Path(functools.partial(cached, framework="torch"), None, CACHED),
    "jax cached": Path(functools.partial(cached, framework="jax"), None, CACHED),
    "torch paged": Path(functools.partial(paged, framework="torch"), None, CACHED),
    "jax paged": Path(functools.partial(paged, framework="jax"), None, CACHED),
}
