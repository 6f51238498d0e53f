"""The YAML files of configurations and their loader; what values are refused is in
`test_refusals.py`.
"""

import dataclasses

import pytest

from nsa_core import config_files
from nsa_jax import NSAConfig
from tests import refusals


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


@pytest.mark.parametrize("row, message, _", refusals.rows("settings"))
def test_yaml_errors_name_the_key(row, message, _, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(row["text"])
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
