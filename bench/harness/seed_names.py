"""The seed system's scripts and tests, and what is called for each of them here.

`seed_env` has its environment variables. `markdown()` is the table that documents show.
"""

from typing import NamedTuple


class Script(NamedTuple):
    """A script of the seed system: what stands in its place, as words of a shell."""

    seed: str
    here: str
    note: str = ""


SCRIPTS = (
    Script("bench/bench_fa2.py", "python -m bench.fa2", "`--csv`: the sweep's columns"),
    Script("bench/bench_masked.py", "python -m bench.fa2", "its column `masked`"),
    Script(
        "bench/bench_sel_triton.py",
        "python -m bench.selection --selected_kernel triton",
        "`--preset s2`: the guide's matrix",
    ),
    Script(
        "bench/bench_sel_cuda.py",
        "python -m bench.selection --selected_kernel mosaic",
        "there is no CUDA extension",
    ),
    Script("bench/bench_decode.py", "python -m bench.decode"),
    Script("bench/summarize_decode_csv.py", "python -m bench.summarize"),
    Script("bench/bench_prefill.py", "python -m bench.prefill"),
    Script(
        "bench/bench_gate.py",
        "python -m bench.compare --branch all",
        "the gates are part of it",
    ),
    Script("bench/bench_pcmp.py", "python -m bench.compare --branch scores"),
    Script("bench/needle_64k_smoke.py", "python -m bench.needle --S 65536"),
    Script("bench/threshold_optimizer.py", "python -m bench.tune_thresholds"),
    Script("bench/sel_threshold_from_csv.py", "python -m bench.tune_thresholds --csv"),
    Script("bench/run_automated_bench.py", "python -m bench.oneshot", "elsewhere: cloud/"),
    Script("bench/prime_gpu_bench.py", "sky launch cloud/sky/primeintellect.yaml"),
    Script("bench/modal_gpu_bench.py", "modal run cloud/modal_app.py"),
    Script("bench/check_availability.py", "sky gpus list", "prices by GPU and cloud"),
    Script("scripts/runner_oneshot.sh", "python -m bench.oneshot"),
    Script("scripts/train_showcase.py", "python -m bench.train", "CONFIG is --config"),
    Script("scripts/train_showcase_fsdp.py", "-", "one device a process"),
    Script("scripts/train_toy.py", "python -m bench.train --model tiny"),
    Script("scripts/print_routing.py", "python -m bench.routing"),
    Script("scripts/print_selection_ranges.py", "python -m bench.ranges"),
    Script("scripts/check_env_pairing.py", "python -m bench.environment"),
    Script("scripts/gpu_sanity.py", "python -m bench.environment"),
    Script("scripts/bench_summary.sh", "python -m bench.report"),
    Script("scripts/apply_fa2_thresholds.py", "python -m bench.tune_thresholds"),
    Script("scripts/demo_64k.py", "python -m bench.needle --S 65536"),
    Script("scripts/demo_decode.py", "python -m bench.decode"),
)
# The names that the seed system's documents give to `pytest -k`: the file that has them.
TESTS = {
    "block_math": "tests/test_block_math.py",
    "equiv_small": "tests/test_equiv_small.py",
    "fa2_gpu_varlen": "tests/test_torch_gpu.py",
    "masks": "tests/test_masks.py",
    "sel_cuda": "tests/test_seed_names.py",
    "triton_sel_edge_cases": "tests/test_triton.py",
    "triton_sel_parity": "tests/test_triton.py",
    "triton_sel_parity_gpu": "tests/test_triton.py",
}


def markdown() -> str:
    """Both tables."""
    lines = ["| seed | here | |", "|---|---|---|"]
    lines += [f"| `{x.seed}` | {_code(x.here)} | {x.note} |" for x in SCRIPTS]
    lines += ["", "| `pytest -k` | where |", "|---|---|"]
    lines += [f"| `{name}` | `{file}` |" for name, file in TESTS.items()]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return text if text == "-" else f"`{text}`"
