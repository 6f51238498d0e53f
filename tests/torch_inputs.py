"""Problems on torch tensors, and what JAX's oracle says of them."""

import contextlib
import ctypes
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch

import nsa_jax
import nsa_torch.mosaic
from bench.judge.parity import assert_parity, check_indices
from nsa_jax import mosaic, reference
from nsa_torch import Branches, NSAConfig, fa2
from tests import torch_oracle
from tests.inputs import SMALL, problem, selection, under_a_loss_scale
from tests.limits import set_limits
from tests.oracles import fa2 as fa2_on_a_cpu
from tests.reach import NUMBERS
from tests.reach import check_reach as check_reach_of

TIGHT = NSAConfig(8, 8, 8, num_selected=3, num_initial=0, num_local=0, window=3)  # l = d = l'
FEW = dataclasses.replace(SMALL, num_selected=3, num_local=1)  # most blocks stay out
BRANCHES = Branches._fields
# The steps around Mosaic kernels of each framework, and what it makes of a numpy array.
FRAMEWORKS = {
    "jax": (mosaic.OPS, jnp.asarray),
    "torch": (nsa_torch.torch_ops.TORCH_OPS, torch.from_numpy),
}


def tensors_at(kernel, addresses):
    """Inputs and outputs of a kernel on the CPU, by the addresses of its launch."""
    found = []
    for address, array in zip(addresses, (*kernel.inputs, *kernel.outputs), strict=True):
        dtype = getattr(torch, array.dtype)
        memory = (ctypes.c_char * (array.size * dtype.itemsize)).from_address(address)
        found.append(torch.frombuffer(memory, dtype=dtype).view(array.shape))
    count = len(kernel.inputs)
    return found[:count], found[count:]


@contextlib.contextmanager
def on_the_cpu(monkeypatch):
    """Several chunks in every call, the stand-in for FA-2, and one thread."""
    set_limits(monkeypatch, torch_chunk_bytes=50_000)
    monkeypatch.setattr(fa2, "varlen", fa2_on_a_cpu.varlen)
    threads = torch.get_num_threads()
    # Threads that wait for each other take longer than these small sums.
    torch.set_num_threads(1)
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    torch.set_num_threads(threads)


def tensor(x, device="cpu"):
    """A torch tensor of a JAX or NumPy array, bfloat16 included."""
    x = jnp.asarray(x)
    if x.dtype == jnp.bfloat16:
        return torch.tensor(np.asarray(x.astype(jnp.float32)), device=device).bfloat16()
    return torch.tensor(np.asarray(x), device=device)


def array(x):
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def cu_seqlens(case, device="cpu"):
    if case.segments is None:
        return None
    lengths = [n for n in case.segments if n >= 0]
    return torch.tensor(np.cumsum([0, *lengths]), device=device)


def run(step, implementation, *tensors, **options):
    """The public function; for `fa2` on the CPU its target, which has no reason to refuse."""
    name = "select_blocks" if step == "scores" else f"{step}_attention"
    if implementation == "fa2" and not tensors[0].is_cuda and step != "scores":
        kv_len = options.pop("kv_len", None)
        kv_len = tensors[0].shape[1] if kv_len is None else kv_len
        return getattr(fa2, name)(*tensors, kv_len=kv_len, **options)
    if implementation == "fa2" and not tensors[0].is_cuda:
        implementation = "sdpa"
    return getattr(nsa_torch, name)(*tensors, implementation=implementation, **options)


def compiled(function, *arrays):
    """`function(*arrays)`, compiled fast rather than well."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=options)(*arrays)


def float64(x):
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(np.asarray(x), jnp.float64) if floating else x


@contextlib.contextmanager
def float64_world():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def where_of(case, device="cpu"):
    packed = case.segments is not None
    return {
        "config": case.config,
        "kv_len": None if packed else case.S,
        "cu_seqlens": cu_seqlens(case, device),
    }


@dataclasses.dataclass(frozen=True)
class Expected:
    inputs: dict  # of a branch: the arrays that it takes
    weights: dict  # of a branch: the gradient of its output
    exact: dict  # of a branch: (out, lse, gradients), and scores, in float64
    rough: dict  # the same in the precision of the case


def bind(name, indices, **options):
    """`reference.<name>` as a function of query, key and value."""
    function = getattr(reference, name)
    return lambda query, key, value: function(query, key, value, *indices, **options)


@functools.lru_cache
def expected(case, blocks=None) -> Expected:
    """The oracle and the yardstick of every step, forward and backward.

    `blocks`: a function of the case to the block indices; None: those of the reference.
    """
    p = problem(case)
    shape = (*p.query.shape[:3], case.Dv)
    normal = np.random.default_rng(1).normal
    weights = {branch: jnp.asarray(normal(size=shape), case.dtype) for branch in BRANCHES}
    if torch_oracle.USED:
        return _by_torch(case, blocks, weights)
    options = {"config": case.config, "segment_ids": p.segment_ids}

    def make_inputs(query, key, value):
        pair = tuple(reference.compress(x, **options) for x in (key, value))
        if blocks is None:
            indices = reference.select_blocks(query, pair[0], **p.where)
        else:
            indices = jnp.asarray(blocks(case))
        return {
            "compressed": (query, *pair),
            "selected": (query, key, value, indices),
            "sliding": (query, key, value),
        }

    def results(inputs, weights, dtype):
        found = {"scores": reference.block_scores(*inputs["compressed"][:2], **p.where)}
        for branch, (query, key, value, *indices) in inputs.items():
            attend = bind(f"{branch}_attention", indices, compute_dtype=dtype, **p.where)
            out, pull, lse = jax.vjp(attend, query, key, value, has_aux=True)
            found[branch] = (out, lse, *pull(weights[branch]))
        return found

    def everything(weights, *tokens):
        inputs = make_inputs(*tokens)
        return inputs, results(inputs, weights, jnp.dtype(case.dtype))

    inputs, rough = compiled(everything, weights, p.query, p.key, p.value)
    with float64_world():
        wide = functools.partial(results, dtype=jnp.float64)
        exact = compiled(wide, *jax.tree.map(float64, (inputs, weights)))
        exact, rough = jax.tree.map(np.asarray, (exact, rough))
    return Expected(inputs, weights, exact, rough)


def _by_torch(case, blocks, weights) -> Expected:
    p = problem(case)
    pair = tuple(torch_oracle.compressed(x, p) for x in (p.key, p.value))
    indices = selection(p.query, pair[0], **p.where) if blocks is None else blocks(case)
    inputs = {
        "compressed": (p.query, *pair),
        "selected": (p.query, p.key, p.value, jnp.asarray(indices)),
        "sliding": (p.query, p.key, p.value),
    }

    def results(exact):
        run = functools.partial(torch_oracle.results, exact=exact, **p.where)
        found = {"scores": run("block_scores", inputs["compressed"][:2])[0][0]}
        for branch, arrays in inputs.items():
            both = run(f"{branch}_attention", arrays, cotangents=(weights[branch],))
            found[branch] = (*both[0], *both[1])
        return found

    return Expected(inputs, weights, results(True), results(False))


def check_branch(case, branch, implementation, device="cpu", blocks=None):
    want = expected(case, blocks)
    inputs = [tensor(x, device) for x in want.inputs[branch]]
    floats = [x.requires_grad_() for x in inputs[:3]]
    options = where_of(case, device)
    out, lse = run(branch, implementation, *inputs, **options)
    assert out.dtype == inputs[0].dtype and lse.dtype == torch.float32
    grads = torch.autograd.grad(out, floats, tensor(want.weights[branch], device))
    names = ("out", "lse", "dquery", "dkey", "dvalue")
    exact, rough = want.exact[branch], want.rough[branch]
    for name, got, good, low in zip(names, (out, lse, *grads), exact, rough, strict=True):
        assert_parity(
            f"{branch}.{name}",
            array(got),
            good,
            low,
            dtype=jnp.dtype(case.dtype),
            selection=name == "out" and branch == "selected",
        )


def check_selection(case, implementation, device="cpu"):
    """The very indices of the reference in float32; else by the float64 scores."""
    want = expected(case)
    query, key = (tensor(x, device) for x in want.inputs["compressed"][:2])
    got = array(run("scores", implementation, query, key, **where_of(case, device)))
    assert got.dtype == np.int32
    if case.dtype == "float32" and device == "cpu":
        np.testing.assert_array_equal(got, want.inputs["selected"][3])
    if case.segments is None:
        positions = np.arange(case.T) + case.S - case.T
        result = check_indices(got, want.exact["scores"], positions, case.config)
        assert result.ok, result.reason


@functools.lru_cache
def expected_whole(case, shared=False):
    """`attention` and its gradients by `query, keys, values, gates`, exact and rough; `shared`:
    all branches have the same keys and values, whose gradient is the sum.
    """
    p = problem(case)
    normal = np.random.default_rng(2).normal
    keys = Branches(*(jnp.asarray(normal(size=p.key.shape), case.dtype) for _ in range(3)))
    values = Branches(*(jnp.asarray(normal(size=p.value.shape), case.dtype) for _ in range(3)))
    if shared:
        keys, values = Branches.each(keys[0]), Branches.each(values[0])
    weight = jnp.asarray(normal(size=(*p.query.shape[:3], case.Dv)), case.dtype)
    options = {"config": case.config, "segment_ids": p.segment_ids}

    def select(query, keys):
        compressed_key = reference.compress(keys.compressed, **options)
        return reference.select_blocks(query, compressed_key, **p.where)

    def attention(indices, dtype, query, keys, values, gates):
        key, value = (
            x._replace(compressed=reference.compress(x.compressed, **options))
            for x in (keys, values)
        )
        outputs = []
        for branch, *pair in zip(BRANCHES, key, value, strict=True):
            slots = [indices] if branch == "selected" else []
            attend = bind(f"{branch}_attention", slots, compute_dtype=dtype, **p.where)
            outputs.append(attend(query, *pair)[0])
        gates = Branches(*(gates[..., i] for i in range(3)))
        return reference.combine(Branches(*outputs), gates)

    def both_of(dtype, weight, indices, *inputs):
        out, pull = jax.vjp(functools.partial(attention, indices, dtype), *inputs)
        return out, pull(weight)

    inputs = (p.query, keys, values, p.gates)
    if torch_oracle.USED:
        indices = selection(p.query, torch_oracle.compressed(keys.compressed, p), **p.where)
        leaves, tree = jax.tree.flatten(inputs)
        run = functools.partial(torch_oracle.results, cotangents=(weight,), **p.where)
        both = [run("whole_of_tokens", [*leaves, indices], exact=x) for x in (True, False)]
        exact, rough = ((out[0], tree.unflatten(gradients)) for out, gradients in both)
    else:
        indices = compiled(select, p.query, keys)
        narrow = functools.partial(both_of, jnp.dtype(case.dtype))
        rough = compiled(narrow, weight, indices, *inputs)
        with float64_world():
            wide = functools.partial(both_of, jnp.float64)
            exact = compiled(wide, *jax.tree.map(float64, (weight, indices, *inputs)))
            exact, rough = jax.tree.map(np.asarray, (exact, rough))
    if shared:
        exact, rough = _summed(*exact), _summed(*rough)
    return inputs, weight, indices, exact, rough


def _summed(out, gradients):
    query, *pair, gates = gradients
    key, value = (sum(x.astype(np.float64) for x in branches) for branches in pair)
    return out, (query, key, value, gates)


def check_under_a_loss_scale(dtype, implementation, device="cpu", *size):
    """dO . V is beyond float16, and no gradient that is asked for."""
    *tensors, gates, do = (torch.from_numpy(x).to(device) for x in under_a_loss_scale(*size))

    def gradients(dtype, implementation):
        *leaves, given, grad = (x.to(dtype) for x in (*tensors, gates, do))
        leaves = [x.requires_grad_() for x in leaves]
        options = {"config": SMALL, "implementation": implementation}
        out = nsa_torch.attention(*leaves, given, **options)
        return torch.autograd.grad(out, leaves, grad)

    pairs = gradients(dtype, implementation), gradients(torch.float32, "reference")
    for got, want in zip(*pairs, strict=True):
        assert (got.float() - want).abs().max() < 0.02 * want.abs().max()


def check_whole(case, implementation, device="cpu", shared=False):
    """`shared`: all branches look at the same keys and values."""
    (query, keys, values, gates), weight, indices, exact, rough = expected_whole(case, shared)
    leaf = lambda x: tensor(x, device).requires_grad_()
    query, gates = leaf(query), leaf(gates)
    key, value = ([leaf(x[0])] if shared else Branches(*map(leaf, x)) for x in (keys, values))
    out = nsa_torch.attention(
        query,
        *(x[0] if shared else x for x in (key, value)),
        gates,
        config=case.config,
        # In float32 the selection is exact, so it is left to the call.
        block_indices=None if case.dtype == "float32" else tensor(indices, device),
        cu_seqlens=cu_seqlens(case, device),
        implementation=implementation,
    )
    moving = (query, *key, *value, gates)
    grads = torch.autograd.grad(out, moving, tensor(weight, device))
    branches = ["shared"] if shared else BRANCHES
    names = ("out", "dquery", *(f"d{x}.{b}" for x in ("key", "value") for b in branches))
    sides = jax.tree.leaves(exact), jax.tree.leaves(rough)
    for name, got, *pair in zip((*names, "dgates"), (out, *grads), *sides, strict=True):
        assert_parity(name, array(got), *pair, dtype=jnp.dtype(case.dtype))


class Inputs:
    """Random float64 tensors of one shape, all of them leaves."""

    def __init__(self, T, S, H=6, Hkv=2, D=8, Dv=6, B=2, config=FEW, seed=0):
        make = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(
            shape, generator=make, dtype=torch.float64, requires_grad=True
        )
        self.config, self.T, self.S = config, T, S
        self.query, self.gates = normal(B, T, H, D), normal(B, T, H, 3)
        self.key, self.value = normal(B, S, Hkv, D), normal(B, S, Hkv, Dv)

    def steps(self, implementation, *tensors, **where):
        return steps(implementation, *tensors, self.config, **where)


def steps(implementation, query, key, value, config, **where):
    """Outputs, lse and indices of all steps; keys beyond `kv_len` are there but hidden."""
    packed = {name: x for name, x in where.items() if name == "cu_seqlens"}
    pair = [nsa_torch.compress(x, config=config, **packed) for x in (key, value)]
    where |= {"config": config}
    indices = run("scores", implementation, query, pair[0], **where)
    return {
        "compressed": run("compressed", implementation, query, *pair, **where),
        "selected": run("selected", implementation, query, key, value, indices, **where),
        "sliding": run("sliding", implementation, query, key, value, **where),
        "indices": (indices,),
    }


def assert_same(got, want, rtol=1e-11):
    for branch, tensors in got.items():
        for a, b in zip(tensors, want[branch], strict=True):
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=1e-12, msg=lambda m, n=branch: f"{n}: {m}"
            )


def poison(x, lengths):
    """`x` [B, S, ...] with NaN from each row's length on."""
    token = torch.arange(x.shape[1], device=x.device)
    hidden = token >= torch.tensor(lengths, device=x.device)[:, None]
    return x.masked_fill(hidden[..., None, None], float("nan"))


def check_reach(case, branch, implementation, device="cpu", numbers=NUMBERS):
    """`reach.check_reach` of a token in the middle of `case`."""
    p = problem(case)
    compress = functools.partial(nsa_torch.compress, config=case.config)
    indices = tensor(
        selection(p.query, nsa_jax.compress(p.key, config=case.config), config=case.config),
        device,
    )

    def function(*arrays):
        *leaves, do = (tensor(x, device).to(getattr(torch, case.dtype)) for x in arrays)
        query, key, value = (x.requires_grad_() for x in leaves)
        if branch == "compressed":
            inputs = query, compress(key), compress(value)
        else:
            inputs = query, key, value, *([indices] if branch == "selected" else [])
        out, lse = run(branch, implementation, *inputs, config=case.config)
        results = out, lse, *torch.autograd.grad(out, leaves, do)
        return [array(x.float()) for x in results]

    do = np.random.default_rng(1).normal(size=(*p.query.shape[:3], case.Dv))
    arrays = [np.array(x, np.float32) for x in (p.query, p.key, p.value, do)]
    check_reach_of(function, arrays, implementation, branch, case.T // 2 + 5, numbers)
