"""The seed system's scripts and test names lead to what is here."""

import importlib.util
import re

import pytest

from bench.harness import seed_names
from bench.harness.process import ROOT

# What the seed system's five documents run.
SCRIPTS = """bench_fa2 bench_sel_triton bench_decode summarize_decode_csv bench_masked
threshold_optimizer sel_threshold_from_csv run_automated_bench prime_gpu_bench modal_gpu_bench
runner_oneshot train_showcase check_availability"""
KEYWORDS = """triton_sel_parity triton_sel_parity_gpu triton_sel_edge_cases sel_cuda
fa2_gpu_varlen equiv_small masks block_math"""


def test_every_script_of_the_documents_is_in_the_table():
    names = {re.split(r"[/.]", script.seed)[1] for script in seed_names.SCRIPTS}
    assert set(SCRIPTS.split()) <= names
    assert len(names) == len(seed_names.SCRIPTS)


@pytest.mark.parametrize("script", seed_names.SCRIPTS, ids=lambda script: script.seed)
def test_what_stands_in_its_place_is_there(script):
    program, *words = script.here.split()
    if program == "python":
        assert words[0] == "-m" and importlib.util.find_spec(words[1]), words
        module = (ROOT / f"{words[1].replace('.', '/')}.py").read_text()
        shared = "".join((ROOT / path).read_text() for path in ("nsa_jax/flags.py",))
        for flag in (word[2:] for word in words if word.startswith("--")):
            known = flag in module or flag.removesuffix("_kernel") in shared
            assert known or flag == "selected_kernel", flag
    elif program in ("sky", "modal"):
        assert all((ROOT / word).is_file() for word in words if "/" in word)
    else:
        assert program == "-" and script.note


@pytest.mark.parametrize("keyword", KEYWORDS.split())
def test_every_keyword_selects_a_test(keyword):
    path = ROOT / seed_names.TESTS[keyword]
    found = re.findall(r"def (test_\w+)", path.read_text())
    assert any(keyword in f"{path.name} {name}" for name in found), found


def test_the_table_is_markdown():
    lines = seed_names.markdown().splitlines()
    assert (
        "| `bench/bench_fa2.py` | `python -m bench.fa2` | `--csv`: the sweep's columns |"
        in lines
    )
    assert {line.count("|") for line in lines[: 2 + len(seed_names.SCRIPTS)]} == {4}


def test_sel_cuda():
    pytest.skip("there is no CUDA extension: the Mosaic and Triton kernels are in its place")
