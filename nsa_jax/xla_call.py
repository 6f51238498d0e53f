"""The call frame that XLA hands to a foreign function, read by ctypes.

Structures, numbers and rules are those of `xla/ffi/api/c_api.h` (in `jax.ffi.include_dir()`),
version 0.x of the interface. Only what a call of a kernel needs is named.
"""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any, NamedTuple

VERSION = (0, 4)  # of the interface
METADATA = 1  # XLA_FFI_Extension_Metadata
CAN_BE_CAPTURED = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
# Structures grow at their end; before it they all begin alike.
HEAD = (("struct_size", c_size_t), ("extension", c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (*HEAD, ("major", c_int), ("minor", c_int))


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32))


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("type", c_int),
        ("next", c_void_p),
        ("metadata", POINTER(_Metadata)),  # of METADATA
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        *HEAD,
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )


class _Buffers(ctypes.Structure):
    """XLA_FFI_Args, XLA_FFI_Rets."""

    _fields_ = (*HEAD, ("size", c_int64), ("types", c_void_p), ("buffers", POINTER(c_void_p)))


class _Bytes(ctypes.Structure):
    _fields_ = (("start", c_void_p), ("size", c_size_t))


class _Attributes(ctypes.Structure):
    _fields_ = (
        *HEAD,
        ("size", c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("values", POINTER(POINTER(_Bytes))),
    )


class _Api(ctypes.Structure):
    _fields_ = (
        *HEAD,
        ("version", _Version),
        ("internal", c_void_p),
        ("error_create", c_void_p),
        ("error_get_details", c_void_p),
        ("error_destroy", c_void_p),
        ("handler_register", c_void_p),
        ("stream_get", c_void_p),
        *[(f"unused{i}", c_void_p) for i in range(12)],
        ("device_ordinal_get", c_void_p),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        *HEAD,
        ("api", POINTER(_Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
    )


class _Error(ctypes.Structure):
    _fields_ = (*HEAD, ("message", c_char_p), ("code", c_int))


class _Destroyed(ctypes.Structure):
    _fields_ = (*HEAD, ("error", c_void_p))


class _Stream(ctypes.Structure):
    _fields_ = (*HEAD, ("context", c_void_p), ("stream", c_void_p))


class _Ordinal(ctypes.Structure):
    _fields_ = (*HEAD, ("context", c_void_p), ("ordinal", c_int32))


# Functions of XLA's that return at once: Python's lock is kept.
_Function = ctypes.PYFUNCTYPE(c_void_p, c_void_p)
Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(_CallFrame))


class Call(NamedTuple):
    """What XLA asks for.

    Attributes:
      attribute: the only one, a string.
      addresses: of inputs, then of outputs.
      stream: the CUstream to queue on; None on a CPU.
      device: which GPU.
    """

    attribute: bytes
    addresses: Sequence[int]
    stream: int | None
    device: int


def handler(run: Callable[[Call], None]) -> Any:
    """A C function that XLA can register and that calls `run`, from any thread; what `run` raises
    is what the program's caller sees. It must be kept for as long as XLA knows it.
    """

    def handle(pointer) -> int | None:
        frame = pointer.contents
        if frame.extension:
            extension = _Extension.from_address(frame.extension)
            if extension.type == METADATA:
                metadata = extension.metadata.contents
                metadata.version.major, metadata.version.minor = VERSION
                metadata.traits = CAN_BE_CAPTURED
                return None
        try:
            run(_call(frame))
        except BaseException as error:  # a C function above: nothing may pass through it
            return _error(frame.api.contents, f"{type(error).__name__}: {error}")
        return None

    return Handler(handle)


def _call(frame: _CallFrame) -> Call:
    api, attributes = frame.api.contents, frame.attributes
    if attributes.size != 1:
        raise ValueError(f"expected one attribute, got {attributes.size}")
    text = attributes.values[0].contents
    name, at = ctypes.string_at(text.start, text.size), _Buffer.data.offset
    addresses = [
        c_void_p.from_address(buffers.buffers[i] + at).value or 0
        for buffers in (frame.arguments, frame.results)
        for i in range(buffers.size)
    ]
    stream = _Stream(ctypes.sizeof(_Stream), None, frame.context, None)
    device = _Ordinal(ctypes.sizeof(_Ordinal), None, frame.context, 0)
    if not _asked(api, api.stream_get, stream):
        return Call(name, addresses, None, 0)
    if not _asked(api, api.device_ordinal_get, device):
        raise RuntimeError("XLA does not say which device it runs on")
    return Call(name, addresses, stream.stream or 0, device.ordinal)


def _asked(api: _Api, function: int, arguments: ctypes.Structure) -> bool:
    """Whether a function of XLA's could fill `arguments` in."""
    error = _Function(function)(ctypes.addressof(arguments))
    if error:
        destroyed = _Destroyed(ctypes.sizeof(_Destroyed), None, error)
        _Function(api.error_destroy)(ctypes.addressof(destroyed))
    return not error


def _error(api: _Api, message: str) -> int | None:
    """An XLA_FFI_Error, which XLA owns."""
    made = _Error(ctypes.sizeof(_Error), None, message.encode(), INTERNAL)
    return _Function(api.error_create)(ctypes.addressof(made))
