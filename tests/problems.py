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


# Of the oracle, whose float64 costs little on a GPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem's shape.

    `documents`: lengths of packed sequences, what is left over is padding, where all is NaN; `own`:
    keys and values of their own for each branch; `blocks`: `own`, as the path selects, else
    `given`, those of the oracle, or `any`, of any place and in any order; `ties`: all scores of a
    compressed token are equal; `only`: the token whose output alone has a gradient; `loud`: the
    size of that gradient, of which dO . V is beyond float16, and no gradient of tokens.
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
    "short documents": Case(40, 40, D=8, Dv=8, documents=(7, 6)),
    "one output": Case(63, 63, only=31),
    "ties": Case(111, 111, H=3, Hkv=1, ties=True),
    "empty documents": Case(91, 91, H=6, documents=(1, 20, 0, 1, 43, 8, 0)),
    "any blocks": Case(70, 130, H=6, blocks="any"),
    "bfloat16": Case(130, 130, H=8, D=32, config=PAPER, dtype="bfloat16", B=2, blocks="given"),
    "float16": Case(77, 77, H=3, Hkv=1, dtype="float16", blocks="given"),
    # Their sum must not be kept in bfloat16.
    "many queries of a block": Case(600, 600, H=8, Hkv=1, dtype="bfloat16", blocks="given"),
    "no document": Case(40, 40, documents=(0, 0)),
}

# Of kernels in 16 bits, which interpreters take seconds for.
BLOCKS = NSAConfig(16, 8, 64, num_selected=3, num_local=1, window=50)
LARGE = NSAConfig(16, 8, 128, num_selected=2, num_local=1, window=30)
# Keys enough that a ring of blocks goes round, and that blocks are seen in full.
LONG = NSAConfig(8, 4, 16, num_selected=17, window=250)
TINY = Case(20, 20, H=2, Hkv=1, dtype="bfloat16")
FREE = dataclasses.replace(SMALL, num_selected=3, window=0)
IN_PLACES = Case(
    90, 90, config=BLOCKS, documents=(70, 0, 1, 13), dtype="bfloat16", blocks="given"
)
CASES |= {
    "kernel: one head a group": Case(63, 63, H=2, D=32, dtype="bfloat16"),
    "kernel: three heads a group": Case(26, 70, 3, 1, 48, 32, dtype="bfloat16", own=True),
    # Tokens that copies bring together choose different blocks, all of whose keys they see.
    "kernel: four heads a group": Case(
        28, 222, 4, 1, 32, 16, B=2, config=BLOCKS, dtype="float16", own=True, blocks="given"
    ),
    "kernel: fewer queries than keys": Case(37, 111, 6, 1, 32, 64, dtype="float16"),
    "kernel: long blocks": Case(
        12, 1200, 16, 1, 128, 64, config=LONG, dtype="bfloat16", blocks="given"
    ),
    "kernel: documents": Case(60, 60, H=6, dtype="bfloat16", documents=(20, 1, 34), own=True),
    # The first document begins before the queries.
    "kernel: documents before queries": Case(
        80, 90, 3, 1, dtype="bfloat16", documents=(20, 1, 43, 8)
    ),
    # A block of the second document stands in three tiles of keys.
    "kernel: blocks in three tiles": Case(
        24, 220, H=2, Hkv=1, config=LARGE, documents=(10, 200), dtype="float16", blocks="given"
    ),
    "kernel: query tiles with rows of no token": Case(
        13, 33, H=5, Hkv=1, D=96, Dv=80, dtype="bfloat16", blocks="given"
    ),
    "kernel: wide": Case(20, 20, H=2, Hkv=1, D=192, Dv=128, dtype="bfloat16"),
    "kernel: no compressed token": Case(5, 5, H=2, Hkv=1, dtype="bfloat16"),
    "kernel: more slots than blocks": Case(
        40, 40, config=dataclasses.replace(SMALL, window=0, num_selected=9), dtype="float16"
    ),
    "kernel: any blocks": Case(70, 130, H=6, dtype="bfloat16", blocks="any"),
    "kernel: large logits": Case(
        70,
        130,
        H=2,
        dtype="bfloat16",
        blocks="any",
        scale=8.0,
        config=dataclasses.replace(SMALL, num_selected=6),
    ),
    "kernel: blocks or nothing": TINY.but(config=FREE, blocks="any"),
    "kernel: one output": TINY.but(T=40, S=40, only=12),
    "kernel: tiny": TINY,
    "kernel: empty documents": Case(
        45, 45, H=6, dtype="bfloat16", documents=(1, 14, 0, 1, 17, 6, 0)
    ),
    # Fewer tokens than a window has.
    "kernel: documents without a compressed token": TINY.but(T=7, S=7, documents=(3, 4)),
    # A tile of each kernel has tokens of several documents. Means are made in slots, entries of
    # lists of small groups are single tokens, dS of large ones is stored.
    "kernel: places of 16 heads": IN_PLACES.but(H=16, Hkv=1, Dv=48, own=True),
    "kernel: places of three heads": IN_PLACES.but(H=6, D=64, Dv=64),
    "kernel: places of tokens": Case(
        44,
        44,
        H=2,
        Hkv=1,
        config=NSAConfig(4, 2, 16, num_selected=2, num_local=1, window=7),
        documents=(33, 6),
        dtype="bfloat16",
        blocks="given",
    ),
}

# Of Triton kernels, whose tiles hold few heads of many tokens, or the reverse.
BLOCKS_OF_A_TOKEN = NSAConfig(16, 16, 16, 2, num_initial=0, num_local=1, window=0)
LONG_BLOCKS = NSAConfig(32, 16, 96, num_selected=2, num_initial=0, num_local=1)
OVERLAPPING = NSAConfig(8, 1, 8, num_selected=4, num_initial=0, num_local=0)
CASES |= {
    "triton: a token per tile": Case(18, 18, 16, 1, 16, 8, dtype="bfloat16", blocks="given"),
    "triton: two tiles per token": Case(6, 20, 70, 1, dtype="float16", blocks="given"),
    "triton: blocks of one compressed token": Case(
        18, 37, 2, 1, config=BLOCKS_OF_A_TOKEN, dtype="float16", own=True, blocks="given"
    ),
    # They begin and end in several tiles of keys, some of which whole tiles of rows see in full.
    "triton: long windows": Case(
        160, 160, 1, 1, 8, 8, config=NSAConfig(8, 4, 16, num_selected=4, window=100)
    ),
    "triton: blocks of two steps": Case(5, 100, 2, config=LONG_BLOCKS),
    "triton: fewer blocks per step than are selected": Case(
        30, 30, config=NSAConfig(2, 1, 16, num_selected=4, window=20)
    ),
    # Half of a score is carried from block to block, and from step to step.
    "triton: blocks of several steps": Case(9, 300, config=OVERLAPPING),
    "triton: any blocks": Case(60, 80, 4, 1, 8, 8, blocks="any"),
    "triton: any blocks, documents": Case(
        50, 50, 4, 1, 8, 8, documents=(35, 1, 12), blocks="any"
    ),
}

# In the precisions and sizes that kernels on a GPU take.
SEVEN_HUNDRED = Case(
    700,
    700,
    8,
    2,
    64,
    64,
    config=dataclasses.replace(PAPER, num_selected=11),
    dtype="bfloat16",
    blocks="any",
)
ON_A_GPU = {
    "one head a group": Case(63, 63, 2, 2, 64, 64, B=2, dtype="float16"),
    "few blocks of many": Case(63, 111, 6, 2, 64, 32, B=2, config=FEW, dtype="bfloat16"),
    "windows and blocks alike": Case(111, 111, 6, 1, 32, 64, config=TIGHT, dtype="bfloat16"),
    "one token": Case(1, 75, 4, 2, 64, 64, B=2, dtype="bfloat16"),
    "no compressed token": Case(5, 5, dtype="bfloat16"),
    "no window": Case(
        40, 40, B=2, config=dataclasses.replace(SMALL, window=0), dtype="float16"
    ),
    "documents": Case(91, 91, 6, documents=(1, 20, 0, 1, 43, 8, 0), dtype="bfloat16"),
    "sixteen heads a group": Case(299, 299, 16, 1, 128, 128, config=PAPER, dtype="bfloat16"),
    "wide": Case(130, 413, 8, 2, 192, 128, B=2, config=PAPER, dtype="float16"),
    "any blocks": SEVEN_HUNDRED,
    "any blocks, one head": SEVEN_HUNDRED.but(H=2),
    "any blocks, 16 heads": SEVEN_HUNDRED.but(H=32, dtype="float16"),
    "any blocks, few queries": SEVEN_HUNDRED.but(T=350),
    "any blocks, documents": SEVEN_HUNDRED.but(documents=(300, 1, 380)),
}
# Of kernels alone: groups and widths that FA-2 does not take.
WIDE = NSAConfig(32, 16, 64, num_selected=6, num_initial=0, num_local=1, window=100)
KERNELS_ON_A_GPU = {
    "three heads a group": Case(111, 111, 6, 2, 32, 96, dtype="bfloat16"),
    "eight heads a group": Case(140, 300, 8, 1, 48, 80, B=2, config=WIDE, dtype="bfloat16"),
    "32 heads a group": Case(300, 300, 64, 2, 128, 64, documents=(299, 1), dtype="bfloat16"),
    "64 heads a group": Case(150, 150, 64, 1, 256, 256, config=WIDE, dtype="float16"),
}
GROUPS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
MIDDLE = NSAConfig(num_selected=8, window=200)
MANY = NSAConfig(16, 16, 16, num_selected=64, window=0)
OF_MIDDLE = Case(777, 777, 2, 1, 64, 96, config=MIDDLE, dtype="bfloat16", blocks="given")
OF_PAPER = Case(500, 500, 32, 2, 192, 128, config=PAPER, dtype="bfloat16", blocks="given")
SHORT = (*(1,) * 50, 600, 230)
# Forward and backward; each group and each width compiles kernels of its own.
JAX_ON_A_GPU = {
    **{f"{x} heads a group": OF_MIDDLE.but(H=x, T=333, S=411) for x in GROUPS},
    "paper": OF_PAPER,
    "48 and 80": OF_PAPER.but(D=48, Dv=80, H=6, config=MIDDLE, B=3, T=200, S=500),
    "96 and 80": OF_PAPER.but(D=96, Dv=80, H=10, T=300, S=300),
    "documents": OF_PAPER.but(
        H=12, T=700, S=700, config=MIDDLE, documents=(300, 1, 33, 1, 100, 200)
    ),
    "short documents": OF_PAPER.but(
        D=64, T=300, S=900, config=MIDDLE, documents=SHORT, dtype="float16"
    ),
    "long blocks": OF_PAPER.but(
        T=600,
        S=600,
        D=128,
        H=16,
        config=dataclasses.replace(MIDDLE, select_block=128, num_selected=3),
        documents=(1, 70, 500, 1),
    ),
    "many blocks": OF_PAPER.but(config=MANY, H=4, T=600, S=1500),
}
# Forward alone.
JAX_FORWARD_ON_A_GPU = {
    **{f"{x} heads, 777 tokens": OF_MIDDLE.but(H=2 * x, Hkv=2) for x in GROUPS},
    "paper, long": OF_PAPER.but(T=1337, S=1337),
    "fewer queries": OF_PAPER.but(D=128, B=2, T=301, S=2049, dtype="float16"),
    # More blocks than scores are held at a time.
    "more scores than are held": OF_PAPER.but(D=128, H=16, Hkv=1, T=65, S=131072),
    # Nearly all is padding, in which all is NaN.
    "padding": OF_MIDDLE.but(H=32, Hkv=2, documents=(1,) * 99),
}
ANY_OF_JAX_ON_A_GPU = {
    f"any blocks, {heads} heads, scale {scale}": OF_MIDDLE.but(
        H=heads, Hkv=2, T=701, scale=scale, blocks="any"
    )
    for heads in (2, 6, 32)
    for scale in (None, 4.0)
}
# Many candidates: 134 blocks; a tile with tokens of two documents.
MANY_BLOCKS = Case(
    65,
    2140,
    D=64,
    dtype="bfloat16",
    config=NSAConfig(16, 16, 16, num_selected=6, window=10),
    blocks="given",
)
SCORES_ON_A_GPU = {}
for heads in GROUPS:
    case = MANY_BLOCKS.but(H=2 * heads, Hkv=2)
    SCORES_ON_A_GPU |= {
        f"scores of {heads} heads a group": case,
        f"scores of {heads} heads a group, documents": case.but(documents=(2105, 35)),
        f"ties of {heads} heads a group": case.but(
            H=heads, Hkv=1, T=18, ties=True, blocks="own"
        ),
    }
OTHER_BLOCKS = {
    "cover 4": NSAConfig(16, 4, 32, num_selected=6),  # a token reaches 3 strides further
    "none forced": NSAConfig(16, 16, 16, num_selected=40, num_initial=0, num_local=0),
    "all forced": NSAConfig(4, 4, 32, num_selected=3),
}
OTHER_SCORES_ON_A_GPU = {
    f"scores, {name}, {heads} heads a group": MANY_BLOCKS.but(
        H=heads, Hkv=1, S=1100, config=config
    )
    for name, config in OTHER_BLOCKS.items()
    for heads in (4, 16)
}

# Of `scores_qk` and `scores_kq`: heads of a group.
FINE = NSAConfig(16, 16, 16, num_selected=6, window=10)
OVERLAPPING = NSAConfig(16, 8, 16, num_selected=40)
SELECTING = Case(30, 110, 2, 1, dtype="bfloat16", blocks="given")
FEW_SCORES = Case(18, 2200, 3, 1, config=FINE, dtype="float16", blocks="given")
SCORES = {}
for heads in (2, 20):
    case = SELECTING.but(H=heads)
    none_forced = NSAConfig(16, 4, 16, num_selected=3, num_initial=0, num_local=0)
    SCORES |= {
        f"none forced, {heads} heads": case.but(config=none_forced),
        f"all forced, {heads} heads": case.but(config=OTHER_BLOCKS["all forced"]),
        f"ties, {heads} heads": case.but(
            S=100,
            dtype="float16",
            config=dataclasses.replace(SMALL, num_selected=6),
            ties=True,
            blocks="own",
        ),
    }
# Few scores are held at a time.
SCORES_IN_PARTS = {
    "many parts": FEW_SCORES.but(S=4500, dtype="bfloat16"),
    # A tile with tokens of both documents, the second from block 132 on.
    "documents": FEW_SCORES.but(T=40, S=2140, documents=(2105, 35)),
    "forced": FEW_SCORES.but(config=dataclasses.replace(FINE, num_selected=3)),
    # A compressed token in two blocks counts in both, wherever a part ends; what a warp knows of a
    # column is used up, and the column is read again.
    "many blocks of a column": FEW_SCORES.but(config=OVERLAPPING),
    "a large group": FEW_SCORES.but(T=6, H=20, config=OVERLAPPING),
    "ties": FEW_SCORES.but(ties=True, blocks="own"),
}

# Tokens leave the union of their tile where its list is too long: those of blocks that are far.
FAR = NSAConfig(32, 32, 64, num_selected=3, num_local=1, window=20)
LONG_FAR = dataclasses.replace(FAR, select_block=128)
OF_FOUR = Case(34, 400, 4, 1, 64, 64, config=FAR, dtype="bfloat16", own=True, blocks="given")
OF_THREE = OF_FOUR.but(T=30, S=330, H=6, Hkv=2, D=128, dtype="float16")
OF_SIXTEEN = OF_FOUR.but(T=9, S=660, H=16, config=LONG_FAR)
GATHERED = {
    "four heads": OF_FOUR,
    "three heads": OF_THREE,
    "long blocks": OF_SIXTEEN,
    "two tiles": OF_FOUR.but(T=24),
    "whole": OF_FOUR.but(T=20, S=330),
    # A slab is staged at a time.
    "slabs": OF_THREE.but(Dv=128),
    # Of fewer heads than have dS stored.
    "dq of long blocks": OF_SIXTEEN.but(T=20, H=6),
    # Half the tokens of the second tile do not see the last block.
    "any blocks": OF_THREE.but(T=45, S=397, blocks="any"),
}
LARGE_GROUPS = Case(1700, 1700, 2, 2, 64, 64, config=PAPER, dtype="bfloat16", blocks="given")
PAPER_LONG = dataclasses.replace(PAPER, select_block=128)
GATHERED_ON_A_GPU = {
    **{f"{x} heads a group": LARGE_GROUPS.but(H=2 * x) for x in range(1, 9)},
    "wide": Case(333, 3000, 16, 4, 192, 128, 2, PAPER, "float16", blocks="given"),
    "wide values": Case(500, 1500, 8, 1, 128, 256, 1, PAPER, "bfloat16", blocks="given"),
    "long blocks": LARGE_GROUPS.but(H=32, D=128, Dv=128, config=PAPER_LONG),
    "rows": Case(700, 2600, 12, 2, 128, 64, 2, PAPER_LONG, "float16", blocks="given"),
}
GATHERED_ON_A_GPU |= {
    f"any blocks, {name}": x.but(blocks="any") for name, x in GATHERED_ON_A_GPU.items()
}

STORED_DS = {
    # Two tokens in the rows of a warp.
    "eight heads": Case(14, 150, 16, 2, 64, 64, config=BLOCKS, dtype="bfloat16"),
    "sixteen heads": Case(14, 150, 32, 2, 64, 64, config=BLOCKS, dtype="bfloat16"),
    "64 heads": Case(5, 130, 64, 1, 16, 48, config=BLOCKS, dtype="bfloat16"),
    # Rows of no head, and tiles of fewer tokens than those of the forward pass.
    "ten heads": Case(11, 140, 50, 5, 32, 64, config=BLOCKS, dtype="float16"),
    # Neighbours that select other blocks, of the future too, and empty slots.
    "any blocks": Case(14, 450, 32, 2, 64, 64, config=BLOCKS, dtype="bfloat16", blocks="any"),
}
STORED_DS = {
    name: x if x.blocks == "any" else x.but(own=True, blocks="given")
    for name, x in STORED_DS.items()
}
STORED_DS_ON_A_GPU = {
    "sixteen heads": Case(1700, 1700, 64, 4, 128, 128, 1, PAPER, "bfloat16"),
    # Two tokens in a warp's rows.
    "eight heads": Case(900, 900, 32, 4, 128, 64, 2, PAPER, "bfloat16"),
    "ten heads": Case(700, 700, 40, 4, 64, 128, 2, PAPER, "float16"),
    "32 heads": Case(333, 3000, 64, 2, 192, 128, 2, PAPER, "bfloat16"),
    "64 heads": Case(500, 900, 64, 1, 128, 256, 1, PAPER, "bfloat16"),
    "widest": Case(130, 130, 128, 2, 256, 256, 1, PAPER, "bfloat16"),
}


def _listed(kind, cases, **change):
    """Rows of `CASES`, with what all of them have."""
    return {f"{kind}: {name}": x.but(**change) for name, x in cases.items()}


GIVEN = {"own": True, "blocks": "given"}
CASES |= (
    _listed("gpu kernel", KERNELS_ON_A_GPU, blocks="given")
    | {
        f"gpu: {name}": x.but(blocks="given" if x.blocks == "own" else x.blocks)
        for name, x in ON_A_GPU.items()
    }
    | _listed("gpu jax", JAX_ON_A_GPU | JAX_FORWARD_ON_A_GPU, own=True)
    | _listed("gpu jax any", ANY_OF_JAX_ON_A_GPU, own=True)
    | _listed("gpu scores", SCORES_ON_A_GPU)
    | _listed("gpu other scores", OTHER_SCORES_ON_A_GPU)
    | _listed("scores", SCORES)
    | _listed("scores in parts", SCORES_IN_PARTS)
    | _listed("gathered", GATHERED)
    | _listed("gpu gathered", GATHERED_ON_A_GPU, own=True)
    | _listed("stored dS", STORED_DS)
    | _listed("gpu stored dS", STORED_DS_ON_A_GPU, **GIVEN)
)


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
