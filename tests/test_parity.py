"""All paths against one oracle: outputs, log-sum-exps, gradients and selections of all problems.

A path is a row of `paths.PATHS`, a problem one of `problems.CASES`.
"""

import pytest

from tests import problems
from tests.paths import PATHS
from tests.problems import CASES, problem


def rows(has):
    return [
        pytest.param(path, case, marks=PATHS[path].marks, id=f"{path}-{case}")
        for path in PATHS
        if has(PATHS[path])
        for case in PATHS[path].cases
    ]


def run(request, path, call, p):
    for name in PATHS[path].fixtures:
        request.getfixturevalue(name)
    return call(p)


@pytest.mark.parametrize(("path", "case"), rows(lambda path: path.whole))
def test_attention(path, case, request):
    """The whole of attention: its output and the gradient of all that it reads."""
    p = problem(CASES[case])
    problems.check(p, run(request, path, PATHS[path].whole, p), p.expected)


@pytest.mark.parametrize(("path", "case"), rows(lambda path: path.steps))
def test_steps(path, case, request):
    """Each branch alone, gradients through its log-sum-exp too, and the selection."""
    p = problem(CASES[case])
    found = run(request, path, PATHS[path].steps, p)
    problems.check_selection(p, found.pop("block_indices"))
    problems.check(p, found, p.expected_steps)
