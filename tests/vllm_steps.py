"""Records steps of vLLM's CPU build: what its scheduler hands to a backend, as JSON.

    python tests/vllm_environment.py --record      # writes tests/vllm_steps.json

`tests/test_vllm_step.py` plays them back where vLLM is not installed, on a GPU too. Blocks have 64
tokens, as the kernels want; lengths, tables and bounds follow from prompts' lengths alone, but for
how many guesses are taken.
"""

import json
from pathlib import Path
from typing import Any

import torch

from tests.model_sizes import MODELS

FILE = Path(__file__).with_suffix(".json")
BLOCK = 64
LENGTHS = 5, 300, 130, 120
TENSORS = "query_start_loc", "seq_lens", "seq_lens_cpu_upper_bound"
NUMBERS = "num_reqs", "num_actual_tokens", "max_query_len"
SIZES = MODELS["steps"]
# Of each a model's changes, the engine's, new tokens: a rejected guess is written over.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = MODELS["engine steps"]


def prompts(case: str) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in LENGTHS]
    if case == "chunks":  # the last two begin with blocks of others
        found += [found[1][:256] + [3, 4], found[2][:64] + [5]]
    if case == "together":  # with blocks of one that comes in the same step
        return [found[2], found[2][:64] + found[3][:40], found[2]]
    return [found[1], found[3]] if case == "preempted" else found


def record(
    case: str, engine: Any, backend: Any, model: Any, answers: Any
) -> list[dict[str, Any]]:
    """The steps of a case.

    Args:
      engine: of a case's options, makes an `LLM` in this process.
      backend, model: modules of `nsa_torch.vllm`.
      answers: of an `LLM`, prompts and a number of new tokens, runs it.
    """
    steps: list[dict[str, Any]] = []
    build, forward = backend.NSABuilder.build, model.NSAForCausalLM.forward

    def built(self, prefix, metadata, *rest, **options):
        found = {name: getattr(metadata, name).tolist() for name in TENSORS}
        table = metadata.block_table_tensor
        columns = -(-max(found["seq_lens_cpu_upper_bound"]) // BLOCK)
        found |= {"block_table": table[:, :columns].tolist(), "columns": table.shape[1]}
        steps.append(found | {name: int(getattr(metadata, name)) for name in NUMBERS})
        return build(self, prefix, metadata, *rest, **options)

    def ran(self, input_ids, *rest, **options):
        if steps and "tokens" not in steps[-1]:
            steps[-1]["tokens"] = input_ids[: steps[-1]["num_actual_tokens"]].tolist()
        return forward(self, input_ids, *rest, **options)

    _, options, new = CASES[case]
    sizes = {"block_size": BLOCK, "max_model_len": 512, "max_num_batched_tokens": 192}
    llm = engine(**sizes | options)
    backend.NSABuilder.build, model.NSAForCausalLM.forward = built, ran
    try:
        answers(llm, prompts(case), new)
    finally:
        backend.NSABuilder.build, model.NSAForCausalLM.forward = build, forward
    return steps


def read() -> dict[str, list[dict[str, Any]]]:
    return json.loads(FILE.read_text())


def write(case: str, steps: list[dict[str, Any]]) -> None:
    """One line per step."""
    found = (read() if FILE.exists() else {}) | {case: steps}
    lines = [
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, each)) + "\n]"
        for name, each in found.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
