"""The YAML files of configurations; what values are refused is in `test_refusals.py`."""

from pathlib import Path

import pytest

from bench.harness import problems
from nsa_jax import NSAConfig
from tests import refusals


def settings(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return problems.settings(path)


def test_numbers_are_read_by_type_over_those_of_the_base_file(tmp_path):
    text = "model: {rope_base: 1e4, d_k: 16}\nruntime: {seq_len: 64, sel_min_len: null}\n"
    found, base = settings(tmp_path, text), problems.settings("base")
    assert (found.model.rope_base, found.model.d_k, found.model.d_v) == (
        1e4,
        16,
        base.model.d_v,
    )
    assert (found.runtime.seq_len, found.runtime.sel_min_len) == (64, None)
    assert isinstance(settings(tmp_path, "model: {rope_base: 3}").model.rope_base, float)
    assert found.nsa == base.nsa == NSAConfig()


@pytest.mark.parametrize("row, message, _", refusals.rows("settings"))
def test_yaml_errors_name_the_key(row, message, _, tmp_path):
    with pytest.raises(ValueError) as error:
        settings(tmp_path, row["text"])
    assert message in str(error.value)


def test_yaml_files_of_the_folder():
    with pytest.raises(FileNotFoundError, match="base"):
        problems.settings("no_such_config")
    names = [x.stem for x in (Path(__file__).parents[1] / "configs").glob("*.yaml")]
    assert {"base", "paper", "seed"} <= {*names} and all(map(problems.settings, names))
