"""Computes the positions of the tokens in a padded or packed batch from transformers'
arguments.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_core.config import NSAConfig
from nsa_torch import checks
from nsa_torch.huggingface.cache import Call, NSAModelCache, NSAPagedModelCache
from nsa_torch.module import NSAAttention
from nsa_torch.shared import is_capturing
from nsa_torch.varlen import varlen_metadata

# Keywords that describe a packed row: boundaries by any name; the sequence of each token; the
# number of tokens of the longest sequence.
BORDERS = "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"
INDEX, POSITION = "seq_idx", "position_ids"
LONGEST = "max_length_q", "max_length_k"
# Keywords that are accepted with a fixed value.
FIXED = {
    "is_causal": (True, "attention is causal"),
    "output_attentions": (False, "no layer computes attention weights"),
    "output_router_logits": (False, "there are no experts"),
}
# Tokenizers return `token_type_ids`, and `generate` passes tokenizers on. Llama ignores them too.
IGNORED = "token_type_ids", "tokenizer", "assistant_tokenizer"
READ = {*BORDERS, INDEX, *LONGEST, *FIXED, "output_hidden_states", *IGNORED}
MASK = "attention_mask must"
COMPARED: set[tuple[Any, ...]] = set()  # device, keywords of a packed row that agreed once
LOSS = "ignore_index", "num_items_in_batch", "shift_labels"  # read by transformers' loss


class Rows(NamedTuple):
    """The real tokens among the `T` columns of a call. These columns follow those of the cache."""

    first: Tensor | None = None  # int64 [B], padding on the left; None means nowhere
    count: Tensor | None = None  # int64 [B], real tokens; None means every column
    cu_seqlens: Tensor | None = None  # int [sequences + 1], where the batch is one packed row
    empty: Tensor | None = None  # bool [B], rows with only padding until now; None means none
    cache: Any = None  # an `NSAModelCache`
    call: Call | None = None  # on the cache
    position: Tensor | None = None  # int64 [B, T], of aligned rows, for dense layers
    mask: Tensor | None = None  # the same, as transformers' attention functions take it

    def attend(self, attention: Any, index: int, x: Tensor) -> Tensor:
        """Compute the attention of layer `index` for the tokens `x` [B, T, dim], to these tokens
        and to those of the cache. Attention to no token is 0.
        """
        x = x if self.first is None else _roll(x, self.first)
        layer = None if self.cache is None else self.cache.layers[index]
        if not isinstance(attention, NSAAttention):
            append = layer and (lambda *new: layer.append(*new[:2], self.call))
            y = attention(x, self.position, self.mask, append)
        elif layer is None:
            y, _ = attention(x, cu_seqlens=self.cu_seqlens)
        else:
            y, _ = attention(x, attend=functools.partial(layer.attend, call=self.call))
        y = y if self.first is None else _roll(y, -self.first)
        return y if self.empty is None else y.masked_fill(self.empty[:, None, None], 0)

    def real(self, length: int) -> Tensor | None:
        """Return which columns are tokens, bool `[B or 1, T]`. None means that all columns are
        tokens.
        """
        if self.cu_seqlens is not None:
            if not checks.may_be_padded(self.cu_seqlens, length):
                return None
            return (
                torch.arange(length, device=self.cu_seqlens.device)[None] < self.cu_seqlens[-1]
            )
        if self.count is None:
            return None
        column = torch.arange(length, device=self.count.device).expand(self.count.shape[0], -1)
        if self.first is not None:
            column = (column - self.first[:, None]) % length
        return column < self.count[:, None]


def check_keywords(call: dict[str, Any], *others: str) -> None:
    """Raises if a keyword of a call is neither in `READ` nor in `others`, or has an unsupported
    value.
    """
    for name, x in checks.present(**call).items():
        if name not in READ.union(others):
            raise TypeError(
                f"{name} is not an argument of the model; boundaries of packed sequences are "
                f"{', '.join(BORDERS)}, {INDEX} or position_ids"
            )
        if name in FIXED and bool(x) is not FIXED[name][0]:
            value, reason = FIXED[name]
            raise NotImplementedError(f"{name} must be {value}, got {x!r}; {reason}")


def rows(
    batch: int,
    length: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    call: dict[str, Any],
    cache: NSAModelCache | None,
    config: NSAConfig,
) -> Rows:
    """Find the tokens of a call with `batch` rows of `length` columns, after the columns of
    `cache`.

    Args:
      attention_mask: `[B, columns of the cache + T]` of 0 and 1. A step of one token per row on an
        `NSAPagedModelCache` also accepts `[B, 1]`, the mask of its own column.
      position_ids: `[B or 1, T]`. The mask determines their values. Without a mask and a cache,
        positions may restart in a single row, which is then a packed row.
      call: The keywords of the call. A name in `BORDERS`, int `[sequences + 1]`, or `INDEX`,
        int `[1, T]`, describes a packed row. With `INDEX` the host waits for a GPU. A name in
        `LONGEST` bounds the number of tokens per sequence, and states that the last sequence
        ends with the row.
      config: The config of the layers with NSA.
    Raises:
      ValueError: A row is padded in the middle or on both sides, or mask, positions, boundaries and
        cache contradict each other. On a GPU these checks wait for the device. A decode step does
        not wait and checks only shapes. The host waits for boundaries only at the first such
        call. In a CUDA graph and under `torch.compile` nothing is checked.
    """
    told = {name: x for name in (*BORDERS, INDEX) if (x := call.get(name)) is not None}
    if name := next(iter(told), None):
        if attention_mask is not None or cache is not None:
            raise ValueError(
                f"{name} must be None if attention_mask or a cache is given, got both"
            )
        if batch != 1:
            raise ValueError(f"input_ids must be one row if {name} is given, got {batch}")
    if batch == 1 and attention_mask is None and cache is None and position_ids is not None:
        told[POSITION] = position_ids
    if told:
        borders = _borders(told, length)
        if name is None and borders.numel() == 2:
            return Rows()
        if torch.compiler.is_compiling():
            return Rows(cu_seqlens=checks.clamped(borders, length))
        longest = next((x for n in LONGEST if isinstance(x := call.get(n), int)), None)
        made = varlen_metadata(
            borders,
            total=length,
            max_seqlen=longest,
            padded=None if longest is None else False,
            config=config,
            device=told[name or POSITION].device,
        )
        return Rows(cu_seqlens=made.cu_seqlens)
    if attention_mask is None and position_ids is None:
        return Rows()
    past = 0 if cache is None else cache.get_seq_length()
    whole, mask = (batch, past + length), attention_mask
    if mask is None:
        assert position_ids is not None
        mask = torch.ones(whole, dtype=torch.bool, device=position_ids.device)
    step = length == 1 and isinstance(cache, NSAPagedModelCache)
    found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    if found != whole and not (step and found == (batch, 1)):
        raise ValueError(
            f"attention_mask must have shape {whole}, one number for each column of the cache and "
            f"of the input, got {found}"
        )
    if step and (found != whole or not free_to_read(mask)):
        return Rows(count=(mask[:, -1] != 0).long())
    wrong: list[tuple[Tensor, str]] = []  # whether each row [B] breaks a rule, and the rule
    if mask.dtype != torch.bool:
        wrong.append((((mask != 0) & (mask != 1)).any(dim=1), f"{MASK} hold 0 and 1 only"))
        mask = mask != 0
    changes = (mask[:, 1:] != mask[:, :-1]).sum(dim=1)
    rule = f"{MASK} be padded on the left or on the right, zeros in one run"
    wrong.append((changes > 1, rule))
    known = mask[:, :past].sum(dim=1)
    if cache is not None and cache.lengths is not None:
        own, known = known, cache.lengths.to(mask.device, torch.int64)
        if attention_mask is not None:
            rule = f"{MASK} have as many ones as the cache has tokens of the row"
            wrong.append((own != known, rule))
    new = mask[:, past:]
    count, first = new.sum(dim=1), new.int().argmax(dim=1)
    if position_ids is not None:
        expected = torch.arange(length, device=mask.device) + (known - first)[:, None]
        rule = "position_ids must count each row's tokens from its first one, as mask and cache say"
        wrong.append((((position_ids != expected) & new).any(dim=1), rule))
    empty = known + count == 0
    if is_capturing(mask.device) or torch.compiler.is_compiling():
        return Rows(first, count, empty=empty)
    rules = [first > 0, count < length, empty, *(each for each, _ in wrong)]
    shifted, short, without, *bad = torch.stack(rules).any(dim=1).tolist()
    if any(bad):
        _refuse(*wrong[bad.index(True)], mask)
    return Rows(
        first if shifted else None,
        count if short else None,
        empty=empty if without else None,
    )


def check_prompt(mask: Tensor) -> None:
    """Raise ValueError if a row of a prompt's mask [B, T] has padding after its tokens."""
    behind = (mask[:, -1:] == 0).any(dim=1) & (mask != 0).any(dim=1)
    if bool(behind.any()):
        rule = f"{MASK} be padded on the left in generate (padding_side='left')"
        _refuse(behind, rule, mask)


def _refuse(failed: Tensor, rule: str, mask: Tensor) -> None:
    row = int(failed.int().argmax())
    line = "".join(str(int(x)) for x in mask[row].tolist())
    raise ValueError(f"{rule}, got {line:.64} in row {row}")


def free_to_read(x: Tensor) -> bool:
    """Return whether the host reads numbers of `x` without waiting for a device."""
    return x.device.type == "cpu"


def _borders(told: dict[str, Any], length: int) -> Tensor:
    """Return the boundaries of a packed row from the first entry of `told`. Other entries must
    agree with it. On a GPU, calls with several entries wait for the device and are compared,
    until one call agrees.
    """
    (first, x), *others = told.items()
    borders, compared = _as_borders(first, x, length), (getattr(x, "device", None), *told)
    wait = compared not in COMPARED
    if not others or not checks.is_read(borders, wait):
        return borders
    starts = [*dict.fromkeys(borders.tolist())]
    for name, x in others:
        if isinstance(x, Tensor) and not checks.is_read(x, wait):
            continue
        given = [*dict.fromkeys(_as_borders(name, x, length, starts[-1]).tolist())]
        if given != starts:
            raise ValueError(
                f"{name} must have the boundaries of {first}, {starts}, got {given}"
            )
    COMPARED.add(compared)
    return borders


def _as_borders(name: str, x: Any, length: int, end: int | None = None) -> Tensor:
    """Return the boundaries of a packed row as int `[sequences + 1]`. `end` is the end of its
    last sequence. If the row is described per token, by sequence numbers or positions, the host
    waits for the device and the result is on the host.
    """
    if name in BORDERS:
        checks.borders_array(x, name)
        checks.borders(x, length, name)
        return x
    shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    if shape != (1, length):
        raise ValueError(f"{name} must have shape {(1, length)}, got {shape}")
    x = x[0].cpu()
    if name == INDEX:
        steps = x.diff()
        if (steps < 0).any():
            raise ValueError(f"{INDEX} must not decrease, got {x.tolist()[:16]}")
        return torch.tensor([0, *(steps.nonzero()[:, 0] + 1).tolist(), length])
    x = x[:end]
    index = torch.arange(len(x))
    start = torch.where(x == 0, index, 0).cummax(dim=0).values
    if not torch.equal(index - start, x):
        raise ValueError(
            f"{POSITION} must count from 0 in every sequence of the row, got {x.tolist()[:16]}"
        )
    return torch.tensor([*index[x == 0].tolist(), len(x)])


def _roll(x: Tensor, shift: Tensor) -> Tensor:
    """Roll row `b` of `x` [B, T, ...] to the left by `shift[b]`."""
    length = x.shape[1]
    index = (torch.arange(length, device=x.device) + shift[:, None]) % length
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[row, index]
