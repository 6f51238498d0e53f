"""Golden files of what runs on a GPU, while code moves: kernels and plans, as hashes.

    python -m tests.golden             # compares; exit status 1 where something differs
    python -m tests.golden --write     # renews tests/golden/, for an intended change
    python -m tests.golden mosaic      # one part, of mosaic, triton and plans
    python -m tests.golden --plans     # prints the steps of all plans, to compare by diff

    mosaic.txt   MLIR of every Mosaic kernel of the presets (`nsa_interop.build`)
    triton.txt   PTX of every Triton kernel of the cases that `test_triton_compiled` compiles, for
                 Hopper and for Ada
    plans.txt    calls of the presets: what each step reads and writes, and where

None of them needs a GPU. Locations in sources and names of kernels are no part of a hash, so that
functions and files may move; the line of a kernel ends in its name, for people. This is no test of
the suite.
"""

import argparse
import collections
import hashlib
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

from nsa_core.plan.buffers import Plan

FOLDER = Path(__file__).parent / "golden"


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.golden")
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--write", action="store_true", help=f"renew {FOLDER.name}/")
    parser.add_argument("--plans", action="store_true", help="print the steps of all plans")
    options = parser.parse_args()
    if odd := set(options.parts) - PARTS.keys():
        parser.error(f"parts must be of {', '.join(PARTS)}, got {', '.join(sorted(odd))}")
    if options.plans:
        for title, plan in _plans():
            print(f"{title}\n{_shown(plan)}\n")
        return 0
    differs = False
    for name in options.parts:
        path, lines = FOLDER / f"{name}.txt", list(PARTS[name]())
        if options.write:
            FOLDER.mkdir(exist_ok=True)
            path.write_text("".join(f"{line}\n" for line in lines))
            continue
        before = path.read_text().splitlines() if path.is_file() else []
        lost, new = (_only_in(*pair) for pair in ((before, lines), (lines, before)))
        print("".join(f"- {x}\n" for x in lost) + "".join(f"+ {x}\n" for x in new), end="")
        print(f"{name}: {len(lines)} lines, {len(lost)} lost, {len(new)} new")
        differs |= bool(lost or new)
    return int(differs)


def _only_in(some: list[str], others: list[str]) -> list[str]:
    """Lines of `some` that `others` do not have as often, what is behind `  # ` left out."""
    left = collections.Counter(line.partition("  # ")[0] for line in others)
    found = []
    for line in some:
        key = line.partition("  # ")[0]
        if not left[key]:
            found.append(line)
        left[key] -= bool(left[key])
    return found


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def mosaic() -> Iterator[str]:
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    from kernels_pallas.runtime.lowering import lower
    from nsa_interop import build

    kernels = {x: None for preset in build.PRESETS for x in build.kernels_of(preset, True)}
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    for kernel in kernels:
        with context:
            module = ir.Module.parse(lower(kernel))
            text = module.operation.get_asm(enable_debug_info=False)
        text = re.sub(r'dump_basename = "\w+"', "", text)
        yield f"{_hash(re.sub(rf'\b{kernel.name}\b', 'kernel', text))}  # {kernel.name}"


def triton() -> Iterator[str]:
    from tests import test_triton_compiled as cases
    from tests import triton_compile

    for capability in (90, 89):
        noted = {}
        for case in (*cases.CASES.values(), *cases.PACKED):
            noted |= {repr(launch): launch for launch in case(divmod(capability, 10))}
        for launch in noted.values():
            text, facts = triton_compile.stage(launch, capability, "ptx")
            lines = (x.partition("//")[0].rstrip() for x in text.splitlines())
            text = "\n".join(x for x in lines if x).replace(facts["name"], "kernel")
            yield f"{capability} {_hash(text)}  # {launch.kernel.function}"


def plans() -> Iterator[str]:
    for title, plan in _plans():
        launches = sum(type(x).__name__ == "Launch" for x in plan.steps)
        counts = f"{launches} launches of {len(plan.steps)} steps, {plan.workspace_bytes} bytes"
        yield f"{_hash(re.sub(' *# .*', '', _shown(plan)))} {title}: {counts}"


def _plans() -> Iterator[tuple[str, Plan]]:
    from nsa_core.config import NSAConfig
    from nsa_interop import build
    from tests import planned

    for preset in build.PRESETS:
        layer = build.layer_of(preset)
        layer["config"] = NSAConfig(**layer["config"])
        for name, path in planned.PATHS.items():
            for (mode_name, mode), packed in itertools.product(
                planned.MODES.items(), (False, True)
            ):
                for keep in ("forward", "saving", "recomputing"):
                    call = planned.described(mode, 1, 4096, packed=packed, **layer)
                    for part, plan in enumerate(path.planned(mode, keep).plans(call, None)):
                        rows = "packed" if packed else "rows"
                        yield f"{preset} {name} {mode_name} {rows} {keep} {part}", plan


def _shown(plan: Plan) -> str:
    """Buffers by number, as `number+offset[shape]`; kernels by the order of their first launch."""
    kernels: dict[str, int] = {}
    lines = []

    def view(x) -> str:
        at = f"+{x.offset}" if x.offset else ""
        return f"{x.buffer}{at}{[*x.shape]}{x.dtype}"

    for number, buffer in enumerate(plan.buffers):
        place = f"{buffer.memory.name.lower()}+{buffer.offset}"
        lines.append(f"buffer {number} {[*buffer.shape]} {buffer.dtype} {place}")
    for kind in ("constants", "batch", "steps"):
        for number, step in enumerate(getattr(plan, kind)):
            what = type(step).__name__.lower()
            if what == "launch":
                what += f" {kernels.setdefault(repr(step.kernel), len(kernels))} {step.beside}"
            reads, writes = (" ".join(map(view, x)) for x in (step.reads, step.writes))
            lines.append(f"{kind} {number} {what}: {reads} -> {writes}  # {step.name}")
    lines.append(f"results {' '.join(map(view, plan.results))}; released {[*plan.released]}")
    return "\n".join(lines)


PARTS = {"mosaic": mosaic, "triton": triton, "plans": plans}

if __name__ == "__main__":
    sys.exit(main())
