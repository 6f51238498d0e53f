"""The call frame that XLA hands to a foreign function, read by ctypes.

Structures, numbers and rules are those of `xla/ffi/api/c_api.h` (in `jax.ffi.include_dir()`),
version 0.x of the interface, with the same names. Only the parts that a kernel call needs are
defined.

A program calls it for each kernel that it runs, so it reads little: nested structures are flat
here, and a number identifies a kernel (`Call.key`).
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any, NamedTuple

VERSION = (0, 4)  # of the interface
METADATA = 1  # XLA_FFI_Extension_Metadata
CAN_BE_CAPTURED = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
SCALAR, STRING = 3, 4  # XLA_FFI_AttrType
# Structures grow at their end; before it they all begin alike.
HEAD = (("struct_size", c_size_t), ("extension", c_void_p))


def _inner(prefix: str, *fields: tuple[str, Any]) -> list[tuple[str, Any]]:
    """The fields of a structure within a structure."""
    return [(f"{prefix}_{name}", kind) for name, kind in (*HEAD, *fields)]


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        *_inner("api_version", ("major_version", c_int), ("minor_version", c_int)),
        ("traits", c_uint32),
    )


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("type", c_int),
        ("next", c_void_p),
        ("metadata", POINTER(_Metadata)),  # of METADATA
    )


class _Buffer(ctypes.Structure):
    _fields_ = (*HEAD, ("dtype", c_int), ("data", c_void_p))


class _Bytes(ctypes.Structure):
    _fields_ = (("ptr", c_void_p), ("len", c_size_t))


class _Scalar(ctypes.Structure):
    _fields_ = (("dtype", c_int), ("value", POINTER(c_int64)))


class _Api(ctypes.Structure):
    _fields_ = (
        *HEAD,
        *_inner("version", ("major", c_int), ("minor", c_int)),
        ("internal", c_void_p),
        ("XLA_FFI_Error_Create", c_void_p),
        ("XLA_FFI_Error_GetMessage", c_void_p),
        ("XLA_FFI_Error_Destroy", c_void_p),
        ("XLA_FFI_Handler_Register", c_void_p),
        ("XLA_FFI_Stream_Get", c_void_p),
        *[(f"unused{i}", c_void_p) for i in range(12)],
        ("XLA_FFI_DeviceOrdinal_Get", c_void_p),
    )


_LIST = ("size", c_int64), ("types", c_void_p)


class _CallFrame(ctypes.Structure):
    _fields_ = (
        *HEAD,
        ("api", c_void_p),
        ("ctx", c_void_p),
        ("stage", c_int),
        *_inner("args", *_LIST, ("args", c_void_p)),
        *_inner("rets", *_LIST, ("rets", c_void_p)),
        *_inner("attrs", *_LIST, ("names", c_void_p), ("attrs", c_void_p)),
    )


class _Error(ctypes.Structure):
    _fields_ = (*HEAD, ("message", c_char_p), ("errc", c_int))


class _Destroyed(ctypes.Structure):
    _fields_ = (*HEAD, ("error", c_void_p))


class _Asked(ctypes.Structure):
    """XLA_FFI_Stream_Get_Args, XLA_FFI_DeviceOrdinal_Get_Args."""

    _fields_ = (*HEAD, ("ctx", c_void_p), ("found", c_void_p))


# Functions of XLA's that return at once: Python's lock is kept.
_Function = ctypes.PYFUNCTYPE(c_void_p, c_void_p)
_Handler = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_DATA = _Buffer.data.offset


class Call(NamedTuple):
    """A request of XLA.
    Attributes:
      key: the attribute `key`, an int64.
      addresses: Those of inputs, then of outputs.
      stream: the CUstream to queue on; None on a CPU.
      device: The index of the GPU.
      text: Function that returns the attribute `kernel`, a string, during the call.
    """

    key: int
    addresses: Sequence[int]
    stream: int | None
    device: int
    text: Callable[[], str]


class _Reader:
    """Reads call frames in one thread. Its arguments for XLA's functions are made once."""

    def __init__(self):
        self._api: int | None = None
        self._asked = _Asked(ctypes.sizeof(_Asked))
        self._argument = ctypes.addressof(self._asked)

    def call(self, frame: _CallFrame) -> Call:
        if frame.api != self._api:
            api = _Api.from_address(frame.api)
            self._stream, self._device = map(
                _Function, (api.XLA_FFI_Stream_Get, api.XLA_FFI_DeviceOrdinal_Get)
            )
            self._api = frame.api
        count = frame.attrs_size
        kinds = tuple((c_int * count).from_address(frame.attrs_types))
        if kinds != (STRING, SCALAR):
            raise ValueError(f"expected the attributes kernel and key, got kinds {kinds}")
        kernel, key = (c_void_p * 2).from_address(frame.attrs_attrs)  # sorted by name
        addresses = [
            c_void_p.from_address(pointer + _DATA).value or 0
            for count, start in (
                (frame.args_size, frame.args_args),
                (frame.rets_size, frame.rets_rets),
            )
            for pointer in (c_void_p * count).from_address(start)
        ]
        number = _Scalar.from_address(key).value[0]
        stream, device = self._found(self._stream, frame), 0
        if stream is not None:
            device = self._found(self._device, frame)
            if device is None:
                raise RuntimeError("XLA does not say which device it runs on")
            device = c_int32(device).value
        return Call(number, addresses, stream, device, lambda: _text(kernel))

    def _found(self, function: Any, frame: _CallFrame) -> int | None:
        """The answer of a function of XLA about the context, or None if it has none."""
        asked = self._asked
        asked.ctx, asked.found = frame.ctx, None
        if error := function(self._argument):
            destroyed = _Destroyed(ctypes.sizeof(_Destroyed), None, error)
            _Function(_Api.from_address(frame.api).XLA_FFI_Error_Destroy)(
                ctypes.addressof(destroyed)
            )
            return None
        return asked.found or 0


def _text(attribute: int) -> str:
    found = _Bytes.from_address(attribute)
    return ctypes.string_at(found.ptr, found.len).decode()


_thread = threading.local()


def handler(run: Callable[[Call], None]) -> Any:
    """A C function that XLA can register and that calls `run`, from any thread; what `run` raises
    is what the program's caller sees. It must be kept for as long as XLA knows it.
    """

    def handle(pointer: int) -> int | None:
        frame = _CallFrame.from_address(pointer)
        if frame.extension and _answers_metadata_query(frame.extension):
            return None
        try:
            reader = getattr(_thread, "reader", None)
            if reader is None:
                reader = _thread.reader = _Reader()
            run(reader.call(frame))
        except BaseException as error:  # a C function above: nothing may pass through it
            return _error(frame.api, f"{type(error).__name__}: {error}")
        return None

    return _Handler(handle)


def _answers_metadata_query(extension: int) -> bool:
    """Fill in the metadata if XLA requests only these. Returns whether it does."""
    found = _Extension.from_address(extension)
    if found.type != METADATA:
        return False
    metadata = found.metadata.contents
    metadata.api_version_major_version, metadata.api_version_minor_version = VERSION
    metadata.traits = CAN_BE_CAPTURED
    return True


def _error(api: int, message: str) -> int | None:
    """An XLA_FFI_Error, which XLA owns."""
    made = _Error(ctypes.sizeof(_Error), None, message.encode(), INTERNAL)
    return _Function(_Api.from_address(api).XLA_FFI_Error_Create)(ctypes.addressof(made))
