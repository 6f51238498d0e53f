"""Both layers as a user has them: one file of weights gives the same output, gradients and decode
in torch and in JAX; how they start, what they refuse.
"""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import nsa_jax
import nsa_torch
from bench.judge.parity import FLOAT32_MAX
from nsa_core.layer import PHI, LayerSpec
from nsa_interop import weights
from nsa_jax.nn import NSAAttention as JaxAttention
from nsa_jax.nn import apply_rope
from nsa_torch import NSAAttention as TorchAttention
from tests.limits import set_limits
from tests.model_sizes import MODELS
from tests.refusals import refused

SIZES, ROWS = MODELS["layer"], MODELS["layers"]


def in_torch(seed=0, **options):
    torch.manual_seed(seed)
    return TorchAttention(**SIZES | options)


def in_jax(dense_below=0, **options):
    return JaxAttention(LayerSpec(**SIZES | options), rngs=nnx.Rngs(0), dense_below=dense_below)


@pytest.fixture
def both(tmp_path):
    """The layers of both frameworks, with torch's weights by a file, random where they start as a
    constant.
    """

    def made(change=lambda module: None, **options):
        module, twin = in_torch(**options), in_jax(**options)
        with torch.no_grad():
            for name, x in module.named_parameters():
                if name.endswith("bias") or "norm" in name or name == "gate.weight":
                    x.normal_()
            change(module)
        weights.save(tmp_path / "layer", module)
        weights.load(tmp_path / "layer", twin)
        return module, twin

    return made


def tokens(length=63, batch=2, seed=1):
    return np.random.default_rng(seed).normal(size=(batch, length, 24)).astype(np.float32)


@nnx.jit
def run_jax(layer, x, cache, where):
    return layer(x, *cache, **where)


def run(layer, x, *cache, **where):
    """The output, and the cache; without gradient."""
    if not isinstance(layer, torch.nn.Module):
        y, kv = run_jax(layer, jnp.asarray(x), cache, where)
        return np.asarray(y), kv
    with torch.no_grad():
        y, kv = layer(torch.from_numpy(x), *cache, **where)
        return y.numpy(), kv


def in_pieces(layer, x, lengths):
    kv, parts = layer.init_cache(len(x), x.shape[1] + 1), []
    for part in np.split(x, np.cumsum(lengths)[:-1], axis=1):
        y, kv = run(layer, part, kv)
        parts.append(y)
    return np.concatenate(parts, axis=1), kv


def gradients(module, x):
    """Of a loss, by the names of torch's parameters."""
    y, _ = module(torch.from_numpy(x))
    names, found = zip(*module.named_parameters(), strict=True)
    options = dict(allow_unused=True, materialize_grads=True)
    grads = torch.autograd.grad(y.sin().sum(), found, **options)
    return dict(zip(names, grads, strict=True))


@nnx.jit
def gradients_of_jax(twin, x):
    """And the output."""

    def loss(twin):
        y, _ = twin(x)
        return jnp.sin(y).sum(), y

    grads, y = nnx.grad(loss, has_aux=True)(twin)
    return y, grads


def close(got, want, bound=FLOAT32_MAX):
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ROWS)
def test_one_file_gives_the_same_in_both(name, both, tmp_path):
    """Whole, in pieces through the cache, packed, and gradients, each of some size."""
    module, twin = both(**ROWS[name])
    made = TorchAttention(**module.spec.as_dict())
    assert made.spec == module.spec and hash(made.spec) == hash(module.spec)
    x = tokens()
    want, none = run(module, x)
    assert none is None and np.abs(want).max() > 0.05
    for lengths in ([20, 1, 30, 12], [1] * 63) if name == "mean" else ([20, 1, 30, 12],):
        got, kv = in_pieces(module, x, lengths)
        close(got, want)
        assert kv.longest == 63 and kv.length.tolist() == [63, 63]
    close(in_pieces(twin, x, [21] * 3)[0], want)
    row, lengths = x[:1], (30, 1, 32)
    alone = [run(module, part)[0] for part in np.split(row, np.cumsum(lengths)[:-1], axis=1)]
    alone = np.concatenate(alone, axis=1)
    close(run(module, row, cu_seqlens=torch.tensor([0, 30, 31, 63]))[0], alone)
    if name in ("mlp_pe", "norms", "taps"):
        ids = jnp.asarray(np.repeat(np.arange(3), lengths)[None], jnp.int32)
        close(run(twin, row, segment_ids=ids)[0], alone)
    y, theirs = gradients_of_jax(twin, jnp.asarray(x))
    close(y, want)
    nnx.update(twin, theirs)
    weights.save(tmp_path / "gradients", twin)
    read = in_torch(**ROWS[name])
    weights.load(tmp_path / "gradients", read)
    # The selected branch is read alone; a shift of all compressed keys cancels in the softmax.
    rotated = ("norms", "taps of each branch")  # by position, after phi
    unread = {"mlp_rope": ("_cmp", "_win", "phi_")} | dict.fromkeys(rotated, ())
    unread = unread.get(name, ("k_mlp.b2",))
    for key, gradient in gradients(module, x).items():
        size = gradient.abs().max().item()
        found = read.get_parameter(key).detach()
        np.testing.assert_allclose(
            found, gradient, rtol=0, atol=1e-4 * max(size, 1), err_msg=key
        )
        assert (size > 1e-4) != any(x in key for x in unread), key


def test_the_seeds_state_dict_keys():
    for options, keys in MODELS["state dicts"]:
        module = in_torch(**options)
        assert module.state_dict().keys() == {*keys, *module.spec.kind_keys()}
    assert in_torch(phi="mlp").state_dict()["phi_k_conv.weight"].shape == (8, 1, 8)


@pytest.mark.parametrize("phi", PHI)
@pytest.mark.parametrize("borders", [None, [0, 5], [0, 3, 5]])
def test_rows_too_short_to_compress_have_gradients_of_zero(phi, borders):
    """And not None, for which `DistributedDataParallel` waits in vain."""
    module, packed = in_torch(phi=phi), {}
    if borders is not None:
        packed["cu_seqlens"] = torch.tensor(borders, dtype=torch.int32)
    out, _ = module(torch.from_numpy(tokens(5, 1)), **packed)
    parameters = dict(module.named_parameters())
    found = torch.autograd.grad(out.sum(), [*parameters.values()])
    for name, x in zip(parameters, found, strict=True):
        assert not ("phi" in name or "cmp" in name) or (x == 0).all(), name


def test_phi_mlp_of_jax_starts_as_the_mean():
    conv = in_jax(phi="mlp")
    for phi in conv.phi_k_conv, conv.phi_v_conv:
        assert (phi.weight[...] == 1 / SIZES["l"]).all()


KINDS = [*((phi, "sigmoid") for phi in PHI), ("avg", "head")]
TAPS = {"avg": 3}  # of the kinds of phi


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("phi, gate", KINDS)
def test_a_layer_made_on_meta_starts_as_any_other(phi, gate, bias):
    """By its own `reset_parameters`, and by that of each module, as FSDP and others call it."""
    options = dict(phi=phi, bias=bias, gate=gate, qk_norm_eps=1e-6 if bias else None)
    options["key_taps"] = TAPS.get(phi)
    start = in_torch(**options)
    with torch.device("meta"):
        layers = [in_torch(**options), in_torch(**options)]
    for layer in layers:
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            torch.nn.init.constant_(parameter, math.nan)
    torch.manual_seed(0)
    layers[0].reset_parameters()
    for module in layers[1].modules():
        if module is not layers[1] and hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, parameter in start.named_parameters():
        own, each = (layer.get_parameter(name) for layer in layers)
        assert torch.equal(own, parameter), name
        assert each.abs().max() <= 2 * parameter.abs().max(), name
        if phi == "mlp" and name.startswith("phi_"):
            assert (each == 1 / SIZES["l"]).all() and (parameter == 1 / SIZES["l"]).all()
    there = in_torch(**options, dtype=torch.float64, device="meta")
    assert {(x.dtype, x.device.type) for x in there.parameters()} == {(torch.float64, "meta")}


@pytest.mark.parametrize("made", [in_torch, in_jax])
def test_a_cache_has_one_key_and_one_value_for_all_branches(made):
    """1 + 1/d of them a token, and the last windows. What the layer computes of them is that of
    the dense models that `test_convert.py` converts.
    """
    mine, other = (made(kv=kv).init_cache(2, 40) for kv in ("shared", "separate"))
    assert mine.sliding_key is mine.sliding_value is None
    assert other.sliding_key.shape == mine.selected_key.shape


@pytest.mark.parametrize(
    "options", [{"rope_scale": 0.3}, {"rope_scaling": ROWS["norms"]["rope_scaling"]}], ids=str
)
def test_keys_that_compression_rotates_turn_as_others_do(options):
    """The MLP's, by the rates, the scale and the length of rotated keys."""
    module = in_torch(phi="mlp_rope", **options)
    spec, key = module.spec, torch.randn(2, 30, 2, 8)
    of = lambda params: nsa_torch.compress(key, params, config=spec.config).detach().numpy()
    plain = jnp.asarray(of(module.phi_k_mlp.params()))
    middle = np.arange(plain.shape[1], dtype=np.float32)[None] * spec.d + (spec.l - 1) / 2
    turns = dict(base=spec.rope_base, scale=spec.rope_scale, scaling=spec.rope_scaling)
    close(of(module.compress_params()[0]), apply_rope(plain, middle, **turns), 1e-5)


def loops(key, weight, position, before):
    """`key_taps` of `LayerSpec`, token by token."""
    taps, found = len(weight), np.empty_like(key)
    for row, token in np.ndindex(key.shape[:2]):
        seen = np.concatenate([before[row], key[row, : token + 1]])[::-1]  # newest first
        total = sum(
            weight[taps - 1 - back] * seen[back]
            for back in range(taps)
            if back <= position[row, token]
        )
        found[row, token] = key[row, token] + total / (1 + np.exp(-total))
    return found


@pytest.mark.parametrize("kv", ["shared", "separate"])
def test_convolved_keys_are_what_loops_say(kv, both):
    """Of sequences that begin in a row, and of rows that continue."""
    module, twin = both(kv=kv, key_taps=3)
    rng = np.random.default_rng(0)
    columns = module.key_conv.out_channels
    assert columns == (16 if kv == "shared" else 48)
    key, before = (rng.normal(size=(2, n, columns)).astype(np.float32) for n in (7, 2))
    position = np.array(MODELS["positions"])
    weight = module.key_conv.weight[:, 0].T.detach().numpy()
    begins = np.arange(7)[None].repeat(2, 0)
    absent = np.full_like(before, np.nan)  # no key before a sequence that begins is read
    for at, earlier, given in (
        (position, before, (key, position, before)),
        (begins, absent, (key, begins)),
    ):
        want = loops(key, weight, at, earlier)
        close(module.key_conv(*map(torch.from_numpy, given)).detach(), want)
        close(twin.key_conv(*map(jnp.asarray, given)), want)
    low = module.bfloat16().key_conv(*map(torch.from_numpy, given))
    assert low.dtype == torch.float32


def test_convolved_keys_in_one_product(monkeypatch, both):
    set_limits(monkeypatch, fused_heads_from=1)
    module, twin = both(kv="shared", gate="head", gate_temp=0.7, key_taps=3)
    close(run(module, tokens(20))[0], run(twin, tokens(20))[0])


def test_a_row_s_newest_keys_follow_its_own_tokens(both):
    """Rows of other numbers of new tokens, none too; rows that change places."""
    module, _ = both(kv="shared", gate="head", key_taps=4)
    x = tokens(20)
    want, _ = run(module, x)
    kv = module.init_cache(2, 32)
    run(module, x[:, :6], kv, new_lengths=torch.tensor([5, 0]))
    second = np.stack([x[0, 5:8], x[1, :3]])
    got, kv = run(module, second, kv, new_lengths=torch.tensor([2, 3]))
    close(got[0, :2], want[0, 5:7])
    close(got[1], want[1, :3])
    turned = kv.map(lambda x: x.flip(0))
    got, _ = run(module, np.stack([x[1, 3:5], x[0, 7:9]]), turned)
    close(got, np.stack([want[1, 3:5], want[0, 7:9]]))
    with refused("tokens cannot be removed"):
        nsa_torch.cache.crop(kv, 1)
    kv.reset()
    close(run(module, x, kv)[0], want)


@pytest.mark.parametrize("made", [in_torch, in_jax])
def test_a_cache_is_of_a_layer_that_convolves_alike(made):
    layers = {taps: made(key_taps=taps) for taps in (None, 3, 4)}
    for (taps, layer), (others, other) in itertools.permutations(layers.items(), 2):
        with refused(f"a layer with key_taps={taps}, got a cache for key_taps={others}"):
            run(layer, tokens(4), other.init_cache(2, 8))


@pytest.mark.parametrize("start", [None, (0, 2, 2), [-1.0, 0.5, 3.0]])
def test_where_gates_of_each_query_head_start(start):
    """Near the sigmoids of three numbers, in both frameworks; which no checkpoint states."""
    options = {"gate": "head", "gate_bias": start}
    module, twin, other = in_torch(**options), in_jax(**options), in_torch(seed=5, gate="head")
    for bias in module.gate.bias.detach(), twin.gate.bias[...]:
        np.testing.assert_array_equal(bias, np.tile(start or (-2.0, 2.0, 2.0), 6))
    for weight in module.gate.weight.detach().numpy(), np.asarray(twin.gate.kernel[...]):
        most = 0.1 * (6 / (24 + 18)) ** 0.5
        assert 0.9 * most < np.abs(weight).max() <= most
    assert other.hyper_parameters() == module.hyper_parameters()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.gate.bias, module.gate.bias)


@pytest.mark.parametrize("number", [0, 1], ids=["torch", "jax"])
def test_the_selected_branch_alone(number, both):
    """It is what gates of 0, 1, 0 give, and, while every block is selected, dense attention, of
    rows and packed rows; what only the other branches read counts no more.
    """

    def other_branches(module, value):
        """Dense attention does not read keys that choose blocks; nothing reads the window's."""
        for name in ("W_K_win", "W_V_win", *(("W_K_cmp",) if value else ())):
            getattr(module, name).weight.fill_(value or math.nan)

    made = {"gate": "selected", "phi": "mlp_rope"}
    plain = both(**made)[number]
    alone = both(lambda module: other_branches(module, 0), **made)[number]
    dense = both(lambda module: other_branches(module, 1e-9), **made, dense_below=65)[number]
    plain.implementation = ("sdpa", "xla")[number]  # all branches
    x, long, bounds = tokens(64, batch=1), tokens(65, batch=1), (0, 40, 60)
    ids = jnp.asarray(np.repeat([[0, 1, -1]], [40, 20, 4], axis=1))
    config = plain.spec.config
    if number == 0:
        packed = {"cu_seqlens": torch.tensor(bounds)}
        rows = {
            "varlen": nsa_torch.varlen_metadata(torch.tensor(bounds), total=64, config=config)
        }
    else:
        packed = {"segment_ids": ids}
        rows = {"varlen": nsa_jax.varlen_metadata(ids, config=config)}
    for where in ({}, packed, rows) if number == 0 else (packed, rows):
        want = run(plain, x, **where)[0]
        assert np.abs(want).max() > 0.05
        close(run(alone, x, **where)[0], want)
        close(run(dense, x, **where)[0], want)
    want = run(plain, long)[0]
    close(run(alone, long)[0], want)  # one token more, and blocks are chosen
    assert np.abs(run(dense, long)[0] - want).max() > 1e-3
    alone.implementation = ""  # not the same as None
    with refused("implementation must be one of "):
        run(alone, x)


@pytest.mark.parametrize("d_v", [6, 8])  # torch's own attention where widths are equal
def test_gradients_of_dense_attention_are_those_of_the_selected_branch(d_v, both):
    layers = [both(gate="selected", d_v=d_v, dense_below=below) for below in (0, 65)]
    x = tokens(64)
    of_torch = [gradients(module, x) for module, _ in layers]
    for name, gradient in of_torch[0].items():
        torch.testing.assert_close(of_torch[1][name], gradient, rtol=1e-4, atol=1e-4)
        assert (gradient.abs().max() > 0.1) != name.endswith(("_cmp.weight", "_win.weight"))
    if d_v == 8:  # no other branch of JAX
        return
    results = [gradients_of_jax(twin, jnp.asarray(x)) for _, twin in layers]
    (y, a), (want, b) = ((y, nnx.to_flat_state(grads)) for y, grads in results)
    close(y, want)
    for (name, gradient), (_, other) in zip(a, b, strict=True):
        np.testing.assert_allclose(
            gradient[...], other[...], rtol=1e-4, atol=1e-4, err_msg=name
        )


def test_a_cache_made_under_autocast_has_its_dtype():
    """A cache that was made before is refused."""
    layer, x = in_torch(), torch.from_numpy(tokens(40))
    before = layer.init_cache(2, 40)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cache = layer.init_cache(2, 40)
        steps = [layer(part, cache)[0] for part in x.split(25, dim=1)]
        torch.testing.assert_close(torch.cat(steps, dim=1), layer(x)[0], rtol=2e-2, atol=2e-3)
        with refused("got float32; make the cache with init_cache(.., dtype=torch.bfloat16)"):
            layer(x, before)


def test_switches_name_implementations():
    assert in_torch(use_flash=False).implementation == nsa_jax.Branches.each("sdpa")
    module = in_torch(use_triton_sel=True)
    assert module.implementation == nsa_jax.Branches(None, "triton", None)
    with refused("triton", NotImplementedError):
        module(torch.zeros(1, 5, 24))
