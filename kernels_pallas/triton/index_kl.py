"""Computes the KL divergence between an attention over listed blocks and the scores of an indexer,
and its gradients.

    t_j = mean over the heads of exp(scale q . k_j - lse)     p = softmax of index_scale iq . ik_j
    L   = sum_j t_j (log t_j - log p_j)                       dS_j = index_scale (p_j sum(t) - t_j)

The kernels are key-stationary. A program has the keys of a block and a part of its query list, for
one index head, and gathers the queries. Per entry, a program reads the rows of one query. A
query-stationary loop would read the `BLOCK` keys of the block per entry.

| kernel            | results                                                                      |
|-------------------|------------------------------------------------------------------------------|
| `kl_targets`      | t and sum t of each entry (query, slot)                                      |
| `kl_entries`      | max z, sum exp(z - max z) and sum t (log t - z) of each entry, with logits z |
| `kl_loss`         | log-sum-exp of z, sum t and L of each query, summed over all slots           |
| `kl_gradients`    | per entry, products of dS with the keys of the block; products with queries  |
| `kl_query_sums`   | sums of the products with keys, in the order of slots                        |
| `index_key_merge` | sums of the products with queries, in the order of entries                   |

`kl_gradients` computes z again, computes dS from t and z, and sums the products with the queries
over the entries of a work item.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.rows import (
    NEGATIVE_INFINITY,
    columns,
    dot,
    in_base_2,
    load_columns,
    load_rows,
    raised,
    store_rows,
)


@triton.jit
def _part_of(item, starts, ends, tile_of, tiles, items, c):
    """Return the row of the lists, the batch row, the index head and the tile of a work item, and
    the bounds of the item's entries.
    """
    row = (item // items).to(tl.int64)
    tile = tl.load(tile_of + item)
    near = tl.minimum(tile, tiles - 1)
    before = tl.load(ends + row * tiles + near - 1, mask=near > 0, other=0)
    list_at = starts + row * (tiles + 1) + near
    begin = tl.load(list_at) + (item % items - before) * c.SEGMENT
    end = tl.minimum(begin + c.SEGMENT, tl.load(list_at + 1))
    return row, row // c.INDEX_HEADS, row % c.INDEX_HEADS, tile, begin, end


@triton.jit
def _entries(order, at, end, COUNT, EACH):
    """Return `COUNT` entries of a query list from `at` on, each repeated `EACH` times. Entries
    past the end are 0.
    """
    place = at + tl.arange(0, COUNT * EACH) // EACH
    return tl.load(order + place, mask=place < end, other=0)


@triton.jit
def _number(entry, batch, T, head, c):
    """Return the index of an entry's token and head in `[B, T, INDEX_HEADS]`."""
    return (batch * T + entry // c.N) * c.INDEX_HEADS + head


@triton.jit
def kl_targets(
    query, key, lse, position, order, starts, ends, tile_of,
    T, S, tiles, items, entries, log2_scale,
    masses, targets, c: tl.constexpr,
):  # fmt: skip
    """Compute the targets t and their sums.

    Programs: B * INDEX_HEADS * items. A step has TOKENS entries.

    Args:
      query: `[B, T, INDEX_HEADS * GROUP, WIDTH]`.
      key: `[B, S, HEADS, WIDTH]`.
      lse: float32 `[B, T, INDEX_HEADS * GROUP]`, natural.
      position: int32 `[B, T]`; negative positions are padding.
      order, starts, ends, tile_of: As in `dkv.of_blocks`, a row per batch row and index head;
        entries are `token * N + slot`.
      masses: float32 `[B, T, INDEX_HEADS, N]`, output: the sum of the targets t_j over the keys of
        each listed block. Entries of blocks that are not listed are not written.
      targets: `[B, T, INDEX_HEADS, N * BLOCK]`, the values t of listed keys.
    """
    at_row, batch, head, tile, begin, end = _part_of(
        tl.program_id(0), starts, ends, tile_of, tiles, items, c
    )
    if tile < tiles:
        order += at_row * entries
        inside = tl.arange(0, c.BLOCK)
        token = tile * c.BLOCK + inside
        kv_head = head * c.HEADS // c.INDEX_HEADS
        keys = load_rows(key, (batch * S + token) * c.HEADS + kv_head, token < S, c.WIDTH)
        row = tl.arange(0, c.TOKENS * c.GROUP_ROWS)
        member = row % c.GROUP_ROWS
        # Values that a step needs after its product are loaded one step ahead. The entries of
        # these values are loaded two steps ahead. The entries of the queries are loaded again,
        # since Triton prefetches queries.
        mine = _entries(order, begin, end, c.TOKENS, c.GROUP_ROWS)
        following = _entries(order, begin + c.TOKENS, end, c.TOKENS, c.GROUP_ROWS)
        entry = _entries(order, begin, end, c.TOKENS, 1)
        next_entry = _entries(order, begin + c.TOKENS, end, c.TOKENS, 1)
        number = _number(mine, batch, T, head, c) * c.GROUP + member
        natural = tl.load(lse + number, mask=member < c.GROUP, other=NEGATIVE_INFINITY)
        upto = tl.load(position + batch * T + entry // c.N)
        for at in range(begin, end, c.TOKENS):
            later = _number(following, batch, T, head, c) * c.GROUP + member
            next_natural = tl.load(lse + later, mask=member < c.GROUP, other=NEGATIVE_INFINITY)
            next_upto = tl.load(position + batch * T + next_entry // c.N)
            following = _entries(order, at + 2 * c.TOKENS, end, c.TOKENS, c.GROUP_ROWS)
            next_entry = _entries(order, at + 2 * c.TOKENS, end, c.TOKENS, 1)
            entry = _entries(order, at, end, c.TOKENS, 1)
            chosen = _entries(order, at, end, c.TOKENS, c.GROUP_ROWS)
            number = _number(chosen, batch, T, head, c) * c.GROUP + member
            real = (at + row // c.GROUP_ROWS < end) & (member < c.GROUP)
            rows = load_columns(query, number, real, c.WIDTH)
            lse_log2 = in_base_2(natural)
            here = at + tl.arange(0, c.TOKENS) < end
            item = batch * T + entry // c.N

            logits = dot(keys, rows, c) * log2_scale
            t = tl.exp2(logits - lse_log2[None, :])
            t = tl.sum(tl.reshape(t, [c.BLOCK, c.TOKENS, c.GROUP_ROWS]), axis=2)
            t *= 1.0 / c.GROUP
            seen = (token[:, None] <= upto[None, :]) & (token < S)[:, None]
            t = tl.where(seen, t, 0.0)
            to = (item * c.INDEX_HEADS + head) * c.N + entry % c.N
            tl.store(masses + to, tl.sum(t, axis=0), mask=here)
            put = targets + to[None, :] * c.BLOCK + inside[:, None]
            tl.store(put, t.to(targets.dtype.element_ty), mask=here[None, :])
            natural, upto = next_natural, next_upto


@triton.jit
def kl_entries(
    index_query, index_key, targets, position, order, starts, ends, tile_of,
    T, S, tiles, items, entries, index_scale,
    maxima, sums, crosses, c: tl.constexpr,
):  # fmt: skip
    """Programs: B * INDEX_HEADS * items.

    Args:
      index_query: `[B, T, INDEX_HEADS, WIDTH]`.
      index_key: `[B, S, WIDTH]`.
      targets, position, order, ..: as in `kl_targets`.
      maxima, sums, crosses: float32 `[B, T, INDEX_HEADS, N]`, written for listed blocks.
    """
    at_row, batch, head, tile, begin, end = _part_of(
        tl.program_id(0), starts, ends, tile_of, tiles, items, c
    )
    if tile < tiles:
        order += at_row * entries
        token = tile * c.BLOCK + tl.arange(0, c.BLOCK)
        key_columns = load_columns(index_key, batch * S + token, token < S, c.WIDTH)
        step = tl.arange(0, c.ROWS)
        entry = _entries(order, begin, end, c.ROWS, 1)
        following = _entries(order, begin + c.ROWS, end, c.ROWS, 1)
        to = _number(entry, batch, T, head, c) * c.N + entry % c.N
        kept = load_rows(targets, to, begin + step < end, c.BLOCK)
        upto = tl.load(position + batch * T + entry // c.N)
        for at in range(begin, end, c.ROWS):  # loaded ahead as in `kl_targets`
            later = _number(following, batch, T, head, c) * c.N + following % c.N
            next_kept = load_rows(targets, later, at + c.ROWS + step < end, c.BLOCK)
            next_upto = tl.load(position + batch * T + following // c.N)
            after = _entries(order, at + 2 * c.ROWS, end, c.ROWS, 1)
            here = at + step < end
            chosen = _entries(order, at, end, c.ROWS, 1)
            number = _number(chosen, batch, T, head, c)
            rows = load_rows(index_query, number, here, c.WIDTH)
            to = number * c.N + chosen % c.N
            t = kept.to(tl.float32)
            z = dot(rows, key_columns, c) * index_scale
            seen = (token[None, :] <= upto[:, None]) & (token < S)[None, :]
            # t is 0 for keys that are not visible.
            difference = tl.log(tl.where(t > 0, t, 1.0)) - tl.where(seen, z, 0.0)
            z = tl.where(seen, z, NEGATIVE_INFINITY)
            top = tl.max(z, axis=1)
            base = tl.where(top == NEGATIVE_INFINITY, 0.0, top)
            tl.store(maxima + to, top, mask=here)
            tl.store(sums + to, tl.sum(tl.exp(z - base[:, None]), axis=1), mask=here)
            tl.store(crosses + to, tl.sum(t * difference, axis=1), mask=here)
            following, kept, upto = after, next_kept, next_upto


@triton.jit
def _listed(indices, position, number, real, c, slot):
    """Return whether the slot `slot` of a query is in the query list of a block."""
    upto = tl.load(position + number // c.INDEX_HEADS, mask=real, other=-1)
    block = tl.load(indices + number * c.N + slot, mask=real, other=-1)
    return (block >= 0) & (block * c.BLOCK <= upto)


@triton.jit
def kl_loss(
    maxima, sums, masses, crosses, indices, position,
    count,
    loss, index_lse, mass, c: tl.constexpr,
):  # fmt: skip
    """Compute the loss of each query and index head.

    Programs: ceil(count / QUERIES), where count = B T INDEX_HEADS.

    Args:
      maxima, sums, masses, crosses: Outputs of `kl_entries` and `kl_targets`.
      indices: int32 `[B, T, INDEX_HEADS, N]`, negative in empty slots.
      position: int32 `[B, T]`.
      loss, index_lse, mass: float32 `[B, T, INDEX_HEADS]`. `index_lse` is the log-sum-exp of z,
        or +inf if no block is listed. `mass` is the sum of t.
    """
    number = tl.program_id(0).to(tl.int64) * c.QUERIES + tl.arange(0, c.QUERIES)
    real = number < count
    top = tl.full([c.QUERIES], NEGATIVE_INFINITY, tl.float32)
    total, whole = tl.full([c.QUERIES], 0.0, tl.float32), tl.full([c.QUERIES], 0.0, tl.float32)
    cross = tl.full([c.QUERIES], 0.0, tl.float32)
    for slot in range(c.N):
        there = _listed(indices, position, number, real, c, slot)
        at = number * c.N + slot
        theirs = tl.load(maxima + at, mask=there, other=NEGATIVE_INFINITY)
        larger, base = raised(top, theirs)
        part = tl.load(sums + at, mask=there, other=0.0)
        total = total * tl.exp(top - base) + part * tl.exp(theirs - base)
        whole += tl.load(masses + at, mask=there, other=0.0)
        cross += tl.load(crosses + at, mask=there, other=0.0)
        top = larger
    some = total > 0
    normal = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), 0.0)
    tl.store(loss + number, tl.where(some, cross + whole * normal, 0.0), mask=real)
    tl.store(index_lse + number, tl.where(some, normal, float("inf")), mask=real)
    tl.store(mass + number, whole, mask=real)


@triton.jit
def kl_gradients(
    index_query, index_key, targets, index_lse, mass, grad, position, order, starts, ends,
    tile_of,
    T, S, tiles, items, entries, index_scale,
    query_partials, key_partials, c: tl.constexpr,
):  # fmt: skip
    """Programs: B * INDEX_HEADS * items.

    Args:
      index_query, index_key, targets, position, order, ..: as in `kl_entries`.
      index_lse, mass: Outputs of `kl_loss`. `grad`, float32 `[B, T, INDEX_HEADS]`, is the
        gradient of the loss.
      query_partials: `[B, T, INDEX_HEADS, N, WIDTH]`, computed for a loss gradient of 1, and
        written only for listed blocks.
      key_partials: float32 `[B * INDEX_HEADS * items, BLOCK, WIDTH]`.
    """
    program = tl.program_id(0)
    at_row, batch, head, tile, begin, end = _part_of(
        program, starts, ends, tile_of, tiles, items, c
    )
    if tile < tiles:
        order += at_row * entries
        to_dtype = query_partials.dtype.element_ty
        inside = tl.arange(0, c.BLOCK)
        token = tile * c.BLOCK + inside
        at_keys = batch * S + token
        key_columns = load_columns(index_key, at_keys, token < S, c.WIDTH)
        keys = load_rows(index_key, at_keys, token < S, c.WIDTH).to(to_dtype)
        total = tl.full([c.BLOCK, columns(c.WIDTH)], 0.0, tl.float32)
        for at in range(begin, end, c.ROWS):
            place = at + tl.arange(0, c.ROWS)
            here = place < end
            entry = tl.load(order + place, mask=here, other=0)
            item = batch * T + entry // c.N
            number = item * c.INDEX_HEADS + head
            rows = load_rows(index_query, number, here, c.WIDTH)
            to = number * c.N + entry % c.N
            t = load_rows(targets, to, here, c.BLOCK).to(tl.float32)
            upto = tl.load(position + item, mask=here, other=-1)
            normal = tl.load(index_lse + number, mask=here, other=float("inf"))
            whole = tl.load(mass + number, mask=here, other=0.0)
            weight = tl.load(grad + number, mask=here, other=0.0)
            z = dot(rows, key_columns, c) * index_scale
            seen = (token[None, :] <= upto[:, None]) & (token < S)[None, :]
            p = tl.where(seen, tl.exp(z - normal[:, None]), 0.0)
            change = ((p * whole[:, None] - t) * index_scale).to(to_dtype)
            product = dot(change, keys, c)
            store_rows(query_partials, to, product, here, c.WIDTH)
            rows = (rows.to(tl.float32) * weight[:, None]).to(to_dtype)
            total = dot(tl.trans(change), rows, c, total)
        row = tl.cast(program, tl.int64) * c.BLOCK + inside
        store_rows(key_partials, row, total, inside >= 0, c.WIDTH)


@triton.jit
def kl_query_sums(partials, grad, indices, position, count, out, c: tl.constexpr):
    """Compute `grad` times the sum of the partials of each query, in the order of slots.

    Programs: ceil(count / QUERIES). Args as in `kl_loss` and `kl_gradients`.
    """
    number = tl.program_id(0).to(tl.int64) * c.QUERIES + tl.arange(0, c.QUERIES)
    real = number < count
    total = tl.full([c.QUERIES, columns(c.WIDTH)], 0.0, tl.float32)
    for slot in range(c.N):
        there = _listed(indices, position, number, real, c, slot)
        part = load_rows(partials, number * c.N + slot, there, c.WIDTH)
        total += part.to(tl.float32)
    total *= tl.load(grad + number, mask=real, other=0.0)[:, None]
    store_rows(out, number, total, real, c.WIDTH)


@triton.jit
def index_key_merge(partials, ends, S, tiles, items, out, c: tl.constexpr):
    """Add the partials of each block in order. The result is `[B, S, WIDTH]`.

    Programs: B * tiles * (BLOCK / PART).

    Args:
      partials: float32 `[B * INDEX_HEADS * items, BLOCK, WIDTH]`.
      ends: int32 `[B * INDEX_HEADS, tiles]`: end of the items of each tile.
    """
    program = tl.program_id(0)
    part = program % (c.BLOCK // c.PART)
    program = program // (c.BLOCK // c.PART)
    tile, batch = program % tiles, (program // tiles).to(tl.int64)
    inside = part * c.PART + tl.arange(0, c.PART)
    total = tl.full([c.PART, columns(c.WIDTH)], 0.0, tl.float32)
    for head in range(c.INDEX_HEADS):
        list_row = batch * c.INDEX_HEADS + head
        at = ends + list_row * tiles + tile
        for item in range(tl.load(at - 1, mask=tile > 0, other=0), tl.load(at)):
            row = (list_row * items + item) * c.BLOCK + inside
            total += load_rows(partials, row, inside >= 0, c.WIDTH)
    at = tile * c.BLOCK + inside
    store_rows(out, batch * S + at, total, at < S, c.WIDTH)
