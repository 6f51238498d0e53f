"""What the walks of forward and dq have in common: a tile of queries goes from block to block.

    interval_walk.py   blocks of an interval of keys, which neighbouring tiles share
    selected_walk.py   blocks of a tile's list
    tile_steps.py      what forward and dq do at a block, on either walk

A block's matrix (P forward, dS in dq) is multiplied with its values or keys at once, or, with
`overlap_pv`, beside the work by element on the next block:

    at once      S(i)   softmax(i)   P(i) V(i)   S(i+1)   softmax(i+1)   ...
    overlap_pv   S(i)   softmax(i)   S(i+1), P(i) V(i)
                                     softmax(i+1)          S(i+2), P(i+1) V(i+1)   ...
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


class TilePlace(NamedTuple):
    """Where the tile of a warpgroup is."""

    b: Any
    kv_head: Any
    index: Any  # along the tokens
    slot: Any  # which of the scratch's tiles is its own


class Block(NamedTuple):
    """A block of keys and values, at these stages of the ring buffers.

    `free_key` and `free_value` give a stage back, once: it is no more read, and the block that
    takes it next may be copied.
    """

    key_stage: Any
    value_stage: Any
    row_mask: Any  # [64], the rows that have this block at all; None: all
    visible: Callable[[], Any]  # [64, block], or None where its rows see all of it
    free_key: Callable[[], None]
    free_value: Callable[[], None]


class Factor(NamedTuple):
    """What is still to be multiplied with the keys or values of a block: P forward, dS in dq."""

    block: Block
    matrix: Any  # [64, block], in the type of the operands


class Mainloop(NamedTuple):
    """What a kernel does with a tile, once its rows are there. It waits for `key_ready` and
    `value_ready` of a block's stages, and frees both.

    `attend(block, before, state)` returns the next state and the matrix of the block's factor;
    `multiply(factor, state)` adds the product to the state. With `overlap_pv` the product
    of the factor `before` is `attend`'s, so that it runs beside the work by element; otherwise,
    and for the first block, `before` is None. `finish(state)` is the result, float32
    `[64, width]`.
    """

    state: Any
    attend: Callable[[Block, Factor | None, Any], tuple[Any, Any]]
    multiply: Callable[[Factor, Any], Any]
    finish: Callable[[Any], Any]


def over_blocks(
    mainloop: Mainloop,
    block_at: Callable[[bool, Any], Block],
    border: Any,
    blocks: Any,
    *,
    masked_first: bool,
    overlap_pv: bool,
) -> Any:
    """The last state of `mainloop` on a tile.

    Args:
      block_at: gives a block by whether some of its keys are masked, and by its number.
      border: of the `blocks` blocks, those before this number are masked and the others not, or
        the other way round.
      masked_first: whether it is those before it.
      overlap_pv: whether a factor is multiplied beside the next block. There must be a block
        then, and the first one is masked.
    """

    def step(under_mask, i, carried):
        state, matrix = carried
        before = Factor(block_at(False, i - 1), matrix)
        return mainloop.attend(block_at(under_mask, i), before, state)

    def step_alone(under_mask, i, state):
        block = block_at(under_mask, i)
        state, matrix = mainloop.attend(block, None, state)
        return mainloop.multiply(Factor(block, matrix), state)

    def walk(first, body, carried):
        middle = jnp.maximum(border, first)
        body_before, body_after = (
            functools.partial(body, under_mask)
            for under_mask in (masked_first, not masked_first)
        )
        carried = lax.fori_loop(first, middle, body_before, carried)
        return lax.fori_loop(middle, blocks, body_after, carried)

    if not overlap_pv:
        return walk(0, step_alone, mainloop.state)
    carried = mainloop.attend(block_at(True, jnp.int32(0)), None, mainloop.state)
    state, matrix = walk(1, step, carried)
    return mainloop.multiply(Factor(block_at(False, blocks - 1), matrix), state)
