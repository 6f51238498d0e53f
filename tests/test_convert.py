"""Dense checkpoints as NSA: what a converted model computes is what the dense one does."""

import copy
import functools
import json
import math
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
from flax import nnx
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bench.judge.parity import assert_parity
from bench.lm.jax_lm import LM
from bench.lm.spec import ModelSpec
from nsa_core.layer import LayerSpec
from nsa_interop import weights
from nsa_jax import nn
from nsa_torch import heads
from nsa_torch.huggingface import NSAForCausalLM, from_safetensors, to_safetensors
from nsa_torch.huggingface.convert import STARTS, convert, main
from tests import refusals
from tests.model_sizes import MODELS

SIZES = MODELS["dense"]
NSA = MODELS["converted to"]
SET = ["--set", *(f"{name}={value}" for name, value in NSA.items())]
REACH = 64  # num_selected * select_block
CASES = {name: AutoConfig.for_model(**SIZES | row) for name, row in MODELS["converted"].items()}
tuples = lambda row: {x: tuple(y) if isinstance(y, list) else y for x, y in row.items()}
PLAIN = [tuple(x) for x in MODELS["starts"]]
ROWS = [(*x, {}) for x in PLAIN] + [(*x, tuples(row)) for *x, row in MODELS["options"]]
plain = pytest.mark.parametrize("case, start", PLAIN)


@functools.cache
def dense(case):
    """A model whose vectors are all off their neutral values."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(CASES[case]).eval()
    with torch.no_grad():
        for x in made.parameters():
            if x.ndim == 1:
                x.add_(torch.randn_like(x) * 0.3)
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """`folders(case, **options)`: the dense model's folder and the converted one's."""
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def made(case, **options):
        source, target = root / case, root / f"{case} {json.dumps(options)}"
        if not source.exists():
            dense(case).save_pretrained(source)
        convert(source, target, **NSA | options)
        return source, target

    return made


@pytest.fixture
def model(folders):
    def made(case, **options):
        return NSAForCausalLM.from_pretrained(folders(case, **options)[1]).eval()

    return made


def tokens(rows=2, width=REACH, seed=1):
    return torch.randint(1, 97, (rows, width), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids, dtype=torch.float32):
    if model.dtype != dtype:
        model.to(dtype)  # rounds the rates of its rotation too
    return model(ids, use_cache=False).logits.double().cpu().numpy()


@functools.cache
def yardstick(case, dtype):
    """Logits of the dense model in `dtype`, and in float64 with weights as `dtype` has them."""
    made = copy.deepcopy(dense(case))
    rough = logits(made, tokens(), getattr(torch, dtype))
    return rough, logits(made, tokens(), torch.float64)


def assert_dense(case, found, dtype="float32"):
    """Each error of logits is within twice the dense model's own in `dtype`."""
    rough, exact = yardstick(case, dtype)
    assert_parity("logits", found, exact, rough, dtype=dtype)


@pytest.mark.parametrize("case, start, more", ROWS, ids=str)
def test_logits_are_the_dense_models(case, start, more, model):
    made, ids = model(case, start=start, **more), tokens(width=4 * REACH)
    first, stay = made.model.layers[0].self_attn, more.get("dense_layers", ())
    if len(stay) == 2:  # beyond the reach of NSA, too
        np.testing.assert_allclose(logits(made, ids), logits(dense(case), ids), 1e-5, 1e-5)
    assert made.config.layer_attention.count("dense") == len(stay)
    assert made.config.phi == more.get("phi", "avg")
    assert "phi" not in more or first.compress_params()[0] is not None
    has_gates = any(".gate." in name for name, _ in made.named_parameters())
    assert has_gates == (more.get("gate") != "selected" and len(stay) < 2)
    for dtype in ("float32", "bfloat16"):
        assert_dense(case, logits(made, tokens(), getattr(torch, dtype)), dtype)


@plain
def test_steps_of_training_move_the_weights_of_the_start(case, start, model):
    made, ids = model(case, start=start).train(), tokens(width=2 * REACH)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.01)  # decays no weight
    named = dict(made.named_parameters())
    assert (start == "shared") != any("W_K_" in name for name in named)
    for still in MODELS["still"][start]:
        optimizer.zero_grad()
        made(ids, labels=ids).loss.backward()
        optimizer.step()
        for name, x in named.items():
            assert bool(x.grad.any()) != any(f".{y}" in name for y in still), name


@pytest.mark.parametrize("case, start", [("qwen2", "shared"), ("qwen3 yarn", "values")])
@torch.no_grad()
def test_what_is_saved_again_is_read_by_both_frameworks(case, start, model, tmp_path):
    made, want = model(case, start=start), model(case, start=start)(tokens()).logits
    made.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.converted_from["model_type"] == CASES[case].model_type
    file, config = tmp_path / "twin.safetensors", made.config
    to_safetensors(file, made)
    for back in (again, from_safetensors(file)):
        assert torch.equal(back(tokens()).logits, want)
    sizes = config.num_hidden_layers, config.intermediate_size, config.vocab_size
    spec = ModelSpec(config.layer_spec, "nsa", *sizes, norm_eps=config.rms_norm_eps)
    twin = LM(spec, dtype=jnp.float32)
    weights.load(file, twin)
    found = nnx.jit(lambda twin, x: twin(x))(twin, jnp.asarray(tokens().numpy()))
    assert_dense(case, np.asarray(found, np.float64))


@pytest.mark.parametrize("rope", MODELS["rotations"])
@pytest.mark.parametrize("width", [8, 64, 128])
def test_rates_are_those_of_transformers(rope, width):
    """A rate that is off by an ulp turns a key at position 1000 by 1e-4 more. Their power is of
    float32, off by an ulp at a pair of some bases, so that a part of the rates is equal.
    """
    config = LlamaConfig(
        hidden_size=4 * width, num_attention_heads=4, rope_parameters=dict(rope)
    )
    rotary, scaling = LlamaRotaryEmbedding(config), None
    wanted = rotary.inv_freq.numpy()
    if rope["rope_type"] != "default":
        own = {k: x for k, x in rope.items() if k != "rope_theta"}
        scaling = LayerSpec(8, 1, 1, 8, 8, rope_scaling=own).rope_scaling
        assert scaling.attention_scaling == pytest.approx(rotary.attention_scaling)
    # They divide by the product of the factor and the power: where the factor is no power of two
    # that is another rounding.
    equal = 0.98 if math.log2(rope.get("factor", 1)).is_integer() else 0
    base = rope["rope_theta"]
    in_torch = heads.rates(width, base, scaling, torch.device("cpu")).numpy()
    for found in (in_torch, nn.rates(width, base, scaling)):
        np.testing.assert_allclose(found, wanted, rtol=2**-23)
        assert (found == wanted).mean() >= equal


# What is refused, by name, and leaves nothing behind.


def edited(source, changed):
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def with_file(source, name, stated):
    (source / name).write_text(json.dumps(stated))


def with_tokens(source, largest):
    """The file of a tokenizer with two tokens."""
    made = json.loads(Tokenizer(WordLevel({"a": 0, "b": largest}, "a")).to_str())
    with_file(source, "tokenizer.json", made)


def with_weights(source, changes):
    """By name: None takes one away, a number multiplies it, a dtype rounds it."""
    path = source / "model.safetensors"
    state = safetensors.torch.load_file(path)
    for name, x in changes.items():
        old = state.pop(name, None)
        if isinstance(x, torch.dtype):
            state[name] = old.to(x)
        elif x is not None:
            state[name] = x if isinstance(x, torch.Tensor) else old * x
    safetensors.torch.save_file(state, path)


def index_of(source, files):
    """In place of the one file of weights, which is then one of several."""
    (source / "model.safetensors").rename(source / "a.safetensors")
    (source / "d.safetensors").mkdir()
    index = {"weight_map": dict(enumerate(files))}
    with_file(source, "model.safetensors.index.json", index)


def without_a_shard(source, size):
    (source / "model.safetensors").unlink()
    dense("qwen2").save_pretrained(source, max_shard_size=size)
    next(source.glob("model-00002-of-*.safetensors")).unlink()


def without_safetensors(source, name):
    path = source / "model.safetensors"
    torch.save(safetensors.torch.load_file(path), source / name)
    path.unlink()


def cut_off(source, size):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


# What is done to a source, by the words of `refusals.yaml`.
DAMAGE = {
    "config": edited,
    "tokens": with_tokens,
    "weights": with_weights,
    "index": index_of,
    "shards": without_a_shard,
    "pickled": without_safetensors,
    "cut": cut_off,
}


@pytest.fixture
def source(folders, tmp_path):
    """A folder that a test may change."""
    return shutil.copytree(folders("qwen2")[0], tmp_path / "source")


def contents(folder):
    return {x: x.read_bytes() for x in folder.rglob("*") if x.is_file()}


@pytest.mark.parametrize("row, sentence, error", refusals.rows("conversion"), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused_leaves_nothing_behind(row, sentence, error, source, tmp_path):
    options = refusals.given(row)
    for name in DAMAGE.keys() & options:
        DAMAGE[name](source, options.pop(name))
    before = contents(source)
    with refusals.refused(sentence, (error, OSError)):
        convert(source, tmp_path / "made" / "target", **NSA | options)
    assert not (tmp_path / "made").exists()
    assert before == contents(source)


def test_a_tied_head_in_the_files_is_left_out(source, tmp_path):
    edited(source, {"tie_word_embeddings": True})
    embedding = "model.embed_tokens.weight"
    with_weights(source, {"lm_head.weight": dense("qwen2").get_parameter(embedding).clone()})
    convert(source, tmp_path / "target", **NSA)
    saved = safetensors.torch.load_file(tmp_path / "target" / "model.safetensors")
    assert embedding in saved and "lm_head.weight" not in saved


def test_weights_keep_their_dtypes(source, tmp_path):
    """Norms of float32 among weights in 16 bits, as some are kept."""
    rounded = [name for name in dense("qwen2").state_dict() if "norm" not in name]
    with_weights(source, dict.fromkeys(rounded, torch.bfloat16))
    convert(source, tmp_path / "target", **NSA)
    theirs, found = (
        safetensors.torch.load_file(x / "model.safetensors")
        for x in (source, tmp_path / "target")
    )
    for name, x in found.items():
        assert x.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
    assert torch.equal(*(x["model.norm.weight"] for x in (found, theirs)))
    assert NSAForCausalLM.from_pretrained(tmp_path / "target").dtype == torch.bfloat16


def test_the_command(source, tmp_path, capsys):
    """Its exit status, what it writes and what it leaves. What is no folder and no owner/name is
    not asked of the Hub.
    """
    with_tokens(source, 96)
    (source / "additional_chat_templates").mkdir()
    copied = "tokenizer.json", "LICENSE.txt", "additional_chat_templates/tools.jinja"
    for name in ("LICENSE.txt", "added_tokens.json", copied[2]):
        (source / name).write_text("{}")
    (source / "tokenizer_of_another").mkdir()
    target, other = tmp_path / "target", str(tmp_path / "other")
    command = [str(source), str(target), *SET, "--dtype", "bf16", "--check", "64"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert (
        "logits of 64 tokens differ by" in said
        and "up to 64 tokens the model equals the dense model" in said
    )
    for name in copied:
        assert (target / name).read_text() == (source / name).read_text()
    made = NSAForCausalLM.from_pretrained(target)
    assert made.dtype == torch.bfloat16 and made.config.num_selected == 4
    edited(source, {"hidden_size": "wide"})
    for words, message in (
        (command, "must not exist"),
        ([str(source), other], "'hidden_size' expected int"),
        *(
            (
                [name, other],
                f"{name} must be a folder, or owner/name on the Hugging Face Hub; there is no such",
            )
            for name in ("none", "./none", "../no/folder", str(tmp_path / "none"))
        ),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err
    assert {x.name for x in tmp_path.iterdir()} == {"source", "target"}


def test_a_check_that_finds_another_model_writes_nothing(source, tmp_path, capsys, monkeypatch):
    """As of a mapping with a fault, which is patched in."""
    monkeypatch.setattr("nsa_torch.huggingface.convert.pairs", lambda x, width: x)
    assert main([str(source), str(tmp_path / "target"), "--check", "64", *SET]) == 1
    assert "nothing was written" in capsys.readouterr().err
    assert {x.name for x in tmp_path.iterdir()} == {"source"}


@pytest.mark.gpu
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("case", ["llama 3.1", "qwen3 yarn", "qwen2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu(case, start, dtype, tmp_path):
    """Gates of exactly 0, 1 and 1/2 in the kernels, forward and backward."""
    torch.manual_seed(0)
    config = type(CASES[case])(**CASES[case].to_dict() | MODELS["converted on a GPU"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "target", start=start)
    # Loaded, not converted in memory: that would round the rates of the dense model's rotation.
    given = {"dtype": getattr(torch, dtype), "device_map": "cuda"}
    load = AutoModelForCausalLM.from_pretrained
    ours, theirs = (load(tmp_path / x, **given).eval() for x in ("target", "source"))
    ids = tokens(width=1024).cuda()
    found, rough = (logits(x, ids, given["dtype"]) for x in (ours, theirs))
    exact = logits(theirs, ids, torch.float64)
    size = np.sqrt(np.mean(exact**2))  # the rule's absolute limit is for outputs of size 1
    assert_parity("logits", found / size, exact / size, rough / size, dtype=dtype)
    ours.train()(ids, labels=ids).loss.backward()
    assert all(bool(x.grad.isfinite().all()) for x in ours.parameters())
    layer = ours.model.layers[0].self_attn
    assert bool((layer.W_V if start == "shared" else layer.W_V_sel).weight.grad.any())
