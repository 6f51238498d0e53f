"""Dense checkpoints as NSA: what a converted model computes is what the dense one does."""

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
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bench.judge.parity import check_parity
from bench.lm.jax_lm import LM
from bench.lm.spec import ModelSpec
from nsa_core import rotation
from nsa_interop import weights
from nsa_jax import nn
from nsa_torch import heads
from nsa_torch.huggingface import NSAForCausalLM, from_safetensors, to_safetensors
from nsa_torch.huggingface.convert import STARTS, DifferentError, convert, main, pairs

SIZES = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.15,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
NSA = dict(compress_block=8, compress_stride=4, select_block=16, num_selected=4, window=24)
REACH = 64  # num_selected * select_block
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=2.0)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)
LLAMA, MISTRAL = (LlamaForCausalLM, LlamaConfig), (MistralForCausalLM, MistralConfig)
QWEN2, QWEN3 = (Qwen2ForCausalLM, Qwen2Config), (Qwen3ForCausalLM, Qwen3Config)
CASES = {
    "llama 2": (*LLAMA, dict(rms_norm_eps=1e-5, num_key_value_heads=6)),
    "llama tied": (*LLAMA, dict(tie_word_embeddings=True)),
    "llama linear": (*LLAMA, dict(rope_parameters=LINEAR)),
    "llama 3.1": (*LLAMA, dict(rope_parameters=LLAMA3, rms_norm_eps=1e-5)),
    "llama yarn": (*LLAMA, dict(rope_parameters=YARN)),
    "llama biases": (*LLAMA, dict(attention_bias=True)),
    "mistral": (*MISTRAL, dict(sliding_window=None, head_dim=16)),
    "qwen2": (*QWEN2, {}),
    "qwen3": (*QWEN3, dict(head_dim=16)),
    "qwen3 yarn": (
        *QWEN3,
        dict(head_dim=16, rope_parameters=YARN, tie_word_embeddings=True),
    ),
}
by_case = pytest.mark.parametrize("case", CASES)
EXACT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@functools.cache
def dense(case):
    """A model whose vectors are all off their neutral values."""
    kind, configuration, changed = CASES[case]
    torch.manual_seed(0)
    made = kind(configuration(**SIZES | changed)).eval()
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
        source = root / case
        if not source.exists():
            dense(case).save_pretrained(source)
        target = root / f"{case} {json.dumps(options)}"
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
    return model.to(dtype)(ids, use_cache=False).logits.double().numpy()


@functools.cache
def yardstick(case, dtype):
    """Logits of the dense model in `dtype`, and in float64 with weights as `dtype` has them."""
    source = dense(case)
    made = type(source)(source.config).eval()
    made.load_state_dict(source.state_dict())
    rough = logits(made, tokens(), EXACT_DTYPES[dtype])
    return rough, logits(made, tokens(), torch.float64)


def parity(case, found, dtype="float32"):
    """Of logits: each error within twice the dense model's own in `dtype`."""
    rough, exact = yardstick(case, dtype)
    return check_parity("logits", found, exact, rough, dtype=dtype)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
@by_case
def test_logits_are_the_dense_models(case, dtype, start, model):
    found = parity(case, logits(model(case, start=start), tokens(), EXACT_DTYPES[dtype]), dtype)
    assert found.ok, found.reason


def permuted_back(attention, name):
    """Rows of the weight as transformers has them."""
    weight = getattr(attention, name).weight
    width = attention.spec.d_k
    halves = weight.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).flatten(0, 2)
    weight.data.copy_(halves)


def rows_as_they_were(model):
    for layer in model.model.layers:
        permuted_back(layer.self_attn, "W_Q")
        permuted_back(layer.self_attn, "W_K_sel")


def norms_as_they_were(model):
    for layer in model.model.layers:
        permuted_back(layer.self_attn, "q_norm")


def values_permuted(model):
    for layer in model.model.layers:
        weight = layer.self_attn.W_V_sel.weight
        weight.data.copy_(pairs(weight, layer.self_attn.spec.d_v))


def another_base(model):
    """Twice as large."""
    theirs = model.config.rope_parameters["rope_theta"]
    model.config.rope_parameters["rope_theta"] = 2 * theirs
    for layer in model.model.layers:
        layer.self_attn.spec = model.config.layer_spec


MUTANTS = [
    (case, x) for x in (rows_as_they_were, values_permuted, another_base) for case in CASES
]
MUTANTS += [(case, norms_as_they_were) for case in CASES if case.startswith("qwen3")]


@pytest.mark.parametrize(("case", "mutant"), MUTANTS)
@torch.no_grad()
def test_a_wrong_mapping_is_seen(case, mutant, model):
    made = model(case)
    mutant(made)
    assert not parity(case, logits(made, tokens())).ok


@pytest.mark.parametrize("start", ["values", "shared"])
@by_case
def test_generate_gives_the_dense_models_tokens(case, start, model):
    """From the cache; of a row that is padded on the left, too."""
    ids = tokens(width=30)
    mask = torch.ones_like(ids)
    ids[1, :11], mask[1, :11] = 0, 0
    options = dict(max_new_tokens=REACH - 30, do_sample=False, attention_mask=mask)
    options |= dict(pad_token_id=0, eos_token_id=None)
    want = dense(case).generate(ids, **options)
    assert torch.equal(model(case, start=start).generate(ids, **options), want)
    assert want.shape[1] == REACH


WAITING = ("W_K_cmp", "W_K_win", "gate.fc1")  # for values, or gates, that are not zero


@by_case
def test_a_step_of_training_moves_every_weight(case, model):
    """But for the keys of branches whose values are zero: they follow in the second step."""
    made = model(case).double().train()
    ids = tokens(width=2 * REACH)
    begin = {name: x.detach().clone() for name, x in made.named_parameters()}
    optimizer = torch.optim.SGD(made.parameters(), lr=0.01)  # decays no weight
    for step in range(2):
        optimizer.zero_grad()
        made(ids, labels=ids).loss.backward()
        optimizer.step()
        still = {name for name, x in made.named_parameters() if torch.equal(x, begin[name])}
        waiting = {x for x in begin if step == 0 and any(f".{y}." in x for y in WAITING)}
        assert still == waiting


def test_the_start_by_gates_trains_the_selected_branch_alone(model):
    made = model("qwen3", start="gates").train()
    ids = tokens(width=2 * REACH)
    made(ids, labels=ids).loss.backward()
    for name, x in made.named_parameters():
        other = any(
            f".{y}" in name for y in ("gate.", "W_K_cmp", "W_V_cmp", "W_K_win", "W_V_win")
        )
        assert bool(x.grad.any()) != other, name


@by_case
def test_the_start_with_shared_keys_trains_all_but_the_gates(case, model):
    made = model(case, start="shared").train()
    ids = tokens(width=2 * REACH)
    made(ids, labels=ids).loss.backward()
    for name, x in made.named_parameters():
        assert bool(x.grad.any()) == (".gate." not in name), name
    assert not any("W_K_" in name for name, _ in made.named_parameters())


@torch.no_grad()
def test_all_starts_are_bitwise_the_same_beyond_their_reach(model):
    ids = tokens(width=4 * REACH)
    one, *others = (model("qwen2", start=start)(ids).logits for start in STARTS)
    assert all(torch.equal(one, other) for other in others)
    assert not torch.allclose(one, dense("qwen2")(ids).logits, atol=0.05)


@pytest.mark.parametrize("dense_layers", [(0,), (0, 1)])
@pytest.mark.parametrize("case", ["qwen3 yarn", "qwen2", "llama 3.1"])
@torch.no_grad()
def test_layers_that_stay_dense(case, dense_layers, model):
    made = model(case, dense_layers=dense_layers)
    assert made.config.layer_attention.count("dense") == len(dense_layers)
    assert parity(case, logits(made, tokens())).ok
    if len(dense_layers) == 2:
        ids = tokens(width=4 * REACH)
        torch.testing.assert_close(made(ids).logits, dense(case)(ids).logits)


@torch.no_grad()
def test_what_is_saved_again_is_the_same(model, tmp_path):
    made = model("qwen3 yarn")
    made.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens()).logits, made(tokens()).logits)
    assert again.config.converted_from["model_type"] == "qwen3"


@pytest.mark.parametrize("start", ["gates", "shared"])
def test_the_selected_branch_alone(start, model):
    """Needs no weights for its gates."""
    made = model("qwen3", start=start, gate="selected")
    assert parity("qwen3", logits(made, tokens())).ok
    assert not any(".gate." in name for name, _ in made.named_parameters())


@pytest.mark.parametrize("start", STARTS)
def test_gates_of_each_query_head(start, model):
    made = model("qwen3", start=start, gate="head", gate_temp=0.5)
    assert parity("qwen3", logits(made, tokens())).ok


@pytest.mark.parametrize(
    ("phi", "start"),
    [("mlp", "values"), ("mlp_pe", "values"), ("mlp_rope", "values"), ("mlp_pe", "shared")],
)
def test_a_learned_phi(phi, start, model):
    made = model("llama 3.1", phi=phi, start=start, gate_temp=0.5)
    assert made.config.phi == phi and parity("llama 3.1", logits(made, tokens())).ok
    assert made.model.layers[0].self_attn.compress_params()[0] is not None


@pytest.mark.parametrize(
    ("case", "start"), [("llama 3.1", "values"), ("qwen2", "shared"), ("qwen3 yarn", "values")]
)
@torch.no_grad()
def test_the_twin_in_jax_reads_it(case, start, model, tmp_path):
    made = model(case, start=start)
    config = made.config
    to_safetensors(tmp_path / "twin.safetensors", made)
    spec = ModelSpec(
        config.layer_spec,
        "nsa",
        config.num_hidden_layers,
        config.intermediate_size,
        config.vocab_size,
        norm_eps=config.rms_norm_eps,
    )
    twin = LM(spec, dtype=jnp.float32)
    weights.load(tmp_path / "twin.safetensors", twin)
    found = nnx.jit(lambda twin, x: twin(x))(twin, jnp.asarray(tokens().numpy()))
    assert parity(case, np.asarray(found, np.float64)).ok
    back = from_safetensors(tmp_path / "twin.safetensors")
    assert torch.equal(back(tokens()).logits, made(tokens()).logits)


@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3,
        LLAMA3 | dict(original_max_position_embeddings=8192),
        YARN | dict(original_max_position_embeddings=32768, rope_theta=1e6),
        YARN | dict(beta_fast=8.0, beta_slow=2.0, truncate=False),
        YARN | dict(factor=40.0, mscale=1.0, mscale_all_dim=0.7),
        YARN | dict(attention_factor=1.5),
    ],
)
@pytest.mark.parametrize("width", [8, 128])
def test_rates_are_those_of_transformers(rope, width):
    config = LlamaConfig(
        hidden_size=4 * width, num_attention_heads=4, rope_parameters=dict(rope)
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    base = rope["rope_theta"]
    scaling = rotation.scaling({k: x for k, x in rope.items() if k != "rope_theta"})
    # They divide by the product of the factor and the power: where the factor is no power of two
    # that is another rounding.
    equal = 0.98 if math.log2(rope["factor"]).is_integer() else 0
    same_rates(wanted.numpy(), width, base, scaling, equal)
    assert scaling.attention_scaling == pytest.approx(factor)


@pytest.mark.parametrize("base", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("width", [64, 128])
def test_rates_without_scaling_are_those_of_transformers(base, width):
    rope = dict(rope_type="default", rope_theta=base)
    config = LlamaConfig(hidden_size=width, num_attention_heads=1, rope_parameters=rope)
    same_rates(LlamaRotaryEmbedding(config).inv_freq.numpy(), width, base, None, 0.98)


def same_rates(wanted, width, base, scaling, equal):
    """A rate that is off by an ulp turns a key at position 1000 by 1e-4 more. Their power is of
    float32, off by an ulp at a pair of some bases, so that a part `equal` of the rates is equal.
    """
    in_torch = heads.rates(width, base, scaling, torch.device("cpu")).numpy()
    for found in (in_torch, nn.rates(width, base, scaling)):
        np.testing.assert_allclose(found, wanted, rtol=2**-23)
        assert (found == wanted).mean() >= equal


# What is refused, by name, and leaves nothing behind.


def edited(source, file="config.json", **changed):
    path = source / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def with_config(**changed):
    return lambda source: edited(source, **changed)


def without_safetensors(source):
    state = safetensors.torch.load_file(source / "model.safetensors")
    torch.save(state, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()


def changed_weights(change):
    def edit(source):
        state = safetensors.torch.load_file(source / "model.safetensors")
        change(state)
        safetensors.torch.save_file(state, source / "model.safetensors")

    return edit


def a_shard_missing(source):
    dense("qwen2").save_pretrained(source, max_shard_size="20KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    next(source.glob("model-00002-of-*.safetensors")).unlink()


def in_two_files(source):
    """Which of the two a reader takes is its own affair."""
    dense("qwen2").save_pretrained(source, max_shard_size="20KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    path = next(source.glob("model-00002-of-*.safetensors"))
    state = safetensors.torch.load_file(path) | {"model.norm.weight": torch.ones(48)}
    safetensors.torch.save_file(state, path)


def a_file_elsewhere(source):
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (source / "model.safetensors").rename(source.parent / "model.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def a_larger_tokenizer(source):
    stated = {"model": {"vocab": {"a": 0, "b": 96}}, "added_tokens": [{"id": 97}]}
    (source / "tokenizer.json").write_text(json.dumps(stated))


def a_small_tokenizer(source):
    a_larger_tokenizer(source)
    edited(source, "tokenizer.json", added_tokens=[])


def with_file(name, text):
    return lambda source: (source / name).write_text(text)


def with_index(text):
    """In place of the one file of weights, which is then one of several."""

    def edit(source):
        (source / "model.safetensors").rename(source / "a.safetensors")
        (source / "model.safetensors.index.json").write_text(text)

    return edit


def a_folder_for_a_file(source):
    (source / "d.safetensors").mkdir()
    stated = {"weight_map": {"a": "a.safetensors", "b": "d.safetensors"}}
    with_index(json.dumps(stated))(source)


def a_cut_file(source):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def nothing(source):
    pass


def eighth(state):
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)


REFUSED = {
    "architecture": (
        lambda source: Gemma2Config(vocab_size=97).save_pretrained(source),
        {},
        "model_type must be one of",
    ),
    "no configuration": (
        with_file("config.json", "[]"),
        {},
        "source must have a config.json that transformers reads, got (Type|Value)Error: ",
    ),
    "a size that is none": (
        with_config(hidden_size="wide"),
        {},
        "config.json that transformers reads, got .*'hidden_size' expected int, got str",
    ),
    "no heads": (
        with_config(num_attention_heads=0),
        {},
        "num_attention_heads must be an int >= 1, got 0",
    ),
    "activation": (with_config(hidden_act="gelu"), {}, "hidden_act must be 'silu'"),
    "dropout": (with_config(attention_dropout=0.1), {}, "attention_dropout must be 0.0"),
    "sliding": (
        with_config(
            use_sliding_window=True, sliding_window=8, layer_types=None, max_window_layers=0
        ),
        {},
        "all layers must attend to all keys",
    ),
    "rotation": (
        with_config(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
        {},
        "must be one of .'default', 'linear', 'llama3', 'yarn'.*'dynamic'",
    ),
    "quantized": (
        with_config(quantization_config={"quant_method": "fp8"}),
        {},
        "quantization_config must be None",
    ),
    "no safetensors": (without_safetensors, {}, "got pytorch_model.bin"),
    "shard": (a_shard_missing, {}, "got no model-00002-of"),
    "cut file": (a_cut_file, {}, "model.safetensors must be a whole file"),
    "index of no files": (
        with_index("{}"),
        {},
        "index.json must have a weight_map, got None",
    ),
    "index of a file elsewhere": (a_file_elsewhere, {}, "must name files .* beside it"),
    "weight twice": (in_two_files, {}, "model.norm.weight must stand in one file"),
    "index of a folder": (a_folder_for_a_file, {}, "got no d.safetensors"),
    "generation": (
        with_file("generation_config.json", "[]"),
        {},
        "generation_config.json must hold names and values",
    ),
    "cut index": (
        with_index("{"),
        {},
        "index.json must be JSON, got",
    ),
    "weight missing": (
        changed_weights(lambda state: state.pop("model.norm.weight")),
        {},
        "must have model.norm.weight",
    ),
    "weight unknown": (
        changed_weights(lambda state: state.update({"score.weight": torch.ones(2, 48)})),
        {},
        "score.weight must not be in a qwen2 model",
    ),
    "head of a tied model": (
        with_config(tie_word_embeddings=True),
        {},
        "lm_head.weight must be model.embed_tokens.weight where tie_word_embeddings is true",
    ),
    "shape": (
        changed_weights(lambda state: state.update({"model.norm.weight": torch.ones(3)})),
        {},
        "model.norm.weight: expected shape .48., got .3.",
    ),
    "dtype": (changed_weights(eighth), {}, "up_proj.weight must be of .*F8_E4M3"),
    "overflow": (
        changed_weights(lambda s: s["model.layers.1.self_attn.v_proj.weight"].mul_(1e6)),
        dict(dtype=torch.float16),
        "W_V_sel.weight must be finite in torch.float16",
    ),
    "tokenizer": (a_larger_tokenizer, {}, "tokens must be below vocab_size=97, got 97"),
    "tokenizer by names": (
        with_file("vocab.json", '{"model": 97}'),
        {},
        "vocab.json: tokens must be below vocab_size=97, got 97",
    ),
    "added tokens": (
        with_file("added_tokens.json", '{"<extra>": 98}'),
        {},
        "added_tokens.json: tokens must be below vocab_size=97, got 98",
    ),
    "no tokenizer": (
        with_file("tokenizer.json", '{"model": null}'),
        {},
        "tokenizer.json must name tokens and their ids",
    ),
    "list for a tokenizer": (
        with_file("tokenizer.json", "[]"),
        {},
        "tokenizer.json must hold names and values",
    ),
    "check": (nothing, dict(check=65), r"check must be in 1..64 tokens .*got 65"),
    "check as a text": (nothing, dict(check="9"), "check must be an int >= 1, got '9'"),
    "dtype of integers": (nothing, dict(dtype=torch.int8), "dtype must be one of .*torch.int8"),
    "size": (nothing, dict(num_selected=1), "num_selected"),
    "softmax": (nothing, dict(gate="softmax"), "gate must not be 'softmax'"),
    "no gates": (nothing, dict(gate="selected"), "gate must not be 'selected' where start="),
    "rotation after phi": (
        nothing,
        dict(phi="mlp_rope", start="shared"),
        "kv must be 'separate'",
    ),
    "name": (nothing, dict(hidden_size=3), "hidden_size must be one of"),
    "keys": (nothing, dict(kv="x"), "kv must not be given, got 'x'; start='shared' conv"),
    "a layer alone": (
        nothing,
        dict(dense_layers=1),
        "dense_layers must be several ints, got 1",
    ),
    "layer": (nothing, dict(dense_layers=(2,)), "dense_layers must be in 0..1, got 2"),
    "start": (nothing, dict(start="zero"), "start must be one of"),
}


@pytest.fixture
def source(folders, tmp_path):
    """A folder that a test may change."""
    return shutil.copytree(folders("qwen2")[0], tmp_path / "source")


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_is_refused_leaves_nothing_behind(what, source, tmp_path):
    change, options, message = REFUSED[what]
    change(source)
    before = {x: x.read_bytes() for x in source.rglob("*") if x.is_file()}
    with pytest.raises((ValueError, OSError), match=message):
        convert(source, tmp_path / "made" / "target", **NSA | options)
    assert not (tmp_path / "made").exists()
    assert before == {x: x.read_bytes() for x in source.rglob("*") if x.is_file()}


def test_a_tied_head_in_the_files_is_left_out(source, tmp_path):
    edited(source, tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"
    change = lambda state: state.update({"lm_head.weight": state[embedding].clone()})
    changed_weights(change)(source)
    convert(source, tmp_path / "target", **NSA)
    saved = safetensors.torch.load_file(tmp_path / "target" / "model.safetensors")
    assert embedding in saved and "lm_head.weight" not in saved


def test_weights_keep_their_dtypes(source, tmp_path):
    """Norms of float32 among weights in 16 bits, as some are kept."""

    def narrowed(state):
        state |= {name: x.bfloat16() for name, x in state.items() if "norm" not in name}

    changed_weights(narrowed)(source)
    convert(source, tmp_path / "target", **NSA)
    found = safetensors.torch.load_file(tmp_path / "target" / "model.safetensors")
    for name, x in found.items():
        assert x.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
    theirs = safetensors.torch.load_file(source / "model.safetensors")["model.norm.weight"]
    assert torch.equal(found["model.norm.weight"], theirs)
    made = NSAForCausalLM.from_pretrained(tmp_path / "target")
    assert made.dtype == torch.bfloat16


def test_the_command(source, tmp_path, capsys):
    """Its exit status, what it writes and what it leaves."""
    a_small_tokenizer(source)
    (source / "LICENSE.txt").write_text("terms")
    (source / "added_tokens.json").write_text("{}")
    (source / "tokenizer_of_another").mkdir()
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("tools")
    target = tmp_path / "target"
    sizes = [f"{name}={value}" for name, value in NSA.items()]
    options = ["--set", *sizes, "--dtype", "bf16", "--check", "64"]
    assert main([str(source), str(target), *options]) == 0
    said = capsys.readouterr().out
    assert "logits of 64 tokens are" in said and "dense attention up to 64 tokens" in said
    for name in ("tokenizer.json", "LICENSE.txt", "additional_chat_templates/tools.jinja"):
        assert (target / name).read_text() == (source / name).read_text()
    made = NSAForCausalLM.from_pretrained(target)
    assert made.dtype == torch.bfloat16 and made.config.num_selected == 4
    assert main([str(source), str(target), *options]) == 2
    assert "must not be there before" in capsys.readouterr().err
    assert {x.name for x in tmp_path.iterdir()} == {"source", "target"}
    edited(source, hidden_size="wide")
    assert main([str(source), str(tmp_path / "other")]) == 2
    assert "'hidden_size' expected int" in capsys.readouterr().err
    for words, message in (
        (["hidden_size=4"], "hidden_size"),
        (["window=4", "window=8"], "window must be set once"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([str(source), str(tmp_path / "other"), "--set", *words])
        assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["none", "./none", "../no/folder", None])
def test_a_source_that_is_not_there(name, tmp_path, capsys):
    """What is no folder and no owner/name is not asked of the Hub."""
    source = str(tmp_path / "none") if name is None else name
    assert main([source, str(tmp_path / "target")]) == 2
    message = "none must be a folder, or owner/name on the Hugging Face Hub; there is no such"
    assert message.replace("none", source) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_name_that_the_hub_has_not(tmp_path, monkeypatch):
    def from_pretrained(source):
        raise OSError(f"{source} is not a valid\nmodel identifier")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", from_pretrained)
    message = (
        "no/model must be a folder, or owner/name .*, got no config.json: .* valid model id"
    )
    with pytest.raises(OSError, match=message):
        convert("no/model", tmp_path / "target")


def test_a_check_that_finds_another_model_writes_nothing(source, tmp_path, capsys, monkeypatch):
    """As of a mapping with a fault."""
    monkeypatch.setattr("nsa_torch.huggingface.convert.pairs", lambda x, width: x)
    with pytest.raises(DifferentError, match="logits of 64 tokens are"):
        convert(source, tmp_path / "target", check=64, **NSA)
    sizes = [f"{name}={value}" for name, value in NSA.items()]
    command = [str(source), str(tmp_path / "target"), "--check", "64", "--set", *sizes]
    assert main(command) == 1
    assert "nothing was written" in capsys.readouterr().err
    assert {x.name for x in tmp_path.iterdir()} == {"source"}


def test_files_are_read_and_written_one_at_a_time(source, tmp_path, folders):
    """Of a source in several files, whose weights are those of one file."""
    (source / "model.safetensors").unlink()
    dense("qwen2").save_pretrained(source, max_shard_size="40KB")
    convert(source, tmp_path / "target", **NSA)
    assert len(list((tmp_path / "target").glob("model-*.safetensors"))) > 2
    one = NSAForCausalLM.from_pretrained(folders("qwen2")[1]).state_dict()
    other = NSAForCausalLM.from_pretrained(tmp_path / "target").state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_of_one_file_and_several_transformers_chooses(source, tmp_path):
    """As where a model was trained further and saved over its shards."""
    kept = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").unlink()
    other = dense("qwen2")
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    other.save_pretrained(source, max_shard_size="40KB")
    (source / "model.safetensors").write_bytes(kept)
    convert(source, tmp_path / "target", check=64, **NSA)
    made = NSAForCausalLM.from_pretrained(tmp_path / "target")
    theirs = safetensors.torch.load_file(source / "model.safetensors")["model.norm.weight"]
    assert torch.equal(made.model.norm.weight, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("case", ["llama 3.1", "qwen3 yarn", "qwen2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu(case, start, dtype, tmp_path):
    """Gates of exactly 0, 1 and 1/2 in the kernels, forward and backward."""
    kind, configuration, changed = CASES[case]
    sizes = dict(
        hidden_size=256, head_dim=64, num_attention_heads=8, max_position_embeddings=2048
    )
    torch.manual_seed(0)
    theirs = kind(configuration(**SIZES | changed | sizes)).eval()
    theirs.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "target", start=start)
    # Loaded, not converted in memory: that would round the rates of the dense model's rotation.
    given = {"dtype": getattr(torch, dtype), "device_map": "cuda"}
    ours = NSAForCausalLM.from_pretrained(tmp_path / "target", **given).eval()
    theirs = kind.from_pretrained(tmp_path / "source", **given).eval()
    ids = tokens(width=1024).cuda()
    found, rough = (logits_on_gpu(x, ids) for x in (ours, theirs))
    exact = logits_on_gpu(theirs.double(), ids)
    size = np.sqrt(np.mean(exact**2))  # the rule's absolute limit is for outputs of size 1
    parity = check_parity("logits", found / size, exact / size, rough / size, dtype=dtype)
    assert parity.ok, parity.reason
    ours.train()(ids, labels=ids).loss.backward()
    assert all(bool(x.grad.isfinite().all()) for x in ours.parameters())
    layer = ours.model.layers[0].self_attn
    grad = (layer.W_V if start == "shared" else layer.W_V_sel).weight.grad
    assert bool(grad.any())


@torch.no_grad()
def logits_on_gpu(model, ids):
    return model(ids, use_cache=False).logits.double().cpu().numpy()
