"""Records for tests of what is derived from them."""

from typing import Any

from bench.harness.records import Record
from nsa_jax import NSAConfig

GPU = "NVIDIA Test 80GB"


def record(branch: str, implementation: str, ms: float | None, **fields: Any) -> Record:
    """A row; without a time it is one that failed, `wrong` unless said otherwise."""
    length = fields.pop("S", 512)
    config = fields.pop("config", NSAConfig())
    values: dict[str, Any] = dict(bench="fa2", framework="torch", mode="forward", device=GPU)
    values |= dict(B=1, T=length, S=length, H=8, Hkv=2, D=64, Dv=64, dtype="bfloat16")
    values |= dict(input="random", commit="c0ffee", time="2026-01-01T00:00:00+00:00")
    values |= dict(versions={"python": "3.12.0", "torch": "2.11.0"})
    if ms is None:
        values |= dict(status="wrong", reason="far off")
    else:
        values |= dict(time_ms=ms, p20_ms=ms * 0.9, p80_ms=ms * 1.1, samples=5)
        values |= dict(error_of="out", error_max=0.01, error_bound=0.1)
        values |= dict(useful_flops=10**9, bytes=10**6, tflops=1 / ms, gbps=1 / ms)
    values |= dict(config=config.as_dict())
    return Record(**values | fields, branch=branch, implementation=implementation)


def pairs(
    branch: str, gains: dict[int, float | None], fast: str = "fa2", *, base="sdpa", **fields
) -> list:
    """Rows of the kernel and of `base`, 1 ms, at each length; `gains`: speed-up by length."""
    rows = []
    for length, gain in gains.items():
        own = {"S": length}
        if branch == "selected":
            config = NSAConfig(num_selected=length // 64, num_initial=0, num_local=1)
            own = {"S": 8192, "config": config}
        rows.append(record(branch, base, 1.0, **own | fields))
        rows.append(record(branch, fast, gain and 1.0 / gain, **own | fields))
    return rows
