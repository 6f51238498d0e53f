"""Steps of torch by implementation, and what stands in for a GPU."""

import contextlib

import jax
import torch

import nsa_torch
from nsa_torch import fa2
from tests import pretend
from tests.limits import set_limits
from tests.oracles import fa2 as fa2_on_a_cpu


@contextlib.contextmanager
def on_the_cpu(monkeypatch):
    """Several chunks in every call, the stand-in for FA-2, and one thread."""
    set_limits(monkeypatch, torch_chunk_bytes=50_000)
    pretend.machine(monkeypatch, fa2_kernel=fa2_on_a_cpu.varlen)
    threads = torch.get_num_threads()
    # Threads that wait for each other take longer than these small sums.
    torch.set_num_threads(1)
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    torch.set_num_threads(threads)


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


def normal(*shape, device="cpu", dtype=torch.bfloat16):
    make = torch.Generator(device).manual_seed(sum(shape))
    x = torch.randn(shape, generator=make, device=device, dtype=dtype)
    return x.requires_grad_()


def inputs(T, S, H=6, Hkv=2, D=8, Dv=6, B=1, **how):
    """Query, key, value and gates."""
    shapes = (T, H, D), (S, Hkv, D), (S, Hkv, Dv), (T, H, 3)
    return [normal(B, *shape, **how) for shape in shapes]


def outcome(function, leaves):
    """The output, and gradients of a loss that has another weight for each number."""
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def check_compiled(function, leaves, backend="aot_eager", **close):
    """Without a graph break a compiled function has the same outcome."""
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    found, want = (outcome(x, leaves) for x in (compiled, function))
    torch.testing.assert_close(found, want, **close)


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
