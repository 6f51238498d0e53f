"""The two modules: JAX and torch on the same weights, decode, phi, gates, a training step."""

import copy
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import nsa_jax
import nsa_torch
from bench.judge.parity import FLOAT32_MAX
from nsa_core.layer import GATES, PHI, LayerSpec
from nsa_interop import weights
from nsa_jax.nn import NSAAttention as JaxAttention
from nsa_jax.nn import apply_rope
from nsa_torch import NSAAttention as TorchAttention
from nsa_torch import heads, reference
from tests.limits import set_limits

SIZES = dict(dim=24, n_heads=6, n_kv_groups=2, d_k=8, d_v=6, l=8, d=4, l_sel=16, n_sel=4, w=10)
PROJECTIONS = [
    *("W_Q", "W_K_cmp", "W_V_cmp", "W_K_sel", "W_V_sel", "W_K_win", "W_V_win"),
    "out",
]


def modules(**options):
    """A torch module, and the JAX one with its weights, taken through a file's arrays."""
    torch.manual_seed(options.pop("seed", 0))
    implementation = options.pop("implementation", None)
    below = dict(dense_below=options.pop("dense_below", 0))
    module = TorchAttention(**(SIZES | options), implementation=implementation, **below)
    twin = JaxAttention(LayerSpec(**(SIZES | options)), rngs=nnx.Rngs(0), **below)
    return module, twin


def tokens(length=63, batch=2, seed=1):
    return np.random.default_rng(seed).normal(size=(batch, length, 24)).astype(np.float32)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("phi", PHI)
@pytest.mark.parametrize("saved_by", ["torch", "jax"])
def test_a_checkpoint_of_either_gives_the_same_output(phi, gate, saved_by, tmp_path):
    module, twin = modules(phi=phi, gate=gate, gate_temp=0.7, rope_scale=2.0)
    source, target = (module, twin) if saved_by == "torch" else (twin, module)
    weights.save(tmp_path / "layer.safetensors", source)
    weights.load(tmp_path / "layer.safetensors", target)
    x = tokens()
    with torch.no_grad():
        expected, none = module(torch.from_numpy(x))
    got, _ = nnx.jit(lambda m, x: m(x))(twin, jnp.asarray(x))
    assert none is None
    np.testing.assert_allclose(np.asarray(got), expected.numpy(), rtol=0, atol=FLOAT32_MAX)
    assert np.abs(expected.numpy()).max() > 0.05


@pytest.mark.parametrize(
    "heads", [(2, 2), (6, 2), (6, 1), (16, 1)], ids=lambda h: f"G{h[0] // h[1]}"
)
def test_jax_equals_torch_on_the_same_weights(heads, tmp_path):
    """Whole, and prefilled then decoded, for every group size; 111 tokens, D != Dv."""
    module, twin = modules(n_heads=heads[0], n_kv_groups=heads[1], phi="mlp_pe")
    weights.save(tmp_path / "layer.safetensors", module)
    weights.load(tmp_path / "layer.safetensors", twin)
    x = tokens(111)
    run = nnx.jit(lambda m, x, kv: m(x, kv))
    with torch.no_grad():
        expected = module(torch.from_numpy(x))[0].numpy()
        first, kv = module(torch.from_numpy(x[:, :70]), module.init_cache(2, 111))
        second, _ = module(torch.from_numpy(x[:, 70:]), kv, prefill=False)
    whole, _ = run(twin, jnp.asarray(x), None)
    a, kv = run(twin, jnp.asarray(x[:, :70]), twin.init_cache(2, 111))
    b, _ = run(twin, jnp.asarray(x[:, 70:]), kv)
    for got in (whole, np.concatenate([a, b], 1), torch.cat([first, second], 1).numpy()):
        np.testing.assert_allclose(np.asarray(got), expected, rtol=0, atol=FLOAT32_MAX)


def test_a_checkpoint_of_another_layer_is_refused(tmp_path):
    module, twin = modules(gate="softmax")
    weights.save(tmp_path / "layer.safetensors", module)
    other = JaxAttention(LayerSpec(**SIZES), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="gate"):
        weights.load(tmp_path / "layer.safetensors", other)
    weights.load(tmp_path / "layer.safetensors", twin)


def test_the_seeds_state_dict_keys():
    keys = {f"{name}.weight" for name in PROJECTIONS}
    keys |= {f"gate.{fc}.{part}" for fc in ("fc1", "fc2") for part in ("weight", "bias")}
    module, _ = modules()
    assert set(module.state_dict()) == keys | set(module.spec.kind_keys())
    gates = {key for key in keys if key.startswith("gate.")}
    module, _ = modules(gate="head")
    own = keys - gates | {"gate.weight", "gate.bias"}
    assert set(module.state_dict()) == own | set(module.spec.kind_keys())
    module, _ = modules(phi="mlp")
    keys |= {"phi_k_conv.weight", "phi_v_conv.weight"}
    assert set(module.state_dict()) == keys | set(module.spec.kind_keys())
    assert module.state_dict()["phi_k_conv.weight"].shape == (8, 1, 8)


@pytest.mark.parametrize("splits", [[63], [20, 1, 30, 12], [1] * 63], ids=len)
@pytest.mark.parametrize(
    "options",
    [{}, {"phi": "mlp_pe"}, {"phi": "mlp_rope"}, {"gate": "head"}, {"kv": "shared"}],
    ids=lambda x: "-".join(x.values()),
)
def test_decode_of_the_torch_module(options, splits):
    module, _ = modules(**options)
    x = torch.from_numpy(tokens())
    with torch.no_grad():
        whole, _ = module(x)
        kv = module.init_cache(2, 64)
        parts = []
        for part in x.split(splits, dim=1):
            y, kv = module(part, kv, prefill=not parts)
            parts.append(y)
    assert kv.longest == 63 and kv.length.tolist() == [63, 63]
    got = torch.cat(parts, dim=1)
    np.testing.assert_allclose(got.numpy(), whole.numpy(), rtol=0, atol=FLOAT32_MAX)


def test_decode_runs_the_plan_of_one_attention(monkeypatch):
    """A name for all branches scores too, and no log-sum-exp is made that nobody reads."""
    calls = {}

    def spy(step):
        run = getattr(reference, step)

        def call(*args, **kwargs):
            calls[step] = kwargs.get("with_lse")
            return run(*args, **kwargs)

        monkeypatch.setattr(reference, step, call)

    steps = [f"{branch}_attention" for branch in nsa_jax.Branches._fields]
    for step in (*steps, "select_blocks"):
        spy(step)
    module, _ = modules(implementation="reference")
    with torch.no_grad():
        module(torch.from_numpy(tokens(9)), module.init_cache(2, 9))
    assert calls == dict.fromkeys(steps, False) | {"select_blocks": None}


def test_decode_of_the_torch_module_with_gradients():
    """Under autograd the cache is copied; the gradients are those of the whole."""
    module, _ = modules(phi="mlp")
    x = torch.from_numpy(tokens(40))
    whole, _ = module(x)
    first, kv = module(x[:, :25], module.init_cache(2, 40))
    second, _ = module(x[:, 25:], kv, prefill=False)
    cotangent = torch.from_numpy(tokens(40, seed=5))
    names, params = zip(*module.named_parameters(), strict=True)
    want = torch.autograd.grad((whole * cotangent).sum(), params)
    got = torch.autograd.grad((torch.cat([first, second], 1) * cotangent).sum(), params)
    for name, a, b in zip(names, got, want, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("phi, gate", [("mlp_pe", "sigmoid"), ("mlp_rope", "head")])
def test_decode_of_the_jax_module(phi, gate):
    _, twin = modules(phi=phi, gate=gate)
    x = jnp.asarray(tokens())
    whole, _ = nnx.jit(lambda m, x: m(x))(twin, x)
    kv, parts = twin.init_cache(2, 64), []
    step = nnx.jit(lambda m, x, kv: m(x, kv))
    for part in jnp.split(x, [21, 42], axis=1):
        y, kv = step(twin, part, kv)
        parts.append(y)
    np.testing.assert_allclose(
        np.concatenate(parts, 1), np.asarray(whole), rtol=0, atol=FLOAT32_MAX
    )


@pytest.mark.parametrize("phi", ["mlp_pe", "mlp_rope"])
def test_packed_batches_of_both_modules(phi, tmp_path):
    module, twin = modules(phi=phi)
    weights.save(tmp_path / "layer.safetensors", module)
    weights.load(tmp_path / "layer.safetensors", twin)
    lengths = (30, 1, 44)
    x = tokens(sum(lengths), batch=1)
    ids = np.repeat(np.arange(3), lengths)[None].astype(np.int32)
    bounds = torch.tensor([0, 30, 31, 75])
    with torch.no_grad():
        packed, _ = module(torch.from_numpy(x), cu_seqlens=bounds)
        alone = [module(part)[0] for part in torch.from_numpy(x).split(lengths, dim=1)]
    got, _ = nnx.jit(lambda m, x, ids: m(x, segment_ids=ids))(
        twin, jnp.asarray(x), jnp.asarray(ids)
    )
    want = torch.cat(alone, dim=1).numpy()
    np.testing.assert_allclose(packed.numpy(), want, rtol=0, atol=FLOAT32_MAX)
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=FLOAT32_MAX)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_phi_mlp_starts_as_the_mean(framework, tmp_path):
    mean, mean_twin = modules(phi="avg")
    conv, conv_twin = modules(phi="mlp", gate="sigmoid")
    x = tokens()
    if framework == "torch":
        shared = dict(mean.named_parameters())  # as the seed's: phi is what the module says
        conv.load_state_dict(shared, strict=False)
        with torch.no_grad():
            a, b = mean(torch.from_numpy(x))[0].numpy(), conv(torch.from_numpy(x))[0].numpy()
    else:
        shared = nnx.state(mean_twin, nnx.Param)
        nnx.update(conv_twin, shared)
        run = nnx.jit(lambda module, x: module(x)[0])
        a, b = (np.asarray(run(module, jnp.asarray(x))) for module in (mean_twin, conv_twin))
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    if framework == "torch":
        with torch.no_grad():
            conv.phi_v_conv.weight.mul_(2.0)
            assert (conv(torch.from_numpy(x))[0] - torch.from_numpy(a)).abs().max() > 1e-3


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("phi, gate", [*((phi, "sigmoid") for phi in PHI), ("avg", "head")])
def test_a_layer_made_on_meta_starts_as_any_other(phi, gate, bias):
    """By its own `reset_parameters`, and by that of each module, as FSDP and others call it."""
    options = SIZES | dict(phi=phi, bias=bias, gate=gate, qk_norm_eps=1e-6 if bias else None)
    torch.manual_seed(0)
    start = TorchAttention(**options)
    with torch.device("meta"):
        layers = [TorchAttention(**options), TorchAttention(**options)]
    for layer in layers:
        layer.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.fill_(math.nan)
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
            assert (each == 1 / SIZES["l"]).all()


def test_where_and_of_what_dtype_a_layer_is_made():
    """All parameters; of the same numbers."""
    for phi, gate in [*((phi, "sigmoid") for phi in PHI), ("mlp_pe", "head")]:
        options = SIZES | dict(phi=phi, bias=True, gate=gate)
        low = TorchAttention(**options, dtype=torch.bfloat16, device=torch.device("cpu"))
        assert {x.dtype for x in low.parameters()} == {torch.bfloat16}
        there = TorchAttention(**options, dtype=torch.float64, device="meta")
        assert {(x.dtype, x.device.type) for x in there.parameters()} == {
            (torch.float64, "meta")
        }
        low.load_state_dict(TorchAttention(**options).state_dict())
    y, kv = low(torch.from_numpy(tokens(9)).bfloat16(), low.init_cache(2, 9))
    assert y.dtype == kv.selected_key.dtype == torch.bfloat16 and bool(y.isfinite().all())


def same_by_a_file(module, twin, tmp_path):
    """Of the same file the layers of both frameworks give the same, torch's through its cache too;
    an input, and the output.
    """
    weights.save(tmp_path / "layer.safetensors", module)
    weights.load(tmp_path / "layer.safetensors", twin)
    x = tokens(30)
    with torch.no_grad():
        whole = module(torch.from_numpy(x))[0].numpy()
        first, kv = module(torch.from_numpy(x[:, :20]), module.init_cache(2, 30))
        second, _ = module(torch.from_numpy(x[:, 20:]), kv)
    theirs = nnx.jit(lambda m, x: m(x)[0])(twin, jnp.asarray(x))
    for got in (np.asarray(theirs), torch.cat([first, second], 1).numpy()):
        np.testing.assert_allclose(got, whole, rtol=0, atol=FLOAT32_MAX)
    return x, whole


def test_a_bias_is_added_in_both_modules(tmp_path):
    """To each projection; whole, through the cache, and in a file for both."""
    module, twin = modules(bias=True, phi="mlp_pe")
    names = {name for name, _ in module.named_parameters() if name.endswith("bias")}
    assert names == {f"{x}.bias" for x in (*PROJECTIONS, "gate.fc1", "gate.fc2")}
    with torch.no_grad():
        for name in names:
            module.get_parameter(name).normal_()
    x, whole = same_by_a_file(module, twin, tmp_path)
    for name in PROJECTIONS:
        silent = copy.deepcopy(module)
        with torch.no_grad():
            silent.get_parameter(f"{name}.bias").zero_()
            changed = silent(torch.from_numpy(x))[0].numpy()
        assert np.abs(changed - whole).max() > 1e-3, name
    with pytest.raises(
        ValueError, match="bias must be 'no such name' as in the module, got True"
    ):
        weights.load(tmp_path / "layer.safetensors", modules(phi="mlp_pe")[0])


@pytest.mark.parametrize("phi", ["avg", "mlp_pe"])
def test_one_key_and_one_value_for_all_branches(phi, tmp_path):
    """The layer is one whose branches have equal weights; a gradient is the sum of theirs."""
    module, twin = modules(phi=phi, kv="shared", bias=True)
    with torch.no_grad():
        module.W_K.bias.normal_(), module.W_V.bias.normal_()
    apart, _ = modules(phi=phi, bias=True)
    state = module.state_dict()
    names = {
        f"W_{x}_{branch}.{part}": f"W_{x}.{part}"
        for x in "KV"
        for branch in ("cmp", "sel", "win")
        for part in ("weight", "bias")
    }
    own = {
        k: v for k, v in state.items() if k not in {*names.values(), *module.spec.kind_keys()}
    }
    copies = {name: state[source] for name, source in names.items()}
    kind = {key: torch.zeros(()) for key in apart.spec.kind_keys()}
    apart.load_state_dict(own | copies | kind)
    weights.save(tmp_path / "layer.safetensors", module)
    weights.load(tmp_path / "layer.safetensors", twin)
    x, outputs = tokens(41), []
    for layer in (module, apart):
        y, _ = layer(torch.from_numpy(x))
        y.square().sum().backward()
        outputs.append(y.detach().numpy())
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-6)
    grads = nnx.jit(nnx.grad(lambda m: (m(jnp.asarray(x))[0] ** 2).sum()))(twin)
    for name in ("W_K", "W_V"):
        sum_ = sum(getattr(apart, f"{name}_{b}").weight.grad for b in ("cmp", "sel", "win"))
        ours = getattr(module, name).weight.grad
        torch.testing.assert_close(ours, sum_, rtol=1e-4, atol=1e-4)
        theirs = np.asarray(grads[name]["kernel"][...]).T
        np.testing.assert_allclose(theirs, ours.numpy(), rtol=1e-3, atol=1e-3)
    # A cache keeps them once: 1 + 1/d of a key and a value a token, and the last windows.
    mine, other = module.init_cache(2, 400), apart.init_cache(2, 400)
    assert mine.sliding_key is mine.sliding_value is None
    assert other.sliding_key.shape == mine.selected_key.shape
    run = nnx.jit(lambda m, x, kv: m(x, kv))
    kv = twin.init_cache(2, 41)
    assert kv.sliding_key is None
    a, kv = run(twin, jnp.asarray(x[:, :30]), kv)
    b, _ = run(twin, jnp.asarray(x[:, 30:]), kv)
    got = np.concatenate([a, b], axis=1)
    np.testing.assert_allclose(got, outputs[0], rtol=0, atol=FLOAT32_MAX)


@pytest.mark.parametrize("phi", ["mlp_pe", "mlp_rope"])
def test_what_a_compressed_key_tells_of_its_place(phi):
    """Its product with a query follows from their distance, or, of rotated keys, does not."""
    module, twin = modules(phi=phi, rope_scale=0.3)
    products = []
    for begin in (0, 4, 40):
        x, position = tokens(20, batch=1), np.arange(begin, begin + 20)[None]
        query, key, *_ = module.project(torch.from_numpy(x), torch.from_numpy(position))
        before = torch.zeros(1, begin, *key.compressed.shape[2:])  # whole strides
        raw, params = torch.cat([before, key.compressed], dim=1), module.compress_params()[0]
        compressed = nsa_torch.compress(raw, params, config=module.spec.config)
        last = compressed[0, -4:]  # windows that are tokens of x alone
        products.append(torch.einsum("gd,cgd->gc", query[0, -1, ::3], last).detach().numpy())
        both = jnp.asarray(raw.detach().numpy())
        theirs = nsa_jax.compress(both, twin_params(params), config=twin.spec.config)
        np.testing.assert_allclose(np.asarray(theirs), compressed.detach(), atol=1e-5)
    scale = np.abs(products[0]).max()
    moved = [np.abs(x - products[0]).max() / scale for x in products[1:]]
    assert (max(moved) < 1e-4) if phi == "mlp_rope" else (min(moved) > 1e-2), moved


def twin_params(params):
    """Of torch, for JAX."""
    kind = getattr(nsa_jax, type(params).__name__)
    return kind(*(jnp.asarray(x.detach().numpy()) for x in params))


@pytest.mark.parametrize("kind", ["pool", "mlp"])
def test_phi_mlp_learns_keys_and_values_apart(kind):
    """Keys' and values' parameters both get gradients, of their own."""
    module, _ = modules(phi={"pool": "mlp", "mlp": "mlp_pe"}[kind])
    y, _ = module(torch.from_numpy(tokens()))
    y.square().sum().backward()
    grads = {n: p.grad for n, p in module.named_parameters() if n.startswith("phi_")}
    assert len(grads) == {"pool": 2, "mlp": 10}[kind]
    for name, grad in grads.items():
        # A shift of all compressed keys cancels in the softmax: b2 of the keys alone.
        assert (grad.abs().max() > 1e-6) == (name != "phi_k_mlp.b2"), name


def test_rope_depends_on_the_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 3, 8)), jnp.float32) for _ in range(2))

    def product(at, other):
        position = lambda p: jnp.full((1, 1), p, jnp.int32)
        return np.asarray(
            (apply_rope(q, position(at)) * apply_rope(k, position(other))).sum(-1)
        )

    np.testing.assert_allclose(product(17, 5), product(112, 100), atol=1e-4)
    assert np.abs(product(17, 5) - product(17, 6)).max() > 1e-2
    position = np.arange(6, dtype=np.int32)[None]
    x = rng.normal(size=(1, 6, 3, 8)).astype(np.float32)
    product = torch.from_numpy(x).flatten(2)
    at = torch.from_numpy(position)
    query, *_ = heads.split(product, at, heads.Heads(3, 1, 8, 8, branches=0), scale=3.0)
    np.testing.assert_allclose(
        np.asarray(apply_rope(jnp.asarray(x), jnp.asarray(position), scale=3.0)),
        query.numpy(),
        atol=1e-6,
    )


def by_hand(x, weight, bias, temp):
    """Gates of each query head `[B, T, H, 3]`, number by number, in float64."""
    gates = np.empty((*x.shape[:2], len(bias) // 3, 3))
    for b, t, head, branch in np.ndindex(gates.shape):
        row = 3 * head + branch
        logit = x[b, t].astype(np.float64) @ weight[row].astype(np.float64) + bias[row]
        gates[b, t, head, branch] = 1 / (1 + np.exp(-logit / temp))
    return gates


@pytest.mark.parametrize("one_product", [False, True])
def test_gates_of_each_query_head(one_product, monkeypatch, tmp_path):
    """Both modules' against a loop, which a neighbour's head, another branch or no bias fails."""
    if one_product:
        set_limits(monkeypatch, fused_heads_from=1)
    module, twin = modules(gate="head", gate_temp=0.7, gate_bias=(-1, 0, 3))
    with torch.no_grad():
        module.gate.weight.normal_()
    weights.save(tmp_path / "layer.safetensors", module)
    weights.load(tmp_path / "layer.safetensors", twin)
    x, at = tokens(9), np.arange(9)[None]
    *_, ours = module.project(torch.from_numpy(x), torch.from_numpy(at))
    *_, theirs = twin.project(jnp.asarray(x), jnp.asarray(at))
    weight, bias = module.gate.weight.detach().numpy(), module.gate.bias.detach().numpy()
    want = by_hand(x, weight, bias, 0.7)
    for gates in (ours.detach().numpy(), np.asarray(theirs)):
        np.testing.assert_allclose(gates, want, rtol=0, atol=1e-5)
    wrong = [
        np.roll(weight, 3, axis=0),  # another head's
        np.roll(weight, 1, axis=0),  # another branch's
        weight.reshape(6, 3, -1).swapaxes(0, 1).reshape(18, -1),  # branch by branch
    ]
    for other in wrong:
        assert np.abs(by_hand(x, other, bias, 0.7) - want).max() > 0.1
    for temp, shift in ((1.0, 0), (0.7, 1)):
        assert np.abs(by_hand(x, weight, np.roll(bias, shift), temp) - want).max() > 0.03


@pytest.mark.parametrize("start", [None, (0, 2, 2), [-1.0, 0.5, 3.0]])
def test_where_gates_of_each_query_head_start(start):
    """Near the sigmoids of three numbers, in both frameworks; which no checkpoint states."""
    module, twin = modules(gate="head", gate_bias=start)
    logits = np.tile(start or (-2.0, 2.0, 2.0), 6)
    np.testing.assert_array_equal(module.gate.bias.detach().numpy(), logits)
    np.testing.assert_array_equal(np.asarray(twin.gate.bias[...]), logits)
    for weight in (module.gate.weight.detach().numpy(), np.asarray(twin.gate.kernel[...])):
        most = 0.1 * (6 / (24 + 18)) ** 0.5
        assert 0.9 * most < np.abs(weight).max() <= most
    other, _ = modules(gate="head", gate_bias=(1, 1, 1), seed=5)
    assert other.hyper_parameters() == module.hyper_parameters()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.gate.bias, module.gate.bias)


def test_gradients_of_gates_of_each_query_head(tmp_path):
    """JAX's are torch's, and none is zero."""
    module, twin = modules(gate="head")
    weights.save(tmp_path / "layer.safetensors", module)
    weights.load(tmp_path / "layer.safetensors", twin)
    x = tokens(40)
    module(torch.from_numpy(x))[0].square().sum().backward()
    grads = nnx.jit(nnx.grad(lambda m: (m(jnp.asarray(x))[0] ** 2).sum()))(twin)
    for got, want in (
        (grads["gate"]["kernel"][...].T, module.gate.weight.grad),
        (grads["gate"]["bias"][...], module.gate.bias.grad),
    ):
        np.testing.assert_allclose(np.asarray(got), want.numpy(), rtol=2e-4, atol=1e-4)
        assert want.abs().min(dim=0).values.max() > 1e-4


def test_softmax_gates_add_up_and_sigmoid_gates_do_not():
    for gate, adds_up in (("softmax", True), ("sigmoid", False), ("head", False)):
        module, _ = modules(gate=gate)
        x = torch.from_numpy(tokens(9))
        *_, gates = module.project(x, torch.arange(9).expand(2, 9))
        total = gates.sum(dim=-1)
        assert gates.shape == (2, 9, 6, 3)
        assert bool(torch.allclose(total, torch.ones_like(total), atol=1e-5)) is adds_up


def test_train_smoke_both_frameworks_take_the_same_steps(tmp_path):
    """Ten SGD steps on a copy task: the loss falls, and JAX and torch stay together."""
    module, twin = modules(phi="mlp_pe")
    weights.save(tmp_path / "layer.safetensors", module)
    weights.load(tmp_path / "layer.safetensors", twin)
    x = tokens(40)
    target = np.roll(x, 1, axis=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=3.0)
    losses = {"torch": [], "jax": []}
    for _ in range(10):
        optimizer.zero_grad()
        loss = (module(torch.from_numpy(x))[0] - torch.from_numpy(target)).square().mean()
        loss.backward()
        optimizer.step()
        losses["torch"].append(loss.item())
    tuned = nnx.Optimizer(twin, optax.sgd(3.0), wrt=nnx.Param)

    @nnx.jit
    def step(model, tuned):
        loss, grads = nnx.value_and_grad(
            lambda m: ((m(jnp.asarray(x))[0] - jnp.asarray(target)) ** 2).mean()
        )(model)
        tuned.update(model, grads)
        return loss

    losses["jax"] = [float(step(twin, tuned)) for _ in range(10)]
    np.testing.assert_allclose(losses["jax"], losses["torch"], rtol=1e-4)
    assert losses["jax"][-1] < 0.97 * losses["jax"][0]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("changed", [dict(qk_norm_eps=1e-3), dict(rope_scaling=YARN)], ids=str)
def test_norms_of_heads_and_a_scaled_rotation_in_both_modules(changed, tmp_path):
    """Whole, through the cache, and in a file for both, which another layer refuses."""
    module, twin = modules(**changed)
    with torch.no_grad():
        for name in ("q_norm", "k_norm") if "qk_norm_eps" in changed else ():
            getattr(module, name).weight.normal_()
    same_by_a_file(module, twin, tmp_path)
    (name,) = changed
    with pytest.raises(ValueError, match=f"{name} must be 'no such name' as in the module"):
        weights.load(tmp_path / "layer.safetensors", modules()[0])
    made = TorchAttention(**module.spec.as_dict())
    assert made.spec == module.spec and hash(made.spec) == hash(module.spec)


def test_keys_that_compression_rotates_are_scaled_as_others_are(tmp_path):
    """The MLP's, by the rates and the length of rotated keys."""
    module, twin = modules(phi="mlp_rope", rope_scaling=YARN, qk_norm_eps=1e-3)
    weights.save(tmp_path / "layer.safetensors", module)
    weights.load(tmp_path / "layer.safetensors", twin)
    spec, at = module.spec, torch.arange(30)[None]
    key = module.project(torch.from_numpy(tokens(30)), at)[1].compressed.detach()
    plain = nsa_torch.compress(key, module.phi_k_mlp.params(), config=spec.config).detach()
    middle = np.arange(plain.shape[1], dtype=np.float32)[None] * spec.d + (spec.l - 1) / 2
    turns = dict(base=spec.rope_base, scaling=spec.rope_scaling)
    want = apply_rope(jnp.asarray(plain.numpy()), jnp.asarray(middle), **turns)
    ours = nsa_torch.compress(key, module.compress_params()[0], config=spec.config)
    theirs = nsa_jax.compress(
        jnp.asarray(key.numpy()), twin.compress_params()[0], config=spec.config
    )
    for got in (ours.detach().numpy(), np.asarray(theirs)):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("phi", ["avg", "mlp_rope"])
def test_the_selected_branch_alone_is_what_gates_of_0_1_0_give(phi):
    """Of rows and packed rows; what only the other branches read counts no more."""
    module, twin = modules(gate="selected", phi=phi)
    automatic = module.implementation
    x, borders = tokens(150), torch.tensor([0, 90, 141])
    ids = jnp.asarray(np.repeat([[0, 1, -1]], [90, 51, 9], axis=1))
    for own, theirs in (({}, {}), ({"cu_seqlens": borders}, {"segment_ids": ids})):
        given = torch.from_numpy(x[:1] if own else x)
        module.implementation = automatic
        alone = module(given, **own)[0]
        module.implementation = "sdpa"  # all branches
        torch.testing.assert_close(alone, module(given, **own)[0], rtol=0, atol=FLOAT32_MAX)
        twin_given = jnp.asarray(given.numpy())
        twin.implementation = None
        jax_alone = np.asarray(twin(twin_given, **theirs)[0])
        twin.implementation = "xla"
        every = np.asarray(twin(twin_given, **theirs)[0])
        np.testing.assert_allclose(jax_alone, every, rtol=0, atol=FLOAT32_MAX)
        assert np.abs(every).max() > 0.05
    alone.square().sum().backward()
    moved = {
        name for name, y in module.named_parameters() if y.grad is not None and y.grad.any()
    }
    assert moved == {f"{name}.weight" for name in ("W_Q", "W_K_sel", "W_V_sel", "out")}
    module.implementation, twin.implementation = automatic, None
    with torch.no_grad():
        module.W_V_win.weight.fill_(math.nan)
        twin.W_V_win.kernel[...] = jnp.nan
        assert (
            torch.isfinite(module(given)[0]).all() and jnp.isfinite(twin(twin_given)[0]).all()
        )


@pytest.mark.parametrize("d_v", [6, 8])  # torch's own where widths are equal
def test_dense_attention_is_what_a_layer_of_the_selected_branch_computes(d_v, tmp_path):
    """As long as every block is selected: packed rows too, and the other branches are not read."""
    own = {"gate": "selected", "d_v": d_v}
    layers, dense = modules(**own), modules(**own, dense_below=65)
    assert not [name for name, _ in layers[0].named_parameters() if "gate" in name]
    path = tmp_path / "layer.safetensors"
    weights.save(path, layers[0])
    for other in (layers[1], *dense):
        weights.load(path, other)
    with torch.no_grad():  # what dense attention does not read
        dense[0].W_K_cmp.weight.zero_()
        dense[1].W_K_cmp.kernel[...] = 0
    long = tokens(65, batch=1)
    x, borders = long[:, :64], torch.tensor([0, 40, 60])
    ids = jnp.asarray(np.repeat([[0, 1, -1]], [40, 20, 4], axis=1))
    config = layers[0].spec.config
    torch_rows = nsa_torch.varlen_metadata(borders, total=64, config=config)
    rows = nsa_jax.varlen_metadata(ids, config=config)
    calls = (
        (0, x, {}),
        (0, x, {"cu_seqlens": borders}),
        (0, x, {"varlen": torch_rows}),
        (1, x, {}),
        (1, x, {"segment_ids": ids}),
        (1, x, {"varlen": rows}),
        (0, long, {}),
        (1, long, {}),
    )
    for framework, x, packed in calls:
        given = jnp.asarray(x) if framework else torch.from_numpy(x)
        with torch.no_grad():
            found = [
                np.asarray(each[framework](given, **packed)[0]) for each in (layers, dense)
            ]
        assert np.abs(found[0]).max() > 0.05
        if x is long:  # not one block more: there the blocks are chosen
            assert np.abs(found[0] - found[1]).max() > 1e-3
        else:
            np.testing.assert_allclose(*found, rtol=0, atol=FLOAT32_MAX)


def test_dense_attention_below_a_length_has_the_gradients_of_the_selected_branch():
    """Of each weight that counts, in both frameworks; the other branches' have none."""
    (module, twin), (dense, dense_twin) = (
        modules(gate="selected", dense_below=below) for below in (0, 65)
    )
    dense.load_state_dict(module.state_dict())
    nnx.update(dense_twin, nnx.state(twin, nnx.Param))
    x = tokens(64)
    for each in module, dense:
        each(torch.from_numpy(x))[0].square().sum().backward()
    loss = lambda layer: jnp.square(layer(jnp.asarray(x))[0]).sum()
    grads = [nnx.to_flat_state(nnx.grad(loss)(each)) for each in (twin, dense_twin)]
    for name, weight in module.named_parameters():
        other = dict(dense.named_parameters())[name].grad
        if name.endswith(("_cmp.weight", "_win.weight")):
            assert other is None or not other.any()
        else:
            torch.testing.assert_close(other, weight.grad, rtol=1e-4, atol=1e-5)
            assert other.abs().max() > 0.1
    for (name, a), (_, b) in zip(*grads, strict=True):
        counts = not str(name[0]).endswith(("_cmp", "_win"))
        np.testing.assert_allclose(a[...], b[...], rtol=1e-4, atol=1e-5)
        assert (np.abs(b[...]).max() > 0.1) == counts, name


def test_norms_are_of_each_head_and_before_the_rotation():
    """Queries and keys of one length, whatever the weights' size; values are left alone."""
    module, twin = modules(qk_norm_eps=1e-6)
    with torch.no_grad():
        for name in ("W_Q", "W_K_cmp", "W_K_sel", "W_K_win"):
            getattr(module, name).weight.mul_(7)
            getattr(twin, name).kernel[...] *= 7
        query, key, value, _ = module.project(
            torch.from_numpy(tokens(5)), torch.arange(5)[None]
        )
    position = jnp.broadcast_to(jnp.arange(5), (2, 5))
    for x in (query, *key, *twin.project(jnp.asarray(tokens(5)), position)[1]):
        length = np.linalg.norm(np.asarray(x), axis=-1)
        np.testing.assert_allclose(length, SIZES["d_k"] ** 0.5, rtol=1e-3)
    assert np.linalg.norm(np.asarray(value.selected), axis=-1).std() > 0.1


def of_autocast(layer, cached_before):
    """`layer` in two steps under autocast, on a cache that was made before it or within."""
    x, cache = torch.from_numpy(tokens(40)), layer.init_cache(2, 40)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = cache if cached_before else layer.init_cache(2, 40)
        steps = [layer(each, cache)[0] for each in x.split(25, dim=1)]
        return torch.cat(steps, dim=1), layer(x)[0]


def test_a_cache_made_under_autocast_has_its_dtype():
    found, wanted = of_autocast(TorchAttention(**SIZES), cached_before=False)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-3)


BAD = {
    "rope_scaling": (
        lambda: TorchAttention(**SIZES, rope_scaling=YARN | {"rope_type": "dynamic"}),
        "rope_scaling must have a rope_type of ('llama3', 'yarn'), or be None",
    ),
    "rope_scaling without a number": (
        lambda: TorchAttention(**SIZES, rope_scaling={"rope_type": "yarn", "factor": 2.0}),
        "rope_scaling of 'yarn' must have original_max_position_embeddings",
    ),
    "rope_scaling with another": (
        lambda: TorchAttention(**SIZES, rope_scaling=YARN | {"beta": 2.0}),
        "rope_scaling of 'yarn' must not have beta",
    ),
    "rope_scaling out of range": (
        lambda: TorchAttention(**SIZES, rope_scaling=YARN | {"factor": -1.0}),
        "rope_scaling: factor must be a positive number, got -1.0",
    ),
    "rope_scaling and rope_scale": (
        lambda: TorchAttention(**SIZES, rope_scaling=YARN, rope_scale=2.0),
        "rope_scale must be 1 and rope_base > 1 where rope_scaling is given",
    ),
    "qk_norm_eps": (
        lambda: TorchAttention(**SIZES, qk_norm_eps=0.0),
        "qk_norm_eps must be a positive number or None, got 0.0",
    ),
    "dense_below of other gates": (
        lambda: modules(dense_below=64, gate="head"),
        "dense_below must be 0 where gate='head', got 64",
    ),
    "dense_below of other gates in JAX": (
        lambda: JaxAttention(LayerSpec(**SIZES), dense_below=64, rngs=nnx.Rngs(0)),
        "dense_below must be 0 where gate='sigmoid', got 64",
    ),
    "dense_below beyond what is selected": (
        lambda: modules(dense_below=66, gate="selected"),
        "dense_below must be at most n_sel * l_sel + 1 = 65, got 66",
    ),
    "dense_below that is no number": (
        lambda: modules(dense_below=True, gate="selected"),
        "dense_below must be an int >= 0, got True",
    ),
    "gate_hidden without a gate": (
        lambda: modules(gate="selected", gate_hidden=4),
        "gate_hidden must be None where gate='selected', got 4",
    ),
    "rope_impl": (
        lambda: TorchAttention(**SIZES, rope_impl="neox"),
        "rope_impl must be 'llama'",
    ),
    "two choices": (
        lambda: TorchAttention(**SIZES, use_triton_sel=True, implementation="sdpa"),
        "use_flash and use_triton_sel must keep their defaults",
    ),
    "x of another dtype": (
        lambda: TorchAttention(**SIZES)(torch.zeros(1, 5, 24).bfloat16()),
        "x must have the dtype of the layer's weights, float32, got bfloat16",
    ),
    "weights of another dtype": (
        lambda: TorchAttention(**SIZES, gate="head").bfloat16()(torch.zeros(1, 8192, 24)),
        "x must have the dtype of the layer's weights, bfloat16, got float32",
    ),
    "a mesh of another type": (
        lambda: TorchAttention(**SIZES, context_mesh="ranks"),
        "context_mesh must be a DeviceMesh, got str",
    ),
    "no layout": (
        lambda: TorchAttention(**SIZES, context_layout="spiral"),
        "context_layout must be one of ('zigzag', 'contiguous'), got 'spiral'",
    ),
    "x of another width": (
        lambda: TorchAttention(**SIZES)(torch.zeros(1, 5, 23)),
        "x must have shape (B, T, 24), got (1, 5, 23)",
    ),
    "no array": (
        lambda: TorchAttention(**SIZES)([[0.0]]),
        "x must be a torch tensor, got list",
    ),
    "no token": (
        lambda: TorchAttention(**SIZES)(torch.zeros(2, 0, 24)),
        "x must not be empty, got shape (2, 0, 24)",
    ),
    "another cache": (
        lambda: TorchAttention(**SIZES)(torch.zeros(2, 1, 24), (torch.zeros(1), None)),
        "kv must be a cache from init_cache, got builtins.tuple",
    ),
    "cache of another batch": (
        lambda: (m := TorchAttention(**SIZES))(torch.zeros(2, 1, 24), m.init_cache(3, 8)),
        "kv must be of batch 2 as x, got 3",
    ),
    "list of bounds": (
        lambda: TorchAttention(**SIZES)(torch.zeros(1, 4, 24), cu_seqlens=[0, 4]),
        "cu_seqlens must be a torch tensor, got list",
    ),
    "bounds of two rows": (
        lambda: TorchAttention(**SIZES)(torch.zeros(2, 4, 24), cu_seqlens=torch.tensor([0, 4])),
        "x must be one row, B=1, where cu_seqlens are given, got B=2",
    ),
    "no token in JAX": (
        lambda: modules()[1](jnp.zeros((2, 0, 24))),
        "x must not be empty, got shape (2, 0, 24)",
    ),
    "cache of torch in JAX": (
        lambda: modules()[1](jnp.zeros((2, 1, 24)), TorchAttention(**SIZES).init_cache(2, 8)),
        "kv must be a cache from init_cache, got nsa_torch.cache.NSACache",
    ),
    "cache of another batch in JAX": (
        lambda: (m := modules()[1])(jnp.zeros((2, 1, 24)), m.init_cache(3, 8)),
        "kv must be of batch 2 as x, got 3",
    ),
    "sizes that are no spec in JAX": (
        lambda: JaxAttention(SIZES, rngs=nnx.Rngs(0)),
        "spec must be a LayerSpec, got dict",
    ),
    "decode without a cache": (
        lambda: TorchAttention(**SIZES)(torch.zeros(1, 1, 24), None, prefill=False),
        "kv must be a cache from init_cache where prefill=False, got None",
    ),
    "decode from an empty cache": (
        lambda: (m := TorchAttention(**SIZES))(
            torch.zeros(1, 1, 24), m.init_cache(1, 8), prefill=False
        ),
        "kv must hold tokens where prefill=False, got an empty cache",
    ),
    "prefill of another type": (
        lambda: TorchAttention(**SIZES)(torch.zeros(1, 1, 24), prefill="no"),
        "prefill must be a bool, got 'no'",
    ),
    "left padding": (
        lambda: (m := TorchAttention(**SIZES))(
            torch.zeros(1, 4, 24),
            m.init_cache(1, 8),
            attention_mask=torch.tensor([[0, 1, 1, 1]]),
        ),
        "attention_mask must be None: put a row's padding behind its tokens, and with a cache give "
        "their number as new_lengths",
    ),
    "a cache made outside of autocast": (
        lambda: of_autocast(TorchAttention(**SIZES), cached_before=True),
        "got float32: make it by init_cache(.., dtype=torch.bfloat16)",
    ),
    "torch cache full": (
        lambda: (m := TorchAttention(**SIZES))(torch.zeros(1, 9, 24), m.init_cache(1, 8)),
        "cache capacity is 8 tokens, got 9",
    ),
    "cache and cu_seqlens": (
        lambda: (m := TorchAttention(**SIZES))(
            torch.zeros(1, 4, 24), m.init_cache(1, 8), cu_seqlens=torch.tensor([0, 4])
        ),
        "cu_seqlens must be None where a cache is given, got both: a sequence is a row of the "
        "cache, with padding behind its tokens (new_lengths)",
    ),
    "x of another width in JAX": (
        lambda: modules()[1](jnp.zeros((1, 5, 23))),
        "x must have shape (B, T, 24), got (1, 5, 23)",
    ),
    "float64 of NumPy in JAX": (
        lambda: modules()[1](np.zeros((1, 4, 24))),
        "x must not be a NumPy array of float64: JAX makes float32 of it",
    ),
    "words in JAX": (
        lambda: modules()[1](jnp.zeros((1, 4, 24), jnp.int32)),
        "x must have dtype in ('float16', 'bfloat16', 'float32', 'float64'), got int32",
    ),
    "a mask in JAX": (
        lambda: modules()[1](jnp.zeros((1, 4, 24)), attention_mask=jnp.ones((1, 4))),
        "attention_mask must be None: padding has segment_ids below 0",
    ),
    "cache and segments in JAX": (
        lambda: (m := modules()[1])(
            jnp.zeros((1, 4, 24)), m.init_cache(1, 8), segment_ids=jnp.zeros((1, 4), jnp.int32)
        ),
        "segment_ids must be None where a cache is given, got both",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_modules(name):
    run, message = BAD[name]
    with pytest.raises(ValueError) as error:
        run()
    assert message in str(error.value)


def test_use_triton_sel_names_the_kernel():
    module = TorchAttention(**SIZES, use_triton_sel=True)
    assert module.implementation == nsa_jax.Branches(None, "triton", None)
    with pytest.raises(NotImplementedError, match="triton"):
        module(torch.zeros(1, 5, 24))


def test_bfloat16_module():
    _, twin = modules()
    low = JaxAttention(
        twin.spec, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    y = nnx.jit(lambda module, x: module(x)[0])(low, jnp.asarray(tokens(30)))
    assert y.dtype == jnp.bfloat16 and bool(jnp.isfinite(y).all())
    module, _ = modules()
    y, _ = module.bfloat16()(torch.from_numpy(tokens(30)).bfloat16())
    assert y.dtype == torch.bfloat16 and bool(y.isfinite().all())
