"""The learners of several processes in torch.

    GraphLearner      all weights in every process; a CUDA graph per micro-batch, one gradient sum
    DDPLearner        the same by `DistributedDataParallel`, without a graph
    FSDPLearner       shards of weights, by FSDP2 over a device mesh
    FSDPGraphLearner  the same; a CUDA graph per micro-batch, collectives in it

All hold float32 master weights, compute in `dtype` and reduce gradients in float32. A process's
loss is its sum over the mean count of a process, so that the mean over processes, which all take
of gradients, is the mean over the tokens of the global batch.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from . import checkpoint, shards, torch_learner, torch_lm
from .ranks import Ranks, debug_level
from .spec import Task


class Cast(nn.Module):
    """A copy of `network` with weights in `dtype`, except the embedding. Gradients are
    float32.
    """

    def __init__(self, network: torch_lm.LM, dtype: torch.dtype):
        super().__init__()
        self.network, self.dtype = network, dtype

    def forward(self, *inputs) -> Tensor:
        named = self.network.named_parameters()
        cast = {n: p if n == "embedding" else p.to(self.dtype) for n, p in named}
        return torch.func.functional_call(self.network, cast, inputs)


class Replicated(torch_learner.Learner):
    """All of the weights in every process.

    Args:
      ranks: the processes.
      options: See `torch_learner.Learner`.
    """

    def __init__(self, task: Task, *args, ranks: Ranks, **options):
        self.ranks = ranks
        super().__init__(task, *args, **options)

    def _numbers(self, *numbers: Tensor) -> list[float]:
        loss, *rest = numbers
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return torch.stack([mean / self.ranks.size, *rest]).tolist()

    def _summed(self, numbers: Tensor) -> Tensor:
        dist.all_reduce(numbers)
        return numbers


class GraphLearner(Replicated):
    """Each process computes like a single one, a CUDA graph per micro-batch; then the gradients,
    side by side in memory, are added up in one collective: a graph runs no hooks, by which
    `DistributedDataParallel` adds some up while others are computed.
    """

    def __init__(self, task: Task, *args, **options):
        super().__init__(task, *args, **options)
        parameters = list(self.master.parameters())
        sizes = [x.numel() for x in parameters]
        self.sums = torch.zeros(sum(sizes), device=self.place)
        pairs = zip(self.sums.split(sizes), parameters, strict=True)
        self.sum_of = [part.view_as(x) for part, x in pairs]

    def _backward(self, rows: list[torch_learner.Rows]) -> Tensor:
        loss = super()._backward(rows)
        parameters = list(self.master.parameters())
        grads = [x.grad for x in parameters if x.grad is not None]
        assert len(grads) == len(parameters)
        torch._foreach_copy_(self.sum_of, grads)
        dist.all_reduce(self.sums)
        self.sums /= self.ranks.size
        for parameter, total in zip(parameters, self.sum_of, strict=True):
            parameter.grad = total
        return loss

    def _own_backward(self, rows: list[torch_learner.Rows]) -> None:
        super()._backward(rows)


class DDPLearner(Replicated):
    """`DistributedDataParallel`, without a graph.

    Args:
      safe: gradients have memory of their own, and weights that a step does not use are looked
        for; slower, and of use where a step hangs or differs.
      options: See `Replicated`.
    """

    def __init__(self, task: Task, *args, safe: bool = False, **options):
        self.safe = safe
        super().__init__(task, *args, graph=False, **options)

    def _network(self) -> nn.Module:
        network = Cast(self.master, self.dtype)
        if not self.safe:
            return DistributedDataParallel(network, gradient_as_bucket_view=True)
        # torch 2.14 dies in DistributedDataParallel of a group that compares collectives. It has
        # one that does not, and the sums of gradients go by the one that does.
        with debug_level("OFF"):
            plain = dist.new_group()
        safe = DistributedDataParallel(
            network, process_group=plain, find_unused_parameters=True
        )
        safe.register_comm_hook(dist.group.WORLD, allreduce_hook)
        return safe

    def _use_master(self) -> None:
        pass  # the weights are cast where they are used

    def _backward(self, rows: list[torch_learner.Rows]) -> Tensor:
        self.optimizer.zero_grad()
        losses = []
        for number, each in enumerate(rows, 1):
            with self._synchronized(number == len(rows)):
                loss = torch_learner.total_loss(self.model, each)
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _synchronized(self, wanted: bool):
        """Whether the backward pass within reduces gradients."""
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        return contextlib.nullcontext() if wanted else model.no_sync()

    def _own_backward(self, rows: list[torch_learner.Rows]) -> None:
        self.optimizer.zero_grad()
        for each in rows:
            with self._synchronized(False):
                torch_learner.total_loss(self.model, each).backward()


class FSDPLearner(DDPLearner):
    """Weights, gradients and moments in shards (`fully_shard`), each block gathered when it
    runs; checkpoints by `torch.distributed.checkpoint`.

    Clipping and AdamW work on this process's shards as plain tensors: what they call for each
    weight takes the host several times as long with a DTensor.
    """

    shards = True

    def _network(self) -> nn.Module:
        mesh = init_device_mesh(self.place.type, (self.ranks.size,), mesh_dim_names=("fsdp",))
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        for module in (*self.master.blocks, self.master.norm, self.master.head):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        # What is left is the embedding, in float32. Once gathered it stays until the backward
        # pass; if none follows, shards must be back before weights are read or changed.
        fully_shard(self.master, mesh=mesh)
        self.master.register_forward_hook(_give_back)
        return self.master

    def _synchronized(self, wanted: bool):
        model = self.model
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(wanted)
        return contextlib.nullcontext()

    def _trained(self) -> list[Tensor]:
        """This process's shards, in the memory that they are gathered from; some are empty."""
        return [_local(x.detach()) for x in self.master.parameters()]

    def _backward(self, rows: list[torch_learner.Rows]) -> Tensor:
        loss = super()._backward(rows)
        for parameter, shard in zip(self.master.parameters(), self.trained, strict=True):
            if parameter.grad is not None:
                shard.grad, parameter.grad = _local(parameter.grad), None
        return loss

    def _clip(self) -> Tensor:
        norm = nn.utils.get_total_norm(x.grad for x in self.trained if x.grad is not None)
        square = norm.square()
        dist.all_reduce(square)
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(self.trained, self.training.clip, norm)
        return norm

    def _culprit(self, loss: Tensor, rows: list[torch_learner.Rows]) -> str:
        """A gradient here is the sum over ranks: it has a name, but no rank."""
        bad = [] if loss.isfinite().all() else ["loss"]
        if self.ranks.any(bool(bad)):
            return torch_learner.of_ranks(self.ranks, bad)
        self._backward(rows)
        found = []
        for kind, attribute in (("gradient of", "grad"), ("weight", None)):
            here = torch_learner.first_bad(kind, self._local(attribute))
            order = [f"{kind} {name}" for name, _ in self._local()]
            names = [name for each in self.ranks.gather(here) for name in each]
            found += sorted(names, key=order.index)[:1]
        return ", ".join(found)

    def save(self, folder: Path) -> None:
        """Writes shards of weights and moments; every process calls it."""
        tensors = self._tensors()
        local = {name.replace("/", " of ", 1): _local(x) for name, x in tensors.items()}
        for bad in self.ranks.gather(torch_learner.first_bad("", local.items())):
            if bad:
                raise ValueError(f"{bad[0].strip()} must be finite; no checkpoint written")
        try:
            dcp.save(tensors, checkpoint_id=folder / checkpoint.SHARDS)
        except CheckpointException as error:  # no Exception: nothing else catches it
            causes = {rank: str(cause) for rank, (cause, _) in error.failures.items()}
            raise OSError(f"shards of ranks not written: {causes}") from error

    def load(self, folder: Path, step: int) -> None:
        """Reads shards written by any number of processes, or whole tensors."""
        named, path = dict(self.master.named_parameters()), folder / checkpoint.SHARDS
        tensors: dict[str, Tensor] = {}
        if path.exists():
            tensors = self._tensors()
            dcp.load(tensors, storage_reader=shards.Reader(path))
        else:
            tensors = shards.whole_tensors(folder)

        def placed(part: str, name: str) -> Tensor:
            return _placed(tensors[shards.key(part, name)], named[name])

        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(placed("weights", name))
        moments = torch_learner.MOMENTS.items()
        found = {
            shard: {state: _local(placed(part, name)) for part, state in moments}
            for name, shard in zip(named, self.trained, strict=True)
        }
        self._set_moments(found, step)

    def _tensors(self) -> dict[str, Tensor]:
        """Weights and moments, in this process's shards."""
        found = {}
        named = self.master.named_parameters()
        for (name, parameter), shard in zip(named, self.trained, strict=True):
            found[shards.key("weights", name)] = parameter.detach()
            state = self.optimizer.state.get(shard, {})
            for part, moment in torch_learner.MOMENTS.items():
                local = state.get(moment, torch.zeros_like(shard))
                found[shards.key(part, name)] = _sharded(local, parameter)
        return found

    def _local(self, attribute: str | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """This process's part of each weight, or of its gradient."""
        named = self.master.named_parameters()
        for (name, _), shard in zip(named, self.trained, strict=True):
            yield name, shard.grad if attribute else shard


class FSDPGraphLearner(FSDPLearner):
    """An `FSDPLearner` with one CUDA graph per micro-batch. The graph contains the gathers of
    weights and the sums of gradients over ranks. Clipping and AdamW follow.

    NCCL ends a process group only after the graphs that have its collectives: let go of the
    learner first.
    """

    def __init__(self, task: Task, *args, **options):
        super().__init__(task, *args, **options)
        self.graph = self.place.type == "cuda"

    def _backward(self, rows: list[torch_learner.Rows]) -> Tensor:
        # Of one process: here each micro-batch has the sum over ranks already.
        return torch_learner.Learner._backward(self, rows)

    def _gradients(self, rows: torch_learner.Rows) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and this process's shards of float32 gradients."""
        loss = super()._backward([rows])
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.trained]
        self.optimizer.zero_grad()
        return loss, grads


def _give_back(module: nn.Module, *_: object) -> None:
    """Frees gathered weights after a forward pass without a backward pass."""
    if not torch.is_grad_enabled():
        assert isinstance(module, FSDPModule)
        module.reshard()


def _placed(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard `tensor` like `like`. Every process has the whole tensor, or its shard."""
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor
    whole = tensor.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    """This process's shard, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded(local: Tensor, like: Tensor) -> Tensor:
    """Return the tensor in shards as `like`, of which `local` is this process's, in the same
    memory.
    """
    assert isinstance(like, DTensor)
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, placements, shape=like.shape, stride=like.stride())
