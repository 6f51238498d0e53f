"""A causal language model with Native Sparse Attention for Hugging Face's `transformers`.

The model has RMSNorm, rotary embedding, grouped heads and SwiGLU. The configuration selects NSA
or dense attention for each layer. Importing this module registers `model_type="nsa"` with
`AutoConfig`, `AutoModel` and `AutoModelForCausalLM`. A program that does not import this module
must pass `trust_remote_code=True` to these classes. For programs without that import,
`save_pretrained` and `convert` write a small module next to the checkpoint. The public names are:
  `NSAModelConfig`                      the sizes and the kind of each layer
  `NSAModel`, `NSAForCausalLM`          the decoder; with a head, a loss and `generate`
  `NSAModelCache`                       the cache of `generate`: one `nsa_torch.NSACache` per layer
  `NSAPagedModelCache`                  the same on pages, for steps of static shapes
  `StepGraph`                           such a step as one CUDA graph
  `continuous_batching_config`          for `generate_batch`: pages that NSA can read
  `to_safetensors`, `from_safetensors`  weights for `nsa_bench.train`'s models, and back
  `register_block_attention`            kernels for released models that choose key blocks, by
                                        `attn_implementation="nsa_blocks"` (`block_selection`)
  `LlamaNSAForCausalLM`                 the layout of zen-E/NSA-1B, with its own selection or the
                                        exact one (`llama_nsa`)

Rows of a batch may be padded on the left or on the right. The positions and the selection blocks
of a row start at its first real token. The results of a row are therefore the same as if the row
were the whole batch.
"""

from nsa_core import extras

extras.require("hf", "transformers", minimum="5.17")

import transformers

from nsa_torch.huggingface.block_selection import register_block_attention
from nsa_torch.huggingface.cache import NSAModelCache, NSAPagedModelCache
from nsa_torch.huggingface.configuration import NSAModelConfig
from nsa_torch.huggingface.continuous import continuous_batching_config
from nsa_torch.huggingface.llama_nsa import LlamaNSAConfig, LlamaNSAForCausalLM
from nsa_torch.huggingface.model import NSAForCausalLM, NSAModel
from nsa_torch.huggingface.step_graph import StepGraph
from nsa_torch.huggingface.training_weights import from_safetensors, to_safetensors

__all__ = [
    "LlamaNSAConfig",
    "LlamaNSAForCausalLM",
    "NSAForCausalLM",
    "NSAModel",
    "NSAModelCache",
    "NSAModelConfig",
    "NSAPagedModelCache",
    "StepGraph",
    "continuous_batching_config",
    "from_safetensors",
    "register_block_attention",
    "to_safetensors",
]

transformers.AutoConfig.register(NSAModelConfig.model_type, NSAModelConfig, exist_ok=True)
transformers.AutoModel.register(NSAModelConfig, NSAModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(NSAModelConfig, NSAForCausalLM, exist_ok=True)
register_block_attention()
