"""Serves prompts of text: NSA and dense by continuous batching, NSA by vLLM and by `generate`.

    python examples/serve.py                                    # small, runs on a CPU in seconds
    python examples/serve.py --serve nsa,dense,vllm             # beside vLLM's CPU build
    python examples/serve.py --serve generate,generate_dynamic  # one batch, no manager
    python examples/serve.py --layers 12 --heads 64 --kv_heads 4 --head_dim 128 --hidden 2048 \
        --prompt_tokens 32768 --requests 8 --dtype bfloat16     # a GPU

The manager of `nsa` and `dense` is transformers' (`generate_batch`): it shares out pages, shares
prefixes, mixes prefill with decode. `vllm` is NSA in vLLM's engine, in this process. `generate` is
NSA with all requests as rows of one batch, padded on the left: on a GPU their cache lies on pages
and a step is a CUDA graph; `generate_dynamic` has the cache that grows. Weights are random and
texts are the standard library's source as bytes: what is measured is speed. All requests come at
once. Needs the extra `hf`, and transformers 5.19 for `nsa`; `vllm` needs the extra `vllm`, and ran
on a CPU alone.

    start         of the manager, with the CUDA graphs that it captures; other requests follow, of
                  the same lengths, so that kernels are built before the clock begins
    first token   from when all requests come to a request's first token
    next token    between two tokens of a request
    GPU seconds   of kernels, with --gpu_time: summed in a second run, under torch's profiler;
                  what `seconds` has beyond them the host takes alone
"""

import argparse
import functools
import importlib.util
import itertools
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from nsa_torch.huggingface import NSAForCausalLM, NSAModelConfig, continuous_batching_config

SERVED = "nsa", "dense", "vllm", "generate", "generate_dynamic"

# vLLM in one process, with 1 GiB for its blocks.
VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--serve", default="nsa,dense", help=f"what to serve: some of {', '.join(SERVED)}")
    add("--layers", type=int, default=2)
    add("--hidden", type=int, default=128, help="width of the model")
    add("--heads", type=int, default=8)
    add("--kv_heads", type=int, default=2)
    add("--head_dim", type=int, default=32)
    add("--requests", type=int, default=6)
    add("--prompt_tokens", type=int, default=300, help="of the longest prompt; others are 1/2")
    add("--new_tokens", type=int, default=16)
    add("--step_tokens", type=int, default=256, help="new tokens of a step, of all requests")
    add("--gpu_time", action="store_true", help="sum up the time of kernels, in a second run")
    add("--out", type=Path, help="a file to append a line of JSON a run to")
    add("--commit", help="of this tree, for that line")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found = parser.parse_args(argv)
    asked = found.serve.split(",")
    if unknown := set(asked) - set(SERVED):
        parser.error(f"--serve must be of {', '.join(SERVED)}, got {sorted(unknown)[0]!r}")
    if "vllm" in asked and importlib.util.find_spec("vllm") is None:
        parser.error("--serve vllm needs vLLM: pip install 'native-sparse-attention[vllm]'")
    if "vllm" in asked and found.device != "cpu":
        parser.error(
            f"--serve vllm needs --device cpu, got {found.device}: it ran nowhere else"
        )
    if "vllm" in asked and found.gpu_time:
        parser.error("--gpu_time is not of --serve vllm")
    if found.gpu_time and not found.device.startswith("cuda"):
        parser.error(f"--gpu_time needs a GPU, got --device {found.device}")
    for name in ("layers", "requests", "prompt_tokens", "new_tokens", "step_tokens"):
        if getattr(found, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(found, name)}")
    if found.out and not found.out.absolute().parent.is_dir():
        parser.error(f"--out must lie in a folder that is there, got {found.out}")
    try:
        configuration(found, "nsa")
    except ValueError as error:
        parser.error(str(error))
    return found


def prompts(count: int, length: int) -> list[list[int]]:
    """Bytes of modules of the standard library, every second one half as long; the first two
    share a beginning.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < count * length:
        text *= -(-count * length // len(text))
    found = [list(text[i * length : (i + 1) * length]) for i in range(count)]
    found = [x[: length // 2 or 1] if i % 2 else x for i, x in enumerate(found)]
    if count > 1:
        found[1] = found[0][: len(found[1])]
    return found


def greedy(flags: argparse.Namespace) -> GenerationConfig:
    """All requests have as many new tokens."""
    return GenerationConfig(
        max_new_tokens=flags.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )


def configuration(flags: argparse.Namespace, attention: str) -> NSAModelConfig:
    return NSAModelConfig(
        vocab_size=256,
        hidden_size=flags.hidden,
        intermediate_size=3 * flags.hidden,
        num_hidden_layers=flags.layers,
        num_attention_heads=flags.heads,
        num_key_value_heads=flags.kv_heads,
        head_dim=flags.head_dim,
        attention=attention,
    )


def model(flags: argparse.Namespace, attention: str) -> NSAForCausalLM:
    config = configuration(flags, attention)
    torch.manual_seed(0)
    with torch.device(flags.device):
        return NSAForCausalLM(config).to(getattr(torch, flags.dtype)).eval()


def serve(flags: argparse.Namespace, attention: str) -> dict[str, float]:
    """One run: seconds, tokens a second, milliseconds to tokens."""
    lm = model(flags, attention)
    texts = prompts(2 * flags.requests, flags.prompt_tokens)
    texts, others = texts[: flags.requests], texts[flags.requests :]
    page = lm.config.select_block
    pages = [-(-(len(x) + flags.new_tokens) // page) for x in texts]
    options = {
        "generation_config": greedy(flags),
        "continuous_batching_config": continuous_batching_config(
            lm.config,
            num_blocks=sum(pages) + flags.requests,
            max_blocks_per_request=max(pages),
            max_batch_tokens=flags.step_tokens,
            max_requests_per_batch=flags.requests,
        ),
    }
    begin = time.perf_counter()
    with lm.continuous_batching_context_manager(**options) as manager:
        start = time.perf_counter() - begin
        answers(manager, others, flags.new_tokens)  # kernels are built
        begin = time.perf_counter()
        results = answers(manager, texts, flags.new_tokens)
        seconds = time.perf_counter() - begin
    failed = [x.error for x in results if x.error] or ["a request is missing"]
    if len(results) != flags.requests or any(x.error for x in results):
        raise RuntimeError(f"{attention}: {failed[0]}")
    found = measures(begin, seconds, texts, [x.timestamps or [] for x in results])
    if flags.gpu_time:
        # Without the steps by which a manager captures graphs before it begins.
        again = functools.partial(lm.generate_batch, texts, warmup=False, **options)
        found["GPU seconds"] = gpu_seconds(again)
    return found | {"start s": start}


def serve_by_generate(flags: argparse.Namespace, cache: str | None) -> dict[str, float]:
    """The same as one batch; `cache`: its `cache_implementation`, None: pages on a GPU."""
    lm = model(flags, "nsa")
    texts = prompts(2 * flags.requests, flags.prompt_tokens)
    given = greedy(flags)
    given.cache_implementation = cache
    given.eos_token_id = lm.generation_config.eos_token_id = None
    texts, others = texts[: flags.requests], texts[flags.requests :]
    generate(lm, others, given)  # kernels are built
    begin = time.perf_counter()
    times = generate(lm, texts, given)
    found = measures(begin, time.perf_counter() - begin, texts, [times] * len(texts))
    if flags.gpu_time:
        found["GPU seconds"] = gpu_seconds(lambda: generate(lm, texts, given))
    return found | {"start s": 0.0}


class Clock(transformers.generation.BaseStreamer):
    """When `generate` gave the prompts back, then each step's tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(lm: Any, texts: list[list[int]], given: GenerationConfig) -> list[float]:
    """When each new token of all rows was there."""
    rows = [torch.tensor(text, device=lm.device) for text in texts]
    pad = functools.partial(
        torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left"
    )
    mask, clock = pad([torch.ones_like(row) for row in rows]), Clock()
    lm.generate(pad(rows), attention_mask=mask, generation_config=given, streamer=clock)
    return clock.times[1:]


def serve_by_vllm(flags: argparse.Namespace) -> dict[str, float]:
    """The same by vLLM's engine, in this process."""
    for name, value in VLLM.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    lm = model(flags, "nsa")
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        lm.save_pretrained(folder)
        engine = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype=flags.dtype,
            block_size=lm.config.select_block,
            max_model_len=flags.prompt_tokens + flags.new_tokens,
            max_num_batched_tokens=max(flags.step_tokens, flags.requests),
            max_num_seqs=flags.requests,
            enable_prefix_caching=True,
            enforce_eager=True,
        ).llm_engine
    start = time.perf_counter() - begin
    texts = prompts(2 * flags.requests, flags.prompt_tokens)
    token_times(
        engine, texts[flags.requests :], flags.new_tokens, "other"
    )  # ready from here on
    begin, texts = time.perf_counter(), texts[: flags.requests]
    times = token_times(engine, texts, flags.new_tokens, "own")
    return measures(begin, time.perf_counter() - begin, texts, times) | {"start s": start}


def token_times(
    engine: Any, texts: list[list[int]], count: int, name: str
) -> list[list[float]]:
    """When vLLM's engine gave each new token of each request."""
    from vllm import SamplingParams

    given = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    times: dict[str, list[float]] = {}
    for i, text in enumerate(texts):
        times[f"{name} {i}"] = []
        engine.add_request(f"{name} {i}", {"prompt_token_ids": text}, given)
    while engine.has_unfinished_requests():
        results, now = engine.step(), time.perf_counter()
        for each in results:
            seen = times[each.request_id]
            seen += [now] * (len(each.outputs[0].token_ids) - len(seen))
    return list(times.values())


def measures(
    begin: float, seconds: float, texts: list[list[int]], times: list[list[float]]
) -> dict[str, float]:
    """Of requests that came at `begin`; `times` of each new token."""
    first = [x[0] - begin for x in times]
    following = [later - sooner for x in times for sooner, later in itertools.pairwise(x)]
    return {
        "seconds": seconds,
        "new tokens/s": sum(map(len, times)) / seconds,
        "prompt tokens/s": sum(map(len, texts)) / seconds,
        "first p50 ms": 1e3 * percentile(first, 50),
        "first p99 ms": 1e3 * percentile(first, 99),
        "next p50 ms": 1e3 * percentile(following, 50),
        "next p99 ms": 1e3 * percentile(following, 99),
    }


def answers(manager: Any, texts: list[list[int]], new_tokens: int) -> list[Any]:
    """The requests' results, as they end."""
    manager.add_requests(texts, max_new_tokens=new_tokens, record_timestamps=True)
    found = []
    while len(found) < len(texts) and manager.is_running():
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            found.append(result)
    return found


def gpu_seconds(call: Callable[[], Any]) -> float:
    """Of all kernels and copies that `call` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return sum(x.self_device_time_total for x in found.key_averages()) / 1e6


def percentile(values: list[float], percent: int) -> float:
    """By linear interpolation; NaN of none."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main(argv: list[str] | None = None) -> int:
    flags = arguments(argv)
    names = flags.serve.split(",")
    by = {
        "vllm": lambda: serve_by_vllm(flags),
        "generate": lambda: serve_by_generate(flags, None),
        "generate_dynamic": lambda: serve_by_generate(flags, "dynamic"),
    }
    rows = {x: by[x]() if x in by else serve(flags, x) for x in names}
    where = torch.cuda.get_device_name() if flags.device.startswith("cuda") else flags.device
    print(f"{flags.requests} requests, prompts up to {flags.prompt_tokens} tokens, on {where}")
    width = max(12, 2 + max(map(len, names)))
    print("".ljust(16) + "".join(name.rjust(width) for name in names))
    if flags.out:
        about = {name: x for name, x in vars(flags).items() if name not in ("serve", "out")}
        about |= {"device": where, "torch": torch.__version__}
        about |= {"transformers": transformers.__version__}
        with flags.out.open("a") as file:
            for name, row in rows.items():
                line = {"attention": name} | about | row
                file.write(json.dumps(line) + "\n")
    for measure in rows[names[0]]:
        print(measure.ljust(16) + "".join(f"{rows[x][measure]:{width}.2f}" for x in names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
