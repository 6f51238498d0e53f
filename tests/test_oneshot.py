"""The run of everything: it cannot end well when a step did not, and leaves nothing behind."""

import importlib.util
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from absl import app

import bench.harness.process
from bench import oneshot, suite
from bench.harness.process import ROOT, expand
from nsa_core import config_files
from tests import commands, pretend, spawned
from tests.tables import table

TABLE = table("test_oneshot")
GOOD = TABLE["runs"][0]["plan"][0]


def test_an_installed_library_has_no_tests_to_run(run, monkeypatch, tmp_path):
    monkeypatch.setattr(bench.harness.process, "ROOT", tmp_path)
    monkeypatch.setattr(oneshot, "process", bench.harness.process)
    code, summary, _ = run(GOOD | {"command": "bench.suite -- tests"})
    reason = "tests come with a checkout, not with a wheel"
    assert code == 0 and told(summary) == [["good skipped", reason, ""]]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command with a plan of these steps: exit status, summary, and its folder."""
    monkeypatch.setattr(oneshot.environment, "device_name", lambda: "cpu")

    def call(*plan, arguments=()):
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump({"steps": list(plan)}))
        places = "--plan", path, "--out", tmp_path / "out"
        code = commands.called(oneshot, *places, *arguments)
        newest = max((tmp_path / "out").iterdir(), key=lambda folder: folder.stat().st_mtime)
        return code, json.loads((newest / "summary.json").read_text()), newest

    return call


def told(summary):
    """Of each step its name and status, the reason, and its files."""
    return [
        [f"{step['name']} {step['status']}", step["reason"], " ".join(step["files"])]
        for step in summary["steps"]
    ]


def gone(pid: int) -> bool:
    """Whether the process ended; a dead one that nobody waited for counts."""
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("row", TABLE["runs"], ids=lambda row: row["steps"][-1][0])
def test_how_a_run_ends(row, run, capsys, monkeypatch):
    """What its summary says, what is printed, and that it leaves no process."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    said = pretend.calls_of(monkeypatch, oneshot.heartbeat, "say", lambda name: name)
    code, summary, folder = run(*row["plan"], arguments=row.get("arguments", "").split())
    assert [code, summary["ok"], summary["complete"]] == row["ends"]
    assert summary["status"] == ("failed" if code else "ok")
    assert {"schema", "commit", "device", "start", "end", "versions"} <= set(summary)
    assert told(summary) == row["steps"]
    ran = [step for step in summary["steps"] if step["files"]]
    assert said == [step["name"] for step in ran] and all(step["seconds"] > 0 for step in ran)
    assert summary["steps"][-1]["command"].endswith(row.get("command", ""))
    printed = capsys.readouterr().out
    assert ("  | the last words of the log" in printed) == ("bad" in said)
    assert "fake step: ok" not in printed
    for pid in folder.glob("pid"):
        assert gone(int(pid.read_text()))


def test_steps_that_are_not_of_the_plan(run):
    with pytest.raises(app.UsageError, match=r"--only must be one of \['good'\], got 'other'"):
        run(GOOD, arguments=["--only=other"])


def test_a_summary_has_no_path_of_this_machine(run):
    made = Path(bench.harness.process.ROOT, "artifacts", "nowhere")
    _, summary, _ = run(GOOD | {"command": f"{GOOD['command']} {made}"})
    assert summary["steps"][0]["command"] == f"python -m {GOOD['command']} artifacts/nowhere"


def test_a_folder_is_never_used_twice(tmp_path):
    names = [oneshot.new_folder(tmp_path, "0123456789abcdef", True).name for _ in range(3)]
    assert names == ["0123456789ab-dirty", "0123456789ab-dirty-2", "0123456789ab-dirty-3"]
    assert oneshot.new_folder(tmp_path, None, None).name == "unknown"


def test_sigterm_ends_the_step_and_writes_the_summary(tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"steps": TABLE["sigterm"]}))
    command = [sys.executable, "-m", "bench.oneshot", "--plan", plan, "--out", tmp_path]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for _ in range(600):
        if pids := [x for x in tmp_path.glob("*/pid") if x.read_text()]:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM and "interrupted" in printed
    assert gone(int(pids[0].read_text()))
    summary = json.loads((pids[0].parent / "summary.json").read_text())
    assert summary["status"] == "interrupted" and not summary["ok"]
    found = (
        ["good ok", ""],
        ["hang interrupted", "SIGTERM"],
        ["bad skipped", "the run was interrupted before it"],
    )
    assert [x[:2] for x in told(summary)] == [*found]


@pytest.mark.parametrize("steps, message", TABLE["refused"])
def test_bad_plans_are_refused(steps, message, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"steps": steps}))
    with pytest.raises(ValueError, match=message):
        oneshot.load(str(path))


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_plans_name_commands_that_exist(name):
    plan = oneshot.load(name)
    words = {"root": "root", "out": "out", "commit": "", "save": ""}
    for step in plan:
        for template in filter(None, (step.command, step.quick, step.hopper)):
            command = expand(template, words, ["a.jsonl"])
            assert importlib.util.find_spec(command[0]), command[0]
            assert not any("{" in word for word in command)
            for test in (word for word in command if word.startswith("tests/")):
                file, _, function = test.partition("::")
                function = f"def {function.partition('[')[0]}(" if function else ""
                assert function in (ROOT / file).read_text(), test
    last = [step.name for step in plan if step.last]
    made = ["report", "seed_report"]
    assert last == (["thresholds", *made] if name == "gpu" else made)
    assert sum(step.timeout_s for step in plan if step.last) <= 60


def plan_of_gpus():
    """The steps by name."""
    oneshot.FLAGS(["oneshot"])
    return {step.name: step for step in oneshot.load("gpu")}


def test_the_plan_names_hoppers_kernels_on_hopper_only():
    plan = plan_of_gpus()
    for step in plan.values():
        portable = oneshot.template_of(step, hopper=False).replace("_mosaic", "")
        assert "mosaic" not in portable, step
    assert "--kernels mosaic" in oneshot.template_of(plan["compare"], hopper=True)
    assert "--selected_kernel triton" in plan["triton"].command
    assert {"train", "seed_report"} <= set(plan)


def test_the_seeds_matrix_and_grid_are_measured_whole_on_any_gpu():
    plan = plan_of_gpus()
    matrix, grid = plan["selection_s2"], plan["fa2"]
    for hopper in (False, True):
        command = expand(oneshot.template_of(matrix, hopper), {}, [])
        flags = [word for word in command if word.startswith("--")]
        own = {"--preset", "--iters", "--processes", "--out"}
        assert set(flags) == own and command[2] == "s2", "no flag in place of one of its lists"
        command = expand(oneshot.template_of(grid, hopper), {}, [])
        lists = dict(zip(command[1::2], command[2::2], strict=False))
        assert {"256", "512", "1024"} <= set(lists["--S_list"].split(","))
        assert {"32", "64", "128", "256"} <= set(lists["--w_list"].split(","))
    assert "--framework jax" in plan["triton_jax"].command


def test_words_of_a_command():
    words = {"root": "/r", "commit": "", "save": "--save_records"}
    assert expand("m --out {root}/x {commit} {save}", words, []) == shlex.split(
        "m --out /r/x --save_records"
    )
    assert expand("m {records} --f={records}", words, ["a b", "c"]) == [
        "m", "a b", "c", "--f=a b", "--f=c",
    ]  # fmt: skip


JUNIT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"/>
<testcase name="c"><failure message="no"/></testcase>
<testcase name="d"><skipped message="needs two GPUs"/></testcase>
<testcase name="e"><skipped message="no mood"/></testcase>
</testsuite></testsuites>"""


def test_skips_count_against_the_list(tmp_path):
    path = tmp_path / "junit.xml"
    path.write_text(JUNIT)
    allowed = suite.allow_list(config_files.FOLDER / "oneshot" / "skips.yaml")
    found = suite.count(path, allowed)
    assert (found.passed, found.failed, found.skipped) == (2, 1, 2)
    assert found.allowed == {"needs two GPUs": 1} and found.unknown == {"no mood": 1}
    assert not found.ok
    path.write_text(JUNIT.replace('<failure message="no"/>', ""))
    assert not suite.count(path, allowed).ok and suite.count(path, [*allowed, "no mood"]).ok
    assert not suite.count(path, ["needs two", "no mood"]).ok  # the whole reason
    path.write_text("<testsuites/>")
    assert not suite.count(path, allowed).ok


def test_the_suite_fails_where_a_test_is_skipped_without_leave(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no mood')\n"
    )
    (tmp_path / "pytest.ini").touch()
    own = f"-p no:cacheprovider --confcutdir={tmp_path}"
    folders = {}
    for reason in ("no mood", "another"):
        skips, out = tmp_path / "skips.yaml", tmp_path / reason.replace(" ", "_")
        skips.write_text(yaml.safe_dump([{"reason": reason, "why": "a test"}]))
        words = f"bench.suite --out={out} --skips={skips} -- {own} {tmp_path}/test_it.py"
        folders[reason] = spawned.python("-m", *words.split())
        counts = json.loads((out / "tests.json").read_text())
        assert (counts["passed"], counts["skipped"], counts["status"]) == (1, 1, 0)
    assert folders["no mood"].returncode == 0, folders["no mood"].stdout
    assert folders["another"].returncode == 1
    assert "1 x 'no mood'" in folders["another"].stdout
