"""Measures a model on held-out text. The measures are the loss by kind of target, and the use of
copies.

A target is a token that is predicted. The kind of a target depends on the n-gram that ends with
the target:

- `new`: the n-gram did not occur earlier in the row.
- `near`: the last occurrence of the n-gram is within the sliding window.
- `far`: the last occurrence of the n-gram is beyond the sliding window. Only the compressed and the
  selected branch can reach this occurrence.

A category is a kind and the part of the row in which the target is. Every process sums the losses
of its own rows by category. All mean losses follow from these sums by category.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from nsa_core.config import NSAConfig
from nsa_core.layer import LayerSpec

from . import recall, share
from .data import Batch, joined
from .learner import Learner
from .recall import PASSAGE

KINDS = ("new", "near", "far")
PARTS = ("first quarter", "second quarter", "second half")
CATEGORIES = len(KINDS) * len(PARTS)
# Length of the n-grams: three tokens of a tokenizer, or eight bytes.
ORDER, BYTES_ORDER = 3, 8
# distances in tokens from a passage to its copy
DISTANCES = (128, 256, 512, 1024, 2048, 4096, 6000)
# number of tokens between the window and the passage that heads have to find
BEYOND = 2 * PASSAGE
# number of rows with a copy whose selection is observed; the second number applies if `thorough`
OBSERVED_ROWS = 4, 32
KNOWN = 7  # number of tokens of a copy before the first query whose selection is judged


def loss(learner: Learner, batch: Batch) -> float:
    """Return the mean loss in nats per token of a batch. `batch` has the rows of this process."""
    which = np.zeros((len(batch.tokens), batch.tokens.shape[1] - 1), np.int32)
    total = sum(learner.ranks.gather(share.count(batch)))
    return float(learner.loss_sums(batch, which, 1)[0] / max(1, total))


def kinds(batch: Batch, order: int, window: int) -> np.ndarray:
    """Return the index in `KINDS` of each target, int8 `[rows, length]`.

    Args:
      batch: The rows.
      order: Length of the n-gram that ends with the target. Occurrences in other rows, or in other
        documents of a packed row, do not count.
      window: An occurrence is near if it is fewer than this number of tokens before the target.
    """
    tokens, segments = batch
    found = np.zeros((len(tokens), tokens.shape[1] - 1), np.int8)
    for number, (row, of) in enumerate(zip(tokens, found, strict=True)):
        size, data = row.itemsize, row.tobytes()
        document = None if segments is None else segments[number]
        seen: dict[Any, int] = {}
        for at in range(order - 1, len(row)):
            gram = data[(at - order + 1) * size : (at + 1) * size]
            if document is not None:
                gram = int(document[at]), gram
            if gram in seen:
                of[at - 1] = 1 if at - seen[gram] < window else 2
            seen[gram] = at
    return found


def categories(batch: Batch, window: int, vocabulary: int) -> np.ndarray:
    """Return the category of each target, int32 `[rows, length]`. A category is a kind and a part
    of the row. A target without a loss has `CATEGORIES`.
    """
    order = ORDER if vocabulary > 256 else BYTES_ORDER
    length = batch.tokens.shape[1] - 1
    part = np.searchsorted([length // 4, length // 2], np.arange(length), side="right")
    found = kinds(batch, order, window).astype(np.int32) * len(PARTS) + part.astype(np.int32)
    which = share.counted(batch)
    return found if which is None else np.where(which, found, np.int32(CATEGORIES))


def of(sums: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Return mean losses by name. There is one mean over all targets, one per kind, and one per
    part of the row. `sums` and `counts` have one entry per category. A mean without targets is
    omitted.
    """
    sums, counts = (x.reshape(len(KINDS), len(PARTS)) for x in (sums, counts))
    named = {"loss": (sums.sum(), counts.sum())}
    named |= {name: (sums[i].sum(), counts[i].sum()) for i, name in enumerate(KINDS)}
    named |= {name: (sums[:, i].sum(), counts[:, i].sum()) for i, name in enumerate(PARTS)}
    return {name: float(total / number) for name, (total, number) in named.items() if number}


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Whole held-out batches, which are equal in every process, and the categories of their
    targets.
    """

    batches: Sequence[Batch]
    categories: Sequence[np.ndarray]

    @classmethod
    def of(cls, batches: Sequence[Batch], window: int, vocabulary: int) -> "HeldOut":
        """Return `batches` with their categories. `window` and `vocabulary` belong to the
        model."""
        return cls(batches, [categories(x, window, vocabulary) for x in batches])

    def every(self, count: int) -> "HeldOut":
        """Return every `count`-th batch, beginning with the first."""
        return HeldOut(self.batches[::count], self.categories[::count])

    def measured(self, learner: Learner) -> dict[str, float]:
        """Return the means (`of`) for the current model. Every process must call this method."""
        counts = np.zeros(CATEGORIES)
        for which in self.categories:
            counts += np.bincount(which.ravel(), minlength=CATEGORIES + 1)[:CATEGORIES]
        return of(self.sums(learner, CATEGORIES), counts)

    def sums(self, learner: Learner, count: int) -> np.ndarray:
        """Return the sums of losses by category, for categories below `count`. Every process must
        call this method.
        """
        found = np.zeros(count)
        for batch, which in zip(self.batches, self.categories, strict=True):
            mine = learner.share.of_whole(batch), learner.share.rows_of(which)
            found += learner.loss_sums(*mine, count)
        return found


def copies(
    learner: Learner,
    held_out: Sequence[Batch],
    layer: LayerSpec,
    seed: tuple[int, ...],
    thorough: bool = False,
) -> dict[str, Any]:
    """Measure how much an earlier passage helps on held-out text (`recall`), and how often
    selections contain that passage (`hit`). Return fields of `log.Summary`, or no fields if rows
    are too short. Every process must call this function.

    Args:
      learner: The learner.
      held_out: Batches of held-out text.
      layer: Sizes of the attention layer.
      seed: Seed of the positions of passages.
      thorough: Whether to measure more rows, and to measure also by distance and by head. A
        thorough measurement takes minutes on a CPU.
    """
    whole = joined(list(held_out))
    starts = recall.passages(whole, layer.w, seed)
    if starts is None:
        return {}
    count, width = whole.tokens.shape
    which = np.ones((count, width - 1), np.int32)
    which[:, -PASSAGE:] = 0

    def loss(batch: Batch) -> float:
        """Return the mean loss of the last `PASSAGE` tokens of the rows."""
        parts = share.split(batch, len(held_out)), np.split(which, len(held_out))
        return float(HeldOut(*parts).sums(learner, 1)[0]) / (count * PASSAGE)

    rows = recall.copies(whole, starts)
    read, control, unread = map(loss, rows)
    gains: dict[str, Any] = {"recall_gain": control - read, "copied_gain": unread - read}
    if thorough:
        gains["copied_at"] = {}
        for distance in DISTANCES:
            if PASSAGE + distance <= width:
                start = np.full(count, width - PASSAGE - distance)
                read, _, unread = recall.copies(whole, start)
                gains["copied_at"][str(distance)] = loss(unread) - loss(read)
    looked_at = min(OBSERVED_ROWS[thorough], count)
    observed = np.linspace(0, count - 1, looked_at).astype(int).tolist()

    def hits(batch: Batch, starts: np.ndarray) -> np.ndarray:
        """Return the hits `[rows, layers, heads, 2]` of the observed rows that have hits."""
        found = [
            [hit(x, int(starts[row]), layer.config) for _, x in learner.observe(batch, row)]
            for row in observed
        ]
        # a row has values in every layer, or in none
        return np.array([x for x in found if x and x[0] is not None], dtype=float)

    at_random = hits(rows.read, starts)
    if not at_random.size:
        return gains
    gains["hits"] = at_random.mean(axis=(0, 2)).tolist()
    begin = width - PASSAGE - layer.w - BEYOND
    if thorough and begin >= 0:
        starts = np.full(count, begin)
        read, _, unread = recall.copies(whole, starts)
        both = np.stack([hits(x, starts) for x in (read, unread)], axis=-1)
        if len(both) > 1:
            both = both[..., 0, :]
            halves = [both[half::2].mean(axis=0) for half in (0, 1)]
            gains["heads"] = np.stack(halves, axis=2).tolist()
    return gains


def hit(indices: np.ndarray, start: int, config: NSAConfig) -> np.ndarray | None:
    """Measure how often the queries in a copy select the block that contains the next token.

    The row has T + 1 tokens and ends in a copy of an earlier passage. The token that follows a
    query also occurs in the earlier passage.

    Args:
      indices: Blocks that each query selects, `[T, heads, n]`, -1 in empty slots.
      start: Position of the first token of the passage.
      config: The config of the selection.

    Returns: `[heads, 2]`: for each head the share of its hits, and the share of hits of a random
      selection. A query whose block is forced does not count. The result is None if the block is
      forced for all queries.
    """
    length, block = len(indices), config.select_block
    query = np.arange(length - PASSAGE + 1 + KNOWN, length - 1)
    wanted = (start + query - (length - PASSAGE)) // block
    free, chance = free_choice(query, wanted, config)
    if not free.any():
        return None
    found = (indices[query] == wanted[:, None, None]).any(-1)[free].mean(axis=0)
    return np.stack([found, np.full(len(found), chance[free].mean())], axis=-1)


def free_choice(
    query: np.ndarray, wanted: np.ndarray, config: NSAConfig
) -> tuple[np.ndarray, np.ndarray]:
    """For each query position, return whether its selection may omit the block `wanted`, because
    that block is not forced. Also return the chance that a random selection contains a block that
    is not forced.
    """
    own, forced = query // config.select_block, config.num_initial + config.num_local
    free = (wanted >= config.num_initial) & (wanted <= own - config.num_local)
    chance = (config.num_selected - forced) / np.maximum(own + 1 - forced, 1)
    return free, np.minimum(chance, 1)


def found_by_best(heads: np.ndarray) -> tuple[float, float]:
    """Return the hits of the head that finds copies best, and the hits of this head with another
    text.

    One half of the rows determines the best head, and the hits of this head are measured on the
    other half, so that the result is unbiased.

    Args:
      heads: `[layers, heads, 2, 2]`. The third axis has the halves of the rows. The fourth axis has
        the hits, then the hits with another text.
    """
    heads = heads.reshape(-1, 2, 2)
    best = (heads[..., 0] - heads[..., 1]).argmax(axis=0)
    both = [heads[best[1 - half], half] for half in (0, 1)]
    hit, unread = np.mean(both, axis=0).tolist()
    return hit, unread
