"""What is read of a checkpoint runs no code: safetensors."""

import pytest
import torch

from nsa_torch.huggingface import NSAForCausalLM
from tests.test_huggingface import model


def test_weights_in_a_pickle_are_not_read(tmp_path):
    made = model()
    made.save_pretrained(tmp_path / "model")
    assert NSAForCausalLM.from_pretrained(tmp_path / "model").config.vocab_size
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(made.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        NSAForCausalLM.from_pretrained(tmp_path / "model")
    with pytest.raises(
        ValueError, match="use_safetensors must be True or not given, got False"
    ):
        NSAForCausalLM.from_pretrained(tmp_path / "model", use_safetensors=False)
