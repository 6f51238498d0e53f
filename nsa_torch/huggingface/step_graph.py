"""`StepGraph`, which runs a model's step on an `NSAPagedModelCache` as one CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils.output_capturing import capture_outputs

from nsa_torch.huggingface.cache import NSAPagedModelCache

WARMUP = 3  # steps before the capture: kernels are built, and chosen for calls of one signature
DEVICE = "cuda"  # whose steps are captured


class StepGraph:
    """Runs steps of `model` on `cache`, with one token per row. `graph(input_ids [B, 1])` returns
    `[B, 1, vocab]`.

    The first `WARMUP` calls run the model eagerly. The next one captures a CUDA graph of all
    layers, and each later call replays it. The host launches once; rows may grow, be cropped and
    begin again. The next call overwrites the logits.

    A graph reads the weights at their addresses during capture. It also repeats all choices of
    Python code during capture, such as adapters and their scaling, kernels and modes. After a
    change of any of these make another graph, as each `generate` does.

    Args:
      model: an `NSAForCausalLM` on one CUDA device.

    Raises:
      ValueError: The model is not on one CUDA device, is sharded, or has forward hooks, which a
        graph does not call.
    """

    def __init__(self, model: Any, cache: NSAPagedModelCache):
        if reason := why_not(model):
            raise ValueError(f"model {reason}")
        self.model, self.cache, self.seen = model, cache, 0
        shape = cache.batch_size, 1
        self.input_ids = torch.zeros(shape, dtype=torch.int64, device=model.device)
        self.mask = torch.ones_like(self.input_ids)
        self.lengths: Tensor | None = None  # the cache's, when the graph was captured
        self.replay: Callable[[], None] | None = None
        self.logits: Tensor | None = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits `[B, 1, vocab]` of one more token of each row.

        Args:
          input_ids: int64 `[B, 1]`.
          attention_mask: `[B, any]`, whose last column marks the rows that have the token. Defaults
            to all. Neither argument is checked, so that nothing waits for the device.

        Raises:
          ValueError: The number of rows or tokens differs, or the cache is full.
        """
        if input_ids.shape != self.input_ids.shape:
            raise ValueError(
                f"input_ids must have shape {tuple(self.input_ids.shape)}, "
                f"got {tuple(input_ids.shape)}"
            )
        cache = self.cache
        cache.reserve(1)
        self.input_ids.copy_(input_ids)
        if attention_mask is None:
            self.mask.fill_(1)
        else:
            self.mask.copy_(attention_mask[:, -1:])
        if self.seen < WARMUP:
            logits = self._step()
            self.seen += 1  # a step that failed is none
            return logits
        if self.replay is None or self.lengths is not cache.lengths:
            columns, self.lengths = cache.columns, cache.lengths
            try:
                self.replay, self.logits = capture(self._step, self.input_ids.device)
            finally:
                cache.columns = columns  # nothing ran yet
        self.replay()
        cache.columns += 1
        assert self.logits is not None
        return self.logits

    def _step(self) -> Tensor:
        inputs = {"input_ids": self.input_ids, "attention_mask": self.mask}
        return self.model(**inputs, cache=self.cache, use_cache=True).logits


def why_not(model: Any) -> str | None:
    """Return the reason why a step of `model` cannot be a CUDA graph, or None. Hooks are Python
    code, which a replay does not run. The hooks that `capture_outputs` leaves in a model are
    allowed, since they do nothing unless hidden states are requested.
    """
    if any(isinstance(x, DTensor) for x in model.parameters()):
        return "must hold whole weights, got DTensors"
    devices = {x.device for x in model.parameters()}
    if len(devices) > 1 or next(iter(devices)).type != DEVICE:
        return f"must be on one CUDA device, got {', '.join(sorted(map(str, devices)))}"
    rule = "must have no forward hooks, which a CUDA graph does not call, but a hook is set"
    if nn.modules.module._has_any_global_hook():
        return f"{rule} for all modules"
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if getattr(hook, "__module__", None) != capture_outputs.__module__:
                return f"{rule} on {name or 'the model'}"
    return None


def capture(
    call: Callable[[], Tensor], device: torch.device
) -> tuple[Callable[[], None], Tensor]:
    """Capture `call`. Returns the function that replays its kernels, and the tensor of its result.

    Raises:
      RuntimeError: `call` waits for the device.
    """
    graph, casts = torch.cuda.CUDAGraph(), torch.is_autocast_cache_enabled()
    # Weights that autocast has cast are freed when it ends: the graph casts its own.
    torch.set_autocast_cache_enabled(False)
    try:
        # What other threads do, such as asking the driver for memory, ends no capture.
        mode = {"capture_error_mode": "thread_local"}
        with torch.cuda.device(device), torch.cuda.graph(graph, **mode):
            found = call()
    finally:
        torch.set_autocast_cache_enabled(casts)
    return graph.replay, found
