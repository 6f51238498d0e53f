"""YAML text with other values keeps the sections that it is not asked to change."""

import pytest
import yaml

from bench.tuners import yaml_text

HEAD = "# head\nschema: 1  # of the file\n\n"
RUNTIME = "runtime:\n  a: 512   # measured\n  # so long\n  b: never\n"
ABOVE = "# why\n\n# two\n"
RULES = ABOVE + "rules:\n- kernel: x\n  reason: >-\n    a long\n    reason\n"
VALUES = yaml.safe_load(HEAD + RUNTIME + RULES)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, HEAD + RUNTIME + RULES),
        ({"schema": 2}, "# head\nschema: 2\n\n" + RUNTIME + RULES),
        ({"runtime": {"a": 1}}, HEAD + "runtime:\n  a: 1\n" + RULES),
        ({"rules": ["x"]}, HEAD + RUNTIME + ABOVE + "rules:\n- x\n"),
        ({"more": {"n": [1]}}, HEAD + RUNTIME + RULES + "more:\n  n:\n  - 1\n"),
    ],
    ids=str,
)
def test_only_what_changes_is_written_again(change, text):
    assert yaml_text.edited(HEAD + RUNTIME + RULES, VALUES | change) == text


def test_the_order_is_that_of_the_values():
    found = yaml_text.edited(RUNTIME + RULES, {"new": 0, "rules": VALUES["rules"]})
    assert found == "new: 0\n" + RULES.removeprefix(ABOVE)
