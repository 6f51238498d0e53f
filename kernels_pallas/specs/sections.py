"""What one launch writes of several tables of a packed row (`kernels_pallas.triton.tables`): each
table, or a part of it, is a section.
"""

from typing import NamedTuple


class Kinds(NamedTuple):
    """What a section's numbers are."""

    # Of queries, by tiles of neighbouring ones:
    tokens: int  # `nsa_core.varlen.Tokens`
    by_row: int  # `key_bounds.by_row` of one or two columns of `Tokens`
    # by tiles of one sequence each (`nsa_core.varlen.QueryTiles`):
    candidate_rows: int  # of `mosaic_forward._candidates_of_tiles` bounds by row,
    query_tiles: int
    candidate_tokens: int  # own and first blocks,
    candidate_spans: int  # and blocks that a tile spans
    # Of keys:
    key_tiles: int
    places_of_keys: int
    # Of intervals:
    parts: int  # `work_items.PART_COLUMNS` of each 64 keys
    items: int  # `work_items.interval_work_items`


KINDS = Kinds(*range(len(Kinds._fields)))


class Section(NamedTuple):
    """Integers that a kernel reads; `_at` and `out`: where numbers begin, in all that is written.

    Attributes:
      begin: its first program.
      kind: one of `KINDS`.
      out: where it begins; a second array of the kind stands `pitch` numbers behind the first.
      total: numbers of an array, or items.
      tokens, group, rows: of a tile of queries.
      first, last: columns of `Tokens`; negative: none.
      runs_at: the tiles of queries before each sequence, its first query and last + 1.
      ratio, block: compressed tokens of a block, and its keys.
      query_tiles: of all tokens.
      parts_at, before_at, firsts_at, counts_at: of an interval's work items.
      columns: numbers of a tile in `parts`.
      tiles, keys: of keys, and how many are in one.
      heads, partials, span, segments, segment_tiles, streams: of `IntervalSplit`; `span`: query
        tiles of a segment.
    """

    begin: int = 0
    kind: int = 0
    out: int = 0
    total: int = 0
    pitch: int = 0
    tokens: int = 1
    group: int = 1
    rows: int = 1
    first: int = -1
    last: int = -1
    runs_at: int = 0
    ratio: int = 1
    block: int = 1
    query_tiles: int = 0
    parts_at: int = 0
    before_at: int = 0
    firsts_at: int = 0
    counts_at: int = 0
    columns: int = 0
    tiles: int = 0
    keys: int = 1
    heads: int = 1
    partials: int = 0
    span: int = 1
    segments: int = 1
    segment_tiles: int = 1
    streams: int = 0


AT = Section(*range(len(Section._fields)))  # where each stands in a row

SECTIONS = 32  # of a launch at most
INTS = 32  # of a row of the table of sections
NEVER = 2**31 - 1  # `begin` of a row that is none
PITCH = 64  # numbers, of which rows of `Sequences` and what kernels read begin at a multiple
RUN_ROWS = 3  # of `runs_at`
PROGRAM = 512  # numbers of a program
PART_KEYS = 64  # keys of `PARTS`
