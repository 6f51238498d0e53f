"""dk and dv of intervals: the queries that see a tile of keys are neighbours.

A CTA has 128 keys: a producer warpgroup, and two consumer warpgroups of 64 keys each; one where
D + Dv > 384. The producer fills the stages of a ring buffer with query tiles of 64 rows, as the
consumers leave them. Steps at both ends of an interval are masked; between them no key is
compared. A consumer leaves out the steps of which no query sees its 64 keys.

Floors at B=1 H=64 Hkv=4 D=Dv=128 T=65536 on an H100, four products a pair: compressed 8.8 TFLOP =
8.9 ms, sliding 2.2 TFLOP. Products that read their operands from shared memory bound both: a step
of two warpgroups takes 2048 cycles of the tensor cores, in which shared memory moves 192 KB to
them (1536 cycles), 32 KB of copies (256) and statistics (256). Where K and V fit in registers
(D + Dv <= 128), products read a third less.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import operands
from kernels_pallas.mosaic.dkv_step import KeyTile, QueryMask, down, key_index, scratch
from kernels_pallas.mosaic.refs import build_kernel
from kernels_pallas.specs.dkv import Dkv
from kernels_pallas.specs.work_items import part_column

CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # a thread


def partials(kernel: Kernel):
    """The body of `specs.dkv.partials` for intervals."""
    spec: Dkv = kernel.spec
    interpret = bool(spec.interpret)
    buffers = operands.Buffers(jnp.dtype(spec.dtype), spec.query_tile, interpret)
    operands.check_registers(*[CONSUMER_REGISTERS] * spec.consumers, PRODUCER_REGISTERS)

    def body(refs):
        tile = KeyTile.of_cta(spec, buffers, refs)
        steps = tile.steps

        def step(wg, keys, under_mask, i, sums):
            stage = tile.stage(i)
            plgpu.barrier_wait(refs.step_full.at[stage])

            def visible(_, key_begin, key_end):
                key = key_index(tile.first_key, wg)
                return (key >= down(key_begin)) & (key < down(key_end))

            mask = QueryMask(visible if under_mask else None)
            sums = tile.add_step(stage, keys, sums, mask)
            plgpu.barrier_arrive(refs.step_free.at[stage])
            return sums

        def skip(i, _):
            """Leaves a step of which no query sees a key of this warpgroup."""
            stage = tile.stage(i)
            plgpu.barrier_wait(refs.step_full.at[stage])
            plgpu.barrier_arrive(refs.step_free.at[stage])

        def consume(wg, keys, sums):
            """Adds all steps to the sums of warpgroup `wg`."""
            first, unmasked_begin, unmasked_end, last = tile.bounds(part_column(wg))
            unmasked_first, unmasked_last = tile.unmasked(
                unmasked_begin, unmasked_end, first, last
            )
            masked, unmasked = (functools.partial(step, wg, keys, x) for x in (True, False))
            lax.fori_loop(0, first, skip, None)
            sums = lax.fori_loop(first, unmasked_first, masked, sums)
            sums = lax.fori_loop(unmasked_first, unmasked_last, unmasked, sums)
            sums = lax.fori_loop(unmasked_last, last, masked, sums)
            lax.fori_loop(last, steps, skip, None)
            return sums

        def produce():
            """Fills the stages with query tiles, as consumers leave them."""

            def load(i, _):
                stage = tile.stage(i)

                @pl.when(i >= spec.stages)
                def _():
                    plgpu.barrier_wait(refs.step_free.at[stage])

                tile.load_query_tile(i, 0, tile.begin + i)

            lax.fori_loop(0, steps, load, None)
            if interpret:  # which wants every completed phase waited for

                def drain(i, _):
                    plgpu.barrier_wait(refs.step_free.at[tile.stage(i)])

                lax.fori_loop(jnp.maximum(steps - spec.stages, 0), steps, drain, None)

        exists = tile.exists()
        wg = lax.axis_index("wg")

        @pl.when(exists & (wg < spec.consumers))
        def _():
            if not interpret:
                plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            tile.sum_steps(wg, functools.partial(consume, wg))

        @pl.when(exists & (wg == spec.consumers))
        def _():
            tile.clear_padding_rows()
            if not interpret:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            produce()

    return build_kernel(
        kernel,
        body,
        scratch=scratch(spec, buffers),
        grid_names=("item",),
        num_threads=spec.consumers + 1,
        thread_name="wg",
        interpret=spec.interpret,
    )
