"""Times one problem on the library of one checkout, as a process of `bench.against`.

    PYTHONPATH=<checkout> python -P timed_problem.py '<Problem as JSON>'

The process uses only public names of the library that all checkouts share, and no other module of
`bench`. First the process compiles the problem and prints one JSON line with the hashes of the
results. After the hashes, the process prints one line of milliseconds for every line that it reads.
The parent process sends a line to the process that may use the GPU.
"""

import dataclasses
import functools
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

SAMPLE_S = 0.25  # seconds of consecutive calls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The sizes of a problem, with the letters of `nsa_core.types`. The config is the config of the
    paper.
    """

    name: str
    T: int
    H: int
    Hkv: int
    D: int
    Dv: int
    B: int = 1
    framework: str = "torch"
    alike: float = 0.0  # correlation of adjacent queries
    graph: bool = False  # whether the call is captured in a CUDA graph
    implementation: str = "mosaic"


def named(section: str) -> dict[str, dict[str, Any]]:
    """Return the sizes of the problems in a section of `bench/problems.yaml`, keyed by name."""
    import yaml

    return yaml.safe_load(Path(__file__).parents[1].joinpath("problems.yaml").read_text())[
        section
    ]


def main() -> None:
    problem = Problem(**json.loads(sys.argv[1]))
    calls, sync = {"torch": torch_calls, "jax": jax_calls}[problem.framework](problem)
    print(json.dumps({name: digest(call()) for name, call in calls.items()}), flush=True)
    if problem.graph:
        calls = {name: cuda_graph(call)[0] for name, call in calls.items()}
    for _ in sys.stdin:
        times = {name: milliseconds(call, sync) for name, call in calls.items()}
        print(json.dumps(times), flush=True)


def drawn(problem: Problem, normal, sigmoid) -> tuple[Any, ...]:
    """Draw query, key, value, gates and the cotangent of the output, in this order."""
    p = problem
    arrays = (
        normal(p.B, p.T, n, width) for n, width in ((p.H, p.D), (p.Hkv, p.D), (p.Hkv, p.Dv))
    )
    return *arrays, sigmoid(normal(p.B, p.T, p.H, 3)), normal(p.B, p.T, p.H, p.Dv)


def torch_inputs(problem: Problem):
    """Draw query, key, value, gates and the cotangent of the output. On a GPU all processes draw
    equal values."""
    import torch

    random = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=random, device="cuda", dtype=torch.bfloat16)

    query, *rest = drawn(problem, normal, torch.sigmoid)
    return correlated(query, problem.alike) if problem.alike else query, *rest


def correlated(query, rho: float):
    """Compute q[t] = rho q[t - 1] + sqrt(1 - rho^2) noise[t] along the tokens in log2(T) steps."""
    import torch

    noise = query.float() * (1 - rho**2) ** 0.5
    step = 1
    while step < noise.shape[1] and rho**step > 1e-6:
        shifted = torch.zeros_like(noise)
        shifted[:, step:] = noise[:, :-step]
        noise, step = noise + rho**step * shifted, 2 * step
    return noise.to(query.dtype)


def torch_calls(problem: Problem):
    import torch

    import nsa_torch

    *inputs, cotangent = torch_inputs(problem)
    how: dict[str, Any] = {"implementation": problem.implementation}
    wanting = [x.clone().requires_grad_() for x in inputs]
    forward = lambda: (nsa_torch.attention(*inputs, **how),)
    both = lambda: torch.autograd.grad(nsa_torch.attention(*wanting, **how), wanting, cotangent)
    return {"forward": forward, "fwdbwd": both}, lambda _: torch.cuda.synchronize()


def jax_calls(problem: Problem):
    import jax

    import nsa_jax

    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, "bfloat16")

    *inputs, cotangent = jax.block_until_ready(drawn(problem, normal, jax.nn.sigmoid))
    how: dict[str, Any] = {"implementation": problem.implementation}
    attention = functools.partial(nsa_jax.attention, **how)
    forward = jax.jit(lambda *arrays: (attention(*arrays),))
    both = jax.jit(lambda arrays, cotangent: jax.vjp(attention, *arrays)[1](cotangent))
    calls = {"forward": lambda: forward(*inputs), "fwdbwd": lambda: both(inputs, cotangent)}
    return calls, jax.block_until_ready


def cuda_graph(call):
    """Capture the function `call` in a CUDA graph on torch's current device. Return the function
    that replays the graph, and the results, which each replay overwrites.

    Raises:
      RuntimeError: The function `call` waits for the device.
    """
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as that of NCCL, may query events during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = call()
    return graph.replay, found


def digest(results) -> str:
    """Return the hash of the bytes of all results."""
    found = hashlib.sha256()
    for x in results:
        if hasattr(x, "detach"):
            x = x.detach().float().cpu().numpy()
        else:
            import numpy

            x = numpy.asarray(x, "float32")
        found.update(x.tobytes())
    return found.hexdigest()[:16]


def milliseconds(call, sync) -> float:
    """Return the mean time of a call in milliseconds, in a loop of at least 0.125 s."""
    sync(call())
    calls = 1
    while True:
        start = time.perf_counter()
        for _ in range(calls - 1):
            call()
        sync(call())
        spent = time.perf_counter() - start
        if spent > SAMPLE_S / 2:
            return spent * 1e3 / calls
        calls = max(calls + 1, int(calls * SAMPLE_S / max(spent, 1e-6)))


if __name__ == "__main__":
    main()
