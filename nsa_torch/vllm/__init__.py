"""A plugin of vLLM: `vllm serve` and `LLM(..)` run checkpoints of `NSAForCausalLM`.

Installing the extra `vllm` is enough: vLLM finds `register` by the entry point
`vllm.general_plugins`. Its own scheduler, block tables, prefix caching, chunked prefill, preemption
and speculative decoding are used as they are:
  `model.py`    the library's modules under vLLM's model interface
  `backend.py`  what a layer keeps in vLLM's blocks, a step's metadata, the op that attends
"""

from nsa_core import extras

MODEL = "NSAForCausalLM"  # of `architectures` in config.json


def register() -> None:
    """Called by vLLM in each of its processes, more than once."""
    extras.require("vllm", "vllm")
    from vllm import ModelRegistry

    import nsa_torch.huggingface  # noqa: F401, AutoConfig knows model_type "nsa" from here on

    # By name: CUDA must not be touched before vLLM forks.
    ModelRegistry.register_model(MODEL, f"nsa_torch.vllm.model:{MODEL}")
