"""transformers' cache: what `generate` asks of one that is not its own.

The names that it may call are in tests/test_huggingface_compatibility.py; here it calls them.
"""

import pytest
import torch

from nsa_torch.huggingface import NSAModelCache
from tests.canaries import canary
from tests.model_sizes import CACHE
from tests.test_huggingface import model, tokens

MEND = "nsa_torch/huggingface/cache.py"


@pytest.fixture
def asked(monkeypatch):
    """The names of the hooks of our cache that were called."""
    found = set()
    for name in ("get_seq_length", "get_mask_sizes", "reorder_cache", "crop", "update"):
        if original := getattr(NSAModelCache, name, None):

            def call(self, *arguments, name=name, original=original, **options):
                found.add(name)
                return original(self, *arguments, **options)

            monkeypatch.setattr(NSAModelCache, name, call)
    return found


@torch.no_grad()
def test_generate_takes_our_cache_and_gives_it_back(asked):
    made, ids = model(), tokens(2)
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    with canary("transformers", "generates on another cache than it was given", MEND):
        kept = NSAModelCache(made.config)
        found = made.generate(ids, **{CACHE: kept}, **options)
        assert found[CACHE] is kept and kept.get_seq_length() == ids.shape[1] + 2
        assert "get_seq_length" in asked and "update" not in asked, asked


@torch.no_grad()
def test_beams_reorder_our_cache(asked):
    made, ids = model("mixed"), tokens(1)
    with canary("transformers", "moves the rows of a cache in another way", MEND):
        made.generate(ids, num_beams=2, max_new_tokens=3, do_sample=False)
        assert "reorder_cache" in asked, asked
