"""Arguments that public functions refuse (`refusals.yaml`), and what refused calls leave behind."""

import itertools
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from flax import nnx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import nsa_jax
import nsa_jax.nn
import nsa_torch
from nsa_core.layer import LayerSpec
from nsa_torch import Branches, NSAConfig, plan_runs
from tests import refusals
from tests.problems import SMALL
from tests.refusals import TABLE, words

LIBRARIES = {"jax": nsa_jax, "torch": nsa_torch}


class World:
    """A framework, and calls that it does not refuse."""

    def __init__(self, framework):
        self.framework, self.library = framework, LIBRARIES[framework]
        self.xp = torch if framework == "torch" else jnp

    def given(self, x):
        """What a part of the table means here."""
        own = {"rows": self.rows, "PagedCache": self.pages, "metadata": self.metadata}
        own["LayerSpec"] = LayerSpec
        own["layer_cache"] = lambda *sizes: self.layer.init_cache(*sizes)
        own["torch_cache"] = WORLDS["torch"].rows
        return refusals.given(x, self.framework, refusals.MAKERS | own)

    def function(self, call):
        name = call.split()[0]
        if name == "NSAAttention" and self.framework == "jax":
            return partial(nsa_jax.nn.NSAAttention, rngs=nnx.Rngs(0))
        if name == "layer":
            return self.layer
        return getattr(self.library, name, None) or getattr(self.pages(), name)

    @cached_property
    def layer(self):
        return self.function("NSAAttention")(**self.arguments("NSAAttention"))

    def pages(self, **options):
        """Four pages of a cache."""
        options = {"config": SMALL, "dtype": self.xp.float32} | options
        return self.library.PagedCache(4, 2, 8, 8, **options)

    def rows(self, batch=2, capacity=30, **options):
        """A cache of rows."""
        options = {"config": SMALL} | options
        return self.library.init_cache(batch, capacity, 2, 8, 8, **options)

    def metadata(self, **options):
        borders = {"cu_seqlens": torch.tensor([0, 5, 20])}
        if self.framework == "jax":
            borders = {"segment_ids": jnp.zeros((1, 20), jnp.int32)}
        return self.library.varlen_metadata(**borders, config=SMALL, **options)

    @cached_property
    def calls(self):
        """By name, the arguments that are arrays, and the others."""
        found = {x: (y.get("arrays", {}), y["rest"]) for x, y in TABLE["calls"].items()}
        packed = {"cu_seqlens": "int64 ints 0 20"}
        if self.framework == "jax":
            packed = {"segment_ids": "int32 zeros 1x20"}
        for name, (arrays, rest) in dict(itertools.islice(found.items(), 9)).items():
            if name not in ("cached_attention", "attention of lists"):
                one = {key: x.replace(" 2x", " 1x") for key, x in arrays.items()}
                found[f"{name} packed"] = one, rest | packed
                found[f"{name} with metadata"] = one, rest | {"varlen": {"metadata": {}}}
        return found

    def arguments(self, call):
        arrays, rest = self.calls[call]
        return self.given(arrays | rest)


ROWS = [
    (framework, call, *row)
    for framework in LIBRARIES
    for table in ("both", framework)
    for call in TABLE[table]
    for row in refusals.rows(table, call)
]
AT = [f"{framework}-{call}-{sentence[:60]}" for framework, call, _, sentence, _ in ROWS]


@pytest.mark.parametrize(("framework", "call", "changes", "sentence", "kind"), ROWS, ids=AT)
def test_bad_arguments_are_named(framework, call, changes, sentence, kind):
    """What `attention` refuses is not explained: the words are the same."""
    world = World(framework)
    arguments = world.arguments(call) | world.given(changes)
    with pytest.raises(kind, match=f"^{words(sentence)}") as wanted:
        world.function(call)(**arguments)
    of_explain = {"query", "key", "value", "gates", "config", "compressed", "implementation"}
    if call == "attention" and changes.keys() <= of_explain:
        with pytest.raises(kind) as error:
            world.library.explain(**arguments)
        assert str(error.value) == str(wanted.value)


WORLDS = {name: World(name) for name in LIBRARIES}
ARRAYS = [(name, call) for name, x in WORLDS.items() for call, (y, _) in x.calls.items() if y]


@pytest.mark.parametrize(("framework", "call"), ARRAYS)
def test_what_is_no_array(framework, call):
    """None, a number, and in torch a sparse tensor, in place of each argument that is an array."""
    world, arrays = WORLDS[framework], WORLDS[framework].calls[call][0]
    for name in arrays:
        good = world.arguments(call)
        optional = name == "block_indices" and len(arrays) == 1
        optional |= name == "gates" and call.startswith("explain")
        bad = [3] if optional else [None, 3]
        if isinstance(good[name], torch.Tensor):
            bad.append(good[name].to_sparse())
        for each in bad:
            with pytest.raises(ValueError, match=rf"^{name} must be (a|an|dense)\b.*, got "):
                world.function(call)(**good | {name: each})


OF_TORCH = "carve", "view", "plan_runs", "varlen_metadata", "NSAAttention"
OF_KINDS = TABLE["kinds"]


by_framework = pytest.mark.parametrize("framework", LIBRARIES)


@by_framework
@pytest.mark.parametrize("kind", OF_KINDS)
def test_what_is_of_another_kind(kind, framework):
    world, (values, *rows) = WORLDS[framework], OF_KINDS[kind]
    for call, *names in map(str.split, rows):
        if framework == "jax" and call in OF_TORCH:
            continue
        for name, wrong in itertools.product(names, values):
            with pytest.raises(ValueError, match=f"^{name} must be {kind}, got "):
                world.function(call)(**world.arguments(call) | {name: wrong})


@pytest.mark.parametrize(
    ("call", "changes"), [*((x, {}) for x in WORLDS["torch"].calls), *TABLE["passing"]]
)
def test_what_is_changed_above_is_good(call, changes):
    """Each row fails for its own reason: so does no call without what it changes."""
    world = WORLDS["torch"]
    world.function(call)(**world.arguments(call) | world.given(changes))
    if (world := WORLDS["jax"]).calls.get(call, ({}, {}))[0] and not changes:
        arguments = world.arguments(call)
        arrays = {x: y for x, y in arguments.items() if isinstance(y, jax.Array)}

        def run(arrays):
            world.function(call)(**arguments | arrays)

        jax.eval_shape(run, arrays)  # compiles nothing


NAMED = [
    (framework, call, row)
    for framework, rows in TABLE["names"].items()
    for row in rows
    for call in row["calls"].split()
]
EVERY_NAME = {x for _, _, row in NAMED for x in f"{row['run']} {row['refused']}".split()}


@pytest.mark.parametrize(("framework", "call", "row"), NAMED)
def test_each_name_runs_or_is_refused(framework, call, row):
    world = WORLDS[framework]
    for name in EVERY_NAME:
        run = partial(world.function(call), **world.arguments(call), implementation=name)
        if name in row["run"].split():
            run()
            continue
        known = name in row["refused"].split()
        with pytest.raises(NotImplementedError if known else ValueError, match=name):
            run()


SCALED = "attention compressed_attention selected_attention sliding_attention block_attention"
SCALED += " cached_attention paged_attention paged_block_attention"


@by_framework
@pytest.mark.parametrize("call", SCALED.split())
def test_a_scale_is_a_factor_of_the_query(framework, call):
    """Twice the default scale and twice the query give the same bits, and others than the
    default does."""
    world = WORLDS[framework]

    def drawn(call):
        given, numbers = world.arguments(call), np.random.default_rng(0)
        for name, x in given.items():
            if hasattr(x, "ndim") and "float" in str(x.dtype):
                given[name] = world.xp.asarray(numbers.normal(size=x.shape).astype("float32"))
        return given

    def run(factor=1, **options):
        given = drawn(call) | options
        given["query"] = factor * given["query"]
        if call == "paged_attention":
            tokens = drawn("append")
            given["cache"] = world.library.append(**tokens) or tokens["cache"]
        found = world.function(call)(**given)
        return np.asarray(found[0] if isinstance(found, tuple) else found)

    scaled = run(scale=2 * 8**-0.5)
    assert (scaled == run(2)).all() and (scaled != run()).any()


@by_framework
def test_appended_tokens_are_those_of_a_maker(framework):
    world = WORLDS[framework]
    given = world.arguments("append")
    cache = world.library.append(**given, made_with=FACTS) or given["cache"]
    with pytest.raises(ValueError, match="rope_base"):
        world.library.append(**given | {"cache": cache}, made_with=(("rope_base", 2.0),))


def test_float64_of_numpy_where_jax_keeps_it():
    arrays = [np.zeros((2, 20, heads, 8)) for heads in (4, 2, 2)]
    with jax.enable_x64(True):
        nsa_jax.explain(*arrays, config=SMALL)


def test_tensors_without_memory_of_their_own():
    """Ragged ones, and shards, of which every rank has a part."""
    world = WORLDS["torch"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh, ends = init_device_mesh("cpu", (2,)), torch.tensor([0, 15, 40])
        ragged = lambda x: torch.nested.nested_tensor_from_jagged(x.flatten(0, 1), ends)
        shard = lambda x: DTensor.from_local(x, mesh, [Shard(0)])
        makers = {
            r"dense \(torch.strided\), got torch.jagged": ragged,
            "a local tensor, got a DTens": shard,
        }
        for (words, make), call in itertools.product(makers.items(), ("attention", "compress")):
            good = world.arguments(call)
            for name in world.calls[call][0]:
                with pytest.raises(ValueError, match=f"^{name} must be {words}"):
                    world.function(call)(**good | {name: make(good[name])})
    finally:
        dist.destroy_process_group()


# A call that writes to a cache


ints = partial(torch.tensor, dtype=torch.int32)
FACTS = (("rope_base", 1e4),)
FP8 = {"dtype": torch.float8_e4m3fn, "compressed_dtype": torch.float32, "max_rows": 4}
KINDS = {"shared": {}, "separate": {"separate": True}, "fp8": FP8, "between others": None}
WRITING = [*itertools.product(("append", "paged_attention", "runs", "a step"), KINDS)]
WRITING += [("cached_attention", "shared"), ("cached_attention", "separate")]


def cache_of(call, kind):
    if kind == "between others":
        memory = torch.zeros(8, 2, 16, 2, 8)
        return nsa_torch.PagedCache.view(memory[:, 0], memory[:, 1], config=SMALL)
    world = WORLDS["torch"]
    if call == "cached_attention":
        return world.rows(2, 99, dtype=torch.float32, **KINDS[kind])
    return world.pages(**KINDS[kind])


COUNTS, COUNTED = [0, 1, 22], [5, 21]  # a row of 4 tokens and one more, a prompt of 21


def written(call, kind, factor):
    """Arguments of a call that is not refused."""
    world, name = (
        WORLDS["torch"],
        call if "_" in call or call == "append" else "paged_attention",
    )
    given = world.arguments(name) | {"made_with": FACTS, "implementation": None}
    if name == "cached_attention":
        given |= {"new_lengths": torch.tensor([11, 4]), "compress_params": (None, None)}
    else:
        given |= {x: world.arguments("append")[x] for x in ("key", "value")} | {"params": None}
        given |= {"lengths": ints(COUNTED), "cu_seqlens_q": ints(COUNTS)}
        tokens, count = given.keys() & {"query", "gates", "key", "value"}, 22
        if call == "a step":
            del given["cu_seqlens_q"]
            count = 2
        given |= {x: torch.ones(count, *given[x].shape[1:]) for x in tokens}
    given |= {"runs": plan_runs(COUNTS, COUNTED, 16)} if call == "runs" else {}
    given |= {"slots": torch.arange(2, dtype=torch.int32)} if kind == "fp8" else {}
    new = {x: torch.full_like(given[x], factor) for x in ("key", "value")}
    if kind == "separate":
        new = {x: Branches(y, y.clone(), y.clone()) for x, y in new.items()}
    return given | new


def wrong_tensors(name, x, gradients):
    """In place of `x`."""
    if isinstance(x, Branches):
        each = ((field, wrong_tensors(name, y, gradients)) for field, y in x._asdict().items())
        return [x._replace(**{field: wrong}) for field, found in each for wrong in found]
    found = [3, "x", [1], x.numpy(), x[None], torch.cat([x, x[:1]]), x[:0], x.bool()]
    found += [x.to_sparse(), x.to("meta")]
    if x.is_floating_point():
        found += [x[..., :-1], *([x.clone().requires_grad_()] if gradients else [])]
    return found + ([None, x.double(), x.half()] if name in ("query", "key", "value") else [])


def wrong_options(call):
    """Of each argument; those of `BOTH` and `ONE` are refused too."""
    plan, runs = plan_runs(COUNTS, COUNTED, 16), []
    if call == "a step":
        runs = [plan]
    elif call in ("paged_attention", "runs"):
        others = plan_runs([0, 2, 22], COUNTED, 16), plan_runs(COUNTS, [1, 21], 16)
        narrow = [x._replace(columns=1) for x in plan]
        runs = ["ab", [None], plan[:1], plan[1:], [], plan[::-1], narrow, *others]
    wrong = [WORLDS["torch"].given(x) for calls, x in TABLE["wrong options"] if call in calls]
    return [{k: x} for each in (*wrong, {"runs": runs}) for k, y in each.items() for x in y]


def state(cache):
    as_bytes = lambda x: x.contiguous().view(torch.uint8).numpy().tobytes()
    return {k: as_bytes(x) if torch.is_tensor(x) else x for k, x in vars(cache).items()}


@pytest.mark.parametrize(("call", "kind"), WRITING)
def test_a_refused_call_changes_nothing(call, kind):
    """Not a byte, nor what is known of the tokens; each is an error that the page names."""
    world, cache = WORLDS["torch"], cache_of(call, kind)
    function = getattr(nsa_torch, call, nsa_torch.paged_attention)
    function(**written(call, kind, 1) | {"cache": cache})
    given = written(call, kind, 2) | {"cache": cache}
    rows = (x for framework, name, x, *_ in ROWS if (framework, name) == ("torch", call))
    wrong = [
        x for x in map(world.given, rows) if x.keys().isdisjoint(["cache", "key", "value"])
    ]
    for name, x in given.items():
        if isinstance(x, torch.Tensor | Branches):
            found = wrong_tensors(name, x, call != "cached_attention")
            wrong += [{name: each} for each in found]
    before = state(cache)
    for changes in (*wrong, *wrong_options(call)):
        with pytest.raises((ValueError, NotImplementedError)):
            function(**given | changes)
            pytest.fail(f"{changes} was not refused")
        assert state(cache) == before, changes
    function(**given)
    assert before.keys() == state(cache).keys() and before != state(cache)


def test_names_of_the_seed_and_fields_of_a_config():
    seed = NSAConfig.from_seed(l=16, d=8, l_sel=32, n_sel=4, w=9)
    assert seed == NSAConfig(16, 8, 32, 4, window=9)
    with pytest.raises(ValueError, match=r"names must be in .* got 'block'"):
        NSAConfig.from_seed(block=3)
    with pytest.raises(AttributeError, match="cannot assign to field 'window'"):
        NSAConfig().window = 3
