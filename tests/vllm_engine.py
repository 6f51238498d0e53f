"""`nsa_torch.vllm` in vLLM's CPU build: texts and log probabilities of `generate`. Run by
`make test-vllm`, in an environment of its own.
"""

import contextlib
import functools
import gc
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "HF_HUB_OFFLINE": "1",
}

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from vllm import LLM, ModelRegistry, SamplingParams

from examples import serve
from nsa_core import paged_layout
from nsa_torch.huggingface import NSAForCausalLM, NSAModelConfig
from nsa_torch.huggingface.convert import convert
from nsa_torch.vllm import backend
from nsa_torch.vllm import model as engine_model
from tests import vllm_steps
from tests.model_sizes import MODELS, SERVED, alone, log_probabilities

pytestmark = pytest.mark.filterwarnings("ignore")  # the engine's own
SIZES = SERVED | dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3)
SIZES |= dict(max_position_embeddings=1024)
NEW = 24


def texts():
    """The last two share six pages with the fourth, and two with the second."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(1, 97, (n,), generator=generator).tolist()
    found = [draw(n) for n in (5, 40, 23, 130, 64)]
    return [*found, found[3][:96] + draw(7), found[1][:32] + draw(3)]


@functools.cache
def model(**changes):
    torch.manual_seed(0)
    return NSAForCausalLM(NSAModelConfig(**SIZES | changes)).eval()


@pytest.fixture
def engine(tmp_path):
    """Makes an `LLM` of a model; gone after the test."""

    def make(lm, **options):
        lm.save_pretrained(tmp_path)
        sizes = {"max_model_len": 256, "max_num_batched_tokens": 48, "max_num_seqs": 4}
        given = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True}
        given |= {"block_size": 16, "disable_log_stats": False} | sizes
        return LLM(str(tmp_path), **given | options)

    yield make
    gc.collect()


def answers(llm, prompts, new=NEW, **sampling):
    sampling = {"temperature": 0, "ignore_eos": True, "logprobs": 0} | sampling
    asked = SamplingParams(max_tokens=new, detokenize=False, **sampling)
    given = [{"prompt_token_ids": x} for x in prompts]
    return llm.generate(given, asked, use_tqdm=False)


def distance(lm, prompt, answer):
    """Most that a token's log probability is off, given the tokens before it."""
    said = list(answer.token_ids)
    got = [x[t].logprob for x, t in zip(answer.logprobs, said, strict=True)]
    return float((log_probabilities(lm, prompt, said) - torch.tensor(got)).abs().max())


def same_as_alone(lm, prompts, found):
    for prompt, result in zip(prompts, found, strict=True):
        (answer,) = result.outputs
        assert list(answer.token_ids) == alone(lm, prompt, NEW), len(prompt)
        assert distance(lm, prompt, answer) < 1e-4, len(prompt)


def metric(llm, name):
    return {x.name: getattr(x, "value", None) for x in llm.get_metrics()}[f"vllm:{name}"]


def pages(llm):
    (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
    return [each.pages for each in runner.model.pages]


@pytest.mark.parametrize("changes", MODELS["engine"], ids=str)
def test_answers_are_those_of_generate(engine, changes):
    """Prompts of several lengths, in chunks (the longest takes three steps), decode rows beside
    them; then again, from cached blocks.
    """
    lm = model.__wrapped__(**changes)
    llm = engine(lm)
    first = texts()[:5]
    same_as_alone(lm, first, answers(llm, first))
    found = answers(llm, texts())
    same_as_alone(lm, texts(), found)
    assert [x.num_cached_tokens for x in found] == [0, 32, 16, 128, 48, 96, 32]
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    kept = pages(llm)
    elements = paged_layout.page_elements(2, 16, 16, kept[0].config, kept[0].separate)
    assert all(x.num_pages >= blocks for x in kept)
    assert sum(x.nbytes for x in kept[0].tensors().values()) == kept[0].num_pages * elements * 4


def test_samples_of_one_prompt(engine):
    """Two of them begin, in the step of the first, with the blocks that it fills then."""
    lm, prompt = model(), texts()[1]
    llm = engine(lm, max_num_batched_tokens=96)
    (found,) = answers(llm, [prompt], n=3, temperature=1, seed=3)
    assert len({tuple(x.token_ids) for x in found.outputs}) == 3
    assert metric(llm, "prefix_cache_hits") == 2 * 32
    assert max(distance(lm, prompt, x) for x in found.outputs) < 1e-4


def test_rows_that_are_put_off_begin_again(engine):
    lm = model()
    llm = engine(lm, num_gpu_blocks_override=18)
    same_as_alone(lm, texts()[:5], answers(llm, texts()[:5]))
    assert metric(llm, "num_preemptions") > 0


def test_a_request_that_is_aborted_within_its_prompt(engine):
    lm = model()
    llm = engine(lm, num_gpu_blocks_override=18)
    long = (texts()[3] * 2)[:220]
    inner = llm.llm_engine
    inner.add_request(
        "long", {"prompt_token_ids": long}, SamplingParams(max_tokens=4, detokenize=False)
    )
    for _ in range(2):  # 96 of 220 tokens
        assert not inner.step()
    inner.abort_request(["long"])
    same_as_alone(lm, texts()[:3], answers(llm, texts()[:3]))


def test_without_a_block_size(engine):
    lm = model()
    llm = engine(lm, block_size=None)
    same_as_alone(lm, texts()[:3], answers(llm, texts()[:3]))


@pytest.mark.parametrize("options, message", MODELS["refused by the engine"])
def test_what_is_refused(engine, options, message):
    with pytest.raises(Exception, match=message):
        engine(model(), **options)


def test_the_plugin_is_found_by_its_entry_point():
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="nsa")
    assert found.value == "nsa_torch.vllm:register"
    for _ in range(2):  # in each process of the engine, more than once
        found.load()()
    assert "NSAForCausalLM" in ModelRegistry.get_supported_archs()


def test_models_and_devices_that_are_refused():
    for message, changes, guesses, parallel in MODELS["refused by the plugin"]:
        sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | parallel
        of_engine = SimpleNamespace(
            parallel_config=SimpleNamespace(**sizes),
            cache_config=SimpleNamespace(cache_dtype="auto", user_specified_block_size=False),
            kv_transfer_config=None,
            quant_config=None,
            speculative_config=guesses and SimpleNamespace(method=guesses),
        )
        refused = pytest.raises(NotImplementedError, match=message)
        with refused if message else contextlib.nullcontext():
            engine_model.check(of_engine, model.__wrapped__(**changes).config)


def test_weights_that_do_not_fit(engine, monkeypatch):
    load = engine_model.NSAForCausalLM.load_weights
    monkeypatch.setattr(
        engine_model.NSAForCausalLM, "load_weights", lambda self, x: load(self, list(x)[1:])
    )
    with pytest.raises(Exception, match="weights are missing: "):
        engine(model())


@pytest.mark.parametrize("case", vllm_steps.CASES)
def test_recorded_steps_are_the_engines(engine, case):
    """What `test_vllm_step.py` plays back, recorded anew; with RECORD_STEPS=1 it is written."""
    changes, options, _ = vllm_steps.CASES[case]
    record = os.environ.get("RECORD_STEPS") == "1"
    if "speculative_config" in options and not record:
        pytest.skip("which guesses are taken follows from a machine's numbers")
    torch.manual_seed(0)
    lm = NSAForCausalLM(NSAModelConfig(**vllm_steps.SIZES | changes)).eval()
    make = functools.partial(engine, lm)
    steps = vllm_steps.record(case, make, backend, engine_model, answers)
    if record:
        vllm_steps.write(case, steps)
    else:
        lost = lambda found: [
            {k: x for k, x in step.items() if k != "tokens"} for step in found
        ]
        assert lost(steps) == lost(vllm_steps.read()[case])


def test_the_example_serves_by_vllm(capsys, tmp_path):
    out = tmp_path / "lines"
    sizes = "--prompt_tokens=200 --new_tokens=4 --requests=3 --step_tokens=96 --layers=1"
    argv = ["--serve=vllm", "--device=cpu", f"--out={out}", *sizes.split()]
    assert serve.main(argv) == 0
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["attention"] == "vllm" and 0 < line["first p50 ms"] <= line["first p99 ms"]
    assert line["new tokens/s"] * line["seconds"] == pytest.approx(12)
    assert "3 requests, prompts up to 200 tokens, on cpu" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        serve.main(["--serve=vllm", "--device=cuda"])
    assert "--serve vllm needs --device cpu, got cuda" in capsys.readouterr().err


def test_the_server_answers(tmp_path):
    """The engine in a process of its own, which finds the plugin itself; the model is a converted
    one, beyond the length at which it is dense.
    """
    torch.manual_seed(0)
    names = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"
    names += "num_attention_heads", "num_key_value_heads", "initializer_range"
    dense = LlamaForCausalLM(LlamaConfig(**{name: SIZES[name] for name in names}))
    dense.save_pretrained(tmp_path / "dense")
    nsa = {x: SIZES[x] for x in ("compress_block", "compress_stride", "select_block", "window")}
    folder, prompt = tmp_path / "nsa", texts()[3]
    convert(tmp_path / "dense", folder, num_selected=3, num_local=1, **nsa)
    lm = AutoModelForCausalLM.from_pretrained(folder).eval()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={folder}",
    ]
    command += "--skip-tokenizer-init --enforce-eager --dtype=float32 --block-size=16".split()
    command += ["--max-model-len=256", "--host=127.0.0.1", f"--port={port}"]
    asked = {"model": str(folder), "prompt": prompt, "max_tokens": NEW, "temperature": 0}
    asked |= {"ignore_eos": True, "detokenize": False, "return_token_ids": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(asked).encode())
    request.add_header("Content-Type", "application/json")
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with subprocess.Popen(command, env=environment) as server:
        try:
            for _ in range(600):
                assert server.poll() is None
                with contextlib.suppress(urllib.error.URLError):
                    found = json.load(urllib.request.urlopen(request))
                    break
                time.sleep(0.5)
            else:
                pytest.fail("the server did not answer for 300 s")
        finally:
            server.terminate()
    assert found["choices"][0]["token_ids"] == alone(lm, prompt, NEW)


def test_guesses_are_taken_and_taken_back(engine):
    """Last: what vLLM imports for it keeps it from starting another engine in this process."""
    lm = model.__wrapped__(initializer_range=0.06)  # repeats itself
    _, guesses, _ = vllm_steps.CASES["guesses"]
    llm = engine(lm, **guesses)
    same_as_alone(lm, texts(), answers(llm, texts()))
    taken, all_ = (metric(llm, f"spec_decode_num_{x}_tokens") for x in ("accepted", "draft"))
    assert 0 < taken < all_
