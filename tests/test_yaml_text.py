"""YAML text with other values keeps what it is not asked to change."""

import pytest
import yaml

from bench.tuners import yaml_text

TEXT = """\
# head
schema: 1  # of the file

runtime:
  # why so long
  a: 512   # measured
  b: never
list:
- kernel: x
  steps: [s, t]  # two
  reason: >-
    a long
    reason
# before the second
- {kernel: y}
empty:
last: "text"
# tail
"""


def changed(**values):
    return yaml.safe_load(TEXT) | values


FIRST, SECOND = yaml.safe_load(TEXT)["list"]


@pytest.mark.parametrize(
    ("wanted", "lost", "new"),
    [
        (changed(), "", ""),
        (changed(schema=2), "schema: 1  #", "schema: 2  # of the file"),
        (changed(runtime={"a": 1, "b": "never"}), "a: 512   #", "a: 1   # measured"),
        (changed(runtime={"a": 512, "b": "never", "c": [1]}), "", "b: never\n  c:\n  - 1\nlist"),
        (changed(runtime={"a": 512, "z": 1, "b": "never"}), "", "measured\n  z: 1\n  b: never"),
        (changed(runtime={"b": "never"}), "  a: 512   # measured\n", "so long\n  b: never\n"),
        (changed(list=[FIRST | {"steps": ["t"]}, SECOND]), "[s, t]", "steps: [t]  # two\n"),
        (changed(list=[SECOND]), "- kernel: x", "list:\n# before the second\n- {kernel: y}"),
        (changed(list=[FIRST, SECOND, 3]), "- {kernel: y}", "- 3\n"),
        (changed(list=[]), "- {kernel: y}", "list: []"),
        (changed(empty={"x": {"y": [1, "2"]}}), "", "empty:\n  x:\n    y:\n    - 1\n    - '2'\n"),
        (changed(last=None), '"text"', "last: null\n# tail"),
        (changed(more={"n": 1}), "", '"text"\nmore:\n  n: 1\n# tail\n'),
    ],
)  # fmt: skip
def test_only_what_changes_is_written_anew(wanted, lost, new):
    found = yaml_text.edited(TEXT, wanted)
    assert yaml.safe_load(found) == wanted
    assert lost in TEXT and (not lost or lost not in found) and new in found
    touched = {"list": "before the second", "runtime": "measured"}
    spared = [x for key, x in touched.items() if wanted[key] == changed()[key]]
    for comment in ("# head", "# why so long", "# tail", *spared):
        assert comment in found


def test_a_key_goes_and_one_comes():
    wanted = {"new": 0} | changed()
    del wanted["list"], wanted["empty"]
    found = yaml_text.edited(TEXT, wanted)
    assert yaml.safe_load(found) == wanted
    assert found.startswith("# head\nnew: 0\nschema: 1  # of the file\n")
    assert "b: never\n" in found and "reason" not in found


@pytest.mark.parametrize("text", ["[1]", "", "{a: 1}"])
def test_what_holds_no_block_of_keys(text):
    if text == "{a: 1}":
        assert yaml.safe_load(yaml_text.edited(text, {"a": 1, "b": [2]})) == {"a": 1, "b": [2]}
        return
    with pytest.raises(ValueError, match="cannot be changed"):
        yaml_text.edited(text, {"a": 1})
