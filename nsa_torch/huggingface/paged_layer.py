"""Layers on pages: what a layer of `NSAPagedModelCache` keeps, and attention from it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_pallas.triton.decode_descriptions import QUERIES
from nsa_core.paged_dispatch import GATHERED
from nsa_core.paged_runs import Run
from nsa_core.types import Branches
from nsa_torch.cache import zero_behind, zeroed
from nsa_torch.functional import Name, Names
from nsa_torch.geometry import own_tokens
from nsa_torch.huggingface.cache import ModelLayer
from nsa_torch.module import NSAAttention
from nsa_torch.paged import FP8, PagedCache
from nsa_torch.paged_attend import explain, paged_attention
from nsa_torch.plain import product_dtype


class Call(NamedTuple):
    """A model's call on `B` rows of `T` columns, the same for all layers."""

    position: Tensor  # int64 [B, T], of each column's token in its row
    after: Tensor  # int32 [B], tokens of each row after the call
    lengths: Tensor  # int32 [B], the same; 0: the row has no token in a call of one column
    page_table: Tensor  # int32 [B, M], of the pages that the call reads
    reach: int  # tokens of a row that the call reads
    starts: Tensor | None = None  # int32 [B + 1], where each row's tokens begin; None: T each
    order: Tensor | None = None  # int64 [B * T], the rows' own tokens, then the padding
    runs: Sequence[Run] | None = None  # as of `paged_attention`


class PagedRows:
    """Which pages are whose, and how long each row is: row `b` has the pages `bM .. bM + M - 1`.

    Args:
      batch: rows.
      capacity: columns of a row, padding included.
      page: tokens of a page.

    The tensors are made by the first call, on the device of its tokens.
    """

    def __init__(self, batch: int, capacity: int, page: int):
        self.batch, self.capacity, self.page = batch, capacity, page
        self.columns = 0  # seen, padding included
        self.page_table: Tensor | None = None  # int32 [B, M]
        self.lengths: Tensor | None = None  # int32 [B]
        self.call: Call | None = None

    @property
    def pages_a_row(self) -> int:
        return math.ceil(self.capacity / self.page)

    def reserve(self, num_new: int) -> None:
        """Raises ValueError where there is no room for `num_new` columns more."""
        needed = self.columns + num_new
        if needed > self.capacity:
            raise ValueError(f"cache capacity is {self.capacity} tokens, got {needed}")

    def begin(self, x: Tensor, count: Tensor | None) -> None:
        """Describes a call with `x` [B, T, ...], of which row `b` has the first `count[b]`.

        Up to `QUERIES` columns, shapes do not follow from the tokens that are there.
        """
        batch, T = x.shape[:2]
        if batch != self.batch:
            raise ValueError(
                f"cache must have a row for each of the {batch} rows of the input, "
                f"got batch_size={self.batch}"
            )
        self.reserve(T)
        if self.lengths is None or self.page_table is None:
            self._allocate(x.device)
        assert self.lengths is not None and self.page_table is not None
        before, table, reach = self.lengths, self.page_table, self.capacity
        if T > QUERIES:
            reach = self.columns + T
            table = table[:, : math.ceil(reach / self.page)].contiguous()
        column = torch.arange(T, device=x.device)
        position = before[:, None] + column
        if count is None:
            after, starts, runs = before + T, None, None
            if T > QUERIES:  # the rows are alike
                tokens, whole = slice(0, batch * T), self.columns == 0
                starts = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * T
                runs = [Run(slice(0, batch), tokens, T, table.shape[1], whole)]
            self.call = Call(position, after, after, table, reach, starts, runs=runs)
            return
        after = before + count.to(before.dtype)
        if T == 1:
            lengths = torch.where(count > 0, after, 0)
            self.call = Call(position, after, lengths, table, reach)
            return
        starts = torch.zeros(batch + 1, dtype=torch.int32, device=x.device)
        starts[1:] = count.cumsum(dim=0)
        padding = (column >= count[:, None]).flatten()
        order = padding.to(torch.uint8).argsort(stable=True)
        self.call = Call(position, after, after, table, reach, starts, order)

    def end(self) -> None:
        """Counts the tokens of the call."""
        assert self.lengths is not None and self.call is not None
        self.lengths.copy_(self.call.after)
        self.columns += self.call.position.shape[1]
        self.call = None

    def _allocate(self, device: torch.device) -> None:
        index = torch.arange(self.batch * self.pages_a_row, dtype=torch.int32, device=device)
        self.page_table = index.view(self.batch, self.pages_a_row)
        self.lengths = torch.zeros(self.batch, dtype=torch.int32, device=device)

    def select(self, rows: Tensor) -> None:
        """Goes on with these rows alone."""
        self.batch = rows.shape[0]
        if self.lengths is not None:
            lengths = self.lengths[rows]
            self._allocate(lengths.device)
            self.lengths = lengths


class SharedRowsLayer(ModelLayer):
    """A layer's cache, whose rows are as long as those of all other layers."""

    def __init__(self, rows: PagedRows):
        super().__init__()
        self.rows = rows

    def get_seq_length(self) -> int:
        return self.rows.columns

    def get_max_length(self) -> int:
        return self.rows.capacity

    def tensors(self) -> dict[str, Tensor]:
        """`[B, .., ...]` each, views of what the layer keeps; none before the first call."""
        raise NotImplementedError

    def replace(self, tensors: dict[str, Tensor]) -> None:
        """Takes others of the names of `tensors`, for another number of rows."""
        raise NotImplementedError

    def reset(self) -> None:
        """Nothing that was written is read again."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` is; the tensors stay where they are."""
        for x in self.tensors().values():
            used = x[:, : self.used]
            used.copy_(used.index_select(0, beam_idx.to(x.device)))

    def take_back(self, count: int) -> None:
        """The rows' last `count` tokens are gone."""

    @property
    def used(self) -> int:
        """Entries of the second axis of `tensors` in which tokens may be."""
        return self.rows.columns

    def batch_select_indices(self, indices: Tensor) -> None:
        self.replace({k: x[indices.to(x.device)] for k, x in self.tensors().items()})


class PagedLayer(SharedRowsLayer):
    """That of a layer with NSA: its pages, perhaps in fp8."""

    def __init__(self, rows: PagedRows, fp8: bool = False):
        super().__init__(rows)
        self.fp8 = fp8
        self.pages: PagedCache | None = None

    def attend(self, attention: NSAAttention, x: Tensor, count: Tensor | None) -> Tensor:
        """`attention` of the columns `x` [B, T, dim] to all before."""
        rows, call, spec = self.rows, self.rows.call, attention.spec
        assert call is not None
        if self.pages is None:
            dtype = product_dtype(x.device, x.dtype)
            self.pages = PagedCache(
                rows.batch * rows.pages_a_row,
                *(spec.n_kv_groups, spec.d_k, spec.d_v),
                config=spec.config,
                dtype=FP8 if self.fp8 else dtype,
                device=x.device,
                separate=spec.separate,
                compressed_dtype=dtype,
                max_rows=rows.batch,
            )
        at = call.page_table, call.lengths, call.starts, x.shape[1], call.order, call.runs
        return attend_pages(attention, x, call.position, self.pages, *at)

    @property
    def used(self) -> int:
        return math.ceil(self.rows.columns / self.rows.page)

    def tensors(self) -> dict[str, Tensor]:
        """Codes of 8 bits as integers: not every torch indexes floats of 8 bits."""
        found = {} if self.pages is None else self.pages.tensors()
        bits = {k: x.view(torch.uint8) if x.dtype is FP8 else x for k, x in found.items()}
        return {k: x.unflatten(0, (self.rows.batch, -1)) for k, x in bits.items()}

    def reset(self) -> None:
        if self.pages is not None:
            self.pages.reset()

    def replace(self, tensors: dict[str, Tensor]) -> None:
        for name, x in tensors.items():
            setattr(self.pages, name, x.flatten(0, 1).view(getattr(self.pages, name).dtype))


class StaticDenseLayer(SharedRowsLayer):
    """That of a layer with dense attention, which reads no pages: `[B, capacity, Hkv, .]`.

    Behind a row's tokens stand zeros, which attention masks.
    """

    def __init__(self, rows: PagedRows):
        super().__init__(rows)
        self.kept: dict[str, Tensor] = {}

    def append(self, key: Tensor, value: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor]:
        """Writes `[B, T, Hkv, .]`; returns the keys and values that the call reads."""
        call, capacity = self.rows.call, self.rows.capacity
        assert call is not None
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise NotImplementedError("a paged cache passes no gradient on: use no_grad")
        row = torch.arange(key.shape[0], device=key.device)[:, None]
        for name, x in zip(("key", "value"), own_tokens(count, key, value), strict=True):
            if name not in self.kept:
                self.kept[name] = x.new_zeros(x.shape[0], capacity, *x.shape[2:])
            self.kept[name][row, call.position] = x
        return self.kept["key"][:, : call.reach], self.kept["value"][:, : call.reach]

    def tensors(self) -> dict[str, Tensor]:
        return self.kept

    def replace(self, tensors: dict[str, Tensor]) -> None:
        self.kept = tensors

    def reset(self) -> None:
        """What is masked must be a number."""
        for x in self.kept.values():
            zeroed(x)

    def take_back(self, count: int) -> None:
        for x in self.kept.values():
            assert self.rows.lengths is not None
            zero_behind(x, self.rows.lengths, count)


def attend_pages(
    attention: NSAAttention,
    x: Tensor,
    position: Tensor,
    pages: PagedCache,
    page_table: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    max_seqlen_q: int | None = None,
    order: Tensor | None = None,
    runs: Sequence[Run] | None = None,
) -> Tensor:
    """`attention` of new tokens `x` [B, T, dim] at `position` [B, T], appended to `pages`.

    Args:
      page_table .. max_seqlen_q, runs: as of `paged_attention`.
      order: as of `Call`; None: tokens stand as they are in `x`.
    """

    def by_token(x: Tensor) -> Tensor:
        return x.flatten(0, 1) if order is None else x.flatten(0, 1)[order]

    query, key, value, gates = attention.project(x, position)
    # One tensor for all branches stays one.
    key, value = (
        Branches(*map(by_token, each))
        if attention.spec.separate
        else Branches.each(by_token(each[0]))
        for each in (key, value)
    )
    out = paged_attention(
        by_token(query),
        by_token(gates),
        pages,
        page_table,
        lengths,
        starts,
        key=key,
        value=value,
        params=attention.compress_params(),
        made_with=attention.spec.cached,
        config=attention.spec.config,
        max_seqlen_q=max_seqlen_q,
        runs=runs,
        implementation=one_name(attention.implementation),
    )
    if order is not None:
        out = torch.empty_like(out).index_copy_(0, order, out)
    return attention.out(out.reshape(*x.shape[:2], -1))


def decodes_on_pages(attention: NSAAttention, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether its steps of one token a row run on kernels that read pages."""
    spec = attention.spec
    heads, widths = spec.n_kv_groups, (spec.d_k, spec.d_v)
    options: Any = {"dtype": dtype, "device": device}
    cache = PagedCache(1, heads, *widths, config=spec.config, separate=spec.separate, **options)
    query, gates = (torch.empty(1, spec.n_heads, n, **options) for n in (spec.d_k, 3))
    table, lengths = (torch.zeros(x, dtype=torch.int32, device=device) for x in ((1, 1), 1))
    try:
        at = query, gates, cache, table, lengths
        found = explain(*at, implementation=one_name(attention.implementation))
    except NotImplementedError:
        return False
    return found.implementation != GATHERED


def one_name(implementation: Names) -> Name | None:
    """The implementation of all branches, which attention from pages runs at once."""
    names = set(Branches.each(implementation))
    if len(names) > 1:
        raise NotImplementedError(
            f"attention from pages runs all branches by one implementation, got {implementation}"
        )
    return names.pop()
