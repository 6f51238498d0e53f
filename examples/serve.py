"""Serves prompts of text and measures the speed, for models with NSA and with dense attention.

    python examples/serve.py                                    # small, runs on a CPU in seconds
    python examples/serve.py --serve nsa,dense,vllm             # with vLLM's CPU build
    python examples/serve.py --serve generate,generate_dynamic  # one batch, no manager
    python examples/serve.py --layers 12 --heads 64 --kv_heads 4 --head_dim 128 --hidden 2048 \
        --prompt_tokens 32768 --requests 8 --dtype bfloat16     # a GPU

`nsa` and `dense` run continuous batching: the manager of transformers (`generate_batch`)
allocates pages, shares prefixes, and mixes prefill with decode. `vllm` is NSA in vLLM's engine,
in this process. `generate` is NSA with all requests as rows of one batch, padded on the left. On
a GPU the cache of `generate` is in pages, and a step is a CUDA graph. `generate_dynamic` is
`generate` with a growing cache. Weights are random, and texts are the source of the standard
library as bytes, since only speed is measured. All requests arrive at the same time. The script
needs the extra `hf`, and transformers 5.19 for `nsa`. `vllm` needs the extra `vllm`, and was tested
only on a CPU.

    start         time until the manager is ready, with the CUDA graphs that it captures. Before
                  the clock begins, other requests of the same lengths run, so that kernels are
                  built
    first token   time from the arrival of all requests to the first token of a request
    next token    time between two tokens of a request
    GPU seconds   with --gpu_time: sum over kernels and copies in a second run, under the profiler
                  of torch. The rest of `seconds` is time of the host only
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import GenerationConfig

from nsa_torch.huggingface import NSAForCausalLM, NSAModelConfig, continuous_batching_config

# The type of a function that serves prompts. For each request, it returns the times of the new
# tokens.
type Run = Callable[[list[list[int]]], list[list[float]]]

SIZES = {"layers": 2, "hidden": 128, "heads": 8, "kv_heads": 2, "head_dim": 32, "requests": 6}
SIZES |= {"prompt_tokens": 300, "new_tokens": 16, "step_tokens": 256}
HELP = {
    "hidden": "width of the model",
    "prompt_tokens": "tokens of the longest prompts; every second prompt has half as many",
    "step_tokens": "maximum number of tokens per step, over all requests",
}
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
    add(
        "--serve", default="nsa,dense", help=f"comma-separated names out of {', '.join(SERVED)}"
    )
    for name, size in SIZES.items():
        add(f"--{name}", type=int, default=size, help=HELP.get(name))
    add("--gpu_time", action="store_true", help="sum the time of kernels, in a second run")
    add("--out", type=Path, help="file to which a line of JSON per run is appended")
    add("--commit", help="commit of this tree, for that line")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found = parser.parse_args(argv)
    found.serve = found.serve.split(",")
    for name in found.serve:
        if name not in SERVED:
            parser.error(f"--serve must be of {', '.join(SERVED)}, got {name!r}")
    if "vllm" in found.serve:
        if importlib.util.find_spec("vllm") is None:
            parser.error("--serve vllm needs vLLM: pip install 'native-sparse-attention[vllm]'")
        if found.device != "cpu":
            parser.error(
                f"--serve vllm needs --device cpu, got {found.device}: it ran nowhere else"
            )
    if found.gpu_time and not found.device.startswith("cuda"):
        parser.error(f"--gpu_time needs a GPU, got --device {found.device}")
    for name in SIZES:
        if getattr(found, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(found, name)}")
    if found.out and not found.out.absolute().parent.is_dir():
        parser.error(f"--out must lie in a folder that is there, got {found.out}")
    try:
        config = configuration(found)
        if by_manager in map(SERVED.get, found.serve):
            continuous_batching_config(config)  # supports transformers 5.19 and newer
    except (ValueError, NotImplementedError) as error:
        parser.error(str(error))
    return found


def prompts(count: int, length: int) -> list[list[int]]:
    """Return bytes of modules of the standard library as prompts. Every second prompt has half the
    length, and the second prompt is a prefix of the first prompt.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    text *= -(-count * length // len(text))
    found = [list(text[i * length : (i + 1) * length]) for i in range(count)]
    found = [x[: length // 2 or 1] if i % 2 else x for i, x in enumerate(found)]
    if count > 1:
        found[1] = found[0][: len(found[1])]
    return found


def configuration(flags: argparse.Namespace, attention: str = "nsa") -> NSAModelConfig:
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


def greedy(flags: argparse.Namespace, **more: Any) -> GenerationConfig:
    """Make a configuration of `generate` in which all requests get the same number of new
    tokens."""
    return GenerationConfig(
        max_new_tokens=flags.new_tokens, do_sample=False, pad_token_id=0, **more
    )


def serve(flags: argparse.Namespace, name: str) -> dict[str, float]:
    """Measure one run. The measurements are seconds, tokens per second, and the milliseconds until
    the first token and between two tokens."""
    torch.manual_seed(0)
    with torch.device(flags.device):
        lm = NSAForCausalLM(configuration(flags, "dense" if name == "dense" else "nsa"))
    lm = lm.to(getattr(torch, flags.dtype)).eval()
    texts = prompts(2 * flags.requests, flags.prompt_tokens)
    texts, others = texts[: flags.requests], texts[flags.requests :]
    begin = time.perf_counter()
    with SERVED[name](flags, lm, texts) as run:
        start = time.perf_counter() - begin
        run(others)  # kernels are built
        begin = time.perf_counter()
        times = run(texts)
        seconds = time.perf_counter() - begin
    first = [x[0] - begin for x in times]
    following = [later - sooner for x in times for sooner, later in itertools.pairwise(x)]
    found = {
        "seconds": seconds,
        "new tokens/s": sum(map(len, times)) / seconds,
        "prompt tokens/s": sum(map(len, texts)) / seconds,
    }
    for each, of in (("first", first), ("next", following or [np.nan])):
        found |= {f"{each} p{n} ms": 1e3 * float(np.percentile(of, n)) for n in (50, 99)}
    if flags.gpu_time:
        with SERVED[name](flags, lm, texts) as run:  # a new manager has no prefixes
            found["GPU seconds"] = gpu_seconds(lambda: run(texts))
    return found | {"start s": start}


@contextlib.contextmanager
def by_manager(flags: argparse.Namespace, lm: Any, texts: list[list[int]]) -> Iterator[Run]:
    """Serve with continuous batching of transformers."""
    pages = [-(-(len(x) + flags.new_tokens) // lm.config.select_block) for x in texts]
    batches = continuous_batching_config(
        lm.config,
        num_blocks=sum(pages) + flags.requests,
        max_blocks_per_request=max(pages),
        max_batch_tokens=flags.step_tokens,
        max_requests_per_batch=flags.requests,
    )
    options: dict[str, Any] = {"continuous_batching_config": batches}
    options["generation_config"] = greedy(flags, eos_token_id=-1)
    with lm.continuous_batching_context_manager(**options) as manager:

        def run(texts: list[list[int]]) -> list[list[float]]:
            manager.add_requests(texts, max_new_tokens=flags.new_tokens, record_timestamps=True)
            found = []
            while len(found) < len(texts) and manager.is_running():
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found.append(result)
            if len(found) < len(texts) or any(x.error for x in found):
                raise RuntimeError(f"a request failed: {[x.error for x in found]}")
            return [x.timestamps or [] for x in found]

        yield run


@contextlib.contextmanager
def by_rows(
    flags: argparse.Namespace, lm: Any, texts: list[list[int]], cache: str | None = None
) -> Iterator[Run]:
    """Serve one batch with `generate`. `cache` is the argument `cache_implementation` of
    `generate`. `cache=None` means pages on a GPU and a growing cache on a CPU.
    """
    given = greedy(flags, cache_implementation=cache)
    lm.generation_config.eos_token_id = None

    def run(texts: list[list[int]]) -> list[list[float]]:
        rows = [torch.tensor(text, device=lm.device) for text in texts]
        mask = [torch.ones_like(row) for row in rows]
        ids, mask = (
            torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_side="left")
            for x in (rows, mask)
        )
        clock = Clock()
        lm.generate(ids, attention_mask=mask, generation_config=given, streamer=clock)
        return [clock.times[1:]] * len(texts)

    yield run


class Clock(transformers.generation.BaseStreamer):
    """A streamer of `generate`, which records the times at which `generate` passes the prompts
    and then the tokens of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@contextlib.contextmanager
def by_engine(flags: argparse.Namespace, lm: Any, texts: list[list[int]]) -> Iterator[Run]:
    """Serve with the engine of vLLM, in this process."""
    for name, value in VLLM.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

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
    asked: dict[str, Any] = {"max_tokens": flags.new_tokens, "ignore_eos": True}
    given, number = SamplingParams(temperature=0, detokenize=False, **asked), itertools.count()

    def run(texts: list[list[int]]) -> list[list[float]]:
        times: dict[str, list[float]] = {}
        for text in texts:
            times[name := str(next(number))] = []
            engine.add_request(name, {"prompt_token_ids": text}, given)
        while engine.has_unfinished_requests():
            results, now = engine.step(), time.perf_counter()
            for each in results:
                seen = times[each.request_id]
                seen += [now] * (len(each.outputs[0].token_ids) - len(seen))
        return list(times.values())

    yield run


SERVED: dict[str, Any] = {
    "nsa": by_manager,
    "dense": by_manager,
    "vllm": by_engine,
    "generate": by_rows,
    "generate_dynamic": functools.partial(by_rows, cache="dynamic"),
}


def gpu_seconds(call: Callable[[], Any]) -> float:
    """Return the time of all kernels and copies that `call` runs, in seconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return sum(x.self_device_time_total for x in found.key_averages()) / 1e6


def main(argv: list[str] | None = None) -> int:
    flags = arguments(argv)
    names, out = flags.serve, flags.out
    rows = {name: serve(flags, name) for name in names}
    where = torch.cuda.get_device_name() if flags.device.startswith("cuda") else flags.device
    print(f"{flags.requests} requests, prompts up to {flags.prompt_tokens} tokens, on {where}")
    width = max(12, 2 + max(map(len, names)))
    print("".ljust(16) + "".join(name.rjust(width) for name in names))
    if out:
        about = {name: x for name, x in vars(flags).items() if name not in ("serve", "out")}
        about |= {"device": where, "torch": torch.__version__}
        about |= {"transformers": transformers.__version__}
        with out.open("a") as file:
            for name, row in rows.items():
                file.write(json.dumps({"attention": name} | about | row) + "\n")
    for measure in rows[names[0]]:
        print(measure.ljust(16) + "".join(f"{rows[x][measure]:{width}.2f}" for x in names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
