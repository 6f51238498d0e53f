"""The seed system's scripts and tests, and what is called for each of them here.

The five documents are its GPU playbook, varlen runbook, selection guide, GPU test plan and RTX
4090 report. `seed_env` has its environment variables. `markdown()` is the tables that documents
show.
"""

from typing import NamedTuple

from .markdown import table


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
    Script("bench/sel_threshold_from_csv.py", "python -m bench.tune_thresholds --csv FILE"),
    Script("bench/run_automated_bench.py", "python -m bench.oneshot", "elsewhere: cloud/"),
    Script("bench/prime_gpu_bench.py", "python cloud/launch.py cloud/sky/primeintellect.yaml"),
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


class Command(NamedTuple):
    """A command of the five documents, without `PYTHONPATH` and what runs Python; what does the
    same here."""

    seed: str
    here: str
    note: str = ""


TRAIN = "scripts/train_showcase.py --dataset fineweb_edu"
RUN = "python -m bench.train --dataset HuggingFaceFW/fineweb-edu:sample-10BT"
TRITON = "NSA_USE_TRITON_SEL=1 NSA_SEL_TRITON_GROUP=1 NSA_SEL_TRITON_MIN_L=64"
DECODE = (
    "--B 1 --dim 256 --heads 8 --groups 2 --dk 32 --dv 32 --l 32 --d 16 --l_sel 64 --n_sel 16 "
    "--w 512 --S_list 512,1024,2048,4096 --iters 64 --warmup 8 --csv decode_gpu_final.csv "
    "--branch_force_mode env"
)
DENSE = "--N 1024 --H 8 --D 128 --Dv 128 --L_list 64,128,256,512,1024 --dist few --iters 50"
DENSE += " --warmup 5 --streams 1 --csv sel_dense.csv"
VARLEN = "--N 1024 --H 8 --D 128 --Dv 128 --L_list 128,256,512,1024 --dist many --iters 50"
VARLEN += " --warmup 5 --streams 2 --csv sel_varlen.csv"
SELECTION = "python -m bench.selection --selected_kernel triton"
# In the order of the documents: the GPU playbook, the varlen runbook, the selection guide, the
# GPU test plan, the RTX 4090 report.
COMMANDS = (
    Command("uv venv; uv pip sync requirements.txt; pip install flash-attn", "make setup"),
    Command(
        "NSA_TEST_FA2=1 pytest -k fa2_gpu_varlen", "python -m pytest -m gpu -k fa2_gpu_varlen"
    ),
    Command(
        "NSA_USE_FA2=1 NSA_DEBUG_TIMING=1 bench/bench_fa2.py",
        "python -m bench.fa2 --compressed_kernel fa2 --sliding_kernel fa2 --log timing",
        "with `--log timing` times are no measurements: leave it out for those",
    ),
    Command(
        "NSA_USE_FA2=1 NSA_FA2_FORCE_VARLEN=1 bench/bench_fa2.py",
        "python -m bench.fa2 --compressed_kernel fa2 --sliding_kernel fa2 --path varlen",
    ),
    Command(
        "NSA_USE_FA2=1 NSA_FA2_FORCE_DENSE=1 bench/bench_fa2.py",
        "python -m bench.fa2 --compressed_kernel fa2 --sliding_kernel fa2 --path dense",
    ),
    Command(
        'pytest -k "performance_guards or selection_v2_equiv or selection_packed"',
        'python -m pytest -k "performance_guards or selection_v2_equiv or selection_packed"',
    ),
    Command(
        'pytest -k "equiv_small or group_consistency or decode_counters or masks"',
        'python -m pytest -k "equiv_small or group_consistency or decode_counters or masks"',
    ),
    *(
        Command(
            f"{variable}CONFIG=configs/runbook_s{length}.yaml {TRAIN} --ddp 0 --steps 200",
            f"{RUN} --config runbook_s{length} --parallel none --steps 200 --ranges {mode}",
            "of all lengths and modes: `python -m bench.showcase`" if length == 512 else "",
        )
        for length in (512, 1024, 2048)
        for variable, mode in (
            ("", "adaptive"),
            ("NSA_SEL_RANGES_V2=0 ", "v1"),
            ("NSA_SEL_RANGES_V2=1 ", "v2"),
        )
    ),
    Command(
        f"CONFIG=configs/runbook_s2048.yaml torchrun --nproc_per_node=2 {TRAIN} --ddp 1 "
        "--steps 200",
        f"torchrun --nproc-per-node=2 {RUN.removeprefix('python ')} --config runbook_s2048 "
        "--parallel ddp --steps 200",
    ),
    Command(
        f"DDP_SAFE=1 CONFIG=configs/runbook_s2048.yaml torchrun --nproc_per_node=2 {TRAIN} "
        "--ddp 1 --steps 200",
        f"torchrun --nproc-per-node=2 {RUN.removeprefix('python ')} --config runbook_s2048 "
        "--parallel ddp --ddp_safe --steps 200",
    ),
    Command(
        f"CONFIG=configs/runbook_prod_2048.yaml {TRAIN} --ddp 0 --steps 50000",
        f"{RUN} --config runbook_prod_2048 --parallel none --steps 50000",
    ),
    Command(
        "nvidia-smi dmon -f artifacts/nv_s2048_adaptive_dmon.csv",
        "python -m bench.showcase --lengths 2048 --modes adaptive",
        "`gpu_s2048_adaptive.csv` is in its folder",
    ),
    Command(f"{TRITON} pytest -k triton_sel_parity", "python -m pytest -k triton_sel_parity"),
    Command(
        f"{TRITON} NSA_TEST_TRITON_SEL=1 pytest -k triton_sel_parity_gpu",
        "python -m pytest -m gpu -k triton_sel_parity_gpu",
    ),
    *(
        Command(
            f"{TRITON} bench/bench_sel_triton.py {given}",
            f"{SELECTION} --sel_triton_min_L 64 {given}",
            "all of its matrix: `--preset s2`",
        )
        for given in (DENSE, VARLEN)
    ),
    Command(
        "NSA_USE_TRITON_SEL=1 NSA_TRITON_SEL_FORCE=1 pytest tests/test_triton_sel_parity_gpu.py",
        "python -m pytest -m gpu -k triton_sel_parity_gpu",
    ),
    Command(
        "NSA_USE_TRITON_SEL=1 NSA_SEL_TRITON_ALLOW_GRAD=1 NSA_TRITON_SEL_FORCE=1 pytest "
        "tests/test_triton_sel_backward_gpu.py",
        "python -m pytest -m gpu -k triton_sel_backward_gpu",
    ),
    Command(
        "NSA_TEST_FA2=1 NSA_USE_FA2=1 pytest -k fa2_gpu_varlen",
        "python -m pytest -m gpu -k fa2_gpu_varlen",
    ),
    Command(
        'NSA_TEST_TRAIN=1 pytest -k "backward_parity or gradcheck or train"',
        'python -m pytest -k "backward_parity or gradcheck or train"',
    ),
    *(
        Command(f"pytest tests/test_{name}.py", f"python -m pytest -k {name}")
        for name in ("backward_varlen", "gradcheck_varlen", "train_smoke")
    ),
    Command(
        "pytest tests/test_sel_cuda_gpu.py",
        "python -m pytest -m gpu -k sel_cuda_gpu",
        "Mosaic kernels: there is no CUDA extension",
    ),
    Command(f"bench/bench_decode.py {DECODE}", f"python -m bench.decode {DECODE}"),
    Command(
        "bench/summarize_decode_csv.py decode_gpu_final.csv",
        "python -m bench.summarize decode_gpu_final.csv",
    ),
    Command(
        "NSA_USE_FA2=1 bench/bench_fa2.py",
        "python -m bench.fa2 --compressed_kernel fa2 --sliding_kernel fa2",
    ),
    Command("NSA_USE_TRITON_SEL=1 NSA_TRITON_SEL_FORCE=1 bench/bench_sel_triton.py", SELECTION),
    Command(
        "NSA_DEBUG_LOG=1 NSA_LOG_LIMIT=5 bench/bench_decode.py",
        "python -m bench.decode --log routing --log_limit 5",
    ),
    Command("bash scripts/runner_oneshot.sh", "python -m bench.oneshot"),
    Command("bench/bench_masked.py", "python -m bench.fa2", "its column `masked`"),
    *(
        Command(f"pytest tests/test_{name}.py", f"python -m pytest -k {name}")
        for name in ("equiv_small", "block_math", "decode_counters")
    ),
    Command(
        "bench/threshold_optimizer.py --safety-margin 1.2",
        "python -m bench.tune_thresholds artifacts --margin 1.2",
    ),
    Command("bench/prime_gpu_bench.py", "python cloud/launch.py cloud/sky/primeintellect.yaml"),
)
# The flags of its training script.
TRAIN_FLAGS = {
    "--dataset synthetic": ("--dataset text", "the standard library's source: no network"),
    "--dataset fineweb_edu": ("--dataset HuggingFaceFW/fineweb-edu:sample-10BT", ""),
    "--dataset fineweb_edu_local --local-path P": ("--dataset P", "files, a folder, a glob"),
    "--ddp 0": ("--parallel none", ""),
    "--ddp 1": ("--parallel ddp", "by torchrun"),
    "--ddp -1": ("-", "say which: nothing follows from how it was started"),
    "--save": ("--save_every N", "always, every 100 steps"),
    "--resume": ("--resume", "with `--out`"),
    "--steps N": ("--steps N", ""),
    "--seq-len N": ("--seq_len N", ""),
    "--batch-size N": ("--batch_size N", "rows of a micro-batch on one device"),
    "--accum-batches N": ("--accumulate N", ""),
    "--no-gc": ("-", "nothing of a block is computed again"),
    "--loader-timeout S": ("--hang_s S", "of a step, its data included"),
    "--fwe-report-docs N": ("-", "a stream says nothing of its documents"),
    "--synthetic-on-fail": ("-", "a stream that fails is an error, and can be resumed"),
}
# The names that the seed system's documents give to `pytest -k`: the file that has them.
TESTS = {
    "backward_parity": "tests/test_parity.py",
    "backward_varlen": "tests/test_torch_rules.py",
    "block_math": "tests/test_block_math.py",
    "decode_counters": "tests/test_caches.py",
    "equiv_small": "tests/test_oracle.py",
    "fa2_gpu_varlen": "tests/test_torch_gpu.py",
    "gradcheck": "tests/test_parity.py",
    "gradcheck_varlen": "tests/test_torch_rules.py",
    "group_consistency": "tests/test_parity.py",
    "masks": "tests/test_properties.py",
    "performance_guards": "tests/test_transforms.py",
    "sel_cuda": "tests/test_torch_mosaic.py",
    "sel_cuda_gpu": "tests/test_torch_mosaic.py",
    "selection_packed": "tests/test_parity.py",
    "selection_v2_equiv": "tests/test_ranges.py",
    "train": "tests/test_train.py",
    "train_smoke": "tests/test_layers.py",
    "triton_sel_backward_gpu": "tests/test_triton.py",
    "triton_sel_edge_cases": "tests/test_triton.py",
    "triton_sel_parity": "tests/test_triton.py",
    "triton_sel_parity_gpu": "tests/test_triton.py",
}


def markdown() -> str:
    """Scripts, test names, commands, and the flags of the training script."""
    named = {
        ("seed", "here", ""): [(x.seed, x.here, x.note) for x in SCRIPTS],
        ("command of the documents", "here", ""): [
            (x.seed, x.here, x.note)
            for x in COMMANDS
            if "pytest" not in x.seed  # tests have a table of their own
            and not any(f"runbook_s{length}" in x.seed for length in (1024, 2048))
        ],
        ("`train_showcase.py`", "`bench.train`", ""): [(x, *y) for x, y in TRAIN_FLAGS.items()],
        ("`pytest -k`", "where"): [*TESTS.items()],
    }
    return "\n".join(
        table(head, ((_code(name), _code(here), *note) for name, here, *note in rows))
        for head, rows in named.items()
    )


def _code(text: str) -> str:
    return text if text == "-" else f"`{text}`"
