"""Reads with ctypes the call frame that XLA passes to a foreign function.

Constants and rules follow `xla/ffi/api/c_api.h` (in `jax.ffi.include_dir()`), version 0.x of
the interface. Every structure begins with its size and a pointer, and nearly every field is a word
of 8 bytes, so the constants of this module are indices of words. Later versions of the interface
add fields at the end of a structure.

A call frame is read for each kernel that a program runs. To save time, only a few fields are
read, and a number identifies the kernel (`Call.key`).
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any, NamedTuple

WORD = 8  # bytes
VERSION = (0, 4)  # of the interface
METADATA = 1  # XLA_FFI_Extension_Metadata
CAN_BE_CAPTURED = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
SCALAR, STRING = 3, 4  # XLA_FFI_AttrType
# Words of a call frame. In ARGS and RETS, types and pointers follow the size. In ATTRS, types,
# names and pointers follow it.
EXTENSION, API, CONTEXT, ARGS, RETS, ATTRS, FRAME = 1, 2, 3, 7, 12, 17, 21
ERROR_CREATE, ERROR_DESTROY, STREAM_GET, DEVICE_GET = 6, 8, 10, 23  # of XLA_FFI_Api
DATA, VALUE = 3, 1  # words of a buffer and of a scalar
TYPE, FACTS = 1, 3  # words of an extension for metadata
MAJOR, TRAITS = 3, 4  # words of the metadata; the minor version is the other half of the first
GIVEN = 2  # the word of an argument; a function writes its answer to the next word

# Functions of XLA return immediately. Python's global lock is therefore not released during their
# calls.
_Function = ctypes.PYFUNCTYPE(c_void_p, c_void_p)
_Handler = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_Frame = c_size_t * FRAME


class Call(NamedTuple):
    """A request from XLA to run a kernel.

    Attributes:
      key: the attribute `key`, an int64.
      addresses: The addresses of inputs, then of outputs.
      stream: the CUstream to queue on; None on a CPU.
      device: The index of the GPU.
      text: Function that returns the attribute `kernel`, a string, during the call.
    """

    key: int
    addresses: Sequence[int]
    stream: int | None
    device: int
    text: Callable[[], str]


def _word(address: int, at: int = 0) -> int:
    return c_size_t.from_address(address + at * WORD).value


@functools.cache
def _function(api: int, which: int) -> Callable[[int], int | None]:
    """Return the function `which` of XLA, whose argument is the address of a structure."""
    return _Function(_word(api, which))


def _structure(*given: int) -> ctypes.Array[c_size_t]:
    """Return a ctypes structure that consists of its size, a pointer, and the given fields."""
    count = GIVEN + len(given)
    return (c_size_t * count)(count * WORD, 0, *given)


class _Question(threading.local):
    """The arguments of queries to XLA's functions, made once per thread."""

    def __init__(self):
        self.words = _structure(0, 0)
        self.address = ctypes.addressof(self.words)


_QUESTION = _Question()


def _asked(frame: Sequence[int], which: int) -> int | None:
    """Return the answer of the function `which` of XLA about the context, or None."""
    question = _QUESTION
    question.words[GIVEN] = frame[CONTEXT]
    error = _function(frame[API], which)(question.address)
    if error:
        destroyed = _structure(error)
        _function(frame[API], ERROR_DESTROY)(ctypes.addressof(destroyed))
        return None
    return question.words[GIVEN + 1]


def _call(frame: Sequence[int]) -> Call:
    kinds = tuple((c_int * frame[ATTRS]).from_address(frame[ATTRS + 1]))
    if kinds != (STRING, SCALAR):
        raise ValueError(f"a call must have the attributes kernel and key, got kinds {kinds}")
    kernel, key = (c_size_t * 2).from_address(frame[ATTRS + 3])  # sorted by name
    number = c_int64.from_address(_word(key, VALUE)).value
    addresses = [
        c_size_t.from_address(pointer + DATA * WORD).value
        for at in (ARGS, RETS)
        for pointer in (c_size_t * frame[at]).from_address(frame[at + 2])
    ]
    stream, device = _asked(frame, STREAM_GET), 0
    if stream is not None:
        found = _asked(frame, DEVICE_GET)
        if found is None:
            raise RuntimeError("XLA does not report the GPU of a call")
        device = c_int32(found).value
    text = lambda: ctypes.string_at(_word(kernel), _word(kernel, 1)).decode()
    return Call(number, addresses, stream, device, text)


def handler(run: Callable[[Call], None]) -> Any:
    """Return a C function that XLA can register. The C function calls the function `run` from any
    thread, and an exception in `run` reaches the caller of the program. Keep a reference to the C
    function while it is registered.
    """

    def handle(pointer: int) -> int | None:
        frame = _Frame.from_address(pointer)[:]
        if frame[EXTENSION] and _answers_metadata_query(frame[EXTENSION]):
            return None
        try:
            run(_call(frame))
        # the caller is a C function, through which no exception may propagate
        except BaseException as error:
            message = ctypes.create_string_buffer(f"{type(error).__name__}: {error}".encode())
            given = _structure(ctypes.addressof(message), INTERNAL)
            # XLA owns the error
            return _function(frame[API], ERROR_CREATE)(ctypes.addressof(given))
        return None

    return _Handler(handle)


def _answers_metadata_query(extension: int) -> bool:
    """Fill in the metadata of the handler if XLA asks only for the metadata. Return whether XLA
    asks only for the metadata.
    """
    if c_int.from_address(extension + TYPE * WORD).value != METADATA:
        return False
    facts = _word(extension, FACTS)
    (c_int * 2).from_address(facts + MAJOR * WORD)[:] = VERSION
    c_uint32.from_address(facts + TRAITS * WORD).value = CAN_BE_CAPTURED
    return True
