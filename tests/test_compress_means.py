"""Means of windows of tokens, and the gradients of tokens that were averaged: plain oracles."""

import types

import ml_dtypes
import numpy as np
import pytest
import torch

from kernels_pallas.mosaic.operands import REGISTERS
from kernels_pallas.specs.compress import Means, compress_means, merge_key_gradients
from nsa_core.steps import mosaic_compress
from nsa_core.steps.params import Params
from nsa_torch import NSAConfig
from nsa_torch.torch_ops import TORCH_OPS
from tests import loops
from tests.cross_compile import compile_report
from tests.devices import needs_gpu
from tests.oracles.list_kernels import emulated, interpreted

SPECS = {
    "l = 2d, odd length": Means(2, 22, 1, 16, 48, 8, 4, "bfloat16", 2),
    "l = d": Means(1, 19, 2, 32, 16, 8, 8, "float16", 2),
    "l = 4d, several warps": Means(1, 95, 3, 32, 16, 16, 4, "bfloat16", 2),
    "zeros after the last window": Means(2, 95, 3, 32, 16, 16, 4, "bfloat16", 2, multiple=8),
    "one window, tokens of its own": Means(2, 8, 1, 16, 16, 8, 4, "float16", 0),
    "d = 1": Means(1, 23, 1, 16, 16, 12, 1, "bfloat16", 1),
    "strides of more loads than are started at once": Means(
        1, 60, 1, 16, 16, 48, 24, "bfloat16", 2
    ),
}
by_spec = pytest.mark.parametrize("name", SPECS)


def draw(spec, arrays):
    rng = np.random.default_rng(3)
    dtype = getattr(ml_dtypes, spec.dtype, spec.dtype)
    return [rng.normal(size=x.shape).astype(dtype) for x in arrays]


def draw_tokens(spec):
    """Keys and values; what is in no window is NaN."""
    arrays = draw(spec, spec.tokens)
    for x in arrays:
        x[:, (spec.C - 1) * spec.stride + spec.block :] = np.nan
    return arrays


def exact_means(spec, *tokens):
    config = types.SimpleNamespace(compress_block=spec.block, compress_stride=spec.stride)
    found = (
        np.stack([loops.compress(row.astype(np.float64), config) for row in x]) for x in tokens
    )
    zeros = (0, 0), (0, spec.rows - spec.C), (0, 0), (0, 0)
    return [np.pad(x, zeros) for x in found]


def exact_gradients(spec, compressed_dk, compressed_dv, *others):
    found = []
    count = spec.others
    for compressed, own in (
        (compressed_dk, others[:count]),
        (compressed_dv, others[count:]),
    ):
        total = np.zeros((spec.B, spec.S, *compressed.shape[2:]))
        for x in own:
            total += x
        for i in range(spec.C):
            for m in range(spec.block):
                total[:, i * spec.stride + m] += (
                    compressed[:, i].astype(np.float64) / spec.block
                )
        found.append(total)
    return found


def check(found, exact):
    """Rounded once: within half a unit in the last place, but for the error of float32 sums."""
    for x, want in zip(found, exact, strict=True):
        half = float(ml_dtypes.finfo(x.dtype).eps) / 2
        np.testing.assert_allclose(x.astype(np.float64), want, rtol=half * 1.001, atol=1e-6)


def inputs_of_merge(spec):
    arrays = [each for x in spec.tokens for each in [x] * spec.others]
    return draw(spec, [*spec.means, *arrays])


@by_spec
def test_means(name):
    spec = SPECS[name]
    arrays = draw_tokens(spec)
    check(emulated(compress_means, interpreted(spec), *arrays), exact_means(spec, *arrays))


@by_spec
def test_gradients(name):
    spec = SPECS[name]
    arrays = inputs_of_merge(spec)
    found = emulated(merge_key_gradients, interpreted(spec), *arrays)
    check(found, exact_gradients(spec, *arrays))


@pytest.mark.parametrize("others", [0, 2])
def test_fewer_tokens_than_a_window(others):
    """No kernel runs: there is no GPU here."""
    config = NSAConfig()
    key, value = torch.randn(2, 31, 3, 16), torch.randn(2, 31, 3, 32)
    params = Params(types.SimpleNamespace(varlen=None), config, None)
    means = mosaic_compress.means(TORCH_OPS, key, value, params)
    assert [x.shape for x in means] == [(2, 0, 3, 16), (2, 0, 3, 32)]
    branches = [(key, value), (key * 2, value * 2)][:others]
    found = mosaic_compress.gradients(TORCH_OPS, means, branches, 31, params)
    for x, want in zip(found, (key, value), strict=True):
        torch.testing.assert_close(x, want * 3 if others else torch.zeros_like(want))


KERNELS = {"compress_means": compress_means, "merge_key_gradients": merge_key_gradients}
COMPILED = {
    "paper": {"D": 128, "Hkv": 4, "block": 32, "stride": 16, "dtype": "bfloat16"},
    "small": {"D": 16, "Hkv": 1, "block": 16, "stride": 4, "dtype": "float16"},
}


def build(kernel, **sizes):
    spec = Means(B=1, S=4096, Dv=128, others=2, **sizes)
    return KERNELS[kernel](spec).for_any_length()


def test_kernels_fit_the_chip():
    """Without spills, and eight CTAs on a multiprocessor: loads under way hide the latency."""
    builders = [
        (f"{__name__}:build", {"kernel": kernel, **sizes})
        for kernel in KERNELS
        for sizes in COMPILED.values()
    ]
    for report in compile_report(builders):
        assert not report["remarks"] and not report["stack_bytes"]
        assert not report["spill_store_bytes"] + report["spill_load_bytes"]
        assert report["registers"] <= REGISTERS // (8 * 128)


@pytest.mark.gpu
@needs_gpu
@by_spec
def test_the_kernels(name):
    from nsa_interop.launch import launch

    spec = SPECS[name]

    def run(kernel, arrays):
        tensors = [torch.from_numpy(x.view(np.int16)).cuda() for x in arrays]
        tensors = [x.view(getattr(torch, spec.dtype)) for x in tensors]
        return [
            x.cpu().view(torch.int16).numpy().view(arrays[0].dtype)
            for x in launch(kernel, *tensors)
        ]

    tokens, gradients = draw_tokens(spec), inputs_of_merge(spec)
    check(run(compress_means(spec), tokens), exact_means(spec, *tokens))
    check(run(merge_key_gradients(spec), gradients), exact_gradients(spec, *gradients))
