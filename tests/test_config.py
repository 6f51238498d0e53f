"""`NSAConfig`, the YAML files and their loader, the layer's hyper-parameters."""

import dataclasses
import math

import pytest

from nsa_core import config_files
from nsa_core.layer import LayerSpec
from nsa_jax import NSAConfig

BAD_CONFIGS = [
    (dict(compress_stride=0), "compress_stride must be >= 1, got 0"),
    (
        dict(compress_block=24),
        "compress_block must be a multiple of compress_stride=16, got 24",
    ),
    (dict(select_block=40), "select_block must be a multiple of compress_stride=16, got 40"),
    (dict(select_block=16), "select_block must be >= compress_block=32, got 16"),
    (dict(num_selected=2), "num_selected must be >= num_initial + num_local = 3, got 2"),
    (dict(num_initial=-1), "num_initial must be >= 0, got -1"),
    (dict(num_local=-2), "num_local must be >= 0, got -2"),
    (dict(window=-1), "window must be >= 0, got -1"),
    (dict(window=2.5), "window must be an int, got 2.5"),
    (dict(window=2**31), "window must be at most 2**30, got 2147483648"),
    (dict(num_selected=True), "num_selected must be an int, got True"),
    (dict(num_selected=0, num_initial=0, num_local=0), "num_selected must be >= 1, got 0"),
]


@pytest.mark.parametrize("values,message", BAD_CONFIGS, ids=lambda x: str(x)[:40])
def test_config_validation(values, message):
    with pytest.raises(ValueError) as error:
        NSAConfig(**values)
    assert message in str(error.value)


def test_config_validation_of_the_seeds_names():
    assert NSAConfig.from_seed(l=16, d=8, l_sel=32, n_sel=4, w=9) == NSAConfig(
        16, 8, 32, 4, window=9
    )
    with pytest.raises(ValueError, match="unknown name 'block'"):
        NSAConfig.from_seed(block=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        NSAConfig().window = 3


@pytest.mark.parametrize(
    "values,message",
    [
        (dict(n_heads=5), "n_heads must be a multiple of n_kv_groups=2, got 5"),
        (dict(d_k=7), "d_k must be even"),
        (dict(phi="conv"), "phi must be one of"),
        (dict(gate="relu"), "gate must be one of"),
        (dict(gate_temp=0.0), r"gate_temp must be a positive number, got 0\.0"),
        (dict(rope_scale="2"), "rope_scale must be a positive number, got '2'"),
        (dict(rope_base=math.inf), "rope_base must be a positive number, got inf"),
        (dict(dim=0), "dim must be an int >= 1, got 0"),
        (dict(dim=16.0), r"dim must be an int >= 1, got 16\.0"),
        (dict(n_heads=True), "n_heads must be an int >= 1, got True"),
        (dict(l=32.0), r"compress_block must be an int, got 32\.0"),
        (dict(bias=1), "bias must be True or False, got 1"),
        (dict(l=20), "compress_block must be a multiple"),
        (dict(gate_bias=(0, 0, 0)), "gate_bias must be None where gate='sigmoid', got"),
        (
            dict(gate="head", gate_bias=(0, 0)),
            r"gate_bias must be three finite numbers, got \(0, 0\)",
        ),
        (
            dict(gate="head", gate_bias=(0, float("nan"), 0)),
            "gate_bias must be three finite numbers, got",
        ),
        (dict(gate="head", gate_hidden=4), "gate_hidden must be None where gate='head', got 4"),
        (dict(kv="one"), r"kv must be one of \('separate', 'shared'\), got 'one'"),
        (dict(kv="shared", phi="mlp_rope"), "kv must be 'separate' where phi='mlp_rope'"),
        (dict(gate_hidden=0), "gate_hidden must be an int >= 1, got 0"),
        (dict(phi_hidden=8.0), r"phi_hidden must be an int >= 1, got 8\.0"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_config_validation_of_layers(values, message):
    good = dict(dim=16, n_heads=4, n_kv_groups=2, d_k=8, d_v=8)
    with pytest.raises(ValueError, match=message):
        LayerSpec(**(good | values))


@dataclasses.dataclass(frozen=True)
class Inner:
    lr: float = 1.0
    steps: int = 1
    name: str = "x"
    fast: bool = False


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    limit: int | None = None


def test_yaml_numbers_are_read_by_type(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("inner: {lr: 1e-4, steps: 3, fast: true}\nlimit: null\n")
    built = config_files.build(Outer, config_files.load(path))
    assert built == Outer(Inner(lr=1e-4, steps=3, fast=True), None)
    assert isinstance(built.inner.lr, float)


@pytest.mark.parametrize(
    "text,message",
    [
        ("inner: {rate: 1}", "config.inner: unknown key 'rate'"),
        ("outer: 1", "config: unknown key 'outer'"),
        ("inner: {steps: 1.5}", "config.inner.steps must be of type int, got 1.5"),
        ("inner: {steps: many}", "config.inner.steps must be of type int, got 'many'"),
        ("inner: {fast: 1}", "config.inner.fast must be of type bool, got 1"),
        ("inner: {steps: true}", "config.inner.steps must be of type int, got True"),
        ("inner: 3", "config.inner must be a mapping, got 3"),
        ("- 1", "must hold a mapping, got list"),
        ("limit: 1\ninner: {lr: 1}\nlimit: 2", "a.yaml is not YAML: key 'limit' stands twice"),
        ("inner:\n  lr: 1\n  lr: 2", "a.yaml is not YAML: key 'lr' stands twice"),
    ],
)
def test_yaml_errors_name_the_key(text, message, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        config_files.build(Outer, config_files.load(path))
    assert message in str(error.value)


def test_yaml_files_of_the_folder():
    with pytest.raises(FileNotFoundError, match="base"):
        config_files.load("no_such_config")
    for path in config_files.FOLDER.glob("*.yaml"):
        merged = config_files.overlay(config_files.load("base"), config_files.load(path))
        NSAConfig(**merged["nsa"])
    assert NSAConfig(**config_files.load("base")["nsa"]) == NSAConfig()


def test_overlay_goes_by_section():
    base = {"a": {"x": 1, "y": 2}, "b": 3}
    assert config_files.overlay(base, {"a": {"y": 5}}) == {"a": {"x": 1, "y": 5}, "b": 3}
    assert base["a"]["y"] == 2
