"""A plugin with which `vllm serve` and `LLM(..)` of vLLM run checkpoints of `NSAForCausalLM`.

Install the extra `vllm`; no code is needed, since vLLM finds `register` by the entry point
`vllm.general_plugins`. The scheduler, block tables, prefix caching, chunked prefill, preemption
and speculative decoding of vLLM are used without changes. The plugin has three parts:

- `model.py` puts the library's modules under vLLM's model interface.
- `backend.py` describes a layer's cache and a step to vLLM, and defines the operators of a layer.
- `step.py` makes the cache and runs the step. `step.py` does not import vLLM.
"""

import warnings

from nsa_core import extras

MODEL = "NSAForCausalLM"  # the name in `architectures` of config.json
TRIED = "0.32", "0.33"  # the tested versions of vLLM, by their first two numbers


def register() -> None:
    """Register the models with vLLM. vLLM calls this function in each of its processes, and more
    than once.
    """
    extras.require("vllm", "vllm")
    from vllm import ModelRegistry, __version__

    if ".".join(__version__.split(".")[:2]) not in TRIED:
        warnings.warn(
            "nsa_torch.vllm uses private names of vLLM and was tested only with versions "
            f"{' and '.join(TRIED)}, got {__version__}",
            stacklevel=2,
        )
    import nsa_torch.huggingface  # noqa: F401, AutoConfig knows model_type "nsa" from here on

    # The class is passed by name, since CUDA must not be initialized before vLLM forks.
    ModelRegistry.register_model(MODEL, f"nsa_torch.vllm.model:{MODEL}")
