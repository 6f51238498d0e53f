"""Log probabilities of a language model that reads a cache, in 16 bits and in fp8."""

import dataclasses

import pytest
import torch

from bench.lm import spec
from bench.lm.cached import compared, read
from bench.lm.torch_lm import LM

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module", params=["separate", "shared"])
def model(request):
    """Tiny, of weights that tell tokens apart."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tiny = spec.model("tiny", "nsa")
        layer = dataclasses.replace(tiny.layer, kv=request.param)
        found = LM(dataclasses.replace(tiny, layer=layer, layers=2, vocabulary=64))
        for parameter in found.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        return found


TOKENS = torch.randint(64, (2, 100), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("step", [None, 4, 64])
def test_a_model_reads_a_cache_as_a_whole(model, step):
    with torch.no_grad():
        wanted = model(TOKENS).log_softmax(-1)
    found, blocks = read(model, TOKENS, step, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    layer = model.spec.layer
    shape = 2, 100, layer.n_kv_groups, layer.n_sel
    assert [x.shape for x in blocks] == [shape] * 2
    now = compared((wanted, read(model, TOKENS)[1]), (found, blocks), TOKENS)
    assert now["gap_p999"] < 1e-4 and now["kl"] < 1e-4 and now["other_blocks"] < 0.02


def test_fp8_changes_it_a_little(model):
    exact = read(model, TOKENS, 8, torch.float32)
    now = compared(exact, read(model, TOKENS, 8, FP8), TOKENS)
    assert 1e-4 < now["gap"] < 0.1 and 1e-6 < now["kl"] < 0.03


@pytest.mark.parametrize("step", [None, 1, 64])
def test_a_dense_model_too(step):
    dense = LM(dataclasses.replace(spec.model("tiny", "dense"), layers=2, vocabulary=64))
    with torch.no_grad():
        torch.nn.init.normal_(dense.embedding)
        wanted = dense(TOKENS).log_softmax(-1)
    found, blocks = read(dense, TOKENS, step)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert blocks == []
