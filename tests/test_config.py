"""The YAML files of configurations and their loader; what values are refused is in
`test_refusals.py`.
"""

import dataclasses

import pytest

from nsa_core import config_files
from nsa_jax import NSAConfig


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
        ("inner: {rate: 1}", "config.inner.rate: unknown key"),
        ("outer: 1", "config.outer: unknown key"),
        ("inner: {steps: 1.5}", "config.inner.steps: Input should be a valid integer, got 1.5"),
        ("inner: {steps: many}", "config.inner.steps: Input should be a valid integer"),
        ("inner: {fast: 1}", "config.inner.fast: Input should be a valid boolean, got 1"),
        ("inner: {steps: true}", "config.inner.steps: Input should be a valid integer"),
        ("inner: 3", "config.inner: Input should be an object, got 3"),
        ("- 1", "must hold a dict, got list"),
        ("limit: 1\ninner: {lr: 1}\nlimit: 2", "a.yaml is not YAML: key 'limit' occurs twice"),
        ("inner:\n  lr: 1\n  lr: 2", "a.yaml is not YAML: key 'lr' occurs twice"),
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
