"""CUDA graphs that are being captured, and what has to outlive them.

    capture    hold(graph, things)     the graph owns a user object of the driver's
    replay     ...                     what the graph reads is still there
    the graph and its executables are destroyed
               the driver runs the object's destructor
    later      `release`               drops what was held; `hold` begins with it

The driver runs a destructor on a thread of its own, perhaps while a thread that holds Python's
lock waits for it. So no Python runs there: the destructor is libc's `sem_post`, and `release`
reads the semaphores.
"""

import ctypes
import functools
import threading
from typing import Any, NamedTuple

from kernels_pallas.runtime import driver

ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
SEMAPHORE_BYTES = 64  # a sem_t has 32 on 64-bit Linux
NO_DESTRUCTOR_SYNC = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
MOVE = 1  # CU_GRAPH_USER_OBJECT_MOVE: the graph takes the caller's reference

_held: "list[tuple[_Flag, Any]]" = []
_lock = threading.Lock()


class Capture(NamedTuple):
    """A CUDA graph that a stream is being captured into."""

    number: int  # no other capture of the process has it
    graph: int


def of_stream(stream: int) -> Capture | None:
    """What a stream is being captured into; None: nothing, or a capture that has failed."""
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    found = ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph)
    driver.call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *found, None, None)
    return Capture(number.value, graph.value or 0) if status.value == ACTIVE else None


def hold(graph: int, things: Any) -> None:
    """Keeps `things` until the graph, its copies and all executables made of them are gone, and
    `release` is called.

    Raises:
      RuntimeError: the driver refused.
    """
    release()
    flag, made, one = _Flag(), ctypes.c_void_p(), ctypes.c_uint(1)
    raise_flag = ctypes.cast(_libc().sem_post, ctypes.c_void_p)
    asked = flag.address, raise_flag, one, ctypes.c_uint(NO_DESTRUCTOR_SYNC)
    driver.call("cuUserObjectCreate", ctypes.byref(made), *asked)
    owner, moved = ctypes.c_void_p(graph), ctypes.c_uint(MOVE)
    driver.call("cuGraphRetainUserObject", owner, made, one, moved)
    with _lock:
        _held.append((flag, things))


def release() -> None:
    """Drops what was held for graphs that are gone."""
    with _lock:
        raised = [flag for flag, _ in _held if flag.raised]
        _held[:] = [(flag, things) for flag, things in _held if flag not in raised]
    for flag in raised:
        flag.free()


class _Flag:
    """A semaphore that is raised once. Its memory is libc's: the driver may raise it when the
    process ends, after Python has.
    """

    def __init__(self):
        address = _libc().calloc(1, SEMAPHORE_BYTES)
        if not address:
            raise MemoryError(f"{SEMAPHORE_BYTES} bytes for a semaphore")
        self.address = ctypes.c_void_p(address)
        _libc().sem_init(self.address, 0, 0)

    @property
    def raised(self) -> bool:
        value = ctypes.c_int()
        _libc().sem_getvalue(self.address, ctypes.byref(value))
        return value.value > 0

    def free(self) -> None:
        _libc().free(self.address)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.calloc.restype = ctypes.c_void_p
    libc.calloc.argtypes = ctypes.c_size_t, ctypes.c_size_t
    return libc
