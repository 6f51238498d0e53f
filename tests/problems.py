"""Problems as data, and what the oracle says of each.

A problem is drawn once, rounded to its dtype; `exact` and `rough` are what the oracle and the
yardstick of the tolerance rule (`bench.judge.parity`) make of it, by names that paths share.
"""

import dataclasses
import functools

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F

from bench.judge.parity import assert_parity, check_indices
from nsa_core.config import NSAConfig
from tests.oracles import nsa

SMALL = NSAConfig(8, 4, 16, num_selected=4, window=10)
FEW = dataclasses.replace(SMALL, num_selected=3, num_local=1)  # most blocks stay out
TIGHT = NSAConfig(8, 8, 8, num_selected=3, num_initial=0, num_local=0, window=3)  # l = d = l'
ODD = NSAConfig(8, 4, 12, num_selected=4, num_initial=1, num_local=1, window=7)
PAPER = NSAConfig()
RESOLUTION = 1e-4  # of a score, relatively: what float32 on a chip may leave undecided
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
STEP_NAMES = "out", "lse", "dquery", "dkey", "dvalue"
# Of the score of the last block taken, how much more than the next it must be: rounded compressed
# tokens change scores by less.
MARGIN = {"float32": 2.0**-14, "float16": 2.0**-9, "bfloat16": 2.0**-7}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem's shape.

    `documents`: lengths of packed sequences, what is left over is padding; `own`: keys and values
    of their own for each branch; `blocks`: `own`, as the path selects, else `given`, those of the
    oracle, or `any`, of any place and in any order.
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
    seed: int = 0


# What each is there for is its name.
CASES = {
    "one head a group": Case(63, 63, H=2),
    "three heads a group": Case(111, 111, H=6, D=24, Dv=8, B=2),
    "five heads a group": Case(37, 37, H=5, Hkv=1, D=8, config=ODD),
    "sixteen heads a group": Case(65, 65, H=16, Hkv=1, D=16, Dv=8),
    "fewer queries than keys": Case(37, 111, H=6, Hkv=1, D=8, Dv=12, B=2),
    "one token": Case(1, 75, B=2),
    "no compressed token": Case(5, 5),
    "no window": Case(40, 40, config=dataclasses.replace(SMALL, window=0, num_selected=9)),
    "a window of one": Case(40, 40, config=dataclasses.replace(FEW, window=1), scale=0.1),
    "few blocks of many": Case(63, 111, H=6, D=8, Dv=12, config=FEW, own=True),
    "windows and blocks alike": Case(111, 111, H=6, Hkv=1, D=4, Dv=16, config=TIGHT),
    "documents": Case(90, 90, documents=(20, 1, 43, 8), own=True),
    "empty documents": Case(91, 91, H=6, documents=(1, 20, 0, 1, 43, 8, 0)),
    "any blocks": Case(70, 130, H=6, blocks="any"),
    "bfloat16": Case(130, 130, H=8, D=32, config=PAPER, dtype="bfloat16", B=2, blocks="given"),
    "float16": Case(77, 77, H=3, Hkv=1, dtype="float16", blocks="given"),
}


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
    def steps(self) -> dict[str, list[torch.Tensor]]:
        """What each branch reads, in the case's dtype; the selection is the oracle's."""
        config = self.case.config
        slots = max((self.case.S - config.compress_block) // config.compress_stride + 1, 0)
        pair = [nsa.compress(x[0], config, self.rows) for x in (self.keys, self.values)]
        pair = [F.pad(x, (0, 0, 0, 0, 0, slots - x.shape[1])) for x in pair]
        chosen = self.attended(*(x.double() for x in self.leaves)).block_indices
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
        """What the oracle makes of leaves in any dtype."""
        query, *pairs, gates = leaves
        half = len(pairs) // 2
        keys, values = (x if self.case.own else x * 3 for x in (pairs[:half], pairs[half:]))
        return nsa.attention(
            *(query, keys, values, gates),
            config=self.case.config,
            documents=self.case.documents,
            scale=self.case.scale,
            **{"block_indices": self.block_indices} | options,
        )

    @functools.cached_property
    def expected(self) -> list[dict[str, np.ndarray]]:
        """The output and gradients of the whole, exact and as in the case's dtype."""
        found = []
        for dtype in (torch.float64, getattr(torch, self.case.dtype)):
            leaves = [x.to(dtype).requires_grad_() for x in self.leaves]
            out = self.attended(*leaves, block_indices=self.steps["selected"][3]).out
            grads = torch.autograd.grad(out, leaves, self.weight.to(dtype))
            found.append(dict(zip(self.names, map(array, (out, *grads)), strict=True)))
        return found

    @functools.cached_property
    def expected_steps(self) -> list[dict[str, np.ndarray]]:
        """Of each branch output, log-sum-exp and gradients by both of these, exact and rough."""
        found = []
        for dtype in (torch.float64, getattr(torch, self.case.dtype)):
            found.append({})
            for branch, (*tensors, mask) in self.masked_steps().items():
                leaves = [x.to(dtype).requires_grad_() for x in tensors]
                seen = [x[:, : mask.shape[-1]] for x in leaves[1:]]
                both = nsa.attend(leaves[0], *seen, mask, self.case.scale)[:2]
                weights = [x.to(dtype) for x in (self.weight, self.lse_weight)]
                grads = torch.autograd.grad(both, leaves, weights)
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
        if case.blocks != "own" or _decided(found):
            return found
    raise ValueError(f"no selection of {case} is beyond doubt: smaller, or blocks='given'")


def _drawn(case, seed):
    rng, dtype = np.random.default_rng(seed), getattr(torch, case.dtype)

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    count = 3 if case.own else 1
    tokens = case.B, case.S, case.Hkv
    heads = case.B, case.T, case.H
    gates = normal(*heads, 3)  # of both signs
    gates[:, ::7, 0] = 0
    found = Problem(
        case,
        normal(*heads, case.D),
        tuple(normal(*tokens, case.D) for _ in range(count)),
        tuple(normal(*tokens, case.Dv) for _ in range(count)),
        gates,
        normal(*heads, case.Dv),
        torch.from_numpy(rng.standard_normal(heads)).float(),
        any_blocks(case) if case.blocks == "any" else None,
    )
    if case.blocks == "given":
        found = dataclasses.replace(found, block_indices=found.steps["selected"][3])
    return found


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
    taken = F.one_hot((found.block_indices + 1).long(), found.scores.shape[-1] + 1).sum(-2)
    taken = taken[..., 1:] > 0
    own, position = (x[-p.case.T :, None, None] for x in p.rows.tokens())
    last, block = position // config.select_block, torch.arange(taken.shape[-1])
    forced = (block < config.num_initial) | (block > last - config.num_local)
    least = found.scores.masked_fill(~taken | forced, torch.inf).amin(-1)
    next_best = found.scores.masked_fill(taken | (block > last), 0).amax(-1)
    doubtful = (next_best > least * (1 - MARGIN[p.case.dtype])) & (own[..., 0] >= 0)
    return not bool(doubtful.any())


def check(p: Problem, found: dict, expected) -> None:
    """Results of a path by name, those of them that it has, against both of `expected`."""
    exact, rough = expected
    assert found.keys() <= exact.keys() and found
    for name, x in found.items():
        how = {"dtype": DTYPES[p.case.dtype], "selection": name == "selected.out"}
        assert_parity(name, array(x), exact[name], rough[name], **how)


def check_selection(p: Problem, block_indices) -> None:
    """Of the compressed keys of `steps`: by the rules exactly, of blocks left out none that scores
    more than float32 decides; where all scores are apart, the oracle's very blocks.
    """
    wide = [x.double() for x in (*p.leaves, *p.steps["compressed"][1:])]
    found = p.attended(*wide[:-2], compressed=wide[-2:], block_indices=None)
    document, position = (x[-p.case.T :] for x in p.rows.tokens())
    position = torch.where(document < 0, -1, position).numpy()
    parity = check_indices(array(block_indices), array(found.scores), position, p.case.config)
    assert parity.ok and parity.error_max <= RESOLUTION, parity
    if p.case.blocks == "own":
        assert parity.rows_differ == 0, parity
