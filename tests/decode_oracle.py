"""A decode step in float64, from the contract alone: plain loops, no code of the library.

`problem` makes a pool of pages in which everything that was never written is NaN.
"""

import dataclasses

import ml_dtypes
import numpy as np

from kernels_pallas.specs.decode import Decode, Variant

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# The paper's sizes; 8 warps, whose strips are many.
PAPER = Decode(
    B=1,
    q_len=1,
    H=16,
    Hkv=1,
    D=128,
    Dv=128,
    compress_block=32,
    stride=16,
    block=64,
    n=16,
    num_initial=1,
    num_local=2,
    window=512,
    pages=90,
    table_pages=80,
    dtype="bfloat16",
    scale=128**-0.5,
    variant=Variant(2, 4, 2, 128),
    interpret=True,
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arrays as `specs.decode.decode` takes them, and each row's own keys and values.

    Attributes:
      arrays: by name.
      rows: by row, branch `compressed`, `selected` or `sliding`: keys `[tokens, Hkv, D]` and
        values, float64.
    """

    spec: Decode
    lengths: list[int]
    arrays: dict[str, np.ndarray]
    rows: list[dict[str, tuple[np.ndarray, np.ndarray]]]


def problem(spec: Decode, lengths, seed=0, zero_query=False) -> Problem:
    """A random problem: pages in a random order, entries past a row's pages out of range."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype))
    counts = [-(-length // spec.block) for length in lengths]
    free = list(rng.permutation(spec.pages))
    table = rng.choice([-1, -7, spec.pages, 2**31 - 1], (spec.B, spec.table_pages))
    table = table.astype(np.int32)
    for b, count in enumerate(counts):
        table[b, :count] = [free.pop() for _ in range(count)]

    def normal(*shape):
        return rng.standard_normal(shape, np.float32).astype(dtype)

    arrays, scales, rows = {}, {}, [{} for _ in lengths]
    lead = spec.compress_block // spec.stride - 1
    for branch in ("compressed", "selected", "sliding"):
        slots = spec.per_page if branch == "compressed" else spec.block
        kinds = ("key", spec.D), ("value", spec.Dv)
        shape = spec.pages, slots, spec.Hkv
        for kind, width in kinds:
            rounded = spec.fp8 and (branch, kind) != ("compressed", "key")
            pool = np.full((*shape, width), np.nan, E4M3 if rounded else dtype)
            scale = np.full(shape, np.nan, np.float32)
            for b, length in enumerate(lengths):
                first, count = (
                    (lead, compressed(spec, length)) if slots < spec.block else (0, length)
                )
                written = normal(count, spec.Hkv, width)
                factor = np.ones((count, spec.Hkv), np.float32)
                if rounded:
                    written = (written.astype(np.float32) * 100).clip(-448, 448).astype(E4M3)
                    factor = rng.uniform(0.005, 0.015, factor.shape).astype(np.float32)
                for i in range(count):
                    page, place = divmod(i + first, slots)
                    pool[table[b, page], place] = written[i]
                    scale[table[b, page], place] = factor[i]
                exact = written.astype(np.float64) * factor[..., None]
                rows[b][branch] = (*rows[b].get(branch, ()), exact)
            arrays[f"{branch}_{kind}"] = pool
            if rounded:
                scales[f"{branch}_{kind}_scale"] = np.ascontiguousarray(scale.swapaxes(1, 2))
    arrays |= scales
    query = normal(spec.tokens, spec.H, spec.D) * dtype.type(0 if zero_query else 1.5)
    gates = rng.random((spec.tokens, spec.H, 3), np.float32)
    gates = gates.astype(np.dtype(getattr(ml_dtypes, spec.gate_dtype, spec.gate_dtype)))
    named = {"query": query, "gates": gates}
    named |= {"page_table": table, "lengths": np.array(lengths, np.int32)}
    return Problem(spec, list(lengths), named | arrays, rows)


def compressed(spec: Decode, length: int) -> int:
    """How many compressed tokens `length` tokens have."""
    if length < spec.compress_block:
        return 0
    return (length - spec.compress_block) // spec.stride + 1


def exact(x):
    return x


def attend(query, keys, values, scale, rounded=exact):
    """Output `[G, Dv]` and probabilities `[G, keys]` of one token; 0 where there is no key."""
    if not len(keys):
        return np.zeros((len(query), values.shape[1])), np.zeros((len(query), 0))
    s = query @ keys.T * scale
    p = np.exp(s - s.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return rounded(rounded(p) @ values), p


def block_scores(spec: Decode, p, blocks: int):
    """Eq. 9 and 10, of probabilities `[G, count]`: each stride has the mass of the compressed
    tokens that cover it, a block that of its strides.
    """
    cover, per_block = spec.compress_block // spec.stride, spec.block // spec.stride
    strides = np.zeros(blocks * per_block + cover)
    for i, x in enumerate(p.sum(0)):
        strides[i : i + cover] += x
    return strides[: blocks * per_block].reshape(blocks, per_block).sum(1)


def selected(spec: Decode, score) -> list[int]:
    """Eq. 11: forced blocks, then the best, ties to the lower block."""
    blocks = len(score)
    forced = {j for j in range(blocks) if j < spec.num_initial or j >= blocks - spec.num_local}
    others = sorted(set(range(blocks)) - forced, key=lambda j: (-score[j], j))
    return sorted(forced | set(others[: spec.n - len(forced)]))


def one_token(made: Problem, b: int, i: int, g: int, chosen=None, rounded=exact):
    """Output `[G, Dv]`, scores and blocks of token `i` of row `b` and key/value head `g`.

    `chosen`: blocks to attend to in place of its own; `rounded`: what low precision does to
    probabilities and to the output of a branch.
    """
    spec = made.spec
    seen = made.lengths[b] - spec.q_len + i + 1
    token, heads = b * spec.q_len + i, slice(g * spec.G, (g + 1) * spec.G)
    if seen <= 0:
        return np.zeros((spec.G, spec.Dv)), np.zeros(0), []
    query = made.arrays["query"][token, heads].astype(np.float64)
    (ck, cv), (sk, sv), (wk, wv) = (
        [x[:, g] for x in made.rows[b][branch]]
        for branch in ("compressed", "selected", "sliding")
    )
    count = compressed(spec, seen)
    out_compressed, p = attend(query, ck[:count], cv[:count], spec.scale, rounded)
    score = block_scores(spec, p, -(-seen // spec.block))
    blocks = selected(spec, score)
    used = blocks if chosen is None else chosen
    keys = [u for u in range(seen) if u // spec.block in used]
    first = max(seen - spec.window, 0)
    outs = [
        out_compressed,
        attend(query, sk[keys], sv[keys], spec.scale, rounded)[0],
        attend(query, wk[first:seen], wv[first:seen], spec.scale, rounded)[0],
    ]
    gates = made.arrays["gates"][token, heads].astype(np.float64)
    return sum(gates[:, c, None] * out for c, out in enumerate(outs)), score, blocks
