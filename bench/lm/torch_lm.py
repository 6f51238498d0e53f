"""The language model in torch, and one step of its training with `torch.optim.AdamW`.

The numbers are those of `jax_lm`: float32 master weights and moments; blocks, norms and head in
`dtype`, on a copy of the weights; embedding, softmax and loss in float32.
"""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.harness import timing
from bench.lm.data import Batch
from bench.lm.spec import DivergedError, ModelSpec, Task
from interop import weights
from nsa_jax.layer import LayerSpec
from nsa_torch.module import NSAAttention, apply_rope

NORM_EPS = 1e-6
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


class RMSNorm(nn.Module):
    """`x / rms(x) * scale` over the last axis, in float32."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        square = wide.square().mean(dim=-1, keepdim=True)
        return (wide * torch.rsqrt(square + NORM_EPS)).to(x.dtype) * self.scale


def _linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out, bias=False)


class DenseAttention(nn.Module):
    """Causal attention to all keys by `scaled_dot_product_attention`, backend of `BACKENDS`."""

    def __init__(self, spec: LayerSpec, backend: str):
        super().__init__()
        self.spec, self.backend = spec, BACKENDS[backend]
        self.W_Q = _linear(spec.dim, spec.n_heads * spec.d_k)
        self.W_K = _linear(spec.dim, spec.n_kv_groups * spec.d_k)
        self.W_V = _linear(spec.dim, spec.n_kv_groups * spec.d_v)
        self.out = _linear(spec.n_heads * spec.d_v, spec.dim)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        spec = self.spec
        position = torch.arange(x.shape[1], device=x.device).expand(*x.shape[:2])

        def rotate(x):
            return apply_rope(x, position, base=spec.rope_base, scale=spec.rope_scale)

        query = rotate(self.W_Q(x).unflatten(-1, (spec.n_heads, -1)))
        key = rotate(self.W_K(x).unflatten(-1, (spec.n_kv_groups, -1)))
        value = self.W_V(x).unflatten(-1, (spec.n_kv_groups, -1))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        with sdpa_kernel([self.backend]):
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
        return self.out(out.transpose(1, 2).flatten(2)), None


class MLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate, self.up = _linear(dim, hidden), _linear(dim, hidden)
        self.down = _linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(self, spec: ModelSpec, implementation):
        super().__init__()
        self.norm_attention = RMSNorm(spec.layer.dim)
        if spec.attention == "nsa":
            options = spec.layer.as_dict()
            self.attention = NSAAttention(**options, implementation=implementation)
        else:
            self.attention = DenseAttention(spec.layer, implementation or "math")
        self.norm_mlp = RMSNorm(spec.layer.dim)
        self.mlp = MLP(spec.layer.dim, spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))[0]
        return x + self.mlp(self.norm_mlp(x))


class LM(nn.Module):
    """Logits `[B, T, vocabulary]` of integer tokens `[B, T]`, in the dtype of the head."""

    def __init__(self, spec: ModelSpec, implementation=None):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Parameter(torch.zeros(spec.vocabulary, spec.layer.dim))
        self.blocks = nn.ModuleList(Block(spec, implementation) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.layer.dim)
        self.head = _linear(spec.layer.dim, spec.vocabulary)

    def hyper_parameters(self) -> dict[str, Any]:
        return self.spec.as_dict()

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding).to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def initialize(path: Path, spec: ModelSpec, seed: int) -> None:
    """Writes the initial weights of `spec` for both frameworks to the file at `path`.

    Matrices are normal with the deviation of torch's own start, `1 / sqrt(3 inputs)` (0.021 at
    768 inputs), those that write to the residual stream `sqrt(2 layers)` times less; the
    embedding's is 0.02; the gate and `phi` start as their modules do. A matrix follows from
    `seed` and its name, so that NSA and dense attention start alike. With 0.02 at every width
    the tiny model learns by NSA, in three branches, markedly slower than by dense attention.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = LM(spec)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim != 2 or ".gate.fc" in name or ".phi_" in name:
                continue
            deviation = 1 / math.sqrt(3 * parameter.shape[1])
            if name == "embedding":
                deviation = 0.02
            elif name.endswith((".out.weight", ".down.weight")):
                deviation /= math.sqrt(2 * spec.layers)
            values = np.random.default_rng([seed, *name.encode()])
            drawn = values.standard_normal(tuple(parameter.shape), np.float32)
            parameter.copy_(torch.from_numpy(drawn * np.float32(deviation)))
    weights.save(path, module)


class Learner:
    """The model, its optimizer, and both in a folder.

    Args:
      task: what to train and how.
      initial: file of `interop.weights` with the initial weights.
      implementation: of NSA, as in `nsa_torch.attention`; of dense attention in `BACKENDS`.
      graph: forward and backward of a step are one CUDA graph, as JAX's step is one program;
        on the CPU nothing. What waits for the device meanwhile cannot be captured.
    """

    def __init__(self, task: Task, initial: Path, implementation, graph: bool = True):
        self.training = training = task.training
        cuda = torch.cuda.is_available()
        self.graph = graph and cuda
        self.captured = {}
        self.place = torch.device("cuda" if cuda else "cpu")
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        self.master = LM(task.model, implementation).to(self.place)
        weights.load(initial, self.master)
        self.model = copy.deepcopy(self.master)
        for name, parameter in self.model.named_parameters():
            if name != "embedding":  # its gradient adds up over many tokens
                parameter.data = parameter.data.to(getattr(torch, task.dtype))
        parameters = list(self.master.parameters())
        matrices = [p for p in parameters if p.ndim >= 2]
        vectors = [p for p in parameters if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": training.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(training.beta1, training.beta2),
            eps=training.eps,
            fused=cuda,
        )

    def step(self, batch: Batch, step: int) -> tuple[float, float]:
        """Loss and gradient norm before clipping of the batch.

        Raises:
          DivergedError: one of them is not finite; weights and moments are as before.
        """
        tokens = self._tokens(batch)
        loss, grads = self._replay(tokens) if self.graph else self._gradients(tokens)
        for master, grad in zip(self.master.parameters(), grads, strict=True):
            master.grad = grad
        norm = nn.utils.clip_grad_norm_(self.master.parameters(), self.training.clip)
        numbers = torch.stack([loss, norm]).tolist()
        if not all(map(math.isfinite, numbers)):
            raise DivergedError(step, *numbers)
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._use_master()
        return numbers[0], numbers[1]

    def loss(self, batch: Batch) -> float:
        """The mean loss of a batch, in nats a token."""
        with torch.no_grad():
            return self._loss(self._tokens(batch)).item()

    def parameters(self) -> int:
        """Numbers in the weights."""
        return sum(parameter.numel() for parameter in self.master.parameters())

    def peak_bytes(self) -> int | None:
        """The most that torch's allocator has held; None on the CPU."""
        return torch.cuda.max_memory_allocated() if self.place.type == "cuda" else None

    def save(self, folder: Path) -> None:
        """Writes weights and moments, each as `interop.weights` does."""
        weights.save(folder / "weights.safetensors", self.master)
        for name, key in (("mean", "exp_avg"), ("square", "exp_avg_sq")):
            moments = copy.deepcopy(self.master)
            pairs = zip(self.master.parameters(), moments.parameters(), strict=True)
            for parameter, moment in pairs:
                found = self.optimizer.state.get(parameter, {}).get(key)
                moment.data = torch.zeros_like(parameter.data) if found is None else found
            weights.save(folder / f"{name}.safetensors", moments)

    def load(self, folder: Path, step: int) -> None:
        """Reads what `save` of either framework wrote after `step` steps."""
        weights.load(folder / "weights.safetensors", self.master)
        found = {}
        for name, key in (("mean", "exp_avg"), ("square", "exp_avg_sq")):
            moments = copy.deepcopy(self.master)
            weights.load(folder / f"{name}.safetensors", moments)
            pairs = zip(self.master.parameters(), moments.parameters(), strict=True)
            for parameter, moment in pairs:
                found.setdefault(parameter, {})[key] = moment.detach()
        groups = self.optimizer.param_groups
        order = [parameter for group in groups for parameter in group["params"]]
        count = torch.tensor(float(step))
        state = {i: {"step": count.clone(), **found[p]} for i, p in enumerate(order)}
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
        self._use_master()

    @torch.no_grad()
    def _use_master(self) -> None:
        torch._foreach_copy_(list(self.model.parameters()), list(self.master.parameters()))

    def _tokens(self, batch: Batch) -> Tensor:
        if batch.segment_ids is not None:
            raise NotImplementedError("the model attends to whole rows, got segment_ids")
        return torch.from_numpy(batch.tokens).to(self.place)

    def _loss(self, batch: Tensor) -> Tensor:
        batch = batch.long()
        logits = self.model(batch[:, :-1]).float().flatten(0, 1)
        return F.cross_entropy(logits, batch[:, 1:].flatten())

    def _gradients(self, batch: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The loss, and float32 gradients in the order of the parameters."""
        loss, used = self._loss(batch), list(self.model.parameters())
        grads = torch.autograd.grad(loss, used, allow_unused=True)
        pairs = zip(used, grads, strict=True)
        return loss.detach(), [
            (torch.zeros_like(x) if g is None else g).float() for x, g in pairs
        ]

    def _replay(self, batch: Tensor) -> tuple[Tensor, list[Tensor]]:
        """`_gradients`, captured when a batch of its shape first comes."""
        if batch.shape not in self.captured:
            static = batch.clone()
            replay, found = timing.cuda_graph(lambda: self._gradients(static))
            self.captured[batch.shape] = replay, static, found
        replay, static, found = self.captured[batch.shape]
        static.copy_(batch)
        replay()
        return found
