"""Compares packed rows with the same documents as rows of a batch, with `nsa_torch.attention` in
eager mode.

    python -m bench.packed
    python -m bench.packed --only "16 x" --implementation triton --save_records

Forms of a call, forward and with gradients:

- `rows`: the documents as rows of a batch, if all documents have the same length.
- `varlen`: one packed row, with `varlen_metadata` made before the call.
- `cu_seqlens`: one packed row, with only the boundaries.

`ms` is measured with CUDA events after an L2 flush. `host` is the time until the call returns,
with an idle GPU. `metadata` and `its host` are the additional times, on the GPU and on the host,
of a `varlen` call that builds its metadata. A form is wrong if its output or a gradient differs
by more than 1 % (root mean square) from the result of separate calls for each document. The
command needs a GPU.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import nsa_torch
from nsa_core.config import NSAConfig

from . import run
from .harness import cli, exit_status, timing
from .harness.records import Values
from .harness.timed_problem import Problem, named, torch_inputs

FLAGS = cli.define(
    only=((), "Only shapes whose names begin with this text (repeatable)."),
    implementation=("mosaic", "Implementation of all branches.", ["mosaic", "triton"]),
    row_seconds=(0.5, "Seconds spent on timing a row."),
    save_records=(False, "Also append the records to bench/records/<device>/packed.jsonl."),
)
cli.define_lines(FLAGS)

FORMS = "rows", "varlen", "cu_seqlens"
MODES = "forward", "fwdbwd"
FARTHEST = 0.01  # relative root mean square of the difference from one call per document
CONFIG = NSAConfig()


SHAPES = named("packed")


def call(mode: str, tensors: Sequence[torch.Tensor], **packed: Any) -> list[torch.Tensor]:
    """Return the output, and the gradients if `mode` requires them."""
    options: Values = {"config": CONFIG, "implementation": FLAGS.implementation}
    with torch.set_grad_enabled(mode == "fwdbwd"):
        out = nsa_torch.attention(*tensors, **options | packed)
    return [out, *(torch.autograd.grad(out, tensors, out) if mode == "fwdbwd" else ())]


def leaves(tensors) -> list[torch.Tensor]:
    return [x.detach().contiguous().requires_grad_() for x in tensors]


def farthest(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Return the largest relative difference (root mean square) of any array."""
    size = lambda x: x.square().mean().sqrt()
    pairs = ((x.detach().float(), y.float()) for x, y in zip(found, wanted, strict=False))
    return max(float(size(x - y) / size(y)) for x, y in pairs)


def measure(name: str) -> Iterator[Values]:
    """Yield the rows of a shape."""
    sizes = dict(SHAPES[name])
    lengths, total = sizes.pop("documents"), sizes["T"]
    ends, seconds = [0, *itertools.accumulate(lengths)], FLAGS.row_seconds
    tensors = leaves(torch_inputs(Problem(name=name, **sizes))[:4])
    borders = torch.tensor(ends, dtype=torch.int32).cuda()
    how: Values = {"max_seqlen": max(lengths), "total": total, "padded": False}
    metadata = lambda: nsa_torch.varlen_metadata(borders, **how, config=CONFIG)
    documents = zip(*(x.split(lengths, 1) for x in tensors), strict=True)
    one_by_one = zip(*(call("fwdbwd", leaves(x)) for x in documents), strict=True)
    wanted = [torch.cat(each, 1).detach() for each in one_by_one]
    about: Values = {
        **{"framework": "torch", "branch": "all", "implementation": FLAGS.implementation},
        **{"B": 1, "S": total, "dtype": "bfloat16", "input": "random"},
        **{"config": CONFIG.as_dict(), "device": torch.cuda.get_device_name()},
    }
    for mode, form in itertools.product(MODES, FORMS):
        given, packed = tensors, {}
        if form == "rows":
            if len({*lengths}) > 1:
                continue
            given = leaves(x[0].unflatten(0, (len(lengths), -1)) for x in tensors)
        else:
            packed = {form: metadata() if form == "varlen" else borders}
        once = functools.partial(call, mode, given, **packed)
        distance = farthest([x.flatten(0, 1)[None] for x in once()], wanted)
        row = about | sizes | {"mode": mode, "form": form, "documents": lengths}
        row["farthest"] = distance
        if not distance <= FARTHEST:
            reason = f"{distance:.2%} from the documents one by one"
            yield row | {"status": "wrong", "reason": reason}
            continue
        took = timing.time_cuda_events(once, seconds=seconds)
        row["host_ms"] = statistics.median(timing.in_a_row(once))
        if form == "varlen":  # the additional times of a call that makes new metadata
            renewed = lambda mode=mode: call(mode, tensors, varlen=metadata())
            more = timing.time_cuda_events(renewed, seconds=seconds)
            row["metadata_ms"] = more.time_ms - took.time_ms
            host = statistics.median(timing.in_a_row(renewed))
            row["metadata_host_ms"] = host - row["host_ms"]
        yield row | dataclasses.asdict(took)


def main(argv: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        raise NotImplementedError("a GPU is needed (for mosaic, a Hopper GPU)")
    statuses = list[str]()
    print(f"device: {torch.cuda.get_device_name()}", flush=True)
    for name in cli.chosen(FLAGS.only, SHAPES):
        show = lambda _, name=name: {"name": name}
        statuses += run.rows("packed", FLAGS, measure(name), show, "packed.jsonl")
    return exit_status.of_statuses(statuses)


if __name__ == "__main__":
    cli.run(main, FLAGS)
