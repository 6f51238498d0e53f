"""The sizes of an indexer's blocks and their checks, for both frameworks."""

from typing import Any, NamedTuple

from nsa_core import block_lists, validate, validate_paged
from nsa_core.config import MAX_SIZE, NSAConfig

ACTIVATIONS, REDUCTIONS = (None, "relu"), (None, "sum")
MAX_POOL = 256  # keys of a block that kernels take


class Index(NamedTuple):
    """The rule from scores of keys to blocks. The fields are arguments of `index_blocks`."""

    pool: int
    num_selected: int
    num_initial: int
    num_local: int
    activation: str | None
    reduce: str | None
    entry: int

    @property
    def config(self) -> NSAConfig:
        """The config of the top-n, which counts in tokens."""
        block = self.pool * self.entry
        forced = self.num_initial, self.num_local
        return NSAConfig(block, block, block, self.num_selected, *forced, 0)

    def num_blocks(self, rows: int) -> int:
        """The number of blocks of `rows` keys."""
        return -(-rows // self.pool)

    def lists(self, heads: int) -> int:
        """The number of lists per query."""
        return heads if self.reduce is None else 1


def _checked(index: Index, keys: int) -> Index:
    """The index as it counts in 32 bits: a pool beyond all `keys` is all of them."""
    validate.sizes(pool=index.pool, entry=index.entry)
    # What kernels take for a pool does not follow the number of keys.
    pool = block_lists.within(index.pool, max(keys, MAX_POOL - 1))
    most = MAX_SIZE // max(pool, keys + 1)
    if index.entry > most:
        raise ValueError(f"entry must be at most {most} for {keys} keys, got {index.entry}")
    index = index._replace(pool=pool)
    _ = index.config  # checks the rest
    for name, allowed in (("activation", ACTIVATIONS), ("reduce", REDUCTIONS)):
        validate.one_of(name, getattr(index, name), allowed)
    return index


def check_paged(query, pages, page_table, lengths, starts, index: Index) -> Index:
    """Check the shapes and dtypes of `paged_index_blocks`' arguments; `starts` is `cu_seqlens_q`.
    Returns the index to use.

    Raises:
      ValueError: an argument that nothing takes.
    """
    validate.queries(query, "index_query", 3)
    validate.array("index_key_pages", pages, (None, None, query.shape[2]), index_query=query)
    validate.sizes(num_pages=pages.shape[0], keys_a_page=pages.shape[1])
    validate_paged.table(page_table, lengths)
    validate_paged.rows("index_query", query.shape[0], lengths, starts)
    return _checked(index, page_table.shape[1] * pages.shape[1])


def check(query, key, index: Index, packed: bool) -> Index:
    """Check the shapes and dtypes of `index_blocks`' arguments. Returns the index to use.

    Raises:
      ValueError: an argument that no implementation takes.
    """
    validate.queries(query, "index_query")
    batch, length, _, width = query.shape
    validate.array("index_key", key, (batch, None, width), index_query=query)
    if packed and index.entry != 1:
        raise ValueError(f"entry must be 1 in packed rows, got {index.entry}")
    if packed and key.shape[1] != length:
        raise ValueError(
            "index_key must be as long as index_query in packed rows, "
            f"got {key.shape[1]} and {length}"
        )
    return _checked(index, key.shape[1])


def implementation(asked: str | None, plain: str, *reasons: str | bool | None) -> str:
    """The name of the chosen implementation: `triton`, or the plain one of a framework.

    Args:
      asked: The name of one of the two. By default the kernels run if they support the call.
      reasons: Why the kernels do not support the call; empty if they do.

    Raises:
      ValueError: No implementation has the name `asked`.
      NotImplementedError: The named one does not support the call.
    """
    known = "triton", plain
    if asked is not None:
        validate.one_of("implementation", asked, known)
    reason = next((x for x in reasons if x), None)
    if asked == "triton" and reason:
        raise NotImplementedError(f"implementation 'triton' {reason}")
    return plain if reason or asked == plain else "triton"


def key_length(kv_len: Any, length: int, rows: int, entry: int) -> Any:
    """`kv_len` in tokens, from an argument that may be None.

    Raises:
      ValueError: There are fewer tokens than queries, or more than keys.
    """
    if kv_len is None:
        kv_len = rows if entry == 1 else length
    if isinstance(kv_len, int) and (kv_len < length or kv_len // entry > rows):
        raise ValueError(
            f"kv_len must be from T={length} to the tokens of {rows} keys of entry={entry}, "
            f"got {kv_len}"
        )
    return kv_len
