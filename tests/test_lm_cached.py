"""The loss of a language model on pages, in 16 bits and in fp8."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from bench.lm import spec
from bench.lm.cached import losses
from bench.lm.torch_lm import LM

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def model():
    """Tiny, of weights that tell tokens apart."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = LM(dataclasses.replace(spec.model("tiny", "nsa"), layers=2, vocabulary=64))
        for parameter in found.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        return found


def whole(model, tokens):
    logits = model(tokens[:, :-1]).transpose(1, 2)
    return F.cross_entropy(logits, tokens[:, 1:], reduction="none")


def test_a_model_on_pages_is_the_model(model):
    tokens = torch.randint(64, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = whole(model, tokens)
    torch.testing.assert_close(losses(model, tokens, torch.float32), wanted, rtol=0, atol=1e-4)


def test_fp8_changes_it_a_little(model):
    tokens = torch.randint(64, (2, 200), generator=torch.Generator().manual_seed(1))
    exact = losses(model, tokens, torch.float32)
    change = losses(model, tokens, FP8) - exact
    assert 1e-4 < change.abs().mean() < 0.1 and change.mean().abs() < 0.03


def test_dense_layers_have_no_pages():
    dense = LM(dataclasses.replace(spec.model("tiny", "dense"), layers=1, vocabulary=64))
    with pytest.raises(ValueError, match="NSA layers alone"):
        losses(dense, torch.zeros(1, 9), torch.float32)
