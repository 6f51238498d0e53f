"""A causal language model with Native Sparse Attention for Hugging Face's `transformers`.

The model has RMSNorm, rotary embedding, grouped heads and SwiGLU. The configuration selects NSA
or dense attention for each layer. Importing this module registers `model_type="nsa"` with
`AutoConfig`, `AutoModel` and `AutoModelForCausalLM`. A program that does not import this module
must pass `trust_remote_code=True` to these classes. For programs that do not import this
module, `save_pretrained` and `convert` write a small module next to the checkpoint.

These names are public:

- `NSAModelConfig` has the sizes and the kind of each layer.
- `NSAModel` is the decoder. `NSAForCausalLM` adds an output head, a loss and `generate`.
- `NSAModelCache` is a cache for `generate`, with one `nsa_torch.NSACache` per layer.
- `NSAPagedModelCache` is a cache in pages, for decode steps with static shapes.
- `StepGraph` runs a decode step on an `NSAPagedModelCache` as one CUDA graph.
- `continuous_batching_config` makes a configuration for `generate_batch` with pages that NSA can
  read.
- `to_safetensors` and `from_safetensors` convert weights for `nsa_bench.train`, and back.
- `register_block_attention` makes released models that select key blocks run on the kernels of this
  library, with `attn_implementation="nsa_blocks"` (`block_selection`).
- `LlamaNSAForCausalLM` loads checkpoints in the layout of zen-E/NSA-1B (`llama_nsa`).

Rows of a batch may be padded on the left or on the right. The positions and the selection blocks of
a row start at its first real token. The results of a row are the same as if the row were the whole
batch.
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
