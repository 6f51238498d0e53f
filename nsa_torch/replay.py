"""Calls of an operator that are alike: what the first ones did is done again, without deciding it
anew.

The steps on kernels are written for both frameworks and decide much by the sizes of their
arguments: kernels, tiles, shapes. All of it follows from the signature of a call: shapes, strides,
dtypes and devices of its tensors, which of them are the same, and all other arguments. The host
never reads a value on the device. So the second call with a signature is recorded, as a list of
launches and of operators of torch on numbered tensors, and from the third on the list is run:

    signature -> Recording -> Program: constants, [Launch | Call, ..] -> results

A call whose signature comes once costs nothing more. Numbers are those of the recorded call, bit
by bit: the same kernels read and write in the same order.
"""

import collections
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_pallas.kernel import Kernel
from kernels_pallas.mosaic import capability
from nsa_interop import launch
from nsa_torch.program import Program
from nsa_torch.program_steps import Array, Call, Constants, Launch, Part, Slot, Step, listed

DEVICE_TYPES = ("cuda",)  # where calls are run from a list
PROGRAMS = 256  # kept at most, the least recently used ones dropped first

_local = threading.local()


def recording() -> "Recording | None":
    """What records this thread's calls now."""
    return getattr(_local, "recording", None)


class Unknown(Exception):
    """A call that cannot be run again from its list."""


class Recording(TorchDispatchMode):
    """Within: what this thread launches and asks of torch is noted, and done.

    Args:
      tensors: of the call.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__()
        self.steps: list[Step] = []
        self.asked: list[Constants] = []
        self.count = self.slots = len(tensors)
        self.numbers = {id(x): i for i, x in reversed([*enumerate(tensors)])}
        # What was made is not kept: a recorded call takes no more memory than any other. One that
        # is gone loses its number, since another may get its identity.
        self._made: dict[int, weakref.ref] = {}
        self.free: list[int] = []
        self.paused = self.failed = False

    def __enter__(self):
        _local.recording = self
        return super().__enter__()

    def __exit__(self, *error):
        _local.recording = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), options=None):
        options = options or {}
        found = function(*args, **options)
        if not self.paused:
            given = [x for x in _pytree.tree_leaves((args, options)) if isinstance(x, Tensor)]
            with self._noting():
                args, options = self._numbered(args), self._numbered(options)
                writes = function._schema.is_mutable
                call = self._call(function, args, options, given, listed(found), writes)
                self.steps.append(call)
        return found

    @contextlib.contextmanager
    def _noting(self):
        """Within: what cannot be noted ends the recording, and the call goes on."""
        try:
            yield
        except Unknown:
            self.paused = self.failed = True

    def launched(self, kernel: Kernel, tensors, run: Callable[[], Sequence[Tensor]]):
        """Notes what `run` does: a launch of `kernel` on `tensors`."""
        if self.paused:
            return run()
        results = self._apart(run)
        with self._noting():
            inputs = [self._known(x) for x in tensors]
            outputs = [self._number(x) for x in results]
            made = {
                number: Array(x.shape, getattr(torch, x.dtype))
                for number, x in zip(outputs, kernel.outputs, strict=True)
                if number not in inputs
            }
            self.steps.append(Launch(kernel, (*inputs, *outputs), made))
        return results

    def released(self, tensors: Iterable[Tensor]) -> None:
        """Notes that tensors of the call are read no more."""
        if not self.paused:
            with self._noting():
                self.free += [self._known(x) for x in tensors]

    def called(self, function: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]):
        """Notes a call of any function of tensors alone."""
        if self.paused:
            return function(*tensors)
        results = self._apart(functools.partial(function, *tensors))
        with self._noting():
            given = [Slot(self._known(x)) for x in tensors]
            self.steps.append(self._call(function, given, {}, [], results))
        return results

    def constants(self, get: Callable[[], Iterable[Tensor]]) -> list[Tensor]:
        """Notes that `get` was asked for tensors."""
        if self.paused:
            return list(get())
        found = list(self._apart(get))
        self.asked.append(Constants(get, [self._number(x) for x in found]))
        return found

    def program(self, device: torch.device, results: Iterable[Tensor]) -> Program:
        """What was recorded, up to these results.

        Raises:
          Unknown: it cannot be run again.
        """
        if self.failed:
            raise Unknown
        numbers = [self._known(x) for x in results]
        counts = self.count, self.slots
        return Program(device, *counts, self.asked, self.steps, numbers, self.free)

    def _call(self, function, args, options, given, found, writes=False):
        """`given`: tensors that results may be views of."""
        part = _part(given[0]) if len(given) == 1 else None
        given = [] if writes else given  # what was written to is no view
        results = [self._number(x) if isinstance(x, Tensor) else None for x in found]
        places = {_place(x): self._known(x) for x in reversed(given)}
        tensors = {n: x for n, x in zip(results, found, strict=True) if n is not None}
        starts = {n: places[_place(x)] for n, x in tensors.items() if _place(x) in places}
        arrays = {n: Array(x.shape, x.dtype) for n, x in tensors.items() if x.is_contiguous()}
        return Call(function, args, options, results, starts, arrays, writes, part)

    def _apart(self, function):
        self.paused = True
        try:
            return function()
        finally:
            self.paused = False

    def _number(self, x: Tensor) -> int:
        key = id(x)
        if key not in self.numbers:
            self.numbers[key] = self.slots
            self._made[key] = weakref.ref(x, lambda _: self._forget(key))
            self.slots += 1
        return self.numbers[key]

    def _forget(self, key: int) -> None:
        del self.numbers[key], self._made[key]

    def _known(self, x: Tensor) -> int:
        if id(x) not in self.numbers:
            raise Unknown
        return self.numbers[id(x)]

    def _numbered(self, x: Any) -> Any:
        """`x` with slots in place of tensors."""
        if isinstance(x, Tensor):
            return Slot(self._known(x))
        if isinstance(x, list | tuple):
            return type(x)(self._numbered(each) for each in x)
        if isinstance(x, dict):
            return {name: self._numbered(each) for name, each in x.items()}
        return x


def _place(x: Tensor) -> tuple[int, int, int]:
    """Of two tensors that start at the same byte of the same memory it is the same."""
    return x.get_device(), x.untyped_storage().data_ptr(), x.data_ptr()


def _part(x: Tensor) -> Part | None:
    if x.is_contiguous():
        return None
    storage = x.untyped_storage().data_ptr()
    return Part(storage, int(x.storage_offset()), tuple(x.shape), x.stride())


TENSORS = frozenset({Tensor, torch.nn.Parameter})  # no other class has a say in what is done


def plain(tensors: Iterable[Any]) -> bool:
    """Whether torch does what it is asked with these tensors (others than tensors do not count),
    and nothing else: they have no class of their own, nothing is traced, compiled or transformed,
    and no mode sees it.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and all(type(x) in TENSORS for x in tensors if isinstance(x, Tensor))
    )


class Alike:
    """Calls with one signature: the second is recorded, from the third on a list is run.

    Args:
      seen: whether there was a first one.
    """

    def __init__(self, seen: bool = False):
        self.program: Program | None = None
        self._seen, self._unknown = seen, False
        self._as_returned: Callable[[list[Tensor]], Any] = list  # or a tuple

    def __call__(self, tensors: Sequence[Tensor], function: Callable[[], Any]) -> Any:
        """What `function()` returns, a list or tuple of tensors; `tensors`: all that it reads."""
        if self.program is not None:
            return self._as_returned(self.program(tensors))
        if self._unknown or not self._seen:
            self._seen = True
            return function()
        found = Recording(tensors)
        with found:
            results = function()
        try:
            program = found.program(tensors[0].device, results)
        except Unknown:
            self._unknown = True
        else:
            self._as_returned, self.program = type(results), program
        return results


class LruCache[Value]:
    """Values by key, the least recently used ones dropped first."""

    def __init__(self):
        self._values: collections.OrderedDict[Hashable, Value] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def keep(self, key: Hashable, value: Value) -> Value:
        with self._lock:
            self._values[key] = value
            while len(self._values) > PROGRAMS:
                self._values.popitem(last=False)
        return value

    def clear(self) -> None:
        with self._lock:
            self._values.clear()


class Pair:
    """Calls alike of an operator, and those of its gradient by the signature of what comes in."""

    def __init__(self):
        self.forward = Alike(seen=True)
        self._backward: LruCache[Alike] = LruCache()

    def backward(self, grad: Tensor) -> Alike:
        key = signature([grad])
        return self._backward.get(key) or self._backward.keep(key, Alike(seen=True))


class Replayed:
    """A function of an operator's arguments whose calls alike are run from a list.

    Args:
      function: of tensors, None, numbers and lists of them; returns a list or tuple of tensors.
        What it does may follow from nothing but the signature.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.__name__ = getattr(function, "__name__", "replayed")
        self._known: LruCache[Alike] = LruCache()

    def __call__(self, *arguments: Any) -> Any:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if tensors[0].device.type not in DEVICE_TYPES or recording():
            return self.function(*arguments)
        key = signature(arguments)
        alike = self._known.get(key) or self._known.keep(key, Alike())
        return alike(tensors, lambda: self.function(*arguments))

    def again(self, alike: Alike, *arguments: Any) -> Any:
        """A call with arguments that are known to have the signature of `alike`."""
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        return alike(tensors, lambda: self.function(*arguments))

    def clear(self) -> None:
        """Forgets all calls."""
        self._known.clear()


def signature(arguments: Iterable[Any]) -> tuple[Hashable, ...]:
    """What decides all that is done with `arguments` on a device, but for whether autograd
    records it.
    """
    parts: list[Any] = [capability.interpret.get() is not False]
    seen: dict[int, int] = {}
    storages: dict[int, int] = {}
    for i, x in enumerate(arguments):
        if not isinstance(x, Tensor):
            parts.append(tuple(x) if isinstance(x, list) else x)
        elif (first := seen.setdefault(id(x), i)) != i:
            parts.append(first)
        else:
            part = None
            if not x.is_contiguous():  # of what, in which others may lie too
                storage = storages.setdefault(x.untyped_storage().data_ptr(), i)
                part = storage, x.storage_offset(), x.stride()
            start = x.data_ptr() % launch.ALIGNMENT
            parts.append((x.shape, part, x.dtype, x.get_device(), start))
    return tuple(parts)
