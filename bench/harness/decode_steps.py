"""Runs the decode steps for the last tokens on a filled cache. `bench.decode` times the steps
and counts their reads.

A step does not change the length of the cache, so that all calls do the same work. In torch every
call writes the tokens to the same slots. In JAX the step resets the length of the returned cache.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_core.config import NSAConfig
from nsa_core.dispatch import INVARIANT, Choices
from nsa_core.types import Branches

from . import timing
from .measure import once
from .problems import Inputs
from .records import Values
from .runners import Step, rotated

ARGUMENTS = ("compressed", "scores", "selected", "sliding", "all")  # branches of a step


def of_one_step(implementation: str) -> str:
    """Return the implementation of a single step. `invariant` runs only all steps together, so that
    single steps run on `mosaic`.
    """
    return "mosaic" if implementation == INVARIANT else implementation


class Cached:
    """A cache with all tokens except the last tokens. The object also has the queries of the last
    tokens, and the steps for these queries.
    """

    def __init__(self, runner, inputs: Inputs, config: NSAConfig, chosen: Choices):
        self.runner, self.config, self.api = runner, config, runner.api
        self.torch, self.tokens = runner.framework == "torch", inputs.num_keys
        self.names = {choice.step: choice.implementation for choice in chosen}
        load = once(runner.load)
        self.given = {x: load(inputs.arguments(x)) for x in ARGUMENTS}
        # The step of the selected branch selects its blocks.
        self.given["selected"] |= self.given["scores"]
        del self.given["selected"]["block_indices"]
        names = "query", "key", "value", "gates"
        self.query, key, value, self.gates = (self.given["all"][name] for name in names)
        self.all_tokens, (self.batch, self.new) = (key, value), self.query.shape[:2]
        self.sizes = *key.selected.shape[2:], value.selected.shape[-1]
        self.separate = inputs.key.sliding is not inputs.key.selected
        if not self.separate:
            key, value = self.all_tokens = key.selected, value.selected
        self.options: Values = {"config": config, "dtype": self.query.dtype}
        if self.torch:
            self.options["device"] = self.query.device
        cache = self.api.init_cache(
            self.batch, self.tokens, *self.sizes, separate=self.separate, **self.options
        )
        past, self.last = (
            jax.tree.map(lambda x, cut=cut: x[:, cut], [key, value])
            for cut in (slice(-self.new), slice(-self.new, None))
        )
        self.cache = self._updated(cache, *past) if self.tokens > self.new else cache

    def _updated(self, cache, key, value):
        """Return the cache with the new tokens `key` and `value`. In torch the cache is changed
        in place."""
        if not self.torch:
            pair = map(Branches.each, (key, value))
            return jax.jit(self.api.cache.update)(cache, *pair, (None, None))
        count = self.tokens - self.new
        longest, lengths = cache.longest + count, cache.length + count
        self.api.append(cache.pages, flat(key), flat(value), cache.page_table, lengths)
        return dataclasses.replace(cache, length=lengths, longest=longest)

    def step(self, branch: str) -> Step:
        """Return the step of one branch. The step of `all` appends the tokens and then attends."""
        if branch != "all":
            function = functools.partial(self._branch, branch)
            return self.runner.prepare(function, self.given[branch])
        options = {"config": self.config, "implementation": self._names}

        def attend(cache, *last):
            return self.api.cached_attention(*last, cache, **options)

        def step(cache, *last):
            out, after = attend(cache, *last)
            return {"out": out}, after._replace(length=cache.length)

        last = self.query, *self.last, self.gates
        if not self.torch:
            return donated(self.runner, step, self.cache, last)
        # Each call has a new cache object, whose length the call changes. All of them share the
        # buffers.
        fresh = functools.partial(dataclasses.replace, self.cache)
        return stepped(self.runner, lambda: {"out": attend(fresh(), *last)[0]})

    @property
    def _names(self) -> Branches[str]:
        return Branches(*(self.names[x] for x in Branches._fields))

    def _branch(self, branch: str, given: Values) -> Values:
        """Run one branch on all tokens. The result has the keys `out` and `lse`, or for the scores
        only the key `indices`.
        """

        def how(step):
            # `kv_len` is a number, since the arrays end with the last token. With lengths on the
            # device these functions would copy and zero all values, unlike the whole step.
            name = of_one_step(self.names[step])
            return {"config": self.config, "kv_len": self.tokens, "implementation": name}

        given = dict(given)
        if branch in ("scores", "selected") and "block_indices" not in given:
            compressed_key = given.pop("compressed_key")
            found = self.api.select_blocks(given["query"], compressed_key, **how("scores"))
            if branch == "scores":
                return {"indices": found}
            given["block_indices"] = found
        out, lse = getattr(self.api, f"{branch}_attention")(**given, **how(branch))
        return {"out": out, "lse": lse}

    def chosen(self) -> jax.Array:
        """Return the blocks that the step selects, int32 `[B, tokens, Hkv, n]`."""
        return jnp.asarray(self.runner.numpy(self.step("scores")()["indices"]))

    def chosen_on_pages(self) -> jax.Array | None:
        """Return the blocks that the kernel of the whole step selects, int32
        `[B, tokens, Hkv, n]`. Return None if the whole step runs branch by branch.
        """
        if not self.torch:
            return None
        from nsa_torch import paged_attend

        cache = self.cache
        at = cache.pages, cache.page_table, cache.length + self.new, None
        decided = paged_attend.decide_step(self.query, self.gates, *at, self._names)
        if decided is None or decided.name == INVARIANT:
            return None
        self.step("all")()  # appends the new tokens, to which the next call attends
        return self.blocks_of(paged_attend, decided.choice.implementation, decided.inputs)

    def blocks_of(self, paged_attend, implementation: str, inputs) -> jax.Array:
        """Return the blocks that a kernel on pages selects, int32 `[B, tokens, Hkv, n]`."""
        _, found = paged_attend.with_indices(implementation, inputs)
        return jnp.asarray(self.runner.numpy(self.by_row(found)))

    def by_row(self, x):
        """Reshape `[B * tokens, ..]` to `[B, tokens, ..]`."""
        return x.reshape(self.batch, self.new, *x.shape[1:])

    def reads(self, branch: str) -> np.ndarray:
        """Return the number of keys that the last query reads in the branch, `[B, Hkv]` (see
        `bench.decode`).
        """
        given = self.given[branch] | {"query": self.query * 0}
        if branch == "selected":
            given["block_indices"] = self.step("scores")()["indices"]
            del given["compressed_key"]
        lse = self.runner.numpy(self._branch(branch, given)["lse"])[:, -1]  # [B, H]
        counts = np.exp(lse.astype(np.float64)).reshape(self.batch, self.sizes[0], -1)
        return np.rint(counts.mean(axis=-1)).astype(np.int64)


class Paged:
    """A paged cache, with pages in random order, that has the same tokens as a `Cached`. The object
    also has the step."""

    def __init__(self, cached: Cached, implementation: str | None, fp8: bool):
        self.cached, self.implementation = cached, implementation
        self.runner, self.api, batch = cached.runner, cached.api, cached.batch
        pages = -(-cached.tokens // cached.config.select_block)
        table = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages)
        at = table, np.full(batch, cached.tokens)
        self.at = tuple(self.runner.load(jnp.asarray(x, jnp.int32)) for x in at)
        options = dict(cached.options)
        if fp8:
            options |= {"compressed_dtype": options["dtype"], "max_rows": batch}
            options["dtype"] = (cached.runner.torch if cached.torch else jnp).float8_e4m3fn
        options["separate"] = cached.separate
        self.cache = self.api.PagedCache(batch * pages, *cached.sizes, **options)
        self.cache = self._append(self.cache, *cached.all_tokens)

    def _append(self, cache, key, value):
        # torch writes to the same cache and returns None.
        return self.api.append(cache, flat(key), flat(value), *self.at) or cache

    def stored(self) -> Values:
        """Return the tokens, rounded as in a cache in fp8, as float32, keyed by the names of
        `problems.Inputs`.
        """
        config, (table, _) = self.cached.config, (self.runner.numpy(x) for x in self.at)

        def array(x):
            wide = x.float() if self.cached.torch else x.astype(jnp.float32)
            return self.runner.numpy(wide)

        def tokens(name, first=0, count=self.cached.tokens):
            pages, scale = (getattr(self.cache, x, None) for x in (name, f"{name}_scale"))
            found = array(pages)[table]
            if scale is not None:
                found = found * array(scale).swapaxes(1, 2)[table][..., None]
            return jnp.asarray(
                found.reshape(len(table), -1, *found.shape[3:])[:, first:][:, :count]
            )

        lead = config.compress_block // config.compress_stride - 1
        slots = lead, config.num_compressed(self.cached.tokens)
        found: Values = {}
        for kind in ("key", "value"):
            own = "sliding" if self.cached.separate else "selected"
            pair = (tokens(f"{branch}_{kind}") for branch in ("selected", own))
            found[kind] = Branches(None, *pair)
            found[f"compressed_{kind}"] = tokens(f"compressed_{kind}", *slots)
        return found

    @property
    def name(self) -> str:
        """The name of the implementation that runs."""
        found = self._attend.explain(*self._arguments(), implementation=self.implementation)
        return INVARIANT if self.implementation == INVARIANT else found.implementation

    @property
    def _attend(self) -> Any:
        if self.cached.torch:
            from nsa_torch import paged_attend
        else:
            from nsa_jax import paged as paged_attend
        return paged_attend

    def chosen(self) -> jax.Array | None:
        """Return the blocks that kernels on pages select, int32 `[B, tokens, Hkv, n]`. Return None
        if the selected blocks equal the selected blocks of the contiguous cache.
        """
        if self.name in ("gathered", INVARIANT):
            return None
        inputs = self._attend.Inputs(*self._arguments(), None, None)
        return self.cached.blocks_of(self._attend, self.name, inputs)

    def _arguments(self):
        query, gates = (
            x.reshape(-1, *x.shape[2:]) for x in (self.cached.query, self.cached.gates)
        )
        return query, gates, self.cache, *self.at

    def step(self) -> Step:
        """Return the step, which appends the tokens and then attends."""
        query, gates, *_ = self._arguments()

        def attend(cache, **new):
            new["implementation"] = self.implementation
            out = self.api.paged_attention(query, gates, cache, *self.at, **new)
            return {"out": self.cached.by_row(out)}

        def step(cache, *last):
            cache = self._append(cache, *last)
            return attend(cache), cache

        if not self.cached.torch:
            return donated(self.runner, step, self.cache, self.cached.last)
        # The tensors are contiguous, like the results of projections. Slices of whole rows would
        # be copied in each step.
        pairs = jax.tree.map(lambda x: x.contiguous(), flat(self.cached.last))
        new = dict(zip(("key", "value"), pairs, strict=True))
        return stepped(self.runner, lambda: attend(self.cache, **new))


def stepped(runner, call: Callable[[], Values]) -> Step:
    """Return the step that makes a call. In torch, gradients are off."""
    call = runner.torch.no_grad()(call) if runner.framework == "torch" else call
    return Step(call, (), functools.partial(runner.time, call))


def timed(runner, step, how: Values) -> tuple[timing.Timing, str]:
    """Return the time of a step. Also return whether a CUDA graph replayed the step, or the reason
    why no graph replayed the step.
    """
    graph = "no: jax.jit" if runner.framework == "jax" else "no: cpu"
    if runner.platform == "cuda":
        try:
            replay, _ = timing.cuda_graph(step)
        except RuntimeError as error:
            runner.torch.cuda.synchronize()
            graph = f"no: {str(error).strip().splitlines()[0]}"
        else:
            name = "cuda_events/graph"
            return timing.time_cuda_events(replay, **how, timer=name), "yes"
    return step.time(**how), graph


def donated(runner, function: Callable, cache: Any, last: Sequence[Any]) -> Step:
    """Return a step of JAX that donates its cache and receives it back for the next call."""
    step = jax.jit(function, donate_argnums=0)
    held = collections.deque(rotated(jax.tree.map(jnp.copy, cache)))

    def run():
        out, after = step(held.popleft(), *last)
        held.append(after)
        return out

    return stepped(runner, run)


def flat(arrays: Any) -> Any:
    """Reshape each `[B, T, ..]` to `[B * T, ..]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
