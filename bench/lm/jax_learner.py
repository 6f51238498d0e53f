"""The learner that trains `jax_lm` with optax, on one device or on a mesh.

Master weights and moments are float32. `jax_parallel` has the layout of weights and rows on
several devices.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree

from nsa_interop import weights

from . import jax_parallel, share
from .data import Batch
from .jax_lm import LM
from .jax_parallel import Layout
from .parallel import Parallel
from .ranks import Ranks
from .spec import DivergedError, Task, Training

FILES = "weights", "mean", "square"  # the files of a checkpoint: weights and moments
FEWEST_SEGMENTS = 8  # minimum number of documents per row for which a program is compiled


class Rows(NamedTuple):
    """The micro-batches of a batch, on the devices."""

    tokens: Any  # [accumulate, B, T + 1]
    total: jax.Array | np.float32  # []: number of tokens with a loss, summed over all rows
    segment_ids: jax.Array | None  # the shape of `tokens`


class Step(NamedTuple):
    """A training step, as two compiled programs on lists of arrays.

    The arguments are lists, since JAX flattens a list in C++, but the state of a module in Python.
    Flattening in Python can take longer than a step on a GPU. For 694 arrays, flattening in Python
    took 20 ms per call and in C++ 1 ms, measured on a CPU. The step has two programs. While the
    devices run the second program and the first program of the next batch, the host can read the
    loss, a result of the first program.
    """

    gradients: Any  # (weights, rows) to numbers, squares and gradients
    update: Any  # (weights and moments, gradients, numbers, rate) to new ones

    def peak_bytes(self) -> int | None:
        """Return the peak memory on one device in bytes, by the plan of the compiler."""
        first, second = (x.memory_analysis() for x in self)
        if first is None or second is None:
            return None
        kept = second.output_size_in_bytes - second.alias_size_in_bytes
        more = max(first.temp_size_in_bytes, second.temp_size_in_bytes + kept)
        return int(second.argument_size_in_bytes + more)


class Begun(NamedTuple):
    """The gradients of a batch, whose computation may still be running."""

    batch: Batch
    compiled: Step
    found: Any  # the results of `compiled.gradients`


class Program(NamedTuple):
    """The properties that determine the compiled functions. Learners with equal properties share
    their compiled functions.
    """

    graphdef: nnx.GraphDef[LM]  # structure of the model with one device's part of the heads
    training: Training
    dtype: jnp.dtype
    layout: Layout | None  # None on one device
    # maximum number of documents per row; None if rows have no documents
    max_segments: int | None = None

    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """Return AdamW without the learning rate and the clipping."""
        at = self.training
        return optax.chain(
            optax.scale_by_adam(at.beta1, at.beta2, at.eps),
            optax.add_decayed_weights(
                at.weight_decay, lambda tree: jax.tree.map(lambda x: x.ndim >= 2, tree)
            ),
        )

    def shown(self, tree):
        """Within `jit`, convert `tree` to a form that every process can read."""
        return tree if self.layout is None else self.layout.shown(tree)

    def pinned(self, tree):
        """Within `jit`, constrain weights or moments to their shardings."""
        return tree if self.layout is None else self.layout.pinned(tree)

    def summed(self, compute):
        """Sum `compute(params, total, tokens, segment_ids)` over the rows of all devices."""
        return compute if self.layout is None else self.layout.summed(compute)


def _cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def _losses(program: Program, params, tokens, segment_ids) -> jax.Array:
    """Return the losses `[B, T]` of some rows in nats. A target without a loss has the loss 0. On a
    mesh, the rows are the rows of one device.
    """
    layout = program.layout
    prepare = functools.partial(
        _cast if layout is None else layout.gathered, dtype=program.dtype
    )
    # The gradient of the embedding is a sum over many tokens, and therefore stays in float32.
    wide = {"embedding": jnp.float32}
    used = {
        name: x
        if name == "blocks"
        else prepare({name: x}, dtype=wide.get(name, program.dtype))[name]
        for name, x in params.items()
    }
    tokens = tokens.astype(jnp.int32)
    inputs = None if segment_ids is None else segment_ids[:, :-1]
    again = layout is not None and layout.mesh.shape[jax_parallel.FSDP] > 1
    model, limit = nnx.merge(program.graphdef, nnx.State(used)), program.max_segments
    logits = model(tokens[:, :-1], inputs, prepare, again, limit)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), tokens[:, 1:]
    )
    if segment_ids is not None:
        same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, :-1] >= 0)
        losses = jnp.where(same, losses, 0.0)
    return losses


def _part(program: Program, params, total, tokens, segment_ids) -> jax.Array:
    """Return the sum of the losses of some rows, divided by `total`."""
    return _losses(program, params, tokens, segment_ids).sum() / total


def _added(compute, rows: Rows):
    """Sum `compute(total, tokens, segment_ids)` over the micro-batches."""
    parts = rows.tokens, rows.segment_ids
    first = jax.tree.map(lambda x: x[0], parts)
    if jax.tree.leaves(parts)[0].shape[0] == 1:
        return compute(rows.total, *first)

    def add(before, part):
        return jax.tree.map(jnp.add, before, compute(rows.total, *part)), None

    shapes = jax.eval_shape(compute, rows.total, *first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zeros, parts)[0]


@functools.partial(jax.jit, static_argnames=("program", "count"))
def _sums(program: Program, params, rows: Rows, categories: jax.Array, count: int):
    """Return the sums of losses by category, `[count]`, divided by `rows.total`. `categories` has
    the shape `[accumulate, B, T]`.
    """

    def part(params, total, given, segment_ids):
        tokens, which = given
        losses = _losses(program, params, tokens, segment_ids)
        sums = [jnp.where(which == i, losses, 0.0).sum() for i in range(count)]
        return jnp.stack(sums) / total

    given = rows._replace(tokens=(rows.tokens, categories))
    return program.shown(_added(functools.partial(program.summed(part), params), given))


@functools.partial(jax.jit, static_argnames="program")
def _finite(program: Program, leaves):
    return program.shown(jnp.stack([jnp.isfinite(x).all() for x in leaves]))


@functools.cache
def _step(program: Program, tree: jax.tree_util.PyTreeDef) -> Step:
    """Return the programs of a step, which are not compiled yet. `tree` is the structure of weights
    and moments."""
    of_params = tree.children()[0]

    def gradients(params, rows):
        return _gradients(program, of_params.unflatten(params), rows)

    def update(leaves, grads, numbers, rate):
        params, state = tree.unflatten(leaves)
        grads = of_params.unflatten(_leaves(grads, params))
        kept = _update(program, params, state, grads, numbers, rate)
        leaves, after = jax.tree.flatten(kept)
        assert after == tree
        return leaves

    return Step(jax.jit(gradients), jax.jit(update, donate_argnums=0))


def _gradients(program: Program, params, rows: Rows):
    """Return three results: the loss and the norm of the gradient, the squared norms of the
    gradients of each weight, and the gradients. The gradients are a list, or one array if there are
    several devices and each device has all weights.
    """
    layout = program.layout
    if layout is not None and layout.data_only:
        compute = layout.summed_gradients(functools.partial(_part, program))
        grads = _added(functools.partial(compute, params), rows)
        loss = grads[-1]
    else:
        compute = jax.value_and_grad(program.summed(functools.partial(_part, program)))
        loss, grads = _added(functools.partial(compute, params), rows)
        grads = jax.tree.leaves(program.pinned(grads))
    squares = [(x * x).sum() for x in _leaves(grads, params)]
    numbers = jnp.stack([loss, jnp.sqrt(sum(squares))]), jnp.stack(squares)
    return *program.shown(numbers), grads


def _leaves(grads, params) -> list[jax.Array]:
    """Return the gradients of each of `params` from the result of `_gradients`."""
    if isinstance(grads, list):
        return grads
    _, apart = ravel_pytree((params, jnp.float32(0)))
    return jax.tree.leaves(apart(grads)[0])


def _update(program: Program, params, state, grads, numbers, rate):
    """Return weights and moments after a step. If the loss or the norm is not finite, return
    weights and moments unchanged.
    """
    norm, clip = numbers[1], program.training.clip
    # The same as optax.clip_by_global_norm, which would compute the norm again.
    grads = jax.tree.map(lambda x: jnp.where(norm < clip, x, x / norm * clip), grads)
    with jax.numpy_dtype_promotion("standard"):  # the result of optax has weaker types
        updates, new_state = program.optimizer().update(grads, state, params)
    updates = jax.tree.map(lambda x: -rate * x, updates)
    new = optax.apply_updates(params, updates), new_state
    finite = jnp.isfinite(numbers).all()
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, state))
    return program.pinned(kept)


@functools.partial(jax.jit, static_argnames=("program", "graphdef"))
def _observe(program: Program, graphdef, params, tokens):
    """Call `LM.observe` for all heads of `graphdef`."""
    model = nnx.merge(graphdef, _cast(params, program.dtype))
    gates, indices = model.observe(tokens)
    return program.shown((gates.astype(jnp.float32), indices))


class Learner:
    """A model and its optimizer, which can be saved to a folder.

    Args:
      task: The model and its training.
      initial: File of `nsa_interop.weights` with the initial weights.
      implementation: For NSA as in `nsa_jax.attention`; for dense attention "xla" or "cudnn".
      parallel: The layout on several devices, by default one device.
      ranks: The processes of the run, by default only this process.
    """

    def __init__(
        self,
        task: Task,
        initial: Path,
        implementation,
        parallel: Parallel = Parallel(),
        ranks: Ranks = Ranks(),
    ):
        self.training, self.ranks, self.parallel = task.training, ranks, parallel
        self.dtype = jnp.dtype(task.dtype)
        parallel.check(task)
        alone = parallel.kind == "none"
        self.layout = None if alone else Layout.of(parallel, task.model)
        self.share = share.Share(
            task.training.batch, parallel.accumulate, ranks.rank, ranks.size
        )
        options = dict(dtype=self.dtype, implementation=implementation)
        # All weights come from the file. No weights are drawn at random, since JAX would compile
        # the drawing.
        self.graphdef, shapes = nnx.split(nnx.eval_shape(lambda: LM(task.model, **options)))
        graphdef = self.graphdef
        if self.layout is not None:
            part = self.layout.part(task.model)
            axis = jax_parallel.TENSOR
            graphdef, _ = nnx.split(nnx.eval_shape(lambda: LM(part, axis=axis, **options)))
        self.shapes, self.observed = shapes, task.model.attention == "nsa"
        self.program = Program(graphdef, task.training, self.dtype, self.layout)
        params = self._read(initial)
        self.keep(params, self._committed(self.program.optimizer().init(params)))
        self.graph = False

    def step(
        self, batch: Batch, step: int, following: Batch | None = None
    ) -> tuple[float, float]:
        """Train on a batch. Return the loss, and the gradient norm before clipping.

        Args:
          batch: The rows of this process (`share`).
          step: Index of the step, which determines the learning rate.
          following: The batch of the next step, if this batch is known. With `following`, the
            devices begin with the gradients of the next batch before the host reads the loss, so
            that the devices do not wait for the host.

        Raises:
          DivergedError: The loss or the norm is not finite. After this error, weights and moments
            are unchanged.
        """
        begun, self._begun = self._begun, None
        if begun is None or begun.batch is not batch:
            begun = self._begin(batch)
        _, compiled, (numbers, squares, grads) = begun
        rate = np.float32(self.training.rate(step))
        self.leaves = compiled.update(self.leaves, grads, numbers, rate)
        del begun, grads  # frees memory for the next gradients
        if following is not None:
            self._begun = self._begin(following)
        loss, norm = map(float, np.asarray(numbers))
        if not np.isfinite([loss, norm]).all():
            raise DivergedError(step, loss, norm, self._culprit(loss, squares))
        return loss, norm

    def _begin(self, batch: Batch) -> Begun:
        """Enqueue the gradients of `batch`. The first call compiles the step."""
        rows = self._rows(batch)
        given = self.leaves[: self.weights], rows
        if self.compiled is not None:
            return Begun(batch, self.compiled, self.compiled.gradients(*given))
        step, rate = _step(self.program, self._tree), np.float32(0)
        with self._precision():
            gradients = step.gradients.lower(*given).compile()
            numbers, _, grads = found = gradients(*given)
            update = step.update.lower(self.leaves, grads, numbers, rate).compile()
        self.compiled = Step(gradients, update)
        return Begun(batch, self.compiled, found)

    def loss_sums(self, batch: Batch, categories: np.ndarray, count: int) -> np.ndarray:
        """Return the losses in nats, summed by category over all processes, float64 `[count]`.

        Args:
          batch: The rows of this process (`share`).
          categories: The category of each target, integers `[rows, T]`. Categories that are not
            below `count` are left out of the sums.
          count: Number of categories.
        """
        rows = self._rows(batch)._replace(total=np.float32(1))
        with self._precision():
            found = _sums(self.program, self.params, rows, self._placed(categories), count)
        return np.asarray(found).astype(np.float64)

    def parameters(self) -> int:
        """Return the number of weights."""
        weights_only = nnx.filter_state(self.params, nnx.Param)
        return sum(x.size for x in jax.tree.leaves(weights_only))

    def peak_bytes(self) -> int | None:
        """Return the peak memory of a step on one device, in bytes."""
        return None if self.compiled is None else self.compiled.peak_bytes()

    def observe(self, batch: Batch, row: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return for each layer the gates `[T, gate heads, 3]` and block indices
        `[T, key/value heads, n]` of a row of process 0's `batch`. Dense attention has no gates
        and no block indices. Every process must call this method."""
        if not self.observed:
            return []
        tokens = batch.tokens[row : row + 1, :-1].astype(np.int32)
        with self._precision():
            tokens = multihost_utils.broadcast_one_to_all(tokens)
            found = _observe(self.program, self.graphdef, self.params, tokens)
        return list(zip(*map(np.asarray, found), strict=True))

    def whole(self) -> Iterator[tuple[str, LM]]:
        """Yield the name of each file of a checkpoint, and a model with the whole weights or
        moments in place of its weights. Every process must iterate."""
        adam = self.state[0]
        for name, tree in zip(FILES, (self.params, adam.mu, adam.nu), strict=True):
            whole = multihost_utils.process_allgather(tree, tiled=True)
            yield name, nnx.merge(self.graphdef, whole)

    def load(self, folder: Path, step: int) -> None:
        """Read weights and moments that any learner had after `step` steps."""
        params, mean, square = (self._read(folder / f"{name}.safetensors") for name in FILES)
        adam, *others = self.state
        adam = adam._replace(count=jnp.int32(step), mu=mean, nu=square)
        self.keep(params, self._committed((adam, *others)))

    @property
    def params(self) -> nnx.State:
        return self._tree.unflatten(self.leaves)[0]

    @property
    def state(self) -> Any:
        """The state of the optimizer."""
        return self._tree.unflatten(self.leaves)[1]

    def keep(self, params: nnx.State, state: Any) -> None:
        """Use the weights `params` and the moments in `state` in all later steps."""
        self.leaves, self._tree = jax.tree.flatten((params, state))
        self.weights = len(jax.tree.leaves(params))  # weights come first
        self.compiled: Step | None = None  # compiled for rows with the shapes of the first step
        self._begun: Begun | None = None

    def _precision(self):
        # On a GPU JAX would compute products of float32 in TF32. torch does not.
        exact = self.dtype == jnp.float32
        return jax.default_matmul_precision("highest" if exact else None)

    def _read(self, path: Path) -> nnx.State:
        # Make new arrays for all entries. No file has the marks of the layer's kind
        # (`nsa_jax.nn.Kind`). A step donates its arrays, so that they must not be shared.
        module = nnx.merge(
            self.graphdef, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.shapes)
        )
        weights.load(path, module)
        return self._committed(nnx.split(module)[1])

    def _committed(self, tree):
        """Return `tree` committed to its devices, like the results of a step."""
        if self.layout is None:
            return jax.device_put(tree, jax.devices()[0])
        return self.layout.placed(tree)

    def _rows(self, batch: Batch) -> Rows:
        """Return the micro-batches, on the devices."""
        total = share.count(batch)
        if batch.segment_ids is None:
            total *= self.ranks.size
        else:
            told = self.ranks.gather([total, int(share.begins(batch).sum(axis=1).max())])
            total = max(1, sum(tokens for tokens, _ in told))
            documents = max(documents for _, documents in told)
            # All processes use the same maximum, since they run one program. The maximum never
            # decreases, since a program also serves fewer documents.
            if documents > (self.program.max_segments or 0):
                power = 1 << (documents - 1).bit_length()
                self.program = self.program._replace(max_segments=max(FEWEST_SEGMENTS, power))
                self.compiled = None
        ids = None if batch.segment_ids is None else self._placed(batch.segment_ids)
        return Rows(self._placed(batch.tokens), np.float32(total), ids)

    def _placed(self, x: np.ndarray) -> jax.Array:
        """Return rows as micro-batches `[accumulate, B, ..]` on the devices."""
        x = x.reshape(self.parallel.accumulate, -1, x.shape[1])
        return jnp.asarray(x) if self.layout is None else self.layout.rows(x)

    def _culprit(self, loss: float, squares: jax.Array) -> str:
        """Return the names of values that are not finite: the loss, the first gradient and the
        first weight, in the order of the model. A gradient also counts as not finite if its
        square overflows float32. `squares` has the squared norms of the gradients.
        """
        found = [] if np.isfinite(loss) else ["loss"]
        params = self.params
        paths = [steps for steps, _ in nnx.to_flat_state(params)]
        flags = _finite(self.program, jax.tree.leaves(params))
        finite = {"gradient of": np.isfinite(squares), "weight": np.asarray(flags)}
        for kind, flags in finite.items():
            bad = [steps for steps, flag in zip(paths, flags, strict=True) if not flag]
            if bad:
                first = min(bad, key=_place)
                found.append(f"{kind} {'.'.join(map(str, first))}")
        return ", ".join(found)


ORDER = "embedding blocks norm_attention attention norm_mlp mlp norm head".split()


def _place(steps: tuple[Any, ...]) -> list[int | str]:
    """Return a key that sorts paths in the order of the model's weights."""
    known = {name: f"{i}" for i, name in enumerate(ORDER)}
    return [step if isinstance(step, int) else known.get(step, step) for step in steps]
