"""Steps of torch by implementation, and what stands in for a GPU."""

import contextlib

import jax
import torch

import nsa_torch
from nsa_torch import fa2
from tests import pretend
from tests.limits import set_limits
from tests.oracles import fa2 as fa2_on_a_cpu
from tests.problems import FEW


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
