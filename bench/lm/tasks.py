"""Adds tasks to rows of text, and measures how many tasks a model solves. The share is measured by
the distance between the two parts of a task.

A row is divided into slots of 64 tokens, at a random offset. Some slots form pairs of slots. The
distance between the two slots of a pair has a log-uniform distribution. Most pairs of slots contain
the same record in both slots, at a random position in each slot:

    source   .. marker key key value ..    copy   .. marker key key value ..

Since keys and values are random, a model can predict the value in the copy only by finding the
source among all records of the row. The task is multi-query associative recall (arXiv 2312.04927).
Every fifth pair of slots has no record. In a pair of slots without a record, the second slot
repeats the text of the first slot.
"""

from typing import Any

import numpy as np

from nsa_core.layer import LayerSpec

from .data import Batch, Edited
from .learner import Learner
from .measures import HeldOut, free_choice
from .recall import PASSAGE

# The last 64 tokens of the vocabulary are keys and values. The token before them is the marker.
SYMBOLS = 64
RECORD = 4  # number of tokens of a record
ROWS = 64  # number of measured rows
NEEDLE_ROWS, NEEDLE_DEPTHS = 16, (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)
NEEDLE_LENGTHS = (1024, 2048, 4096, 8192, 16384)


def records(random: np.random.Generator, count: int, vocabulary: int) -> np.ndarray:
    """Return `count` records with different pairs of keys, `[count, RECORD]`."""
    keys = random.choice(SYMBOLS**2, count, replace=False)
    value = random.integers(0, SYMBOLS, count)
    symbols = np.stack([keys // SYMBOLS, keys % SYMBOLS, value], axis=1) + vocabulary - SYMBOLS
    return np.insert(symbols, 0, vocabulary - SYMBOLS - 1, axis=1)


def place(row: np.ndarray, random: np.random.Generator, vocabulary: int) -> np.ndarray:
    """Replace parts of `row` by tasks, in place. The number of pairs of slots is a third of the
    number of slots.

    Returns:
      `[records, 2]`: the positions of the value of each record, in the source and in the copy.
    """
    begin = int(random.integers(PASSAGE))
    slots = (len(row) - begin) // PASSAGE
    free, pairs = set(range(slots)), []
    while len(pairs) < slots // 3:
        apart = int(np.exp(random.uniform(0, np.log(slots))))  # 1 .. slots - 1
        first = int(random.integers(slots - apart))
        if {first, first + apart} <= free:
            free -= {first, first + apart}
            pairs.append((first, first + apart))
    starts = begin + PASSAGE * np.array(pairs, int).reshape(-1, 2)
    for source, copy in starts[4::5]:
        row[copy : copy + PASSAGE] = row[source : source + PASSAGE]
    starts = np.delete(starts, np.s_[4::5], axis=0)
    starts += random.integers(0, PASSAGE - RECORD + 1, starts.shape)
    for both, record in zip(starts, records(random, len(starts), vocabulary), strict=True):
        for start in both:
            row[start : start + RECORD] = record
    return starts + RECORD - 1


class Tasks(Edited):
    """`Batches` in which a share of the training rows contains tasks. Held-out rows contain no
    tasks.

    Args:
      share: Probability that a row contains tasks.

    Raises:
      ValueError: Rows have several documents or are shorter than four slots, or the vocabulary is
        too small.
    """

    numbers = 7

    def __init__(self, *given, share: float, **more):
        super().__init__(*given, **more)
        self.share = share
        if self.pack == "documents" or self.shape[1] < 4 * PASSAGE:
            raise ValueError(
                "rows with tasks must come from one text (pack other than 'documents') and have at "
                f"least {4 * PASSAGE} tokens, got pack={self.pack!r} and rows of {self.shape[1]} "
                "tokens"
            )
        if self.vocabulary < 2 * SYMBOLS:
            raise ValueError(
                f"vocabulary must be at least {2 * SYMBOLS} for rows with tasks, got "
                f"{self.vocabulary}"
            )
        self.sha256 = f"{self.sha256[:48]}-tasks-{share}"

    def edit(self, row: np.ndarray, random: np.random.Generator) -> None:
        if random.random() < self.share:
            place(row, random, self.vocabulary)


def measured(learner: Learner, batches: Tasks, layer: LayerSpec) -> dict[str, Any]:
    """Return the fields `records_at` and `needle` of `log.Summary`. Every process must call this
    function."""
    return {
        "records_at": records_at(learner, batches, layer),
        "needle": needle(learner, batches),
    }


def records_at(learner: Learner, batches: Tasks, layer: LayerSpec) -> dict[str, Any]:
    """Measure held-out rows with tasks.

    Returns:
      Measures by distance in tokens from source to copy. The name of an entry is a power of two. An
      entry covers the distances from its name up to the next power of two; "64" includes shorter
      distances. `solved` is the share of values that are solved, and `loss` is the mean loss of the
      values. For NSA `hit` is how often the best head selects the block of the source, and `chance`
      is how often a random selection would select this block. One half of the rows determines the
      best head, and the hits of this head are measured on the other half.
    """
    random = np.random.default_rng((batches.seed, 8))
    rows = batches.evaluation(max(2, ROWS // batches.shape[0]))
    rows = [Batch(x.tokens.copy()) for x in rows]
    where = [[place(row, random, batches.vocabulary) for row in x.tokens] for x in rows]
    values = [
        [(number, *at) for number, row in enumerate(each) for at in row] for each in where
    ]
    losses = value_losses(learner, rows, [[(r, at) for r, _, at in x] for x in values])
    apart = np.array([copy - source for x in values for _, source, copy in x])
    octave = 2 ** np.log2(apart).clip(6).astype(int)
    found = {
        str(x): {"solved": solved(losses[octave == x]), "loss": losses[octave == x].mean()}
        for x in sorted({*octave.tolist()})
    }
    observed = [
        _hits(learner, batch, row, at, layer)
        for batch, each in zip(rows, where, strict=True)
        for row, at in enumerate(each)
    ]
    hits = [x for x in observed if x is not None]
    if not hits:
        return found
    of_row = np.concatenate([np.full(len(x), i % 2) for i, x in enumerate(hits)])
    hit = np.concatenate(hits)  # [records, 1 + layers x heads]: chance, and each head
    far = octave >= layer.w
    best = [1 + np.nanmean(hit[far & (of_row == i), 1:], axis=0).argmax() for i in (0, 1)]
    own = np.where(of_row, hit[:, best[0]], hit[:, best[1]])
    for x, values_of in found.items():
        free = (octave == int(x)) & ~np.isnan(hit[:, 0])
        if free.any():
            values_of |= {"hit": own[free].mean(), "chance": hit[free, 0].mean()}
    return found


def _hits(
    learner: Learner, batch: Batch, row: int, at: np.ndarray, layer: LayerSpec
) -> np.ndarray | None:
    """Return `[records, 1 + layers x heads]` for a row: the chance that a random selection contains
    the block of the source, then whether each head of each layer selects this block. A record whose
    block is always selected has NaN. If the model selects no blocks, return None.
    """
    indices = [x for _, x in learner.observe(batch, row)]
    if not indices:
        return None
    source, query = at[:, 0] // layer.config.select_block, at[:, 1] - 1
    free, chance = free_choice(query, source, layer.config)
    heads = [(x[query] == source[:, None, None]).any(-1) for x in indices]
    found = np.column_stack([chance, *heads]).astype(float)
    found[~free] = np.nan
    return found


def needle(learner: Learner, batches: Tasks) -> dict[str, list[float]]:
    """Measure held-out rows with a single record, whose copy is at the end of the row. For each
    length of a row and each of `NEEDLE_DEPTHS`, return how often the value is solved. Depth 0
    means a source at the beginning of the row. Rows are up to twice as long as the rows in
    training.
    """
    found = {}
    count = max(1, NEEDLE_ROWS // batches.shape[0])
    for length in NEEDLE_LENGTHS:
        if length > min(2 * (batches.shape[1] - 1), len(batches.held_out) - 1):
            break
        shares = []
        for depth in NEEDLE_DEPTHS:
            random = np.random.default_rng((batches.seed, 9, length, int(100 * depth)))
            rows = [_with_needle(batches, random, length, depth) for _ in range(count)]
            last = [[(row, length) for row in range(len(x.tokens))] for x in rows]
            shares.append(solved(value_losses(learner, rows, last)))
        found[str(length)] = shares
    return found


def _with_needle(
    batches: Tasks, random: np.random.Generator, length: int, depth: float
) -> Batch:
    """Return a batch of held-out rows of `length` + 1 tokens, each with one record at `depth`."""
    starts = random.integers(0, len(batches.held_out) - length, batches.shape[0])
    tokens = batches.held_out[starts[:, None] + np.arange(length + 1)]
    source = int(depth * (length + 1 - 2 * RECORD))
    for row in tokens:
        row[source : source + RECORD] = row[-RECORD:] = records(random, 1, batches.vocabulary)[
            0
        ]
    return Batch(tokens)


def value_losses(
    learner: Learner, rows: list[Batch], values: list[list[tuple[int, int]]]
) -> np.ndarray:
    """Return the losses of single tokens. `values` has the row and the position of each token, for
    each batch.
    """
    count, following = sum(map(len, values)), 0
    which = [np.full((len(x.tokens), x.tokens.shape[1] - 1), count, np.int32) for x in rows]
    for each, tokens in zip(which, values, strict=True):
        for row, at in tokens:
            each[row, at - 1] = following
            following += 1
    return HeldOut(rows, which).sums(learner, count)


def solved(losses: np.ndarray) -> float:
    """Return the share of tokens to which the model gives a probability over 1/2."""
    return float((losses < np.log(2)).mean())
