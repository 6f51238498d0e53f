"""`StepGraph` runs a decode step of a model on an `NSAPagedModelCache` as one CUDA graph."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils.output_capturing import capture_outputs

from nsa_torch.huggingface.cache import NSAPagedModelCache

WARMUP = 3  # eager steps before the capture, in which kernels are chosen and built
DEVICE = "cuda"  # type of the devices whose steps are captured


class StepGraph:
    """Runs a step of `model` on `cache` as one CUDA graph. A step has one token per row.
    `graph(input_ids)` maps tokens `[B, 1]` to logits `[B, 1, vocab]`.

    The first `WARMUP` calls run the model eagerly. The next call captures a CUDA graph of all
    layers. The capturing call and each later call replay the graph. A replay is one launch of the
    host. Rows may grow, be cropped and restart between calls. A call overwrites the logits that
    the previous call returned.

    A graph reads the weights at the addresses that they had during capture. The graph also
    repeats all choices that Python code made during capture, such as adapters and their scaling,
    kernels and modes. If a weight moves to another address, or if Python code takes another
    branch, make another `StepGraph`. Each call of `generate` makes its own graph.

    Args:
      model: an `NSAForCausalLM` on one CUDA device.
      cache: an `NSAPagedModelCache` for `B` rows, to which each call appends.

    Raises:
      ValueError: The model is not on one CUDA device, is sharded, or has forward hooks. A graph
        does not call forward hooks.
    """

    def __init__(self, model: Any, cache: NSAPagedModelCache):
        if reason := why_not(model):
            raise ValueError(f"model {reason}")
        self.model, self.cache, self.seen = model, cache, 0
        shape = cache.batch_size, 1
        self.input_ids = torch.zeros(shape, dtype=torch.int64, device=model.device)
        self.mask = torch.ones_like(self.input_ids)
        self.lengths: Tensor | None = None  # `cache.lengths` when the graph was captured
        self.replay: Callable[[], None] | None = None
        self.logits: Tensor | None = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Compute the logits `[B, 1, vocab]` of one more token per row.

        Args:
          input_ids: int64 `[B, 1]`.
          attention_mask: `[B, any]`. The last column of the mask marks the rows that have a new
            token. `attention_mask=None` means all rows. The values of both arguments are not
            checked, since the host would have to wait for the device.

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
            self.seen += 1  # a step that failed does not count
            return logits
        if self.replay is None or self.lengths is not cache.lengths:
            columns, self.lengths = cache.columns, cache.lengths
            try:
                self.replay, self.logits = capture(self._step, self.input_ids.device)
            finally:
                cache.columns = columns  # the graph has not run yet
        self.replay()
        cache.columns += 1
        assert self.logits is not None
        return self.logits

    def _step(self) -> Tensor:
        inputs = {"input_ids": self.input_ids, "attention_mask": self.mask}
        return self.model(**inputs, cache=self.cache, use_cache=True).logits


def why_not(model: Any) -> str | None:
    """Return the reason why a step of `model` cannot be a CUDA graph, or None. A model with hooks
    is refused, since hooks are Python code, which a replay does not run. The hooks that
    `capture_outputs` of transformers leaves in a model are allowed, since they do nothing unless
    hidden states are requested.
    """
    if any(isinstance(x, DTensor) for x in model.parameters()):
        return "must have parameters that are whole tensors, got DTensors"
    devices = {x.device for x in model.parameters()}
    if len(devices) > 1 or next(iter(devices)).type != DEVICE:
        return f"must be on one CUDA device, got {', '.join(sorted(map(str, devices)))}"
    rule = "must have no forward hooks, since a CUDA graph does not call them, got a hook"
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
    """Capture the function `call` as a CUDA graph. Return the function that replays the graph, and
    the tensor to which it writes the result.

    Raises:
      RuntimeError: The function `call` waits for the device.
    """
    graph, casts = torch.cuda.CUDAGraph(), torch.is_autocast_cache_enabled()
    # When autocast ends, it frees the weights that it has cast. The graph therefore casts them
    # itself.
    torch.set_autocast_cache_enabled(False)
    try:
        # In this capture mode, driver calls of other threads, such as memory allocations, do not
        # end the capture.
        mode: Any = {"capture_error_mode": "thread_local", "stream": _stream(device)}
        with torch.cuda.device(device), torch.cuda.graph(graph, **mode):
            found = call()
    finally:
        torch.set_autocast_cache_enabled(casts)
    return graph.replay, found


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for the captures on a device. torch's own stream for captures belongs to
    the device of the first capture of the process. cuBLAS keeps memory for each stream, so that
    all captures share one.
    """
    return torch.cuda.Stream(device)
