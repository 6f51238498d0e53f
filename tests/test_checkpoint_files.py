"""What is read of a checkpoint runs no code: safetensors, and shards whose description is plain."""

import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bench.lm import checkpoint, shards
from nsa_torch.huggingface import NSAForCausalLM
from tests.test_huggingface import model


class Planted:
    """What leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


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


@pytest.fixture
def kept(tmp_path):
    """A checkpoint in shards."""
    tensors = {
        shards.key(part, "x"): torch.ones(3, 4, dtype=torch.bfloat16) for part in shards.PARTS
    }
    with warnings.catch_warnings():  # that no process group is used
        warnings.filterwarnings("ignore", "torch.distributed is")
        dcp.save(tensors, checkpoint_id=tmp_path / checkpoint.SHARDS, no_dist=True)
    return tmp_path


def test_shards_are_read(kept):
    found = shards.whole_tensors(kept)
    assert found.keys() == {f"{part}/x" for part in shards.PARTS}
    assert found["mean/x"].dtype == torch.bfloat16 and (found["mean/x"] == 1).all()


@pytest.mark.parametrize("what", ["a function", "a module of the description"])
def test_a_description_that_names_more_is_refused(kept, what):
    path, planted = kept / checkpoint.SHARDS / ".metadata", kept / "planted"
    if what == "a function":
        path.write_bytes(pickle.dumps(Planted(planted)))
        named = r"_io\.open"
    else:
        path.write_bytes(b"ctorch.distributed.checkpoint.metadata\nos.system\n.")
        named = r"torch\.distributed\.checkpoint\.metadata\.os\.system"
    with pytest.raises(ValueError, match=f"must contain only sizes of tensors, got {named}"):
        shards.whole_tensors(kept)
    assert not planted.exists()
