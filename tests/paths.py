"""Every path that computes the same (`paths.yaml`), from a problem to results by name."""

import dataclasses
import fnmatch
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from nsa_torch import fa2
from tests import interpreted_triton
from tests.devices import needs_gpu
from tests.oracles.nsa import BRANCHES
from tests.problems import CASES, STEP_NAMES, Problem, array, moved
from tests.tables import table

ALL_STEPS = *BRANCHES, "scores"


def same(x):
    return x


def negated(x: torch.Tensor) -> torch.Tensor:
    """Equal to `x`, in memory its negative."""
    return torch._neg_view(-x)


def of_torch(
    p: Problem, implementation, device="cpu", bit=same, metadata=False, **options
) -> dict:
    leaves = [x.to(device).detach().requires_grad_() for x in p.leaves]
    out = nsa_torch.attention(
        *p.of(map(bit, leaves), nsa_torch.Branches),
        **in_torch(p, device, metadata),
        block_indices=None if p.block_indices is None else p.block_indices.to(device),
        implementation=implementation,
        **options,
    )
    grads = torch.autograd.grad(out, leaves, bit(p.weight.to(device)))
    return dict(zip(p.names, (out, *grads), strict=True))


def of_jax(p: Problem, implementation, gradients=True, metadata=False, **options) -> dict:
    blocks = None if p.block_indices is None else jnp.asarray(p.block_indices.numpy())
    attend = functools.partial(
        nsa_jax.attention, block_indices=blocks, implementation=implementation
    )

    def both(weight, *leaves):
        given = lambda *x: attend(*p.of(x, nsa_jax.Branches), **in_jax(p, metadata), **options)
        if not gradients:  # nothing is kept for them
            return (given(*leaves),)
        out, pull = jax.vjp(given, *leaves)
        return out, *pull(weight)

    found = jax.jit(both)(*map(to_jax, (p.weight, *p.leaves)))
    return dict(zip(p.names, found, strict=gradients))


def steps_of_torch(
    p, implementation, device="cpu", of_lse=True, only=ALL_STEPS, metadata=False
) -> dict:
    """Of a `Problem` or of `Ragged` rows. On a CPU FA-2 is its index work alone, since the public
    functions refuse it there.
    """
    where, found = in_torch(p, device, metadata) | {"kv_len": moved(p.kv_len, device)}, {}
    api, index_work = nsa_torch, implementation == "fa2" and device == "cpu"
    if index_work:
        api, only = fa2, BRANCHES
        where["kv_len"] = p.case.S if p.kv_len is None else p.kv_len
    else:
        where["implementation"] = implementation
    for branch, tensors in p.steps.items():
        if branch not in only:
            continue
        inputs = [x.to(device).detach() for x in tensors]
        leaves = [x.requires_grad_() for x in inputs[:3]]
        results = getattr(api, f"{branch}_attention")(*inputs, **where)
        weights = [x.to(device) for x in (p.weight, p.lse_weight)]
        used = 1 + of_lse
        grads = torch.autograd.grad(results[:used], leaves, weights[:used])
        names = (f"{branch}.{x}" for x in STEP_NAMES)
        found |= dict(zip(names, (*results, *grads), strict=True))
    if "scores" in only:
        query, key, _ = (x.to(device) for x in p.steps["compressed"])
        found["block_indices"] = nsa_torch.select_blocks(query, key, **where)
    return found


def steps_of_jax(p, implementation, gradients=True, only=ALL_STEPS, metadata=False) -> dict:
    def all_steps(steps, weights, kv_len):
        where = in_jax(p, metadata) | {"implementation": implementation, "kv_len": kv_len}
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


def in_torch(p: Problem, device, metadata=False) -> dict:
    """How a call is told of the configuration and of documents."""
    where, config = {"config": p.case.config, "scale": p.case.scale}, p.case.config
    if p.case.documents is None:
        return where
    bounds = torch.tensor(np.cumsum([0, *p.case.documents]), device=device)
    if metadata:
        return where | {
            "varlen": nsa_torch.varlen_metadata(bounds, total=p.case.S, config=config)
        }
    return where | {"cu_seqlens": bounds}


def in_jax(p: Problem, metadata=False) -> dict:
    where, config = {"config": p.case.config, "scale": p.case.scale}, p.case.config
    if p.case.documents is None:
        return where
    ids = jnp.asarray(p.rows.tokens()[0][None].numpy(), jnp.int32)
    if metadata:
        most = {"max_segments": len(p.case.documents), "max_seqlen": max(*p.case.documents, 1)}
        return where | {"varlen": nsa_jax.varlen_metadata(ids, config=config, **most)}
    return where | {"segment_ids": ids}


def to_jax(x: torch.Tensor) -> jax.Array:
    return jnp.asarray(array(x), str(x.dtype).removeprefix("torch."))


@dataclasses.dataclass(frozen=True)
class Path:
    """`whole`, `steps`: from a problem to results by name, and the names of `problems.CASES` that
    each takes; `fixtures`: what they run in.
    """

    whole: Callable[..., dict]
    cases: tuple[str, ...]
    steps: Callable[..., dict]
    cases_of_steps: tuple[str, ...]
    fixtures: tuple[str, ...]
    marks: tuple[pytest.MarkDecorator, ...]
    of_lse: bool = True


def named(patterns) -> tuple[str, ...]:
    """The names of `problems.CASES` that are meant; patterns may be lists of others."""
    if isinstance(patterns, str):
        return tuple(x for x in CASES if fnmatch.fnmatchcase(x, patterns))
    return tuple(x for each in patterns for x in named(each))


def of_row(name, whole=(), steps=None, fixtures=(), only=ALL_STEPS, bit=None, **how) -> Path:
    """A row of `paths.yaml`."""
    cases, marks, of_steps = named(whole), (), {}
    if name.startswith("cuda "):
        kernels = how["implementation"] == "mosaic"
        marks = (pytest.mark.gpu, needs_gpu) if kernels else (pytest.mark.gpu,)
    elif how["implementation"] == "triton":
        marks = interpreted_triton.MARKS
    of_whole = how.copy()
    if "torch" in name:
        device = "cuda" if name.startswith("cuda ") else "cpu"
        device = interpreted_triton.DEVICE if "small_triton" in fixtures else device
        of_whole["device"] = how["device"] = device
        of_whole.pop("of_lse", None)
        of_whole |= {"bit": negated} if bit else {}
    else:
        of_steps["only"] = only
    both = (of_torch, steps_of_torch) if "torch" in name else (of_jax, steps_of_jax)
    return Path(
        functools.partial(both[0], **of_whole),
        cases,
        functools.partial(both[1], **how, **of_steps),
        cases if steps is None else named(steps),
        tuple(fixtures),
        marks,
        how.get("of_lse", True),
    )


ROWS = table("paths")["paths"]
PATHS = {name: of_row(name, **row) for name, row in ROWS.items()}
