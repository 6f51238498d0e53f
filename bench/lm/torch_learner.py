"""The learner that trains `torch_lm` with `torch.optim.AdamW`.

Master weights and moments are float32. The model computes with a copy of the weights in the dtype
of the task.
"""

import copy
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_core.config import NSAConfig
from nsa_interop import weights
from nsa_torch import functional
from nsa_torch.checks import room
from nsa_torch.module import NSAAttention
from nsa_torch.varlen import VarlenMetadata, varlen_metadata

from ..harness import timing
from . import share
from .data import Batch
from .parallel import Parallel
from .ranks import Ranks
from .spec import DivergedError, Task
from .torch_lm import LM, Block, Packing

# The files of a checkpoint, and the name of each moment in the state of AdamW.
FILES = {"weights": None, "mean": "exp_avg", "square": "exp_avg_sq"}
IGNORED = -100  # the label of a target without a loss


class Rows(NamedTuple):
    """The rows of a batch, on the device."""

    tokens: Tensor  # [B, T + 1]
    total: Tensor  # float32 []: the divisor of the sum of the losses
    packing: Packing | None


def losses_of(network: nn.Module, rows: Rows, reduction: str = "none") -> Tensor:
    """Return the losses of the targets of `rows` in nats, `[B * T]` or reduced by `reduction`. A
    target without a loss has the loss 0.
    """
    tokens, packing = rows.tokens.long(), rows.packing
    target = tokens[:, 1:]
    if packing is not None:
        target = target.where(packing.counted, IGNORED)
    logits = network(tokens[:, :-1], packing).float().flatten(0, 1)
    how: dict[str, Any] = {"ignore_index": IGNORED, "reduction": reduction}
    return F.cross_entropy(logits, target.flatten(), **how)


def total_loss(network: nn.Module, rows: Rows) -> Tensor:
    """Return the sum of the losses of the rows in nats, divided by `rows.total`."""
    return losses_of(network, rows, "sum") / rows.total


class Learner:
    """A model and its optimizer, which can be saved to a folder. Every process has all weights.

    Args:
      task: The model and its training.
      initial: File of `nsa_interop.weights` with the initial weights.
      implementation: For NSA as in `nsa_torch.attention`; for dense attention a name of
        `torch_lm.BACKENDS`, or None for "math".
      parallel: The layout on several devices, by default one device. `accumulate` is the number of
        micro-batches per batch, whose gradients are summed in float32.
      ranks: The processes of the run. One collective after the last micro-batch sums the
        gradients. `DistributedDataParallel` overlaps sums with computation by hooks, but hooks do
        not run in a graph.
      graph: Whether the forward and backward pass of a micro-batch are one CUDA graph. On the CPU
        `graph` has no effect. A graph cannot contain operations that wait for the device.
    """

    def __init__(
        self,
        task: Task,
        initial: Path,
        implementation,
        parallel: Parallel = Parallel(),
        ranks: Ranks = Ranks(),
        graph: bool = True,
    ):
        self.training, self.ranks, self.parallel = task.training, ranks, parallel
        training = task.training
        self.dtype = getattr(torch, task.dtype)
        self.accumulate, self.config = parallel.accumulate, task.model.layer.config
        cuda = torch.cuda.is_available()
        self.graph = graph and cuda
        # graphs by shape; maximum number of documents per micro-batch
        self.captured, self.room = {}, 0
        self.place = torch.device("cuda" if cuda else "cpu")
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        self.master = LM(task.model, implementation).to(self.place)
        weights.load(initial, self.master)
        self.share = share.Share(training.batch, self.accumulate, ranks.rank, ranks.size)
        self.model = self._network()
        if parallel.compiled:
            for block in self._blocks():
                block.compile()
        self.trained = self._trained()
        matrices = [p for p in self.trained if p.ndim >= 2]
        vectors = [p for p in self.trained if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": training.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(training.beta1, training.beta2),
            eps=training.eps,
            fused=cuda,
        )

    def step(
        self, batch: Batch, step: int, following: Batch | None = None
    ) -> tuple[float, float]:
        """Train on a batch. Return the loss, and the gradient norm before clipping.

        Args:
          batch: The rows of this process (`share`).
          step: Index of the step, which determines the learning rate.
          following: The batch of the next step, which is not used.

        Raises:
          DivergedError: The loss or the norm is not finite. After this error, weights and moments
            are unchanged.
        """
        rows = self._rows(batch)
        loss = self._backward(rows)
        norm = self._clip()
        mean = loss
        if self.ranks.size > 1:
            mean = self._summed(loss.clone()) / self.ranks.size
        of_all, size = torch.stack([mean, norm]).tolist()
        if not (math.isfinite(of_all) and math.isfinite(size)):
            raise DivergedError(step, of_all, size, self._culprit(loss, rows))
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.use_master()
        return of_all, size

    @torch.no_grad()
    def loss_sums(self, batch: Batch, categories: np.ndarray, count: int) -> np.ndarray:
        """Return the losses in nats, summed by category over all processes, float64 `[count]`.

        Args:
          batch: The rows of this process (`share`).
          categories: The category of each target, integers `[rows, T]`. Categories that are not
            below `count` are left out of the sums.
          count: Number of categories.
        """
        found = torch.zeros(count + 1, dtype=torch.float64, device=self.place)
        parts = np.split(categories, self.accumulate)
        for rows, each in zip(self._rows(batch), parts, strict=True):
            which = torch.from_numpy(each).to(self.place).long().flatten().clamp(max=count)
            found.index_add_(0, which, losses_of(self.model, rows).double())
        return self._summed(found[:count]).cpu().numpy()

    def parameters(self) -> int:
        """Return the number of weights."""
        return sum(parameter.numel() for parameter in self.master.parameters())

    def peak_bytes(self) -> int | None:
        """Return the peak memory of torch's allocator in bytes, or None on the CPU."""
        return torch.cuda.max_memory_allocated() if self.place.type == "cuda" else None

    def observe(self, batch: Batch, row: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each layer the gates `[T, gate heads, 3]` and block indices
        `[T, key/value heads, n]` of a row of `batch`. Dense attention has no gates and no block
        indices. Every process must call this method."""
        found: list[tuple[np.ndarray, np.ndarray]] = []
        hooks = [
            block.norm_attention.register_forward_hook(
                lambda module, given, x, at=block.attention: found.append(_observed(at, x))
            )
            for block in self._blocks()
            if isinstance(block.attention, NSAAttention)
        ]
        if not hooks:
            return []
        tokens = torch.from_numpy(batch.tokens[row : row + 1, :-1]).to(self.place).long()
        try:
            with torch.no_grad():
                self.model(tokens)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def whole(self) -> Iterator[tuple[str, LM]]:
        """Yield the name of each file of a checkpoint, and a model on the CPU with the whole
        weights or moments in place of its weights. Every process must iterate."""
        model = self._empty()
        for name, moment in FILES.items():
            of = zip(model.parameters(), self.trained, self.master.parameters(), strict=True)
            for whole, trained, like in of:
                mine = trained
                if moment is not None:
                    state = self.optimizer.state.get(trained, {})
                    mine = state.get(moment, torch.zeros_like(trained))
                whole.data.copy_(self._joined(mine, like))
            yield name, model

    @torch.no_grad()
    def load(self, folder: Path, step: int) -> None:
        """Read weights and moments that a learner, with any number of processes, had after `step`
        steps."""
        model = self._empty()
        for name, moment in FILES.items():
            weights.load(folder / f"{name}.safetensors", model)
            of = zip(model.parameters(), self.trained, self.master.parameters(), strict=True)
            for whole, trained, like in of:
                state = self.optimizer.state[trained]
                state["step"] = torch.tensor(float(step), device=self.place)
                mine = trained
                if moment is not None:
                    mine = state[moment] = torch.empty_like(trained)
                mine.copy_(self._part(whole, like))
        self.use_master()

    def _empty(self) -> LM:
        """Return the model on the CPU, with memory for its weights that is not initialized."""
        with torch.device("meta"):
            return LM(self.master.spec).to_empty(device="cpu")

    def _joined(self, mine: Tensor, like: Tensor) -> Tensor:
        """Return the whole tensor of which this process has the part `mine`. The parameter `like`
        has the same layout.
        """
        return mine

    def _part(self, whole: Tensor, like: Tensor) -> Tensor:
        """Return this process's part of the tensor `whole`, with the layout of the parameter
        `like`."""
        return whole

    def _network(self) -> nn.Module:
        """Return the model that computes, with a copy of the weights in `dtype`."""
        return self._narrow(copy.deepcopy(self.master))

    def _narrow(self, model: LM) -> LM:
        """Convert the weights of `model` to `dtype`, in place."""
        for name, parameter in model.named_parameters():
            if name != "embedding":  # the gradient of the embedding is a sum over many tokens
                parameter.data = parameter.data.to(self.dtype)
        return model

    def _trained(self) -> list[Tensor]:
        """Return the weights that the optimizer updates, in the order and with the axes of the
        parameters.
        """
        return list(self.master.parameters())

    def _blocks(self) -> list[Block]:
        """Return the blocks of the model that computes."""
        return [each for each in self.model.modules() if isinstance(each, Block)]

    @torch.no_grad()
    def use_master(self) -> None:
        torch._foreach_copy_(list(self.model.parameters()), list(self.master.parameters()))

    def _summed(self, numbers: Tensor) -> Tensor:
        """Sum `numbers` over all processes, in place."""
        if self.ranks.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def _rows(self, batch: Batch) -> list[Rows]:
        """Return the micro-batches, on the device. The divisor of losses is the number of tokens
        with a loss in the global batch, divided by the number of processes. The mean of the results
        over the processes is therefore the mean over all tokens with a loss.
        """
        parts, count = share.split(batch, self.accumulate), share.count(batch)
        if batch.segment_ids is not None:
            most = max(int(share.begins(part).sum()) for part in parts)
            told = self.ranks.gather([count, most])
            count = sum(tokens for tokens, _ in told) / self.ranks.size
            documents = max(documents for _, documents in told)
            # All processes use the same maximum, since their graphs may contain collectives. The
            # maximum never decreases, since a captured graph also serves fewer documents.
            if documents > self.room:
                self.room = room(documents)
                self.captured.clear()  # frees memory for the new graphs
        total, found = torch.tensor(max(1.0, count), device=self.place), []
        for part in parts:
            # torch supports few operations on uint16.
            narrow = part.tokens.dtype == np.uint16
            host = part.tokens.astype(np.int32) if narrow else part.tokens
            tokens = torch.from_numpy(np.ascontiguousarray(host)).to(self.place)
            packing = _packing(part, self.config, self.place, self.room)
            found.append(Rows(tokens, total, packing))
        return found

    def _backward(self, rows: list[Rows], reduce: bool = True) -> Tensor:
        """Run forward and backward. Return the loss of this process's rows, and set the float32
        gradients of `trained`. With `reduce` the gradients are means over all processes.
        """
        compute = self._replay if self.graph else self._gradients
        loss, grads = compute(rows[0])
        if len(rows) > 1:
            loss, grads = loss.clone(), [grad.clone() for grad in grads]
        for each in rows[1:]:
            more, others = compute(each)
            loss += more
            torch._foreach_add_(grads, others)
        if reduce and self.ranks.size > 1:
            means = self._summed(torch.cat([x.flatten() for x in grads]))
            means /= self.ranks.size
            parts = means.split([x.numel() for x in grads])
            grads = [part.view_as(x) for part, x in zip(parts, grads, strict=True)]
        for parameter, grad in zip(self.trained, grads, strict=True):
            parameter.grad = grad
        return loss

    def _clip(self) -> Tensor:
        """Clip the gradients, and return their norm before clipping."""
        return nn.utils.clip_grad_norm_(self.trained, self.training.clip)

    def _gradients(self, rows: Rows) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and float32 gradients in the order of the parameters."""
        loss, used = total_loss(self.model, rows), list(self.model.parameters())
        beside = [x / self.accumulate for x in further_losses(self._blocks())]
        grads = torch.autograd.grad([loss, *beside], used, allow_unused=True)
        pairs = zip(used, grads, strict=True)
        return loss.detach(), [
            (torch.zeros_like(x) if g is None else g).float() for x, g in pairs
        ]

    def _replay(self, rows: Rows) -> tuple[Tensor, list[Tensor]]:
        """Compute the result of `_gradients` by replaying a CUDA graph. The graph of a shape is
        captured for the first rows of that shape.
        """
        shapes = tuple(map(_shape, _leaves(rows)))
        if shapes not in self.captured:
            own = copy.deepcopy(rows)
            replay, found = timing.cuda_graph(lambda: self._gradients(own))
            self.captured[shapes] = replay, _leaves(own), found
        replay, static, found = self.captured[shapes]
        for mine, each in zip(static, _leaves(rows), strict=True):
            if isinstance(mine, VarlenMetadata):
                mine.update(each.cu_seqlens)
            else:
                mine.copy_(each)
        replay()
        return found

    def _culprit(self, loss: Tensor, rows: list[Rows]) -> str:
        """Return the names of values that are not finite: the loss, the first gradient and the
        first weight. The names come from the first rank with values that are not finite. The
        gradients are computed again without the sum over ranks, since clipping has changed all
        gradients.
        """
        found = [] if loss.isfinite().all() else ["loss"]
        self._backward(rows, reduce=False)
        return of_ranks(self.ranks, sum(self._bad(), found))

    def _bad(self) -> list[list[str]]:
        """Return the names of the first gradient and the first weight of this process that are not
        finite. Each of the two results is a list of at most one name.
        """
        names = [name for name, _ in self.master.named_parameters()]
        kinds = {"gradient of": [x.grad for x in self.trained], "weight": self.trained}
        return [first_bad(kind, zip(names, of, strict=True)) for kind, of in kinds.items()]


def of_ranks(ranks: Ranks, found: list[str]) -> str:
    """Return, as text, the names in `found` of the first rank that found any."""
    for rank, each in enumerate(ranks.gather(found)):
        if each:
            return ", ".join(each) + (f", on rank {rank}" if ranks.size > 1 else "")
    return ""


def further_losses(blocks: Iterable[Block]) -> list[Tensor]:
    """Return the further losses of the last forward pass, and remove them from the blocks."""
    found = []
    for block in blocks:
        found += block.losses
        block.losses = []
    return found


def first_bad(kind: str, named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Return a list with the `kind` and name of the first tensor that is not finite. If all
    tensors are finite, the list is empty.
    """
    for name, tensor in named:
        if tensor is not None and not tensor.isfinite().all():
            return [f"{kind} {name}"]
    return []


def _leaves(rows: Rows) -> list[Any]:
    return [rows.tokens, rows.total, *(rows.packing or ())]


def _shape(leaf: Tensor | VarlenMetadata) -> torch.Size:
    return leaf.cu_seqlens.shape if isinstance(leaf, VarlenMetadata) else leaf.shape


def _packing(
    batch: Batch, config: NSAConfig, place: torch.device, max_sequences: int
) -> Packing | None:
    """Return the packing of the inputs of `batch`, or None if its rows are not packed. Padding
    counts as a separate document without a loss.
    """
    which = share.counted(batch)
    if which is None or batch.segment_ids is None:
        return None
    ids, begins = batch.segment_ids[:, :-1], share.begins(batch)
    index = np.arange(ids.size).reshape(ids.shape)
    position = index - np.maximum.accumulate(np.where(begins, index, 0).ravel()).reshape(
        ids.shape
    )
    bounds = torch.from_numpy(np.append(np.flatnonzero(begins), ids.size))
    sizes = {"max_seqlen": ids.shape[1], "total": ids.size, "max_sequences": max_sequences}
    varlen = varlen_metadata(bounds, **sizes, config=config, device=place)
    arrays = ids.astype(np.int32), position, which
    return Packing(varlen, *(torch.from_numpy(each).to(place) for each in arrays))


def _observed(attention: NSAAttention, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the gates and block indices of a layer for its input `x` [1, T, dim]."""
    spec, position = attention.spec, torch.arange(x.shape[1], device=x.device)[None]
    query, key, _, gates = attention.project(x, position)
    params = attention.compress_params()[0]
    compressed = functional.compress(key.compressed, params, config=spec.config)
    indices = functional.select_blocks(query, compressed, config=spec.config)
    heads = slice(None, None, spec.n_heads // spec.gate_heads)
    return gates[0, :, heads].float().cpu().numpy(), indices[0].cpu().numpy()
