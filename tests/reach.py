"""What a token that is not finite reaches in one branch, against docs/kernels/numerics.md."""

import functools
import re
from pathlib import Path

import numpy as np
import torch

import nsa_torch
from tests.problems import array

DOCS = Path(__file__).parents[1] / "docs" / "kernels" / "numerics.md"
HEADING = "## Range"
RESULTS = "out", "lse", "dq", "dk", "dv"
NUMBERS = np.nan, np.inf, 3e38
# Of the four products the operand that may be NaN, and what of other tokens it may then reach.
REACHES = {"query": {"dk"}, "key": {"dq"}, "value": {"out", "dq"}, "do": {"dv"}}
# Where P, not dS, is masked: what dP = dO V^T overflows to reaches them too, and of a query whose
# own logits overflow its delta.
OF_DP = {"query": {"dk"}, "value": {"dq"}, "do": {"dk"}}
MASK_P = "mosaic", "fa2"


def table():
    """Of each implementation and branch: `nothing`, or how far NaN reaches."""
    text = DOCS.read_text().split(HEADING)[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\| .*", text, re.M)
    ]
    branches = next(row[1:] for row in rows if row[0] == "implementation")
    return {
        (name, branch): cell
        for row in rows
        for name in re.findall(r"`(\w+)`", row[0])
        for branch, cell in zip(branches, row[1:], strict=True)
    }


def check_reach(function, arrays, implementation, branch, token, numbers=NUMBERS):
    """`function(*arrays)`: `RESULTS` `[B, T, ...]` of `query, key, value, do`, float32 arrays.

    A pair of a query and a later key must not count: of keys and values that are not finite
    earlier queries see nothing, of queries and cotangents no later key and no other query, but
    where the table says so, and there nothing that is finite and wrong. What is finite, however
    large, is not seen, but in gradients of `MASK_P`.
    """
    clean = function(*arrays)
    may_spread = table()[implementation, branch] != "nothing"
    for place, name in enumerate(REACHES):
        earlier = name in ("key", "value")
        for number in numbers:
            changed = [x.copy() for x in arrays]
            changed[place][:, token] = number
            reached = set()
            found = function(*changed)
            for result, x, y in zip(RESULTS, found, clean, strict=True):
                if earlier and result in ("dk", "dv"):
                    continue  # later queries see the token, and these keys
                if earlier:
                    x, y = x[:, :token], y[:, :token]
                elif result in ("dk", "dv"):
                    x, y = x[:, token + 1 :], y[:, token + 1 :]
                else:
                    x, y = (np.delete(z, token, axis=1) for z in (x, y))
                differs = ~((x == y) | (np.isnan(x) & np.isnan(y)))
                assert not np.isfinite(x[differs]).any(), (name, number, result)
                if differs.any():
                    reached.add(result)
            finite = np.isfinite(number)
            spreads = set() if finite else REACHES[name]
            if implementation in MASK_P:
                spreads = spreads | OF_DP.get(name, set())
            assert reached <= (spreads if may_spread else set()), (name, number, reached)
            assert reached or finite or not may_spread, (name, number, "the table says more")


def steps(api, case, name, blocks):
    """Each branch as a function of query, keys and values, and the selection."""
    options = {"config": case.config, "implementation": name}
    compress = functools.partial(api.compress, config=case.config)
    of_compressed = options | {"kv_len": case.S}
    return {
        "compressed": lambda query, *pair: api.compressed_attention(
            query, *map(compress, pair), **of_compressed
        ),
        "selected": lambda *x: api.selected_attention(*x, blocks, **options),
        "sliding": lambda *x: api.sliding_attention(*x, **options),
    }, lambda query, key: api.select_blocks(query, compress(key), **of_compressed)


def check_torch(p, branch, name, device="cpu", numbers=NUMBERS):
    """`check_reach` of a token in the middle of a problem."""
    dtype, blocks = getattr(torch, p.case.dtype), p.block_indices.to(device)
    step = steps(nsa_torch, p.case, name, blocks)[0][branch]

    def function(*arrays):
        *leaves, do = (torch.tensor(x, dtype=dtype, device=device) for x in arrays)
        leaves = [x.requires_grad_() for x in leaves]
        out, lse = step(*leaves)
        return [array(x) for x in (out, lse, *torch.autograd.grad(out, leaves, do))]

    arrays = [np.float32(array(x)) for x in (p.query, p.keys[0], p.values[0], p.weight)]
    check_reach(function, arrays, name, branch, p.case.T // 2 + 5, numbers)
