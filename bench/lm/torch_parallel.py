"""Learners for several processes in torch.

- `Learner` has all weights in every process (`torch_learner`), a CUDA graph per micro-batch, and
  one sum of the gradients.
- `DDPLearner` has all weights in every process, by `DistributedDataParallel`, without a graph.
- `FSDPLearner` has shards of weights, by FSDP2 over a device mesh, with or without a graph.

All three learners have float32 master weights, compute in the dtype of the task and sum gradients
in float32. Since gradients are averaged over processes, the loss of a process is the sum of its
token losses divided by a common number. This number is the mean number of tokens with a loss per
process. The average over processes is then the mean over the tokens of the global batch.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from . import torch_learner, torch_lm
from .ranks import debug_level
from .torch_learner import Learner, Rows


class Cast(nn.Module):
    """Runs `network` with its weights cast to `dtype`, except the embedding. The weights and their
    gradients remain float32.
    """

    def __init__(self, network: torch_lm.LM, dtype: torch.dtype):
        super().__init__()
        self.network, self.dtype = network, dtype

    def forward(self, *inputs) -> Tensor:
        named = self.network.named_parameters()
        cast = {n: p if n == "embedding" else p.to(self.dtype) for n, p in named}
        return torch.func.functional_call(self.network, cast, inputs)


class DDPLearner(Learner):
    """A learner with `DistributedDataParallel`, without a CUDA graph.

    With `parallel.safe` gradients have their own memory, weights that a step does not use are
    detected, and collectives are compared between ranks. A safe run is slower. Use `safe` if a step
    hangs or if ranks differ.
    """

    def _network(self) -> nn.Module:
        network = Cast(self.master, self.dtype)
        if not self.parallel.safe:
            return DistributedDataParallel(network, gradient_as_bucket_view=True)
        # torch 2.14 crashes in DistributedDataParallel with a process group that compares
        # collectives. DistributedDataParallel therefore has a group that does not compare them,
        # and a hook sums the gradients in the group that does.
        with debug_level("OFF"):
            plain = dist.new_group()
        safe = DistributedDataParallel(
            network, process_group=plain, find_unused_parameters=True
        )
        safe.register_comm_hook(dist.group.WORLD, allreduce_hook)
        return safe

    def use_master(self) -> None:
        pass  # the weights are cast when they are used

    def _backward(self, rows: list[Rows], reduce: bool = True) -> Tensor:
        self.optimizer.zero_grad()
        losses = []
        for number, each in enumerate(rows, 1):
            with self._synchronized(reduce and number == len(rows)):
                loss = torch_learner.total_loss(self.model, each)
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _synchronized(self, wanted: bool):
        """Return a context in which the backward pass sums gradients over processes if `wanted`."""
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        return contextlib.nullcontext() if wanted else model.no_sync()


class FSDPLearner(DDPLearner):
    """A learner with weights, gradients and moments in shards (`fully_shard`). The weights of a
    block are gathered when the block runs.

    With `graph` a CUDA graph per micro-batch contains the gathers of weights and the sums of
    gradients over ranks. Clipping and AdamW follow outside the graph. NCCL can destroy a process
    group only after the graphs with its collectives. Delete the learner before the process group.

    Clipping and AdamW work on this process's shards as plain tensors, since operations on DTensors
    need several times as much host time.
    """

    def _network(self) -> nn.Module:
        mesh = init_device_mesh(self.place.type, (self.ranks.size,), mesh_dim_names=("fsdp",))
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for module in (*self.master.blocks, self.master.norm, self.master.head):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        # Only the embedding is left, in float32. Once it is gathered, it stays in memory until
        # the backward pass. If no backward pass follows, `_give_back` frees it before weights are
        # read or changed.
        fully_shard(self.master, mesh=mesh)
        self.master.register_forward_hook(_give_back)
        return self.master

    def _synchronized(self, wanted: bool):
        model = self.model
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(wanted)
        return contextlib.nullcontext()

    def _trained(self) -> list[Tensor]:
        """Return this process's shards, in the memory from which weights are gathered. Some
        shards are empty.
        """
        return [_local(x.detach()) for x in self.master.parameters()]

    def _backward(self, rows: list[Rows], reduce: bool = True) -> Tensor:
        if self.graph:  # the gradients of each micro-batch are already summed over ranks
            return Learner._backward(self, rows, reduce=False)
        return self._backward_of(rows)

    def _backward_of(self, rows: list[Rows]) -> Tensor:
        loss = super()._backward(rows)
        for parameter, shard in zip(self.master.parameters(), self.trained, strict=True):
            if parameter.grad is not None:
                shard.grad, parameter.grad = _local(parameter.grad), None
        return loss

    def _gradients(self, rows: Rows) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and this process's shards of float32 gradients."""
        loss = self._backward_of([rows])
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.trained]
        self.optimizer.zero_grad()
        return loss, grads

    def _clip(self) -> Tensor:
        norm = nn.utils.get_total_norm(x.grad for x in self.trained if x.grad is not None)
        square = norm.square()
        dist.all_reduce(square)
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(self.trained, self.training.clip, norm)
        return norm

    def _culprit(self, loss: Tensor, rows: list[Rows]) -> str:
        """Return the names of values that are not finite. Since gradients are sums over ranks, no
        rank is named for a gradient.
        """
        bad = [] if loss.isfinite().all() else ["loss"]
        if self.ranks.any(bool(bad)):
            return torch_learner.of_ranks(self.ranks, bad)
        self._backward(rows)
        order = [name for name, _ in self.master.named_parameters()]
        found = []
        for each in zip(*self.ranks.gather(self._bad()), strict=True):
            names = [name for here in each for name in here]
            found += sorted(names, key=lambda name: order.index(name.split()[-1]))[:1]
        return ", ".join(found)

    def _joined(self, mine: Tensor, like: Tensor) -> Tensor:
        assert isinstance(like, DTensor)
        how = {"shape": like.shape, "stride": like.stride()}
        return DTensor.from_local(mine, like.device_mesh, like.placements, **how).full_tensor()

    def _part(self, whole: Tensor, like: Tensor) -> Tensor:
        assert isinstance(like, DTensor)
        place = like.device_mesh, like.placements
        return distribute_tensor(whole.to(like.device), *place, src_data_rank=None).to_local()


def _give_back(module: nn.Module, *_: object) -> None:
    """Free gathered weights after a forward pass without a backward pass."""
    if not torch.is_grad_enabled():
        assert isinstance(module, FSDPModule)
        module.reshard()


def _local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, in the same memory."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
