"""Computes the positions of the tokens of a padded or packed batch from the arguments of
transformers.
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
from nsa_torch.torch_ops import TORCH_OPS
from nsa_torch.varlen import varlen_metadata

# Keywords that describe a packed row. They are names of the boundaries, of the sequence of each
# token, and of the number of tokens of the longest sequence.
BORDERS = "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens"
INDEX, POSITION = "seq_idx", "position_ids"
LONGEST = "max_length_q", "max_length_k"
# Keywords that must have a fixed value, each with the reason.
FIXED = {
    "is_causal": (True, "attention is causal"),
    "output_attentions": (False, "NSA layers compute no attention weights"),
    "output_router_logits": (False, "the model has no experts"),
}
# Keywords that the model ignores, as Llama does. Tokenizers return `token_type_ids`, and
# `generate` passes `tokenizer`.
IGNORED = "token_type_ids", "tokenizer", "assistant_tokenizer"
READ = {*BORDERS, INDEX, *LONGEST, *FIXED, "output_hidden_states", *IGNORED}
MASK = "attention_mask must"
COMPARED: set[tuple[Any, ...]] = set()  # device, and keywords of a packed row that agreed once
# the loss of transformers reads these keywords
LOSS = "ignore_index", "num_items_in_batch", "shift_labels"


class Rows(NamedTuple):
    """Describes which of the `T` columns of a call are tokens and which are padding. The columns
    of a call follow the columns of the cache.
    """

    # int64 [B], columns of padding on the left; None means no padding on the left
    first: Tensor | None = None
    count: Tensor | None = None  # int64 [B], number of tokens; None means every column
    # int [sequences + 1], boundaries if the batch is one packed row
    cu_seqlens: Tensor | None = None
    # bool [B], the rows that have had only padding so far; None means that there are no such rows
    empty: Tensor | None = None
    cache: Any = None  # an `NSAModelCache`
    call: Call | None = None  # the call on the cache
    position: Tensor | None = None  # int64 [B, T], positions of aligned rows, for dense layers
    # for dense layers, a mask in the form that attention functions of transformers accept
    mask: Tensor | None = None

    def attend(self, attention: Any, index: int, x: Tensor) -> Tensor:
        """Compute the attention of layer `index` for the tokens `x` [B, T, dim]. The tokens
        attend to the tokens in the cache and to each other. The output is 0 for rows that have
        had only padding so far.
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
        """Return a mask of the columns that are tokens, bool `[B or 1, T]`, or None if all columns
        are tokens.
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
    """Raise an error if a keyword of the call is unknown or has an unsupported value. Known
    keywords are the names in `READ` and `others`.
    """
    for name, x in checks.present(**call).items():
        if name not in READ.union(others):
            raise TypeError(
                f"{name} is not an argument of the model; pass boundaries of packed sequences as "
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
    """Find the tokens among the `length` columns of a call with `batch` rows. The columns of the
    call follow the columns of `cache`.

    Args:
      attention_mask: `[B, columns of the cache + T]` of 0 and 1. For a step of one token per row
        on an `NSAPagedModelCache`, the mask may also be `[B, 1]`, for the new column only.
      position_ids: `[B or 1, T]`. With a mask, the positions must have the values that the mask
        determines. Without a mask and without a cache, a single row whose positions restart is a
        packed row.
      call: The keyword arguments of the call. A packed row is described by a name in `BORDERS`,
        int `[sequences + 1]`, or by `INDEX`, int `[1, T]`. With `INDEX` the host waits for a
        GPU. An argument in `LONGEST` is an upper bound of the tokens per sequence. With an upper
        bound, the last sequence must end at the last column of the row.
      config: The config of the layers with NSA.
    Raises:
      ValueError: A row is padded in the middle or on both sides, or mask, positions, boundaries and
        cache contradict each other. On a GPU the checks of values wait for the device, so that a
        decode step checks only shapes. If a packed row has several descriptions, the descriptions
        are compared in each call until one call finds them equal. In a CUDA graph and under
        `torch.compile` no values are checked.
    """
    told = {name: x for name in (*BORDERS, INDEX) if (x := call.get(name)) is not None}
    if name := next(iter(told), None):
        if attention_mask is not None or cache is not None:
            raise ValueError(
                f"{name} must be None if attention_mask or a cache is given, got both"
            )
        if batch != 1:
            raise ValueError(f"input_ids must be one row if {name} is given, got {batch} rows")
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
            f"attention_mask must have shape {whole} (one column for each column of the cache and "
            f"of the input), got {found}"
        )
    if step and (found != whole or not free_to_read(mask)):
        return Rows(count=(mask[:, -1] != 0).long())
    # pairs of a bool [B], which is True for rows that break a rule, and the rule
    wrong: list[tuple[Tensor, str]] = []
    if mask.dtype != torch.bool:
        wrong.append((((mask != 0) & (mask != 1)).any(dim=1), f"{MASK} contain only 0 and 1"))
        mask = mask != 0
    changes = (mask[:, 1:] != mask[:, :-1]).sum(dim=1)
    rule = f"{MASK} be padded only on the left or only on the right"
    wrong.append((changes > 1, rule))
    known = mask[:, :past].sum(dim=1)
    if cache is not None and cache.lengths is not None:
        own, known = known, cache.lengths.to(mask.device, torch.int64)
        if attention_mask is not None:
            rule = f"{MASK} have one 1 for each token that the cache has of the row"
            wrong.append((own != known, rule))
    new = mask[:, past:]
    count, first = new.sum(dim=1), new.int().argmax(dim=1)
    if position_ids is not None:
        expected = torch.arange(length, device=mask.device) + (known - first)[:, None]
        rule = (
            "position_ids must count the tokens of each row from 0, including the tokens in the "
            "cache"
        )
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
    """Return whether the host can read `x` without waiting for a device."""
    return x.device.type == "cpu"


def _borders(told: dict[str, Any], length: int) -> Tensor:
    """Return the boundaries of a packed row from the first entry of `told`. The other entries of
    `told` must describe the same boundaries. After one call has found the entries equal, later
    calls with the same names do not compare the entries, since on a GPU the comparison waits for
    the device.
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
                f"{name} must have the same boundaries as {first}, {starts}, got {given}"
            )
    COMPARED.add(compared)
    return borders


def _as_borders(name: str, x: Any, length: int, end: int | None = None) -> Tensor:
    """Convert a description of a packed row to boundaries, int `[sequences + 1]`. `end` is the
    end of the last sequence. If `x` has a sequence number or a position for each token, the
    host waits for the device, and the result is on the host.
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
    return TORCH_OPS.take_rows(x, index)
