"""Packed rows and the same documents as rows of a batch: `nsa_torch.attention`, eager.

    python -m bench.packed
    python -m bench.packed --only "16 x" --implementation triton --save_records

Forms of a call, forward and with gradients:

    rows        a batch of the documents, where all have one length
    varlen      one row, with `varlen_metadata` made before
    cu_seqlens  one row, with only the boundaries

`ms` is between CUDA events, L2 written over before; `host` until the call returns, the GPU idle
before; `metadata` the same of `varlen_metadata` and a first call's share of it: what a call with
new metadata takes more than one with old. A packed form is wrong where its output or a gradient is
further than 1 % (root mean square) from that of the documents one by one. Needs a GPU.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import nsa_torch
from nsa_core.config import NSAConfig

from . import tables
from .harness import cli, exit_status, markdown, records, timing
from .harness.records import Record
from .harness.timed_problem import Problem, torch_inputs

FLAGS = cli.define(
    only=((), "Shapes whose names begin so (repeatable)."),
    implementation=("mosaic", "Kernels.", ["mosaic", "triton"]),
    row_seconds=(0.5, "Of timing a row."),
    save_records=(False, "Keep the records."),
)
cli.define_lines(FLAGS)

FORMS = "rows", "varlen", "cu_seqlens"
MODES = "forward", "fwdbwd"
FARTHEST = 0.01  # of the documents one by one, relative, root mean square
CONFIG = NSAConfig()


@dataclasses.dataclass(frozen=True)
class Shape:
    """Documents, and the layer that looks at them."""

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    width: int

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def alike(self) -> bool:
        return len({*self.lengths}) == 1


def drawn(count: int, total: int) -> tuple[int, ...]:
    """Log-normal lengths of documents, similar to a corpus, with the sum `total`."""
    sizes = np.random.default_rng(0).lognormal(0, 1, count)
    ends = np.rint(np.cumsum(sizes) / sizes.sum() * total).astype(int)
    return tuple(np.diff(ends, prepend=0).tolist())


SHAPES: Mapping[str, Shape] = {
    "8 x 8192": Shape((8192,) * 8, 64, 4, 128),
    "31 documents, 61444 tokens": Shape(drawn(31, 61444), 64, 4, 128),
    "16 x 2048": Shape((2048,) * 16, 12, 2, 64),
    "5 documents, 6000 tokens": Shape((2100, 1700, 1200, 900, 100), 8, 2, 64),
}


@dataclasses.dataclass(frozen=True)
class Packed:
    """The tensors of a shape, and calls on them."""

    shape: Shape
    tensors: list[torch.Tensor]  # query, key, value, gates [1, T, ..]
    borders: torch.Tensor
    implementation: str

    @classmethod
    def of(cls, shape: Shape, implementation: str) -> "Packed":
        sizes = {"H": shape.heads, "Hkv": shape.kv_heads, "D": shape.width, "Dv": shape.width}
        *tensors, _ = torch_inputs(Problem(name="", T=shape.total, **sizes))
        tensors = [x.requires_grad_() for x in tensors]
        borders = torch.tensor([0, *itertools.accumulate(shape.lengths)], dtype=torch.int32)
        return cls(shape, tensors, borders.cuda(), implementation)

    def metadata(self) -> nsa_torch.VarlenMetadata:
        longest, total = max(self.shape.lengths), self.shape.total
        return nsa_torch.varlen_metadata(
            self.borders, max_seqlen=longest, total=total, padded=False, config=CONFIG
        )

    def run(self, mode: str, tensors: Sequence[torch.Tensor], **packed: Any) -> list[Any]:
        """The output, and the gradients where `mode` wants them."""
        options: dict[str, Any] = {"config": CONFIG, "implementation": self.implementation}
        options |= packed
        if mode == "forward":
            with torch.no_grad():
                return [nsa_torch.attention(*tensors, **options)]
        out = nsa_torch.attention(*tensors, **options)
        return [out, *torch.autograd.grad(out, tensors, out)]

    def call(self, form: str, mode: str) -> Callable[[], list[Any]]:
        """What is timed."""
        if form == "rows":
            batch = len(self.shape.lengths)
            rows = [
                x.detach().unflatten(1, (batch, -1))[0].requires_grad_() for x in self.tensors
            ]
            return lambda: self.run(mode, rows)
        if form == "cu_seqlens":
            return lambda: self.run(mode, self.tensors, cu_seqlens=self.borders)
        meta = self.metadata()
        return lambda: self.run(mode, self.tensors, varlen=meta)

    def renewed(self, mode: str) -> list[Any]:
        """A call whose metadata is new."""
        return self.run(mode, self.tensors, varlen=self.metadata())

    def one_by_one(self) -> list[torch.Tensor]:
        """Output and gradients of the documents, each a row of its own."""
        found = []
        for first, end in itertools.pairwise([0, *itertools.accumulate(self.shape.lengths)]):
            document = [x.detach()[:, first:end].clone().requires_grad_() for x in self.tensors]
            found.append([x.detach() for x in self.run("fwdbwd", document)])
        return [torch.cat(each, dim=1) for each in zip(*found, strict=True)]


def farthest(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest relative distance of an array, root mean square."""
    distances = []
    for x, y in zip(found, wanted, strict=False):
        exact = y.float()
        error = (x.detach().float() - exact).square().mean().sqrt()
        distances.append(float(error / exact.square().mean().sqrt()))
    return max(distances)


def measure(shape: Shape, implementation: str, seconds: float) -> Iterator[dict[str, Any]]:
    """The fields of the records of a shape."""
    packed = Packed.of(shape, implementation)
    wanted = packed.one_by_one()
    options = {"seconds": seconds}
    for mode, form in itertools.product(MODES, FORMS):
        if form == "rows" and not shape.alike:
            continue
        call = packed.call(form, mode)
        found = [x.flatten(0, 1)[None] for x in call()]
        distance = farthest(found, wanted)
        row: dict[str, Any] = {"mode": mode}
        extra: dict[str, Any] = {"form": form, "documents": [*shape.lengths]}
        extra |= {"farthest": distance}
        if not distance <= FARTHEST:
            reason = f"{distance:.2%} from the documents one by one"
            yield row | {"extra": extra, "status": "wrong", "reason": reason}
            continue
        row |= dataclasses.asdict(
            timing.time_cuda_events(lambda _, call=call: call(), **options)
        )
        extra["host_ms"] = statistics.median(timing.in_a_row(call))
        if form == "varlen":
            renewed = lambda mode=mode: packed.renewed(mode)
            more = timing.time_cuda_events(lambda _, renewed=renewed: renewed(), **options)
            extra["metadata_ms"] = more.time_ms - row["time_ms"]
            host = statistics.median(timing.in_a_row(renewed))
            extra["metadata_host_ms"] = host - extra["host_ms"]
        yield row | {"extra": extra}


def cells(name: str, record: Record) -> dict[str, str]:
    """A row of the table."""
    fate = None if record.status == "ok" else f"{record.status}: {record.reason}"
    line = vars(record) | record.extra | {"name": name, "fate": fate, "status": "ok"}
    return tables.rows("packed_calls", [line])[0]


def main(argv: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        raise NotImplementedError("a GPU is needed, for mosaic a Hopper one")
    device, done = torch.cuda.get_device_name(), []
    print(
        f"device: {device}\n\n{markdown.table(tables.KINDS['packed_calls']['cells'])}",
        end="",
        flush=True,
    )
    for name in cli.chosen(FLAGS.only, SHAPES):
        shape = SHAPES[name]
        total, width = shape.total, shape.width
        common: dict[str, Any] = {
            **{"framework": "torch", "branch": "all", "implementation": FLAGS.implementation},
            **{"B": 1, "T": total, "S": total, "H": shape.heads, "Hkv": shape.kv_heads},
            **{"D": width, "Dv": width, "dtype": "bfloat16", "input": "random"},
            **{"config": CONFIG.as_dict(), "device": device},
        }
        for fields in measure(shape, FLAGS.implementation, FLAGS.row_seconds):
            record = records.record("packed", FLAGS.commit, **common, **fields)
            done.append(record)
            print(markdown.line(cells(name, record).values()), flush=True)
            if FLAGS.out:  # at once: the process may be ended from outside
                records.append(FLAGS.out, [record])
            if FLAGS.save_records:
                records.keep([record], "packed.jsonl")
    return exit_status.of(done)


if __name__ == "__main__":
    cli.run(main, FLAGS)
