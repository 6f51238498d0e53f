"""Every path that computes the same: a few lines each, from a problem to results by name."""

import dataclasses
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
from tests import interpreted_triton, problems
from tests.devices import needs_gpu
from tests.oracles.nsa import BRANCHES
from tests.problems import CASES, STEP_NAMES, Problem, array, moved

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
    fixtures: tuple[str, ...] = ()
    marks: tuple[pytest.MarkDecorator, ...] = ()
    of_lse: bool = True  # whether a log-sum-exp has a gradient


def torch_path(
    implementation,
    cases,
    cases_of_steps=None,
    how=None,
    device="cpu",
    metadata=False,
    **options,
) -> Path:
    where = {"implementation": implementation, "device": device, "metadata": metadata}
    whole = functools.partial(of_torch, **where, **how or {})
    of_lse = options.get("of_lse", True)
    steps = functools.partial(steps_of_torch, **where, of_lse=of_lse)
    alone = cases if cases_of_steps is None else cases_of_steps
    return Path(whole, cases, steps, alone, **options)


def jax_path(
    implementation,
    cases,
    cases_of_steps=None,
    gradients=True,
    only=ALL_STEPS,
    metadata=False,
    **options,
) -> Path:
    how = {"implementation": implementation, "gradients": gradients, "metadata": metadata}
    whole = functools.partial(of_jax, **how)
    steps = functools.partial(steps_of_jax, **how, only=only)
    alone = cases if cases_of_steps is None else cases_of_steps
    return Path(whole, cases, steps, alone, **options)


# Names of `problems.CASES`. XLA compiles each problem anew: the references have few of them.
EVERY = tuple(CASES)[: tuple(CASES).index("float16") + 1]
FEW = "fewer queries than keys", "few blocks of many", "empty documents", "bfloat16"
PARTS = "few blocks of many", "empty documents"
PATHS = {
    "torch reference": torch_path("reference", PARTS, EVERY),
    "torch sdpa": torch_path("sdpa", EVERY),
    "torch sdpa in chunks": torch_path("sdpa", PARTS, FEW, fixtures=("in_chunks",)),
    "torch sdpa in long chunks": torch_path("sdpa", (), PARTS, fixtures=("long_chunks",)),
    "torch fa2": torch_path("fa2", (), EVERY, fixtures=("fa2_on_a_cpu",), of_lse=False),
    "torch jax": torch_path("jax", PARTS, FEW),
    "jax reference": jax_path("reference", PARTS, (*FEW, "ties", "no compressed token")),
    "jax xla": jax_path("xla", (*EVERY, "many queries of a block"), EVERY),
    "jax xla in chunks": jax_path("xla", PARTS[:1], (), fixtures=("in_chunks",)),
    "jax xla token by token": jax_path("xla", PARTS[:1], (), fixtures=("token_by_token",)),
}
for name, implementation in (("sdpa", "sdpa"), ("reference", "reference"), ("jax", "jax")):
    PATHS[f"torch {name} negated"] = torch_path(
        implementation, ("one output",), (), how={"bit": negated}
    )
# What follows from the borders of documents is made once a batch.
PACKED = "documents", "short documents", "empty documents", "no document"
METADATA = {"metadata": True}
PATHS |= {
    "torch sdpa with metadata": torch_path("sdpa", PACKED, **METADATA),
    "torch reference with metadata": torch_path("reference", PACKED[2:], **METADATA),
    "torch jax with metadata": torch_path("jax", PACKED[2:3], (), **METADATA),
    "jax xla with metadata": jax_path("xla", PACKED, PACKED[:3], **METADATA),
    "jax reference with metadata": jax_path("reference", PACKED[2:3], **METADATA),
}
MOSAIC = (
    "kernel: three heads a group",
    "kernel: four heads a group",
    "kernel: documents",
    "kernel: query tiles with rows of no token",
    "kernel: wide",
    "kernel: any blocks",
    "kernel: no compressed token",
    "kernel: blocks in three tiles",
    "kernel: documents before queries",
)
WITHOUT_GRADIENTS = (
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
PLANNED = {"fixtures": ("planned_kernels",)}


def of_kind(kind):
    """Names of `problems.CASES`."""
    return tuple(x for x in CASES if x.startswith(f"{kind}: "))


SCORES, SELECTED = {"only": ("scores",), "gradients": False}, {"only": ("selected",)}
GATHERED = {"fixtures": ("interpreted", "gathered_tiles")}
STORED = {"fixtures": ("interpreted", "stored_ds")}
PATHS |= {
    "jax mosaic": jax_path("mosaic", MOSAIC, (), **INTERPRETED),
    "jax mosaic without gradients": jax_path(
        "mosaic", WITHOUT_GRADIENTS, STEPS_OF_MOSAIC, gradients=False, **INTERPRETED
    ),
    "jax mosaic in pieces": jax_path(
        "mosaic", ("kernel: one output",), IN_PIECES, fixtures=("interpreted", "in_pieces")
    ),
    "jax mosaic scores": jax_path("mosaic", (), of_kind("scores"), **SCORES, **INTERPRETED),
    "jax mosaic scores in parts": jax_path(
        "mosaic",
        (),
        of_kind("scores in parts"),
        **SCORES,
        fixtures=("interpreted", "few_scores"),
    ),
    "jax mosaic gathered": jax_path(
        "mosaic",
        ("gathered: whole",),
        ("gathered: slabs", "gathered: dq of long blocks"),
        **SELECTED,
        **GATHERED,
    ),
    "jax mosaic gathered without gradients": jax_path(
        "mosaic",
        ("gathered: two tiles",),
        tuple(
            f"gathered: {x}" for x in ("four heads", "three heads", "long blocks", "any blocks")
        ),
        gradients=False,
        **SELECTED,
        **GATHERED,
    ),
    "jax mosaic stored dS": jax_path(
        "mosaic",
        tuple(f"stored dS: {x}" for x in ("eight heads", "sixteen heads", "64 heads")),
        ("stored dS: any blocks", "stored dS: ten heads"),
        **SELECTED,
        **STORED,
    ),
    "torch mosaic stored dS in chunks": torch_path(
        "mosaic", ("stored dS: ten heads",), (), fixtures=("ds_chunks",)
    ),
}
PATHS |= {
    "torch mosaic": torch_path(
        "mosaic",
        (
            "kernel: tiny",
            "kernel: three heads a group",
            "kernel: no compressed token",
            "kernel: documents without a compressed token",
        ),
        ("kernel: fewer queries than keys", "kernel: empty documents"),
        **PLANNED,
    ),
    "torch mosaic with metadata": torch_path(
        "mosaic",
        ("kernel: places of 16 heads", "kernel: places of three heads"),
        (),
        **METADATA,
        **PLANNED,
    ),
    "jax mosaic with metadata": jax_path(
        "mosaic", ("kernel: places of tokens",), (), **METADATA, **INTERPRETED
    ),
}
OF_TRITON = [x for x in CASES if x.startswith("triton: ")]
ON_TRITON = {"device": interpreted_triton.DEVICE, "marks": interpreted_triton.MARKS}
PATHS |= {
    "torch triton": torch_path(
        "triton",
        ("five heads a group", "kernel: documents", *OF_TRITON[:3]),
        ("kernel: no compressed token", "short documents", *OF_TRITON[1:-2]),
        fixtures=("small_triton",),
        **ON_TRITON,
    ),
    "torch triton of long lists": torch_path(
        "triton",
        (),
        OF_TRITON[-2:],
        fixtures=("small_triton", "long_lists"),
        **ON_TRITON,
    ),
}
GPU = {"device": "cuda", "marks": (pytest.mark.gpu,), "fixtures": ("large_chunks",)}
ON_GPU = [x for x in CASES if x.startswith("gpu: ")]
KERNELS_ON_GPU = [x for x in CASES if x.startswith("gpu kernel: ")]
ANY_ON_GPU = [x for x in ON_GPU if "any blocks" in x]
HOPPER = GPU | {"marks": (pytest.mark.gpu, needs_gpu)}
WHOLE_ON_GPU = "gpu: few blocks of many", "gpu: documents"
PATHS |= {
    "cuda torch sdpa": torch_path("sdpa", WHOLE_ON_GPU, ON_GPU, **GPU),
    "cuda torch fa2": torch_path("fa2", WHOLE_ON_GPU, ON_GPU, of_lse=False, **GPU),
    "cuda torch jax": torch_path("jax", WHOLE_ON_GPU, WHOLE_ON_GPU, **GPU),
    "cuda torch triton": torch_path(
        "triton", (*WHOLE_ON_GPU, *KERNELS_ON_GPU), (*ON_GPU, "fewer queries than keys"), **GPU
    ),
    "cuda torch mosaic": torch_path(
        "mosaic",
        (*WHOLE_ON_GPU, "gpu: wide"),
        (*ON_GPU, *of_kind("gpu kernel")),
        **HOPPER,
    ),
    "cuda torch mosaic with metadata": torch_path(
        "mosaic", WHOLE_ON_GPU[1:], WHOLE_ON_GPU[1:], **METADATA, **HOPPER
    ),
    "cuda torch triton with metadata": torch_path(
        "triton", WHOLE_ON_GPU[1:], WHOLE_ON_GPU[1:], **METADATA, **GPU
    ),
    "cuda torch mosaic gathered": torch_path(
        "mosaic",
        ("gpu gathered: 4 heads a group", "gpu gathered: rows"),
        (),
        **HOPPER | {"fixtures": ("gathered_parts",)},
    ),
}
IN_JAX = {"marks": HOPPER["marks"]}
JAX_ON_GPU = (
    *(f"gpu jax: {x}" for x in problems.JAX_ON_A_GPU),
    *of_kind("gpu kernel"),
    "gpu: wide",
    *MOSAIC[-3:],
)
GROUPED = tuple(f"gpu jax: {x} heads a group" for x in (3, 16))
SCORES_ON_GPU = of_kind("gpu scores")
GATHERED_ON_GPU = of_kind("gpu gathered")
PATHS |= {
    "cuda jax mosaic with metadata": jax_path(
        "mosaic", ("gpu jax: documents",), (), **METADATA, **IN_JAX
    ),
    "cuda jax mosaic": jax_path(
        "mosaic", JAX_ON_GPU, (*GROUPED, "gpu jax: 48 and 80", "gpu jax: 96 and 80"), **IN_JAX
    ),
    "cuda jax mosaic without gradients": jax_path(
        "mosaic",
        tuple(f"gpu jax: {x}" for x in problems.JAX_FORWARD_ON_A_GPU),
        of_kind("gpu jax"),
        gradients=False,
        **IN_JAX,
    ),
    "cuda jax mosaic, any blocks": jax_path(
        "mosaic", (), of_kind("gpu jax any"), gradients=False, **SELECTED, **IN_JAX
    ),
    "cuda jax mosaic scores": jax_path(
        "mosaic", (), (*SCORES_ON_GPU, *of_kind("gpu other scores")), **SCORES, **IN_JAX
    ),
    "cuda jax mosaic scores in parts": jax_path(
        "mosaic", (), SCORES_ON_GPU, **SCORES, **IN_JAX, fixtures=("few_scores",)
    ),
    "cuda jax mosaic gathered": jax_path(
        "mosaic",
        tuple(
            f"gpu gathered: {x}"
            for x in problems.GATHERED_ON_A_GPU
            if not x.startswith(("2 ", "3 ", "5 ", "6 ", "7 ", "any"))
        ),
        (),
        **IN_JAX,
        fixtures=("gathered_parts",),
    ),
    "cuda jax mosaic gathered without gradients": jax_path(
        "mosaic",
        tuple(x for x in GATHERED_ON_GPU if "any blocks" not in x),
        GATHERED_ON_GPU,
        gradients=False,
        **SELECTED,
        **IN_JAX,
        fixtures=("gathered_parts",),
    ),
    "cuda jax mosaic stored dS": jax_path(
        "mosaic", of_kind("gpu stored dS"), (), **IN_JAX, fixtures=("stored_ds",)
    ),
}
