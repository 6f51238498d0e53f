"""Caches as a table: histories of rows, what a cache must give and hold of them, and its paths.

A history is a list of turns: new tokens `begin[b] .. end[b] - 1` of each row `b`. A row that goes
back to an earlier token goes on with other tokens. The oracles know no pages and no frameworks.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import nsa_jax
import nsa_torch
from bench.judge.parity import FLOAT32_MAX
from nsa_torch import Branches, MLPParams, NSAConfig, PoolParams, RopeMLPParams
from nsa_torch.cache import crop
from tests.oracles import fp8, nsa
from tests.tables import table

SMALL = NSAConfig(8, 4, 16, num_selected=3, num_initial=1, num_local=1, window=9)
LAZY = NSAConfig(12, 4, 12, num_selected=3, num_initial=0, num_local=1, window=0)
POOL, WIDTH, RINGS = 24, 6, 9


@dataclasses.dataclass(frozen=True)
class Sizes:
    """`dtype`: of tokens and compressed keys; `fp8`: pages are in 8 bits."""

    H: int = 4
    Hkv: int = 2
    D: int = 8
    Dv: int = 6
    config: NSAConfig = SMALL
    separate: bool = False
    fp8: bool = False
    dtype: str = "float32"
    gate_dtype: str = "float32"

    @property
    def branches(self):
        """In the order of `Branches`, by the names that they have in a cache."""
        return ("raw", "selected", "sliding") if self.separate else ("selected",)

    @property
    def shapes(self):
        """Of a token, by name."""
        pair = {"key": (self.Hkv, self.D), "value": (self.Hkv, self.Dv)}
        tokens = {f"{x}_{kind}": shape for x in self.branches for kind, shape in pair.items()}
        return {"query": (self.H, self.D), "gates": (self.H, 3)} | tokens

    def narrow(self, x, name=""):
        """`x` in float32, rounded to the dtype of the array `name`."""
        dtype = self.gate_dtype if name == "gates" else self.dtype
        wide = np.float64 if dtype == "float64" else np.float32
        return x.astype(getattr(ml_dtypes, dtype, dtype)).astype(wide)

    def stored(self, x):
        """Of tokens, what pages hold."""
        return fp8.as_stored(x) if self.fp8 else x


class Rows:
    """Sequences of random tokens; `params`: of learned compression, for keys and values."""

    def __init__(self, sizes: Sizes, lengths, params=None, seed=0):
        self.sizes, self.params = sizes, params
        self.rng = np.random.default_rng(seed)
        self.tokens = {
            name: [self.draw(name, (n, *shape)) for n in lengths]
            for name, shape in sizes.shapes.items()
        }

    def draw(self, name, shape):
        draw = self.rng.random if name == "gates" else self.rng.standard_normal
        return self.sizes.narrow(draw(shape), name)

    def redraw(self, row, begin):
        for name, rows in self.tokens.items():
            rows[row][begin:] = self.draw(name, rows[row][begin:].shape)

    def share(self, source, target, count):
        """Row `target` begins as `source` does."""
        for name in self.tokens.keys() - {"query", "gates"}:
            self.tokens[name][target][:count] = self.tokens[name][source][:count]

    def cut(self, name, begin, end, order):
        """New tokens of a turn, one row after the other; NaN before a row's first."""
        found = []
        for b in order:
            x = self.tokens[name][b]
            found += [np.full((max(-begin[b], 0), *x.shape[1:]), np.nan, x.dtype)]
            found += [x[max(begin[b], 0) : end[b]]]
        return np.concatenate(found)

    def compressed(self, kind, tokens):
        """Of a row's tokens."""
        place, param = nsa.Rows(len(tokens), len(tokens), (len(tokens),)), None
        if self.params is not None:
            param = [torch.from_numpy(np.float64(x)) for x in self.params[kind == "value"]]
        x = torch.from_numpy(tokens.astype(np.float64))[None]
        found = nsa.compress(x, self.sizes.config, place, param)[0].numpy()
        return self.sizes.narrow(found) if param is None else found


class Pages:
    """What a cache must hold, by its names of arrays; NaN: never written. Rounded tokens are what
    is read of them.
    """

    def __init__(self, sizes: Sizes, pool, rings):
        config, self.sizes = sizes.config, sizes
        self.arrays, self.learned = {}, False
        slots = config.select_block // config.compress_stride
        for kind, width in (("key", sizes.D), ("value", sizes.Dv)):
            for branch in (*sizes.branches, "compressed"):
                entries = slots if branch == "compressed" else config.select_block
                shape = pool, entries, sizes.Hkv, width
                self.arrays[f"{branch}_{kind}"] = np.full(shape, np.nan)
            if sizes.fp8:
                shape = rings, 2 * config.compress_block, sizes.Hkv, width
                self.arrays[f"recent_{kind}"] = np.full(shape, np.nan)

    def append(self, rows: Rows, table, turn, order):
        """Of rows in the order of a call."""
        self.learned = rows.params is not None
        for place, row in enumerate(order):
            slot = row if turn.slots else place
            first, last = max(turn.begin[row], 0), turn.end[row]
            if first < last:
                self._append(rows, table[row], row, first, last, slot)

    def _append(self, rows, table, row, first, last, slot):
        config, raw = self.sizes.config, self.sizes.branches[0]
        kinds = ("key", "value")
        tokens = {x: rows.tokens[f"{raw}_{x}"][row][:last].copy() for x in kinds}
        rings = {x: self.arrays.get(f"recent_{x}", ())[slot:][:1] for x in kinds}
        made = {x: self._compressed(rows, x, tokens[x], first, rings[x]) for x in kinds}
        for position in range(first, last):
            column, offset = divmod(position, config.select_block)
            page = table[column] if column < len(table) else -1
            if not 0 <= page < len(self.arrays["selected_key"]):
                continue
            for name in self.sizes.shapes.keys() - {"query", "gates"}:
                token = rows.tokens[name][row][position]
                self.arrays[name][page, offset] = self.sizes.stored(token)
            index, rest = divmod(position + 1 - config.compress_block, config.compress_stride)
            for kind in kinds:
                if index >= 0 and rest == 0:
                    place = page, offset // config.compress_stride
                    self.arrays[f"compressed_{kind}"][place] = made[kind][index]
                for ring in rings[kind]:
                    if position >= last - len(ring):
                        ring[position % len(ring)] = tokens[kind][position]

    def _compressed(self, rows, kind, tokens, first, rings):
        """Of a row whose tokens from `first` on are those of the call; where pages round, older
        ones are what its ring has of them, or else what pages have.
        """
        if not self.sizes.fp8:
            return rows.compressed(kind, tokens)
        seen = self.sizes.narrow(self.sizes.stored(tokens))
        seen[first:] = tokens[first:]
        for ring in rings:
            for position in range(max(first - len(ring), 0), first):
                if np.array_equal(ring[position % len(ring)], tokens[position]):
                    seen[position] = tokens[position]
        made = rows.compressed(kind, seen)
        return self.sizes.stored(made) if kind == "value" else made

    def expected(self, rows, table, turn, order):
        """Of the tokens of a turn what attention gives, float64 `[N, H, Dv]`, and their blocks
        `[N, Hkv, n]`.
        """
        sizes, config = self.sizes, self.sizes.config
        outs = [np.zeros((0, sizes.H, sizes.Dv))]
        blocks = [np.zeros((0, sizes.Hkv, config.num_selected), np.int32)]
        lead = config.compress_block // config.compress_stride - 1
        for b in order:
            first, last = max(turn.begin[b], 0), turn.end[b]
            missing = first - turn.begin[b]
            outs.append(np.zeros((missing, sizes.H, sizes.Dv)))
            blocks.append(np.full((missing, *blocks[0].shape[1:]), -1))
            if first >= last:
                continue
            pages = table[b][: -(-last // config.select_block)]

            def held(name, begin, end, pages=pages):
                x = self.arrays[name][pages]
                return torch.from_numpy(x.reshape(1, -1, *x.shape[2:])[:, begin:end])

            count = lead + max(config.num_compressed(last), 0)
            made = [held(f"compressed_{kind}", lead, count) for kind in ("key", "value")]
            pair = [
                [held(f"{x}_{kind}", 0, last) for x in (sizes.branches * 3)[:3]]
                for kind in ("key", "value")
            ]
            query, gates = (
                torch.from_numpy(rows.tokens[x][b][first:last])[None].double()
                for x in ("query", "gates")
            )
            rest = {"config": config, "compressed": tuple(made)}
            found = nsa.attention(query, *pair, gates, **rest)
            outs.append(found.out[0].numpy())
            blocks.append(found.block_indices[0].numpy())
        return np.concatenate(outs), np.concatenate(blocks)

    def copy(self, page, source, target):
        """A page, and the ring of a row."""
        for name, x in self.arrays.items():
            of, to = (source, target) if name.startswith("recent") else page
            x[to] = x[of]

    def compare(self, found):
        """With `found`, a cache's arrays."""
        eps = float(ml_dtypes.finfo(self.sizes.dtype).eps)
        scaled = 1e-6 * self.sizes.fp8  # a scale is rounded to float32
        for name, want in self.arrays.items():
            made = name.startswith("compressed")
            # In float32 a learned sum of products in another order is off by more than a rounding.
            rounded = 4 * eps if self.learned and eps < 1e-6 else eps
            bound = {"rtol": rounded if made else scaled, "atol": 1e-6 * made}
            np.testing.assert_allclose(found[name], want, **bound, err_msg=name)


def tables(capacities, config: NSAConfig, pool=POOL, width=WIDTH, seed=0):
    """A table of shuffled pages, int32 `[B, width]`; entries of no page are anything."""
    rng = np.random.default_rng(seed)
    free = list(rng.permutation(pool))
    table = rng.integers(-5, pool + 5, (len(capacities), width)).astype(np.int32)
    for row, tokens in enumerate(capacities):
        for column in range(-(-tokens // config.select_block)):
            table[row, column] = free.pop()
    return table


def bounds(counts):
    """`cu_seqlens` of rows of so many tokens."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Turn:
    """`order`: in which the rows come, if not their own; `fork`: before it, a row that begins as
    another does with so many tokens; `even`: no bounds are given; `attends`: or appends alone;
    `slots`: whether rows say which rings they have in fp8; `lost`: entries of the table, row,
    column and number, that are of no page from now on, so that nothing is known of the output.
    """

    begin: list[int]
    end: list[int]
    order: tuple[int, ...] = ()
    fork: tuple[int, int, int] | None = None
    even: bool = False
    attends: bool = True
    slots: bool = True
    lost: tuple[tuple[int, int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Call:
    """A turn as a call has it; arrays of NumPy, `new` by the names of `Sizes.shapes`."""

    new: dict
    table: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray | None
    slots: np.ndarray | None
    params: tuple | None
    most: int

    def given(self, sizes, array):
        """Query, gates, keys and values."""
        found = {name: array(x) for name, x in self.new.items()}
        pair = [
            Branches(*(found[f"{x}_{kind}"] for x in sizes.branches))
            if sizes.separate
            else found[f"selected_{kind}"]
            for kind in ("key", "value")
        ]
        return found["query"], found["gates"], *pair


@dataclasses.dataclass
class TorchPages:
    """`implementation`: of steps of few tokens. Its `attend` may append, too."""

    api, xp = nsa_torch, torch

    sizes: Sizes
    device: str = "cpu"
    implementation: str | None = None
    appender: str | None = None
    together: bool = False
    pool: int = POOL
    width: int = WIDTH
    rings: int = RINGS

    def __post_init__(self):
        self.cache = self.made(device=self.device)
        for x in self.cache.tensors().values():
            x.fill_(torch.nan)

    def made(self, **options):
        sizes, dtype = self.sizes, getattr(self.xp, self.sizes.dtype)
        options |= {"dtype": self.xp.float8_e4m3fn if sizes.fp8 else dtype}
        options |= {"compressed_dtype": dtype, "max_rows": self.rings}
        options |= {"config": sizes.config, "separate": sizes.separate}
        return self.api.PagedCache(self.pool, sizes.Hkv, sizes.D, sizes.Dv, **options)

    def array(self, x):
        if x is None:
            return None
        tensor = torch.from_numpy(np.array(x))
        floats = tensor.is_floating_point() and x.shape[-1] != 3
        return tensor.to(self.device, getattr(torch, self.sizes.dtype) if floats else None)

    def given(self, call: Call):
        query, gates, *pair = call.given(self.sizes, self.array)
        gates = gates.to(getattr(torch, self.sizes.gate_dtype))
        at = [self.array(x) for x in (call.table, call.lengths)]
        params, starts = jax.tree.map(self.array, call.params), self.array(call.starts)
        slots = self.array(call.slots) if self.sizes.fp8 else None
        return query, gates, pair, at, starts, {"params": params, "slots": slots}

    def append(self, call: Call):
        _, _, pair, at, starts, rest = self.given(call)
        rest |= {"cu_seqlens_q": starts, "implementation": self.appender}
        nsa_torch.append(self.cache, *pair, *at, **rest)

    def attend(self, call: Call, new=False, **options):
        query, gates, pair, at, starts, rest = self.given(call)
        if new:
            options |= rest | {"key": pair[0], "value": pair[1]}
        name = "sdpa" if self.device == "cpu" else None  # of prompts
        options.setdefault("implementation", self.implementation if call.most <= 8 else name)
        options.setdefault("max_seqlen_q", None if starts is None else call.most)
        out = nsa_torch.paged_attention(query, gates, self.cache, *at, starts, **options)
        assert out.dtype is query.dtype
        return out.double().cpu().numpy()

    def step(self, call: Call):
        if self.together and call.most <= 8:
            return self.attend(call, new=True)
        self.append(call)
        return self.attend(call)

    def copy(self, pages, rings):
        self.cache.copy_pages(*map(self.array, map(np.array, pages)))
        self.cache.copy_recent(*map(self.array, map(np.array, rings)))

    def snapshot(self):
        return restored({k: x.double().cpu() for k, x in self.cache.tensors().items()})


def restored(arrays):
    """What is read of arrays, in float64."""
    arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    scales = {name: arrays.get(f"{name}_scale", np.ones((1, 1, 1))) for name in arrays}
    return {
        name: x if x.ndim == 3 else x * scales[name].swapaxes(1, 2)[..., None]
        for name, x in arrays.items()
    }


class JaxPages(TorchPages):
    api, xp = nsa_jax, jnp
    attending = staticmethod(
        jax.jit(nsa_jax.paged_attention, static_argnames=("max_seqlen_q", "implementation"))
    )
    appending = staticmethod(jax.jit(nsa_jax.append, donate_argnums=0))

    def __post_init__(self):
        self.cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), self.made())

    def array(self, call):
        """Few programs are compiled: there are 8 tokens or 96, with NaN behind a call's."""

        def made(x):
            x = x.astype(np.float32 if x.shape[-1] == 3 else self.sizes.dtype)
            size = len(x) if call.starts is None else 8 if len(x) <= 8 else 96
            behind = np.full((max(size - len(x), 0), *x.shape[1:]), np.nan, x.dtype)
            return np.concatenate([x, behind])

        return made

    def append(self, call: Call):
        *_, key, value = call.given(self.sizes, self.array(call))
        rest = {"cu_seqlens_q": call.starts, "params": call.params}
        rest["slots"] = call.slots if self.sizes.fp8 else None
        self.cache = self.appending(self.cache, key, value, call.table, call.lengths, **rest)

    def attend(self, call: Call, **options):
        query, gates, *_ = call.given(self.sizes, self.array(call))
        count, at = len(call.new["query"]), (self.cache, call.table, call.lengths, call.starts)
        if call.starts is not None:
            options = {"max_seqlen_q": 8 if count <= 8 else 61} | options
        out = self.attending(query, gates, *at, implementation=self.implementation, **options)
        out = np.asarray(out).astype(np.float32)
        assert (out[count:] == 0).all(), "tokens of no row"
        return out[:count]

    def copy(self, pages, rings):
        self.cache = self.cache.copy_pages(*map(np.array, pages))
        self.cache = self.cache.copy_recent(*map(np.array, rings))

    def snapshot(self):
        fields = {k: x for k, x in vars(self.cache).items() if isinstance(x, jax.Array)}
        return restored({k: x.astype(jnp.float32) for k, x in fields.items()})


class TorchDense:
    """A cache of whole rows, each as so many pages side by side."""

    api, rings = nsa_torch, 0

    def __init__(self, sizes: Sizes, made_with=None, batch=2, width=4):
        self.sizes, self.width, self.pool = sizes, width, batch * width
        capacity, widths = width * sizes.config.select_block, (sizes.D, sizes.Dv)
        self.options = {"config": sizes.config} if made_with else {}  # by default the cache's
        options = {"config": made_with or sizes.config, "separate": sizes.separate}
        self.cache = self.api.init_cache(batch, capacity, sizes.Hkv, *widths, **options)

    def tables(self):
        return np.arange(self.pool, dtype=np.int32).reshape(-1, self.width)

    def step(self, call: Call):
        batch, most = len(call.lengths), call.most
        starts = np.arange(batch + 1) * most if call.starts is None else call.starts
        counts = np.diff(starts)

        def padded(x):
            rows = np.full((batch, most, *x.shape[1:]), np.nan, x.dtype)
            for row, own in zip(rows, np.split(x, starts[1:-1]), strict=True):
                row[: len(own)] = own
            return self.array(rows)

        out = self.attend(call, counts, *call.given(self.sizes, padded))
        outs = [row[:count] for row, count in zip(np.asarray(out), counts, strict=True)]
        return np.concatenate(outs)

    array = staticmethod(torch.from_numpy)

    def attend(self, call, counts, query, gates, key, value):
        back = (self.cache.length - torch.from_numpy(call.lengths - counts)).unique()
        if back.any():
            crop(self.cache, int(back))
        options = dict(self.options)
        if np.ptp(counts):
            options["new_lengths"] = torch.from_numpy(counts)
        if call.params is not None:
            options["compress_params"] = jax.tree.map(torch.from_numpy, call.params)
        with torch.no_grad():
            return nsa_torch.cached_attention(query, key, value, gates, self.cache, **options)[
                0
            ]

    def snapshot(self):
        """Nothing: what it holds shows in later outputs."""


class JaxDense(TorchDense):
    api, array = nsa_jax, staticmethod(jnp.asarray)
    attending = staticmethod(jax.jit(nsa_jax.cached_attention, static_argnames="config"))

    def append(self, call: Call):
        """Of zeros, that is nothing: rows that begin later."""
        assert not any(
            x.any() for name, x in call.new.items() if name not in ("query", "gates")
        )
        self.cache = self.cache._replace(length=jnp.asarray(call.lengths))

    def attend(self, call, counts, query, gates, key, value):
        options = dict(self.options)
        if call.params is not None:
            options["compress_params"] = call.params
        out, self.cache = self.attending(query, key, value, gates, self.cache, **options)
        return out


def phi(kind, width):
    """Parameters of a kind of compression, by the names that layers have for it."""
    rng = np.random.default_rng(width)
    shapes = ((8, width), (8 * width, 12), (12,), (12, width), (width,))
    arrays = [np.float32(rng.normal(size=shape) * 0.3) for shape in shapes]
    rates = np.float32(10.0 ** -np.arange(width // 2))
    return {
        "avg": None,
        "mlp": PoolParams(arrays[0]),
        "mlp_pe": MLPParams(*arrays),
        "mlp_rope": RopeMLPParams(*arrays, rates),
    }[kind]


def close(found, want, bound=None):
    """Within `FLOAT32_MAX`, or a part `bound` of the root of the mean square."""
    assert found.shape == want.shape
    if bound is None:
        np.testing.assert_allclose(found, want, rtol=0, atol=FLOAT32_MAX)
        return
    error = np.sqrt(((found - want) ** 2).mean() / (want**2).mean())
    assert error < bound, f"{error:.2e}"


def call_of(rows: Rows, table, turn: Turn, order):
    """A turn's arrays; rows without new tokens are padding."""
    begin, end = turn.begin, turn.end
    counts = [end[b] - begin[b] for b in order]
    return Call(
        {name: rows.cut(name, begin, end, order) for name in rows.sizes.shapes},
        table[order],
        np.array([end[b] if end[b] > begin[b] else 0 for b in order], np.int32),
        None if turn.even else bounds(counts),
        np.array(order, np.int32) if turn.slots else None,
        rows.params,
        max(counts),
    )


def forked(fork, rows, pages, table, path):
    source, target, count = fork
    rows.share(source, target, count)
    whole, rest = divmod(count, rows.sizes.config.select_block)
    table[target, :whole] = table[source, :whole]
    if rest:
        copied = table[[source, target], whole]
        pages.copy(copied, source, target)
        path.copy(copied[:, None], ([source], [target]))


def check(path, turns: list[Turn], rows=None, table=None, bound=None, seed=0):
    """Each turn's output is the oracle's, and in the end the cache holds what it must, no more.
    `path.call` and `path.blocks` are then those of the last turn.

    Returns the outputs. `seed`: of where pages lie.
    """
    sizes, batch = path.sizes, len(turns[0].end)
    ends = [max(turn.end[b] for turn in turns) for b in range(batch)]
    rows = rows or Rows(sizes, ends)
    pages, at, outs = Pages(sizes, path.pool, path.rings), [0] * batch, []
    if isinstance(path, TorchDense):
        table = path.tables()
    elif table is None:
        table = tables(ends, sizes.config, path.pool, path.width, seed)
    for turn in turns:
        if turn.fork is not None:
            forked(turn.fork, rows, pages, table, path)
        for b, begin in enumerate(turn.begin):
            if begin < at[b] and turn.end[b] > begin:
                rows.redraw(b, max(begin, 0))
        for row, column, entry in turn.lost:
            table[row, column] = entry
        order = [*turn.order] or [*range(batch)]
        call = path.call = call_of(rows, table, turn, order)
        pages.append(rows, table, turn, order)
        if turn.attends:
            outs.append(path.step(call))
            if not turn.lost:
                want, path.blocks = pages.expected(rows, table, turn, order)
                close(outs[-1], want, bound)
        else:
            path.append(call)
        at = [max(x) for x in zip(turn.end, turn.begin, strict=True)]
    if (found := path.snapshot()) is not None:
        pages.compare(found)
    return outs


def of_counts(*counts, begin=None, **options):
    """Turns of so many new tokens of each row, one after the other."""
    begin = [*begin] if begin else [0] * len(counts[0])
    more = lambda at, counts: [x + y for x, y in zip(at, counts, strict=True)]
    ends = itertools.accumulate(counts, more, initial=begin)
    return [Turn(*pair, **options) for pair in itertools.pairwise(ends)]


def decoding(lengths, queries):
    """A prompt, then a step of so many queries of each row; where a row has some, but fewer, of
    different numbers.
    """
    even = all(n == 0 or n >= queries for n in lengths)
    before = [n - queries if even else max(n - queries, 0) for n in lengths]
    prompt = Turn([0] * len(lengths), [max(n, 0) for n in before], attends=False)
    return [prompt, Turn(before, [*lengths], even=even)]


def turns(parts):
    """A history of `caches.yaml`."""
    found = []
    for part in parts:
        tuples = {x: tuple(y) if x in ("order", "fork") else y for x, y in part.items()}
        counts, times = tuples.pop("counts", None), tuples.pop("times", 1)
        found += of_counts(*counts * times, **tuples) if counts else [Turn(**tuples)]
    return found


def sized(row, **sizes):
    """The sizes of a row of a table, over these, and what else it has."""
    names = {field.name for field in dataclasses.fields(Sizes)}
    if "config" in row:
        sizes["config"] = NSAConfig(**row["config"])
    own = {x: y for x, y in row.items() if x in names - {"config"}}
    return Sizes(**sizes | own), {x: y for x, y in row.items() if x not in names}


by_separate = pytest.mark.parametrize("separate", [False, True], ids=["", "own keys"])
by_fp8 = pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
TABLE = table("caches")
HISTORIES, DENSE, APPENDED_BY_TRITON = (
    {name: turns(parts) for name, parts in TABLE[x].items()}
    for x in ("histories", "dense", "triton")
)
