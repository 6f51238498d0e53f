"""Problems as data, and what the oracle says of each.

A problem is drawn once, rounded to its dtype; `exact` and `rough` are what the oracle and the
yardstick of the tolerance rule (`bench.judge.parity`) make of it, by names that paths share.
"""

import dataclasses
import functools

import jax
import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F

from bench.judge.parity import assert_parity, check_indices
from nsa_torch import NSAConfig
from tests.oracles import nsa
from tests.tables import table

SMALL, PAPER = NSAConfig(8, 4, 16, num_selected=4, window=10), NSAConfig()
RESOLUTION = 1e-4  # of a score, relatively: what float32 may leave undecided on a CPU
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
STEP_NAMES = "out", "lse", "dquery", "dkey", "dvalue"
# Of the score of the last block taken, how much more than the next it must be: rounded compressed
# tokens change scores by less.
MARGIN = {"float32": 2.0**-14, "float16": 2.0**-9, "bfloat16": 2.0**-7}


# Of the oracle, whose float64 costs little on a GPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem's shape.

    `documents`: lengths of packed sequences, what is left over is padding, where all is NaN; `own`:
    keys and values of their own for each branch; `blocks`: `own`, as the path selects, else
    `given`, those of the oracle, or `any`, of any place and in any order; `ties`: queries are 0, so
    that a query scores all compressed tokens that it sees alike; `only`: the token whose output
    alone has a gradient; `loud`: the size of the output's gradient, with which dO . V is beyond
    float16, and no gradient of tokens is.
    """

    T: int
    S: int
    H: int = 4
    Hkv: int = 2
    D: int = 16
    Dv: int = 16
    B: int = 1
    config: NSAConfig = SMALL
    dtype: str = "float32"
    documents: tuple[int, ...] | None = None
    own: bool = False
    scale: float | None = None
    blocks: str = "own"
    ties: bool = False
    only: int | None = None
    loud: float | None = None
    seed: int = 0

    def but(self, **changes) -> "Case":
        """The same problem, but for these."""
        return dataclasses.replace(self, **changes)


def of_row(row: dict) -> Case:
    """A row of `problems.yaml`."""
    row = {"S": row["T"]} | row
    if "config" in row:
        row["config"] = NSAConfig(**row["config"])
    if "documents" in row:
        row["documents"] = tuple(row["documents"])
    return Case(**row)


TABLE = table("problems")
FEW, FAR = (NSAConfig(**TABLE["configs"][x]) for x in ("few", "far"))
CASES = {
    f"{kind}: {name}" if kind else name: of_row(rows.get("all", {}) | row)
    for kind, rows in TABLE["problems"].items()
    for name, row in rows.items()
    if name != "all"
}
TINY = CASES["kernel: tiny"]


def of_kind(kind: str) -> dict[str, Case]:
    """Its problems, by their own names."""
    named = {name.partition(": "): case for name, case in CASES.items()}
    return {name: case for (of, _, name), case in named.items() if of == kind}


def by_heads(found_of):
    """What `found_of` gives for a problem, made for one key/value head of one row at a time: on a
    GPU its `[T, S]` has room beside those of other tests.
    """

    def joined(axis, found):
        cat = lambda *x: (torch.cat if isinstance(x[0], torch.Tensor) else np.concatenate)(
            x, axis
        )
        return jax.tree.map(cat, *found)

    @functools.wraps(found_of)
    def whole(p, *rest):
        case = p.case
        if case.B * case.Hkv == 1:
            return found_of(p, *rest)
        alone = case.but(B=1, H=case.H // case.Hkv, Hkv=1)

        def of(row, head):
            def own(x):
                each = x.shape[2] // case.Hkv
                return x[row : row + 1, :, head * each : (head + 1) * each]

            _, *tensors = (getattr(p, x.name) for x in dataclasses.fields(p))
            return found_of(Problem(alone, *jax.tree.map(own, tensors)), *rest)

        rows = ([of(row, head) for head in range(case.Hkv)] for row in range(case.B))
        return joined(0, [joined(2, heads) for heads in rows])

    return whole


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Torch tensors on the CPU in the case's dtype; `keys` and `values` one, or three of branches;
    `weight`: the gradient of the output; `block_indices`: None where the path selects.
    """

    case: Case
    query: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    gates: torch.Tensor
    weight: torch.Tensor
    lse_weight: torch.Tensor
    block_indices: torch.Tensor | None

    @property
    def kv_len(self) -> int | None:
        return None if self.case.documents else self.case.S

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [self.query, *self.keys, *self.values, self.gates]

    @property
    def names(self) -> list[str]:
        """Of the output and the gradients of `leaves`."""
        of_branches = [f".{x}" for x in nsa.BRANCHES] if self.case.own else [""]
        return [
            "out",
            "dquery",
            *(f"d{x}{y}" for x in ("key", "value") for y in of_branches),
        ] + ["dgates"]

    def of(self, leaves, each) -> list:
        """Arguments of `attention` of arrays in the order of `leaves`; `each` joins branches."""
        query, *pairs, gates = leaves
        half = len(pairs) // 2
        both = pairs[:half], pairs[half:]
        return [query, *(each(*x) if self.case.own else x[0] for x in both), gates]

    @functools.cached_property
    @by_heads
    def steps(self) -> dict[str, list[torch.Tensor]]:
        """What each branch reads, in the case's dtype; the selection is the oracle's."""
        config = self.case.config
        slots = max((self.case.S - config.compress_block) // config.compress_stride + 1, 0)
        whole = [self.cleaned(x[0]) for x in (self.keys, self.values)]
        pair = [nsa.compress(x, config, self.rows) for x in whole]
        pair = [F.pad(x, (0, 0, 0, 0, 0, slots - x.shape[1])) for x in pair]
        chosen = self.attended(*(x.double() for x in self.leaves)).block_indices.cpu()
        tokens = self.query, self.keys[-1], self.values[-1]
        return {
            "compressed": [self.query, *pair],
            "selected": [*tokens, chosen],
            "sliding": [*tokens],
        }

    @property
    def rows(self) -> nsa.Rows:
        return nsa.Rows(self.case.T, self.case.S, self.case.documents or (self.case.S,))

    def attended(self, *leaves, **options) -> nsa.Found:
        """What the oracle makes of leaves in any dtype, in which padding may be anything."""
        query, *pairs, gates = (self.cleaned(x).to(DEVICE) for x in leaves)
        half = len(pairs) // 2
        keys, values = (x if self.case.own else x * 3 for x in (pairs[:half], pairs[half:]))
        given = {"block_indices": self.block_indices} | options
        found = nsa.attention(
            *(query, keys, values, gates),
            config=self.case.config,
            documents=self.case.documents,
            scale=self.case.scale,
            **{x: moved(y, DEVICE) for x, y in given.items()},
        )
        if not self.case.ties:
            return found
        # As whole numbers, which are equal whatever the order of sums.
        seen = nsa.compressed_mask(self.case.config, self.rows).to(query.dtype)
        scores = nsa.scores(
            seen[:, :, None].expand(self.case.B, self.case.Hkv, -1, -1, -1),
            self.case.config,
            self.rows,
        )
        chosen = nsa.select(scores, self.case.config, self.rows)
        return dataclasses.replace(found, scores=scores, block_indices=chosen)

    def cleaned(self, x: torch.Tensor) -> torch.Tensor:
        """Without what padding holds."""
        return torch.where(self.rows.padding(x.shape[1]).to(x.device)[:, None, None], 0, x)

    @functools.cached_property
    @by_heads
    def expected(self) -> list[dict[str, np.ndarray]]:
        """The output and gradients of the whole, exact and as in the case's dtype."""
        found = []
        for dtype in (torch.float64, getattr(torch, self.case.dtype)):
            leaves = [x.to(dtype).requires_grad_() for x in self.leaves]
            out = self.attended(*leaves, block_indices=self.steps["selected"][3]).out
            grads = torch.autograd.grad(out, leaves, self.cleaned(self.weight).to(out))
            found.append(dict(zip(self.names, map(array, (out, *grads)), strict=True)))
        return found

    @functools.cache  # noqa: B019  # as long as `problem` keeps it
    @by_heads
    def expected_steps(self, of_lse: bool = True) -> list[dict[str, np.ndarray]]:
        """Of each branch output, log-sum-exp and gradients by both of these, exact and rough."""
        found = []
        for dtype in (torch.float64, getattr(torch, self.case.dtype)):
            found.append({})
            for branch, (*tensors, mask) in self.masked_steps().items():
                leaves = [x.to(dtype).requires_grad_() for x in tensors]
                clean = (lambda x: x) if branch == "compressed" else self.cleaned
                seen = [clean(x)[:, : mask.shape[-1]] for x in leaves[1:]]
                query = self.cleaned(leaves[0])
                inputs = [x.to(DEVICE) for x in (query, *seen, mask)]
                both = nsa.attend(*inputs, self.case.scale)[:2]
                weights = self.weight.to(dtype), self.lse_weight[..., None].to(dtype)
                weights = [self.cleaned(x) for x in weights]
                weights[1] = weights[1][..., 0] * of_lse
                grads = torch.autograd.grad(both, leaves, [x.to(DEVICE) for x in weights])
                names = (f"{branch}.{x}" for x in STEP_NAMES)
                found[-1] |= dict(zip(names, map(array, (*both, *grads)), strict=True))
        return found

    def masked_steps(self):
        """`steps`, with the mask in place of the selection."""
        config, (*selected, chosen) = self.case.config, self.steps["selected"]
        masks = (
            nsa.compressed_mask(config, self.rows),
            nsa.selected_mask(chosen, config, self.rows),
            nsa.sliding_mask(config, self.rows),
        )
        tensors = self.steps | {"selected": selected}
        return {x: [*tensors[x], mask] for x, mask in zip(nsa.BRANCHES, masks, strict=True)}


def moved(x, device):
    """Tensors, alone or in a sequence; anything else as it is."""
    if isinstance(x, list | tuple):
        return [moved(y, device) for y in x]
    return x.to(device) if isinstance(x, torch.Tensor) else x


def array(x) -> np.ndarray:
    """A tensor or an array of JAX, in NumPy; bfloat16 widened."""
    if not isinstance(x, torch.Tensor):
        x = np.asarray(x)
        return x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


@functools.lru_cache(maxsize=64)
def problem(case: Case) -> Problem:
    """Drawn again until the selection, which a path makes itself, is beyond doubt."""
    for seed in range(case.seed, case.seed + 1000):
        found = _drawn(case, seed)
        if case.blocks != "own" or case.ties or _decided(found):
            return found
    raise ValueError(f"no selection of {case} is beyond doubt: smaller, or blocks='given'")


def _drawn(case, seed):
    rng, dtype = np.random.default_rng(seed), getattr(torch, case.dtype)

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    count = 3 if case.own else 1
    tokens = case.B, case.S, case.Hkv
    heads = case.B, case.T, case.H
    size = (1 / 64, 64.0, case.loud) if case.loud else (1.0, 1.0, 1.0)
    gates = (
        normal(*heads, 3) if case.loud is None else torch.full((*heads, 3), 1 / 3, dtype=dtype)
    )
    gates[:, ::7, 0] = 0
    weight, lse_weight = normal(*heads, case.Dv) * size[2], normal(*heads).float()
    if case.only is not None:
        for x in (weight, lse_weight):
            x[:, : case.only] = x[:, case.only + 1 :] = 0
    found = Problem(
        case,
        normal(*heads, case.D) * (0 if case.ties else size[0]),
        tuple(normal(*tokens, case.D) * size[0] for _ in range(count)),
        tuple(normal(*tokens, case.Dv) * size[1] for _ in range(count)),
        gates,
        weight,
        lse_weight,
        any_blocks(case) if case.blocks == "any" else None,
    )
    for x in (*found.leaves, weight, lse_weight):
        x[:, found.rows.padding(x.shape[1])] = torch.nan
    if case.blocks == "given":
        found = dataclasses.replace(found, block_indices=found.steps["selected"][3])
    return found


class Ragged:
    """Several problems of one sequence in one batch, as steps take them: queries of a row that is
    shorter than their number stand at the end, and NaN is where a row has no token, or what
    `compressed` says where it has no compressed token.
    """

    def __init__(self, *cases: Case, compressed: float = torch.nan):
        self.rows, self.case = [problem(case) for case in cases], cases[0]
        self.kv_len = torch.tensor([case.S for case in cases])
        T, nan = max(case.T for case in cases), torch.nan
        each = [row.steps for row in self.rows]
        hide = dict.fromkeys(nsa.BRANCHES, nan) | {"compressed": compressed}
        slots = {x: max(row[x][1].shape[1] for row in each) for x in nsa.BRANCHES}
        self.steps = {
            branch: [
                torch.cat([filled(row[branch][0], T, nan, front=True) for row in each]),
                *(
                    torch.cat(
                        [filled(row[branch][i], slots[branch], hide[branch]) for row in each]
                    )
                    for i in (1, 2)
                ),
            ]
            for branch in nsa.BRANCHES
        }
        chosen = [filled(row["selected"][3], T, -1, front=True) for row in each]
        self.steps["selected"].append(torch.cat(chosen))
        weights = [filled(row.weight, T, nan, front=True) for row in self.rows]
        of_lse = [filled(row.lse_weight[..., None], T, nan, front=True) for row in self.rows]
        self.weight, self.lse_weight = torch.cat(weights), torch.cat(of_lse)[..., 0]

    def check(self, found: dict, of_lse: bool = True) -> None:
        """Each row as it is alone, nothing behind it and before its queries."""
        chosen = found.pop("block_indices", None)
        for i, row in enumerate(self.rows):
            if chosen is not None:
                check_selection(row, array(chosen)[i : i + 1, chosen.shape[1] - row.case.T :])
            expected, own = row.expected_steps(of_lse), {}
            for name, x in found.items():
                x, size = array(x)[i : i + 1], expected[0][name].shape[1]
                of_queries = name.endswith(("out", "lse", "dquery"))
                own[name], rest = np.split(x, [x.shape[1] - size if of_queries else size], 1)
                if of_queries:
                    own[name], rest = rest, own[name]
                nothing = -np.inf if name.endswith("lse") else 0
                assert (rest == nothing).all(), (name, i, rest[rest != nothing])
            check(row, own, expected)


def filled(x: torch.Tensor, length: int, value: float, front: bool = False) -> torch.Tensor:
    """`x` `[1, n, ..]` with tokens of `value` up to `length`, before its own or behind them."""
    missing = length - x.shape[1]
    return F.pad(
        x, (0, 0) * (x.ndim - 2) + ((missing, 0) if front else (0, missing)), value=value
    )


def any_blocks(case: Case) -> torch.Tensor:
    """Blocks of any place: of the future too, even where the first token has no number of 32 bits,
    empty slots anywhere, no block for each seventh query.
    """
    rng = np.random.default_rng(5)
    blocks, n = case.config.num_blocks(case.S), case.config.num_selected
    shape = (case.B, case.T, case.Hkv, blocks)
    order = rng.permuted(np.broadcast_to(np.arange(blocks), shape), axis=-1)
    indices = np.full((*shape[:3], n), -1, np.int32)
    indices[..., :blocks] = order[..., :n]
    indices[rng.uniform(size=indices.shape) < 0.3] = -1
    indices[:, 1::5, :, 0] = 2**31 - 1
    indices[:, 2::5, :, 0] = 2**32 // case.config.select_block  # 0 in 32 bits
    indices[:, ::7] = -1
    return torch.from_numpy(indices)


def _decided(p: Problem) -> bool:
    found, config = p.attended(*(x.double() for x in p.leaves)), p.case.config
    scores, chosen = found.scores.cpu(), found.block_indices.cpu()
    taken = F.one_hot((chosen + 1).long(), scores.shape[-1] + 1).sum(-2)
    taken = taken[..., 1:] > 0
    own, position = (x[-p.case.T :, None, None] for x in p.rows.tokens())
    last, block = position // config.select_block, torch.arange(taken.shape[-1])
    forced = (block < config.num_initial) | (block > last - config.num_local)
    least = scores.masked_fill(~taken | forced, torch.inf).amin(-1)
    next_best = scores.masked_fill(taken | (block > last), 0).amax(-1)
    doubtful = (next_best > least * (1 - MARGIN[p.case.dtype])) & (own[..., 0] >= 0)
    return not bool(doubtful.any())


def check(p: Problem, found: dict, expected) -> None:
    """Results of a path by name, those of them that it has, against both of `expected`; what sees
    nothing and what nothing sees is exactly 0.
    """
    exact, rough = expected
    assert found.keys() <= exact.keys() and found
    for name, x in found.items():
        how = {"dtype": DTYPES[p.case.dtype], "selection": name == "selected.out"}
        assert_parity(name, array(x), exact[name], rough[name], **how)
        # Of few keys a query's gradient may be 0 as a sum.
        if p.case.only is not None or {"dquery", "dkey"}.isdisjoint(name.split(".")):
            unseen = exact[name] == 0
            if not name.endswith(("lse", "dgates")):
                # Terms of few keys may cancel in an element, but not in all of a head.
                unseen = unseen.all(-1)
            assert not array(x)[unseen].any(), f"{name}: not 0 where nothing is seen"


def check_loud(p: Problem, found: dict) -> None:
    """Gradients of tokens where dO . V is beyond float16."""
    value = p.values[0].repeat_interleave(p.case.H // p.case.Hkv, 2)
    product = torch.einsum("bqhd,bkhd->bhqk", p.weight.float() / 3, value.float())
    assert product.abs().max() > torch.finfo(torch.float16).max
    for name in ("dquery", "dkey", "dvalue"):
        exact = p.expected[0][name]
        error = np.abs(array(found[name]).astype(np.float64) - exact).max()
        assert error < 0.02 * np.abs(exact).max(), name


def check_selection(p: Problem, block_indices) -> None:
    """Of the compressed keys of `steps`: by the rules exactly, of blocks left out none that scores
    more than float32 decides; where all scores are apart, the oracle's very blocks.
    """
    wide = [x.double() for x in (*p.leaves, *p.steps["compressed"][1:])]
    found = p.attended(*wide[:-2], compressed=wide[-2:], block_indices=None)
    document, position = (x[-p.case.T :] for x in p.rows.tokens())
    position = torch.where(document < 0, -1, position).numpy()
    parity = check_indices(array(block_indices), array(found.scores), position, p.case.config)
    assert parity.ok and (DEVICE == "cuda" or parity.error_max <= RESOLUTION), parity
    if p.case.blocks == "own":
        assert parity.rows_differ == 0, parity
