"""Block attention, an indexer's lists and its loss, by dense masks in float64 with autograd."""

import dataclasses
import functools

import numpy as np
import torch

from tests.oracles import nsa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem of all three.

    segments: lengths of packed sequences, then padding. lengths: valid keys of each row; counts: of
    its queries, the first ones. page: index keys of a page. every: the loss is of all keys;
    other_lse: named blocks have the log-sum-exp of all keys. equal: many scores are the same;
    highest: the key whose score alone is not 0.
    """

    B: int = 2
    T: int = 40
    S: int = 70
    segments: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | int | None = None
    counts: tuple[int, ...] | None = None
    page: int | None = None
    block: int = 16
    n: int = 3
    H: int = 4
    Hkv: int = 2
    G: int = 2
    D: int = 16
    Dv: int = 8
    include: str = "selected"
    scale: float | None = None
    lse_alone: bool = False
    Hi: int = 2
    Di: int = 16
    entry: int = 1
    initial: int = 0
    local: int = 1
    activation: str | None = None
    reduce: str | None = None
    equal: bool = False
    highest: int | None = None
    index_scale: float = 0.6
    every: bool = False
    other_lse: bool = False
    dtype: str | None = None

    @property
    def pool(self) -> int:
        return self.block // self.entry

    @property
    def lengths_of_rows(self) -> torch.Tensor:
        found = self.lengths or self.S
        return torch.tensor((found,) * self.B if isinstance(found, int) else found)[:, None]


@functools.cache
def places(case: Case):
    """Of keys `[B, S]` their sequence, -1 for padding, and position in it; of queries `[B, T]`
    their place among the keys, negative for padding.
    """
    index = torch.arange(case.S).expand(case.B, -1)
    position, sequence = index, torch.where(index < case.lengths_of_rows, 0, -1)
    if case.segments is not None:
        ends = torch.tensor(case.segments).cumsum(0)
        number = torch.bucketize(index, ends, right=True)
        position = index - torch.cat([torch.zeros(1, dtype=torch.long), ends])[number]
        sequence = torch.where(index < ends[-1], number, -1)
    counts = torch.tensor(case.counts or (case.T,) * case.B)[:, None]
    query = torch.arange(case.T)
    at = torch.where(query < counts, case.lengths_of_rows - counts + query, -1)
    return sequence, position, at


def positions(case: Case) -> torch.Tensor:
    """`[B, T]` of queries in their sequences, negative for padding."""
    sequence, position, at = places(case)
    inside = at.clamp(min=0)
    return position.gather(1, inside).where((at >= 0) & (sequence.gather(1, inside) >= 0), -1)


@functools.cache
def seen(case: Case) -> torch.Tensor:
    """`[B, T, S]`: the keys of a query's sequence at or before it."""
    sequence, _, at = places(case)
    own = sequence.gather(1, at.clamp(min=0)).where(positions(case) >= 0, -2)
    return (sequence[:, None] == own[..., None]) & (torch.arange(case.S) <= at[..., None])


@functools.cache
def tensors(case: Case) -> dict[str, torch.Tensor]:
    """Arrays, and gradients of results, float64 that the case's dtype holds."""
    rows, keys = (case.B, case.T), (case.B, case.S)
    shapes = {
        "query": (*rows, case.H, case.D),
        "key": (*keys, case.Hkv, case.D),
        "value": (*keys, case.Hkv, case.Dv),
        "out": (*rows, case.H, case.Dv),
        "lse": (*rows, case.H),
        "loss": (*rows, case.Hi),
        "index_query": (*rows, case.Hi, case.Di),
        "index_key": (case.B, case.S // case.entry, case.Di),
    }
    rng = np.random.default_rng(2)
    found = {}
    for name, shape in shapes.items():
        if case.equal and name.startswith("index"):
            found[name] = torch.tensor(rng.integers(-1, 2, size=shape)).double()
        else:
            dtype = torch.float32 if name in ("lse", "loss") else getattr(torch, case.dtype)
            found[name] = torch.tensor(rng.normal(size=shape)).to(dtype).double()
    if case.highest is not None:
        found["index_query"].fill_(1), found["index_key"].zero_()[:, case.highest].fill_(1)
    return found


@functools.cache
def lists(case: Case) -> torch.Tensor:
    """Random blocks in any order, none twice: of the future, beyond the keys, some of numbers whose
    multiples are small in 32 bits, empty anywhere; the own block not where the tail has it.
    """
    rng = np.random.default_rng(3)
    shape = case.B, case.T, case.G
    blocks = max(-(-case.S // case.block) + 3, case.n)
    order = rng.permuted(np.broadcast_to(np.arange(blocks), (*shape, blocks)), axis=-1)
    found = torch.tensor(order[..., : case.n])
    found[found == blocks - 1] = 2**31 - 1
    found[found == blocks - 2] = 2**30  # four times this is 0
    found[torch.tensor(rng.uniform(size=found.shape)) < 0.3] = -1
    found[:, ::7] = -(2**31)
    own = positions(case)[..., None, None] // case.block
    return found.masked_fill((found == own) & (case.include == "tail"), -1).int()


@functools.cache
def named(case: Case) -> torch.Tensor:
    """`[B, T, G, S]`: what a query sees of the blocks that its lists name."""
    block, own = places(case)[1] // case.block, positions(case)
    found = (lists(case)[..., None] == block[:, None, None, None]).any(3)
    if case.include == "tail":
        tail = (block[:, None] == (own // case.block)[..., None]) & (
            (own + 1) % case.block != 0
        )[..., None]
        found |= tail[:, :, None]
    return found & seen(case)[:, :, None]


def leaves(case: Case, dtype, *names):
    return [tensors(case)[name].to(DEVICE, dtype, copy=True).requires_grad_() for name in names]


def attended(case: Case, mask, query, key, value):
    """Output, log-sum-exp and probabilities `[B, H, T, S]`, of a mask of any number of heads."""
    key, value = (x.repeat_interleave(case.H // case.Hkv, 2) for x in (key, value))
    mask = mask.to(DEVICE).transpose(1, 2).repeat_interleave(case.H // mask.shape[2], 1)
    out, lse, probs = nsa.attend(query, key, value, mask, case.scale)
    return out, lse, probs[:, :, 0]


@functools.cache
def block_attention(case: Case, dtype=torch.float64) -> list[torch.Tensor]:
    """The output, the log-sum-exp, and gradients of query, key and value."""
    inputs = leaves(case, dtype, "query", "key", "value")
    results = attended(case, named(case), *inputs)[:2]
    moving = slice(case.lse_alone, None)
    given = [tensors(case)[name].to(DEVICE, dtype) for name in ("out", "lse")]
    options = {"materialize_grads": True, "allow_unused": True}
    grads = torch.autograd.grad(results[moving], inputs, given[moving], **options)
    return [x.detach().cpu() for x in (*results, *grads)]


@functools.cache
def index_blocks(case: Case) -> list[torch.Tensor]:
    """Lists `[B, T, Hi or 1, n]`, ascending: forced blocks, and those of the highest scores; of
    equal scores the lower block.
    """
    query, key = (tensors(case)[name].to(DEVICE) for name in ("index_query", "index_key"))
    scores = torch.einsum("bthd,bsd->bths", query, key)
    scores = scores.relu() if case.activation else scores
    scores = scores.sum(2, keepdim=True) if case.reduce else scores
    last = slice(case.entry - 1, key.shape[1] * case.entry, case.entry)  # token of each key
    hidden = ~seen(case)[:, :, last, None].to(DEVICE).transpose(2, 3)
    block = (places(case)[1][:, last] // case.block).to(DEVICE)[:, None, None]
    number = -(-case.S // case.block)
    best = scores.new_full((*scores.shape[:3], number), -torch.inf)
    scores = scores.masked_fill(hidden, -torch.inf)
    best.scatter_reduce_(3, block.expand(scores.shape), scores, "amax")
    own = (positions(case)[..., None, None] // case.block).to(DEVICE)
    each = torch.arange(number, device=DEVICE)
    forced = (each <= own) & ((each < case.initial) | (each > own - case.local))
    best = torch.nn.functional.pad(
        best.masked_fill(forced, torch.inf), (0, case.n), value=-torch.inf
    )
    order = best.sort(dim=-1, descending=True, stable=True).indices[..., : case.n]
    order = order.masked_fill(best.gather(-1, order) == -torch.inf, 2**31 - 1).sort(-1).values
    return [order.masked_fill(order == 2**31 - 1, -1).int().cpu()]


@functools.cache
def main(case: Case):
    """What the loss is given of the attention: the log-sum-exp `[B, T, H]`, and probabilities."""
    mask = seen(case)[:, :, None] if case.every or case.other_lse else named(case)
    given = (tensors(case)[name].to(DEVICE) for name in ("query", "key", "value"))
    _, lse, probs = attended(case, mask, *given)
    return lse.cpu(), probs.transpose(1, 2)


@functools.cache
def indexer_kl(case: Case) -> list[torch.Tensor]:
    """The loss, and gradients of index queries and keys."""
    mask = (seen(case)[:, :, None] if case.every else named(case)).to(DEVICE)
    mask = mask.repeat_interleave(case.Hi // mask.shape[2], 2)
    target = main(case)[1].unflatten(2, (case.Hi, -1)).mean(3).masked_fill(~mask, 0)
    inputs = leaves(case, torch.float64, "index_query", "index_key")
    scores = torch.einsum("bthd,bsd->bths", *inputs) * case.index_scale
    scores = scores.masked_fill(~mask, -torch.inf).masked_fill(~mask.any(-1, keepdim=True), 0)
    log_probs = scores.log_softmax(-1).masked_fill(~mask, 0)
    loss = (torch.xlogy(target, target) - target * log_probs).sum(-1)
    grads = torch.autograd.grad(loss, inputs, tensors(case)["loss"].to(DEVICE))
    return [x.detach().cpu() for x in (loss, *grads)]
