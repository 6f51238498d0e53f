"""bench.gpu_tests: the age of the last run of GPU tests."""

import pytest

from bench import gpu_tests
from bench.harness import records
from tests import pretend, spawned

CHANGED = "2026-11-20T12:00:00+02:00"
LATER, EARLIER = "2026-11-20T10:00:01+00:00", "2026-11-20T09:59:59+00:00"


@pytest.fixture
def age(tmp_path, monkeypatch):
    """`gpu_tests.age` where kernels were changed at `CHANGED`, of the runs it is given; git's
    history and the records are data, which a test must not take from this checkout."""
    pretend.folder(monkeypatch, "records", tmp_path)
    monkeypatch.setattr(records, "output", lambda *command: CHANGED)

    def of(*runs):
        for i, run in enumerate(runs):
            line = dict(zip(("time", "part", "failed", "gpus"), (*run, 1), strict=False))
            path = tmp_path / f"card{i % 2}" / gpu_tests.KEPT
            records.append(path, [records.record("gpu_tests", **line)])
        return gpu_tests.age()

    return of


@pytest.mark.parametrize(
    "runs, said",
    [
        ([], "GPU tests never"),
        ([(EARLIER, None, [])], "GPU tests 2026-11-20 09:59 (UTC): run `make test-gpu`"),
        ([(LATER, "1/2", []), (EARLIER, "2/2", [])], "run `make test-gpu`"),
        ([(LATER, None, [], 2)], "run `make test-gpu`"),
        (
            [(LATER, None, ["a::b"]), (EARLIER, None, [])],
            "GPU tests 2026-11-20 10:00 (UTC): 1 failed",
        ),
    ],
    ids=["no run", "an older run", "half a run", "on two GPUs", "a failure"],
)
def test_a_warning_has_both_dates(age, runs, said):
    found = age(*runs)
    assert found.startswith("warning: newest change 2026-11-20 10:00, ") and said in found


@pytest.mark.parametrize("parts", [[None], ["1/2", "2/2"], ["3/3", "1/2", "2/3", "1/3"]])
def test_no_warning_after_a_whole_run(age, parts):
    assert age(*((LATER, part, []) for part in parts)).startswith("ok: ")


def test_the_command_says_the_age_of_this_checkout():
    """CI runs it; git may not be there."""
    done = spawned.python("-m", "bench.gpu_tests", "--age")
    assert done.returncode in (0, 3)
    assert done.stdout.startswith(("ok: ", "warning: ")) == (done.returncode == 0), done.stdout


def test_every_record_is_whole():
    paths = [*records.FOLDER.glob(f"*/{gpu_tests.KEPT}")]
    assert paths
    for path in paths:
        for where, line in records.placed(path):
            assert line.commit and line.extra["passed"] > 0, f"{where}: {line}"
