"""Describes the sections that one launch writes for a packed row (`kernels_pallas.triton.tables`).

A section is a table, or a part of a table.
"""

from typing import NamedTuple


class Kinds(NamedTuple):
    """The kinds of content of a section."""

    # Kinds with numbers of queries, in the order of tiles of neighbouring queries:
    tokens: int  # `nsa_core.varlen.Tokens`
    by_row: int  # `key_bounds.by_row` of one or two columns of `Tokens`
    # Kinds with numbers of queries, in the order of tiles that each belong to one sequence
    # (`nsa_core.varlen.QueryTiles`). The candidates are the results of
    # `nsa_core.steps.mosaic_forward._candidates_of_tiles`:
    candidate_rows: int  # begin and end of the compressed keys to which each row attends
    query_tiles: int  # `QueryTiles`
    candidate_tokens: int  # own block of each token, and the block where its sequence begins
    candidate_spans: int  # number of blocks that the tokens of a tile span
    # Kinds with numbers of keys:
    key_tiles: int  # `nsa_core.varlen.KeyTiles`
    places_of_keys: int  # slot of each key
    # Kinds with numbers of intervals:
    parts: int  # `work_items.PART_COLUMNS` of each 64 keys
    items: int  # `work_items.interval_work_items`


KINDS = Kinds(*range(len(Kinds._fields)))


class Section(NamedTuple):
    """Integers that a kernel reads. `out` and the fields `.._at` are offsets in the output.

    Attributes:
      begin: Index of the first program of the section.
      kind: One of `KINDS`.
      out: Offset of the section. A second array of the same kind begins `pitch` numbers after
        the first.
      total: Number of entries of an array, or of work items.
      tokens: Number of tokens of a tile of queries.
      group: Number of heads per group of a tile of queries.
      rows: Number of rows of a tile of queries.
      first: Column of `Tokens`. A negative number means none.
      last: Column of `Tokens`. A negative number means none.
      runs_at: Offset of three arrays with an entry per sequence. The arrays have the number of
        query tiles before the sequence, the first query of the sequence, and the last query of the
        sequence + 1.
      ratio: Number of compressed tokens per block.
      block: Number of keys per block.
      query_tiles: Number of query tiles of all tokens.
      parts_at: Offset of an array of the work items of an interval.
      before_at: Offset of an array of the work items of an interval.
      firsts_at: Offset of an array of the work items of an interval.
      counts_at: Offset of an array of the work items of an interval.
      columns: Number of entries per tile in `parts`.
      tiles: Number of tiles of keys.
      keys: Number of keys per tile.
      heads: Number of key/value heads.
      partials: `partials` of `work_items.IntervalSplit`.
      segments: `segments` of `work_items.IntervalSplit`.
      segment_tiles: `tiles` of `work_items.IntervalSplit`.
      streams: `streams` of `work_items.IntervalSplit`.
      span: Number of query tiles of a segment.
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


AT = Section(*range(len(Section._fields)))  # index of each field in a row

SECTIONS = 32  # maximum number of sections per launch
INTS = 32  # length of a row of the table of sections
NEVER = 2**31 - 1  # `begin` of an unused row
PITCH = 64  # rows of `Sequences` and arrays that kernels read begin at multiples of 64 numbers
RUN_ROWS = 3  # number of arrays at `runs_at`
PROGRAM = 512  # entries per program
PART_KEYS = 64  # keys per entry of a section of the kind `parts`
