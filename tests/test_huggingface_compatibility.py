"""What the Hugging Face model stands on in transformers: what broke, and where to mend it."""

import inspect

import pytest
import torch
import transformers.utils
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_utils import PreTrainedModel

from nsa_torch.huggingface import NSAForCausalLM, NSAModel, NSAModelCache, NSAPagedModelCache
from tests import spawned
from tests.model_sizes import CACHE, MODELS
from tests.test_huggingface import model, tokens

OURS = {
    GenerationMixin: (NSAForCausalLM,),
    PreTrainedModel: (NSAForCausalLM, NSAModel),
    Cache: (NSAModelCache, NSAPagedModelCache),
}
# What transformers calls or reads of our classes: a hook that it renames is never called, and no
# error says so.
OVERRIDDEN = {base: MODELS["overridden"][base.__name__] for base in OURS}
MEND = f"transformers {transformers.__version__}: see nsa_torch/huggingface"


def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [x for x in found if x.kind is not x.VAR_KEYWORD and x.kind is not x.VAR_POSITIONAL]


@pytest.mark.parametrize("base", OVERRIDDEN, ids=lambda x: x.__name__)
def test_transformers_has_what_is_overridden(base):
    """Each hook by its name, called as ours is declared."""
    for name in OVERRIDDEN[base]:
        assert hasattr(base, name), f"{base.__name__}.{name} is gone in {MEND}"
        for ours in OURS[base]:
            theirs, own = getattr(base, name), getattr(ours, name, None)
            if own is None or own is theirs or not inspect.isfunction(theirs):
                continue
            takes = inspect.signature(own).parameters.values()
            anything = any(x.kind is x.VAR_POSITIONAL for x in takes)
            names = [x.name for x in parameters(own)]
            required = [x.name for x in parameters(theirs) if x.default is x.empty]
            assert anything or set(required) <= set(names), (
                f"{base.__name__}.{name} takes {required} in {MEND}; ours takes {names}"
            )


@torch.no_grad()
def test_a_cache_has_two_names():
    """`cache`, and `past_key_values` of before 5.24, in calls and in `generate`."""
    made, ids = model("mixed"), tokens(2)
    assert CACHE in ("cache", "past_key_values")
    want, texts = made(ids, use_cache=False).logits[:, -1:], []
    for name in ("cache", "past_key_values"):
        kept = NSAModelCache(made.config)
        out = made(ids[:, :-1], **{name: kept})
        assert out[CACHE] is kept
        last = made.model(ids[:, -1:], **{name: kept})
        assert last[CACHE] is kept and kept.get_seq_length() == ids.shape[1]
        torch.testing.assert_close(made.lm_head(last[0]), want)
        kept.reset()
        options = dict(max_new_tokens=3, do_sample=False)
        texts.append(made.generate(ids, **{name: kept}, **options))
        assert kept.get_seq_length() == ids.shape[1] + 2
    assert torch.equal(*texts)
    both = {name: NSAModelCache(made.config) for name in ("cache", "past_key_values")}
    for call in (made, made.model, made.generate):
        with pytest.raises(
            ValueError, match="only one of cache and past_key_values may be given"
        ):
            call(ids, **both)
    assert made(ids, use_cache=False, past_key_values=None).logits.shape == (2, 41, 64)
    assert len(made(ids, use_cache=False, return_dict=False)) == 1  # logits alone


EVALUATION = """
import sys, torch, transformers
folder, again = sys.argv[1:]
for name in ("AutoModel", "AutoModelForCausalLM"):
    options = {"trust_remote_code": True, "dtype": torch.float32}
    made = getattr(transformers, name).from_pretrained(folder, **options).eval()
    print(type(made).__name__, float(made(torch.arange(1, 42)[None])[0].double().sum()))
made.save_pretrained(again)
"""


@torch.no_grad()
def test_a_program_that_never_names_us(tmp_path):
    """It loads what was saved by transformers' names alone; what it saves is the same again."""
    folders = tmp_path / "saved", tmp_path / "again"
    made, ids = model(), torch.arange(1, 42)[None]
    made.save_pretrained(folders[0])
    modules = str(tmp_path / "modules")
    done = spawned.python("-c", EVALUATION, *folders, HF_MODULES_CACHE=modules)
    assert done.returncode == 0, done.stderr
    base, whole = (line.split() for line in done.stdout.splitlines())
    assert (base[0], whole[0]) == ("NSAModel", "NSAForCausalLM")
    for (_, found), x in ((base, made.model(ids)[0]), (whole, made(ids)[0])):
        assert float(found) == pytest.approx(float(x.double().sum()), rel=1e-5)
    files = [{x.name: x.read_bytes() for x in each.iterdir()} for each in folders]
    assert files[0] == files[1]
