"""The steps on Mosaic kernels on torch tensors (implementation `mosaic`): Hopper GPUs.

Every function is one operator (`operators.py`) on the current stream: the host never waits for
the device, and after one call of the same shape, which compiles the kernels, a CUDA graph can
capture it. Arguments are those of `functional.py`, with `kv_len` never None.

Where a gradient will be wanted, each branch's own output and log-sum-exp are kept for the
backward pass, and the selection. It cannot be differentiated once more.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from interop.launch import ALIGNMENT, launch
from kernels_pallas.mosaic.operands import slab_width
from kernels_pallas.specs.selected import SelectedAttention
from nsa_jax import mosaic_backward
from nsa_jax.config import NSAConfig
from nsa_jax.mosaic_forward import Framework, shapes_of
from nsa_jax.types import Branches
from nsa_torch import operators
from nsa_torch.geometry import geometry
from nsa_torch.shared import SHARED


def _run(kernel, *tensors):
    tensors = [_readable(x) for x in tensors]
    # What a branch is added to is always made here, and read by nothing else afterwards.
    out = [tensors[-1], *[None] * (len(kernel.outputs) - 1)] if kernel.in_place else ()
    return launch(kernel, *tensors, out=out)


def _readable(x):
    """`x`, or a copy where kernels cannot read it in place.

    Only bounds, gates, block indices and what torch.compile laid out are ever copied:
    `dispatch.choose` refuses other such tensors of the caller.
    """
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _rows(x, index):
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[row, index]


def _search(rows, values, side):
    values = values.to(rows.dtype).contiguous()
    return torch.searchsorted(rows.contiguous(), values, side=side)


def _cast(x, dtype):
    return x.to(dtype, memory_format=torch.contiguous_format)


def _sort(x):
    return torch.sort(x, dim=-1).values


def _sort_pairs(keys, values):
    keys, order = torch.sort(keys, dim=-1, stable=True)
    return keys, torch.gather(values, -1, order)


def _numbers(x, n):
    return torch.arange(n, dtype=torch.int32, device=x.device)[None]


def _once(where, name, make):
    return where.once(name, make)


def _pad(x, axis, count, value):
    return F.pad(x, (0, 0) * (x.ndim - 1 - axis) + (0, count), value=value)


def _put(x, index, part):
    if x[index].data_ptr() != part.data_ptr():  # else the kernel has written it there
        x[index] = part
    return x


STEPS = Framework(
    torch, _run, _rows, _search, _cast, _sort, _sort_pairs, _numbers, _once, _pad, _put
)


class _Place:
    """Where the queries of one call stand, int32 `[B, T]`, as `Framework` asks for it."""

    def __init__(self, query, kv_len, lengths, cu_seqlens, config, scale):
        self.config, self.scale = operators.config_of(*config), scale
        self.kv_len, self.lengths, self.cu_seqlens = kv_len, lengths, cu_seqlens
        self.shape, self.device = tuple(query.shape[:2]), query.device
        self.fixed = lengths is None and cu_seqlens is None  # by sizes alone

    def once(self, name, make):
        """What `make()` gives, shared by calls of the same sizes."""
        if not self.fixed:
            return list(make())
        key = self.shape, self.kv_len, self.config, self.device, name
        return SHARED.get(key, self.device, make)

    @functools.cached_property
    def _where(self):
        return self.once(("where",), self._positions)

    def _positions(self):
        where = geometry(
            *self.shape,
            config=self.config,
            kv_len=self.kv_len if self.lengths is None else self.lengths,
            cu_seqlens=self.cu_seqlens,
            device=self.device,
        )
        start = where.key_start if self.cu_seqlens is None else where.compressed_start
        return [x.to(torch.int32) for x in (where.position, where.key_start, start)]

    packed = property(lambda self: self.cu_seqlens is not None)
    position = property(lambda self: self._where[0])
    key_start = property(lambda self: self._where[1])
    compressed_start = property(lambda self: self._where[2])

    def run(self, step, *tensors, **options) -> Any:
        return step(*tensors, where=self, config=self.config, scale=self.scale, **options)

    def queries(self, query):
        """`query` with zeros for padding, whose rows `selected` does not mask."""
        if self.fixed and self.kv_len >= self.shape[1]:
            return query  # no padding
        return torch.where((self.position >= 0)[..., None, None], query, 0)

    def gradients(self, step, *tensors, saved, **options):
        """Gradients of a branch: `step` of `nsa_jax.mosaic_backward`."""
        return self.run(functools.partial(step, STEPS), *tensors, saved, **options)

    # A probability of zero times a value that is NaN is NaN, so values behind the last key
    # that a query may see are zeroed; of keys only the logits are masked, forward.

    def values(self, value):
        """`value` [B, S, Hkv, Dv] with zeros behind the tokens that there are."""
        if self.cu_seqlens is not None:
            return _cut(value, self.cu_seqlens[-1:])
        return _cut(value, self.kv_len if self.lengths is None else self.lengths)

    def compressed_values(self, value):
        """`value` [B, C, Hkv, Dv] with zeros behind the compressed tokens that there are."""
        if self.cu_seqlens is None and self.lengths is None:
            return value
        return _cut(value, STEPS.visible(self, self.config)[1][:, -1])

    def num_blocks(self, compressed_key) -> int:
        """The most selection blocks that a sequence can have."""
        longest = self.kv_len
        if self.lengths is not None:
            stride, block = self.config.compress_stride, self.config.compress_block
            longest = compressed_key.shape[1] * stride + block - 1
        return self.config.num_blocks(longest)

    def best_blocks(self, query, compressed_key, lse):
        blocks, packed = self.num_blocks(compressed_key), self.packed
        options = {"num_blocks": blocks, "packed": packed}
        return self.run(STEPS.best_blocks, query, compressed_key, lse, **options).contiguous()


def _cut(x, end):
    """`x` [B, S, ...] with zeros from index `end` on, an int or a tensor `[]`, `[1]`, `[B]`."""
    length = x.shape[1]
    if isinstance(end, int) and end >= length:
        return x
    there = torch.arange(length, device=x.device)
    there = there < (end if isinstance(end, int) else end.reshape(-1, 1))
    return torch.where(there.reshape(-1, length, 1, 1), x, 0)


def _compressed(query, key, value, *place):
    place = _Place(query, *place)
    value = place.compressed_values(value)
    out, lse = place.run(STEPS.compressed, query, key, value)
    return out, lse.contiguous()


def _select(query, key, *place):
    place = _Place(query, *place)
    # Only the log-sum-exp is wanted: the narrowest values do.
    value = key[..., : slab_width(key.shape[-1])].contiguous()
    _, lse = place.run(STEPS.compressed, query, key, value)
    return place.best_blocks(query, key, lse)


def _selected(query, key, value, indices, *place):
    place = _Place(query, *place)
    query, value = place.queries(query), place.values(value)
    out, lse = place.run(STEPS.selected, query, key, value, indices, packed=place.packed)
    return out, lse.contiguous()


def _sliding(query, key, value, *place):
    place = _Place(query, *place)
    out, lse = place.run(STEPS.sliding, query, key, place.values(value))
    return out, lse.contiguous()


def _attention(query, *tensors_and_place):
    keys, values, gates, compressed, indices, clean, place = _parts(*tensors_and_place)
    place = _Place(query, *place)
    padded = query
    if not clean:
        shared = values.sliding is values.selected
        selected = place.values(values.selected)
        sliding = selected if shared else place.values(values.sliding)
        values = Branches(None, selected, sliding)
        compressed = compressed[0], place.compressed_values(compressed[1])
        padded = place.queries(query)
    out, lse = place.run(STEPS.compressed, query, *compressed, gate=gates.compressed)
    found = query.new_empty(0, dtype=torch.int32)
    if indices is None:
        indices = found = place.best_blocks(query, compressed[0], lse)
    local = query, keys.sliding, values.sliding
    out, _ = place.run(STEPS.sliding, *local, gate=gates.sliding, added=out)
    chosen = padded, keys.selected, values.selected, indices
    out, _ = place.run(
        STEPS.selected, *chosen, gate=gates.selected, added=out, packed=place.packed
    )
    return out, found


def _parts(*tensors_and_place):
    """The arguments of `nsa::attention` after the query, put together."""
    (*tensors, indices, clean), place = tensors_and_place[:11], tensors_and_place[11:]
    keys, values = (Branches(None, *tensors[i : i + 2]) for i in (0, 2))
    return keys, values, Branches(*tensors[4:7]), tuple(tensors[7:9]), indices, clean, place


def _select_shapes(query, key, kv_len, lengths, cu_seqlens, config, scale):
    shape = *query.shape[:2], key.shape[2], config[operators.FIELDS.index("num_selected")]
    return query.new_empty(shape, dtype=torch.int32)


def _attention_shapes(query, *tensors_and_place):
    keys, values, _, _, indices, _, place = _parts(*tensors_and_place)
    out, _ = operators.branch_shapes(query, keys.selected, values.selected)
    if indices is None:
        return out, _select_shapes(query, keys.selected, *place)
    return out, query.new_empty(0, dtype=torch.int32)


def _saving(query, *tensors_and_place):
    """`_attention`, and what its gradients need: the branches one by one (`SAVED`)."""
    keys, values, gates, compressed, indices, clean, place = _parts(*tensors_and_place)
    place = _Place(query, *place)
    padded = query
    if not clean:
        values = Branches(None, *map(place.values, values[1:]))
        compressed = compressed[0], place.compressed_values(compressed[1])
        padded = place.queries(query)
    first = place.run(STEPS.compressed, query, *compressed)
    found = query.new_empty(0, dtype=torch.int32)
    if indices is None:
        indices = found = place.best_blocks(query, compressed[0], first[1])
    selected = padded, keys.selected, values.selected, indices
    lists = [x.contiguous() for x in place.run(STEPS.selected_lists, *selected)]
    chosen = place.run(STEPS.selected, *selected, lists=lists, packed=place.packed)
    local = place.run(STEPS.sliding, query, keys.sliding, values.sliding)
    outputs, norms = zip(first, chosen, local, strict=True)
    out = mosaic_backward.gated_sum(STEPS, outputs, gates)
    return out, found, *outputs, *(lse.contiguous() for lse in norms), *lists


def _saving_shapes(query, *tensors_and_place):
    out, found = _attention_shapes(query, *tensors_and_place)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    keys, values, _, _, indices, _, place = _parts(*tensors_and_place)
    indices = found if indices is None else indices
    shape = shapes_of(query, keys.selected, values.selected, None)
    block = place[3][operators.FIELDS.index("select_block")]
    spec = SelectedAttention(**shape, n=indices.shape[-1], block=block)
    by_tile = spec.B, spec.Hkv, spec.tiles
    lists = (
        query.new_empty(*by_tile, *sizes, dtype=torch.int32)
        for sizes in ((spec.entries,), (spec.words, spec.entries), (2,))
    )
    return out, found, *(x.new_empty(x.shape) for x in [out] * 3 + [lse] * 3), *lists


def _branch_backward(step, grad, out, lse, query, key, value, *rest):
    indices, place = rest[:-5], _Place(query, *rest[-5:])
    clean = place.compressed_values if step is mosaic_backward.compressed else place.values
    query, grad = place.queries(query), place.queries(grad)
    (dots,) = mosaic_backward.output_dots(STEPS, grad, out)
    saved = mosaic_backward.Saved(lse, dots)
    options = {"packed": place.packed} if indices else {}
    tensors = query, clean(key), clean(value), *indices, grad
    return list(place.gradients(step, *tensors, saved=saved, **options))


def _attention_backward(grad, found, query, *rest, outputs=None, lists=None):
    """`outputs`: `Branches` of `(out, lse)`, `lists`: `selected_lists`; or None, and they are
    computed again.
    """
    keys, values, gates, compressed, indices, clean, place = _parts(*rest)
    indices = found if indices is None else indices
    place = _Place(query, *place)
    if not clean:
        query, grad = place.queries(query), place.queries(grad)
        keys, values = (Branches(None, *map(place.values, x[1:])) for x in (keys, values))
        compressed = tuple(map(place.compressed_values, compressed))
    total, pairs, dots = place.run(
        functools.partial(mosaic_backward.whole, STEPS),
        query,
        keys,
        values,
        gates,
        compressed,
        indices,
        grad,
        outputs,
        packed=place.packed,
        lists=lists,
    )
    gates = [x.to(gate.dtype, copy=True) for x, gate in zip(dots, gates, strict=True)]
    local = zip(pairs.selected, pairs.sliding, strict=True)
    return [total, *(x for pair in local for x in pair), *gates, *pairs.compressed]


def _saving_backward(grad, found, *tensors):
    outputs = Branches(*zip(tensors[:3], tensors[3:6], strict=True))
    return _attention_backward(grad, found, *tensors[9:], outputs=outputs, lists=tensors[6:9])


def _define_branch(name, tensors, function, step):
    backward = functools.partial(_branch_backward, step)
    operators.define_branch(name, tensors, function, "Tensor out, Tensor lse", backward)


PAIR = "Tensor query, Tensor compressed_key"
ALL = (
    "Tensor query, Tensor selected_key, Tensor sliding_key, Tensor selected_value, "
    "Tensor sliding_value, Tensor compressed_gate, Tensor selected_gate, Tensor sliding_gate, "
    "Tensor compressed_key, Tensor compressed_value, Tensor? block_indices, bool clean"
)
SAVED = (
    "Tensor found, Tensor compressed_out, Tensor selected_out, Tensor sliding_out, "
    "Tensor compressed_lse, Tensor selected_lse, Tensor sliding_lse, "
    "Tensor starts, Tensor members, Tensor counts"
)
_define_branch("compressed_attention", operators.THREE, _compressed, mosaic_backward.compressed)
_define_branch("selected_attention", operators.CHOSEN, _selected, mosaic_backward.chosen)
_define_branch("sliding_attention", operators.THREE, _sliding, mosaic_backward.sliding)
operators.define("select_blocks", PAIR, "Tensor", _select, _select_shapes)
operators.define("attention", ALL, "(Tensor out, Tensor found)", _attention, _attention_shapes)
operators.define(
    "attention_recomputing", ALL, "(Tensor out, Tensor found)", _attention, _attention_shapes
)
operators.define("attention_saving", ALL, f"(Tensor out, {SAVED})", _saving, _saving_shapes)
operators.differentiate("attention_recomputing", ALL, 10, "Tensor found", _attention_backward)
operators.differentiate("attention_saving", ALL, 10, SAVED, _saving_backward)


# The functions that `dispatch.py` names.


def compressed_attention(
    query,
    compressed_key,
    compressed_value,
    *,
    config,
    kv_len,
    cu_seqlens=None,
    scale=None,
    with_lse=True,
):
    """`functional.compressed_attention`."""
    place = operators.arguments(config, kv_len, cu_seqlens, scale)
    operator = torch.ops.nsa.compressed_attention
    out, lse = operator(query, compressed_key, compressed_value, *place)
    return out, lse.detach()


def select_blocks(query, compressed_key, *, config, kv_len, cu_seqlens=None, scale=None):
    """`functional.select_blocks`; the normalisation is a pass of its own here."""
    place = operators.arguments(config, kv_len, cu_seqlens, scale)
    return torch.ops.nsa.select_blocks(query.detach(), compressed_key.detach(), *place)


def selected_attention(
    query,
    key,
    value,
    block_indices,
    *,
    config,
    kv_len,
    cu_seqlens=None,
    scale=None,
    with_lse=True,
):
    """`functional.selected_attention`."""
    place = operators.arguments(config, kv_len, cu_seqlens, scale)
    operator = torch.ops.nsa.selected_attention
    out, lse = operator(query, key, value, block_indices, *place)
    return out, lse.detach()


def sliding_attention(
    query, key, value, *, config, kv_len, cu_seqlens=None, scale=None, with_lse=True
):
    """`functional.sliding_attention`."""
    place = operators.arguments(config, kv_len, cu_seqlens, scale)
    out, lse = torch.ops.nsa.sliding_attention(query, key, value, *place)
    return out, lse.detach()


def attention(
    query: Tensor,
    key: Branches,
    value: Branches,
    gates: Branches[Tensor],
    compressed: tuple[Tensor, Tensor],
    block_indices: Tensor | None,
    *,
    config: NSAConfig,
    kv_len: int | Tensor,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    clean: bool = False,
    recompute: bool = False,
) -> Tensor:
    """All steps: gates and the sum of the branches are part of the last kernels.

    Args:
      key, value: the compressed field is not read.
      compressed: `(k_cmp, v_cmp)`.
      clean: whether keys and values that no query may look at are finite, as in a cache, so
        that they need not be copied to be kept out.
      recompute: the backward pass computes the branches again. Else it keeps their outputs.
    """
    place = operators.arguments(config, kv_len, cu_seqlens, scale)
    tensors = query, *key[1:], *value[1:], *gates, *compressed
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    name = "attention"
    if learns:
        name = "attention_recomputing" if recompute else "attention_saving"
    operator = getattr(torch.ops.nsa, name)
    return operator(*tensors, block_indices, clean, *place)[0]
