"""Tests of Triton kernels without a GPU.

Triton decides when it is imported whether kernels are interpreted. So a file of tests runs once
more in a process of its own, under TRITON_INTERPRET=1, where the tests of the kernels take
tensors on the CPU.
"""

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import pretend
from tests.limits import set_limits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
TRITON = importlib.util.find_spec("triton") is not None
ROOT = Path(__file__).parents[1]


# A test of kernels runs here where they are interpreted, elsewhere on a GPU.
MARKS = () if INTERPRETED else (pytest.mark.gpu,)


def kernel(test):
    return test if INTERPRETED else pytest.mark.gpu(test)


def small(monkeypatch) -> None:
    """In the interpreter no kernel refuses, and few queries are several segments."""
    if INTERPRETED:
        pretend.machine(monkeypatch, triton_why_not=None, triton_decode_why_not=None)
        set_limits(monkeypatch, triton_segment=16, triton_programs=5)
        right_bfloat16(monkeypatch)


def run_again(*files: str) -> None:
    """Runs files of tests under the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
        + ["--durations=0", *files],
        env=os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def patched_once() -> None:
    """The interpreter puts its functions in place of the language's once a kernel, and looks for a
    dtype once. By itself it does so at each call of a function and for each result, which takes
    four tenths of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, scope_of = interpreter._patch_lang, interpreter._LangPatchScope
    both, in_place = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}), []

    class Scope(scope_of):
        def restore(self):
            super().restore()
            in_place.clear()

    def patch_lang(_):
        if in_place:  # a function that a kernel calls
            return scope_of()
        in_place.append(scope := patch(both))
        return scope

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, patch_lang
    dtype_of, known = interpreter._get_np_dtype, {}

    def kept(kind):
        name = kind.scalar.name
        if name not in known:
            known[name] = dtype_of(kind)
        return known[name]

    interpreter._get_np_dtype = kept


if INTERPRETED:
    patched_once()


def right_bfloat16(monkeypatch) -> None:
    """bfloat16 as on a GPU: the interpreter keeps it as 16 bits, multiplies these as integers,
    and cuts off where a GPU rounds.
    """
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    dot, cast = interpreter_builder.create_dot, interpreter_builder.create_fp_trunc

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(a, b, *rest):
        return dot(widened(a), widened(b), *rest)

    def create_fp_trunc(x, dtype):
        if (x.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(x, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(x.data)).bfloat16().view(torch.int16)
        return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)

    monkeypatch.setattr(interpreter_builder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter_builder, "create_fp_trunc", create_fp_trunc)


def right_fp8(monkeypatch) -> None:
    """8-bit floats as on a GPU: the interpreter rounds the least ones otherwise, and reads NaN as a
    number.
    """
    import ml_dtypes
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    ext, trunc = interpreter_builder.create_fp_ext, interpreter_builder.create_fp_trunc
    convert = interpreter_builder.create_fp_to_fp

    def converted(otherwise):
        def to(x, dtype, *rest):
            source, target = x.dtype.scalar, dtype.scalar
            if source == tl.float8e4nv and target in (tl.float32, tl.float16):
                found = x.data.view(ml_dtypes.float8_e4m3fn)
                kind = np.float32 if target == tl.float32 else np.float16
                return TensorHandle(found.astype(kind), target)
            if (source, target) == (tl.float32, tl.float8e4nv):
                found = x.data.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
                return TensorHandle(found.view(np.uint8), target)
            return otherwise(x, dtype, *rest)

        return to

    monkeypatch.setattr(interpreter_builder, "create_fp_ext", converted(ext))
    monkeypatch.setattr(interpreter_builder, "create_fp_trunc", converted(trunc))
    monkeypatch.setattr(interpreter_builder, "create_fp_to_fp", converted(convert))
