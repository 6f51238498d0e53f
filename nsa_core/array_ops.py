"""The array operations that the steps on kernels need from a framework.

The steps (`fused`, `mosaic_forward`, `triton_forward`, ..) are written once for both frameworks,
and receive an `ArrayOps`. `nsa_jax.jax_ops.JaxOps` and `nsa_torch.torch_ops.TorchOps` run the
kernels. `nsa_core.plan` has an `ArrayOps` that records the operations instead of running them. This
module imports neither JAX nor torch.

A step computes with arrays only through the methods of `ArrayOps` that `nsa_core.plan` records,
such as `run` and `derive`. A step uses only `shape`, `dtype` and `reshape` of an array. Any other
computation between kernels must be a derived step (`derived`).
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kernels_pallas.kernel import Array, Kernel
from kernels_pallas.triton.kernel import TritonKernel

type Slices = tuple[slice, ...]  # slices of the first axes, with a step of 1


type Shapes = Callable[..., Sequence[Array]]


def derived(shapes: Shapes) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a derived step.

    A derived step is a function `f(ops, *arrays, **static)` that returns a list of arrays. The
    results depend only on the arguments, and the step does not modify its arguments. A derived step
    may use all of `ArrayOps`, including `xp`.

    Args:
      shapes: Function that returns the shapes and dtypes of the results. `shapes` has the arguments
        of the step, without `ops`. `shapes` reads only the shapes and dtypes of the arrays.
    """

    def decorate(function):
        function.shapes = shapes
        return function

    return decorate


def like(x: Any, *shape: int) -> Array:
    """Return the shape and dtype of an array like `x`, for `shapes` of a derived step. `shape`
    replaces the shape of `x` if it is given.
    """
    return Array(shape or tuple(x.shape), x.dtype)


class Places(NamedTuple):
    """A `QueryLayout` that has only arrays.

    A step receives `Places` if the step reads only the arrays of a layout.
    """

    position: Any
    key_start: Any
    compressed_start: Any = None
    packed: bool = False
    varlen: None = None


class QueryLayout(Protocol):
    """The position of each query, as integers `[B, T]`. For a query, key `k` of the key array has
    position `k - key_start` in the query's sequence.
    """

    @property
    def position(self) -> Any:
        """The position of the query in its own sequence, from 0. A negative position marks
        padding, which attends to no key.
        """

    @property
    def padded(self) -> bool:
        """Whether some queries may be padding. Padding need not be finite."""

    @property
    def key_start(self) -> Any:
        """The index in the key array of the first token of the query's sequence."""

    @property
    def compressed_start(self) -> Any:
        """The index of the first compressed token of the query's sequence."""

    @property
    def packed(self) -> bool:
        """Whether rows are packed, so that sequences may begin at any key."""

    @property
    def varlen(self) -> Any:
        """The tables of packed rows, a `nsa_core.varlen.Varlen`, or None if the number of sequences
        is not known.
        """

    @property
    def num_keys(self) -> int | None:
        """The number of keys of every sequence, or None.

        JAX uses the number for tables that are constants of a program. In torch the property is
        None, since torch caches the tables instead of making them constants.
        """


class ArrayOps(Protocol):
    """The array operations that differ between JAX and torch.

    Attributes:
      xp: `jax.numpy` or `torch`, for functions that have the same name in both.
      nn: `jax.nn` or `torch`, which have `softmax`, `log_softmax` and `logsumexp`.
      parts_stay: whether a result of `part` keeps the elements that an `in_place` kernel does not
        write.
      has_streams: whether `run_beside` is supported.
    """

    xp: Any
    nn: Any
    parts_stay: bool = True
    has_streams: bool = False

    def run(self, kernel: Kernel | TritonKernel, *arrays: Any) -> Sequence[Any]:
        """Run `kernel` and return its outputs. An input may have any shape with the required
        number of elements. A kernel that is `in_place` may write its first outputs to the
        memory of its last inputs.
        """
        ...

    def run_together(self, kernel: Kernel, *arrays: Any) -> Sequence[Any]:
        """Run a kernel whose outputs all have the same shape. If the outputs are adjacent in
        memory, the method `stacked` copies all outputs at once.
        """
        return self.run(kernel, *arrays)

    def run_beside(self, kernel: Kernel, *arrays: Any) -> tuple[Sequence[Any], Any]:
        """Run a kernel concurrently with later work, until the method `join` is called with the
        second result of `run_beside`. Before the method `join` is called, no other step may read or
        write the kernel's outputs.
        """
        raise NotImplementedError

    def join(self, running: Any) -> None:
        """Make later work wait for the end of `running`, the second result of `run_beside`."""
        raise NotImplementedError

    def writes_in_place(self, kernel: Kernel) -> bool:
        """Return whether `kernel` writes into its last inputs.

        A kernel that writes in place does not change the elements of its last inputs that it does
        not write.
        """
        return bool(kernel.in_place)

    def after(self, x: Any, done: Any) -> Any:
        """Make `x` (int32) depend on `done` (16-bit), so that no kernel that reads the result
        starts before `done` is computed. By default this method does nothing, since steps are
        queued one after the other.
        """
        return x

    def capability(self, x: Any) -> tuple[int, int]:
        """Return the compute capability of the GPU of `x`, which determines the sizes of
        tiles."""
        ...

    def derive(
        self, function: Callable[..., Sequence[Any]], *arrays: Any, **static: Hashable
    ) -> Sequence[Any]:
        """Run the derived step `function` and return its arrays."""
        return function(self, *arrays, **static)

    def per_batch(self, x: Any) -> Any:
        """Mark `x` as an argument that many calls share, and return it. Arrays that are derived
        only from `x` may be cached.
        """
        return x

    def release(self, arrays: Iterable[Any]) -> None:
        """Declare that no later step reads `arrays`. The released arrays must not share memory
        with other arrays. By default this method does nothing.
        """
        return None

    def arange(self, like: Any, count: int) -> Any:
        """Return the integers from 0 to `count - 1` as int32 `[1, count]`, on the device of
        `like`.
        """
        ...

    def numbers(self, like: Any, count: int) -> Any:
        """Return the integers from 0 to `count - 1` in each row of `like` `[B, ..]`, as int32 `[B,
        count]`.
        """
        return self.xp.broadcast_to(self.arange(like, count), (like.shape[0], count))

    def cast(self, x: Any, dtype: Any) -> Any:
        """Return `x`, or a copy of `x` in another dtype of `xp`."""
        ...

    def contiguous(self, x: Any) -> Any:
        """Return `x`, or a copy of `x` in row-major order."""
        ...

    def take_rows(self, x: Any, index: Any) -> Any:
        """Return `x[b, index[b]]` for each row b. `x` is `[B, n, ...]`, `index` is `[B, m]`,
        and the result is `[B, m, ...]`.
        """
        ...

    def searchsorted(self, rows: Any, values: Any, side: str) -> Any:
        """Return `numpy.searchsorted` of each row as int32 `[B, m]`. `rows` is `[B, n]` and
        ascending, and `values` is `[B, m]`.
        """
        ...

    def sort(self, rows: Any) -> tuple[Any, Any]:
        """Sort rows `[B, n]` in ascending order with a stable sort. Return the sorted rows, and
        the original index of each element."""
        ...

    def pad_end(self, x: Any, axis: int, count: int, value: float) -> Any:
        """Append `count` entries with `value` to the end of `axis` of `x`."""
        ...

    def product(self, subscripts: str, x: Any, y: Any) -> Any:
        """Compute the `einsum` of two arrays exactly, in float32 or wider."""
        raise NotImplementedError

    def top(self, x: Any, count: int) -> Any:
        """Return the largest `count` values of the last axis, in descending order."""
        raise NotImplementedError

    def take_along(self, x: Any, index: Any) -> Any:
        """Return the entries `index` of the last axis of `x`. The other axes are broadcast."""
        raise NotImplementedError

    def stop_gradient(self, x: Any) -> Any:
        """Return `x` without its gradient."""
        raise NotImplementedError

    def if_any(self, condition: Any, made: Callable[[], Any], otherwise: Any) -> Any:
        """Return `made()` if any element of `condition` is true and the arrays are on a CPU,
        otherwise `otherwise`. On a GPU the host would have to wait for the condition. While torch
        traces on a CPU, the condition has no value, and this method returns `made()`.
        """
        raise NotImplementedError

    def take(self, pages: Any, at: tuple) -> Any:
        """Return `pages[at]`, where `at` has arrays of indices."""
        return pages[at]

    def put(self, pages: Any, at: Any, new: Any) -> Any:
        """Write `new` to the entries of `pages` that `at` (`paged_layout.Places`) marks as valid.

        In torch the write is in place.
        """
        raise NotImplementedError

    def write(self, x: Any, index: Slices, part: Any) -> Any:
        """Return `x` with `part` written to `x[index]`, possibly in place."""
        ...

    def zeros(self, like: Any, shape: tuple[int, ...]) -> Any:
        """Return new zeros in the dtype and on the device of `like`."""
        ...

    def copied(self, x: Any, dtype: Any) -> Any:
        """Return a copy of `x` in the dtype `dtype` of `xp`."""
        return self.cast(x, dtype)

    def part(self, x: Any, index: Slices) -> Any:
        """Return `x[index]`, possibly as a view."""
        return x[index]

    def side_by_side(self, arrays: Sequence[Any]) -> Any:
        """Concatenate arrays along the first axis."""
        return arrays[0] if len(arrays) == 1 else self.xp.concatenate(arrays)

    def to_int32(self, x: Any) -> Any:
        """Return `x`, or an int32 copy."""
        return self.cast(x, self.xp.int32)

    def to_float32(self, x: Any) -> Any:
        """Return `x`, or a float32 copy."""
        return self.cast(x, self.xp.float32)

    def all_float32(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Convert several arrays of one shape to float32."""
        return [self.to_float32(x) for x in arrays]

    def float32_rows(self, arrays: Sequence[Any], length: int) -> Any:
        """Return rows of `length` float32 elements. Each row begins with one of the given
        arrays, or with an entry along the first axis if a single array is given. The remaining
        elements of a row are arbitrary.
        """
        raise NotImplementedError

    def unstacked_float32(self, x: Any) -> Sequence[Any]:
        """Split `x` along its last axis into float32 copies."""
        return [self.to_float32(x[..., i]) for i in range(x.shape[-1])]

    def stacked(self, arrays: Sequence[Any], dtype: Any) -> Any:
        """Stack arrays of one shape along a new last axis, in a dtype of `xp`. `stacked` is the
        inverse of `unstacked_float32`.
        """
        return self.copied(self.xp.stack([*arrays], -1), dtype)

    def extend(self, x: Any, axis: int, length: int, fill: float | None = None) -> Any:
        """Extend `x` along `axis` to `length` with `fill`, or with its last entry if `fill` is
        None.
        """
        missing = length - x.shape[axis]
        if missing <= 0:
            return x
        if fill is not None:
            return self.pad_end(x, axis, missing, fill)
        last = x[(slice(None),) * axis + (slice(-1, None),)]
        shape = (*x.shape[:axis], missing, *x.shape[axis + 1 :])
        return self.xp.concatenate([x, self.xp.broadcast_to(last, shape)], axis=axis)


def zero_padding(xp: Any, layout: Any, *arrays: Any) -> list[Any]:
    """Return `arrays` `[B, T, ...]` with zeros in the rows that are padding. Kernels that mask
    whole blocks or key tiles also multiply padding, and zero times NaN is NaN.
    """
    return masked(xp, layout.position >= 0, *arrays) if layout.padded else [*arrays]


def padding_zeroed(ops: ArrayOps, layout: Any, *arrays: Any) -> Sequence[Any]:
    """Run `zero_padding` as a derived step."""
    return ops.derive(_padding_zeroed, layout.position, *arrays) if layout.padded else arrays


@derived(lambda position, *arrays: [like(x) for x in arrays])
def _padding_zeroed(ops, position, *arrays):
    return masked(ops.xp, position >= 0, *arrays)


def masked(xp: Any, there: Any, *arrays: Any) -> list[Any]:
    """Return `arrays` with zeros where `there`, which has their first axes, is False."""
    shape, axes = there.shape, there.ndim
    return [xp.where(there.reshape(shape + (1,) * (x.ndim - axes)), x, 0) for x in arrays]
