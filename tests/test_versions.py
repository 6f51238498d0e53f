"""Which versions `make test-versions` installs, and how it tells what it found."""

import pytest
from packaging.requirements import Requirement

from bench.reports import render
from tests import versions


def names(lines):
    return {x.name: x for x in map(Requirement, lines)}


def test_environments_take_the_bounds_of_the_project():
    each = (names(versions.requirements(x)) for x in ("oldest", "newest", "pre-release"))
    oldest, newest, later = each
    assert oldest.keys() == newest.keys() == later.keys() >= {"jax", "torch", "transformers"}
    for name in ("jax", "torch", "transformers", "numpy", "flax"):
        (pinned,) = oldest[name].specifier
        assert pinned.operator == "==" and f">={pinned.version}" in str(newest[name].specifier)
    for name in ("jax", "torch", "transformers"):
        assert "<" in {x.operator for x in newest[name].specifier}
        assert {x.operator for x in later[name].specifier} == {">="}
    assert str(oldest["jax-triton"].marker) == str(newest["jax-triton"].marker)


@pytest.mark.parametrize("line, lowest", versions.TABLE["lowest"])
def test_the_lowest_version(line, lowest):
    assert versions.lowest(Requirement(line)) == lowest


REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/>
<testcase classname="tests.a" name="bad"><failure message="x"/></testcase>
<testcase classname="tests.b" name="broken"><error/></testcase>
<testcase classname="tests.b" name="one"><skipped message="no GPU"/></testcase>
<testcase classname="tests.b" name="two"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_what_was_found_is_a_table(tmp_path):
    (tmp_path / "x.xml").write_text(REPORT)
    found = versions.outcomes(tmp_path / "x.xml")
    assert found == {
        "passed": 1,
        "failed": ["tests.a::bad", "tests.b::broken"],
        "skipped": {"no GPU": 2},
    }
    about = {"name": "oldest", "versions": {"jax": "0.11.2"}, "test_minutes": 2.5}
    lines = render.filled(
        "versions.md.jinja", found=[about | found | {"commit": "abcdef123"}]
    ).splitlines()
    assert lines[0] == "|  | oldest |" and "| jax | 0.11.2 |" in lines
    assert "| failed | tests.a::bad, tests.b::broken |" in lines
    assert "| skipped | 2: no GPU |" in lines and "| minutes | 2.5 |" in lines
    assert lines[-1] == "| commit | abcdef1 |"


def test_every_listed_file_is_there():
    missing = [x for x in versions.TABLE["tests"] if not (versions.ROOT / "tests" / x).exists()]
    assert not missing
