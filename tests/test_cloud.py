"""Task files, the Modal app and the workflows: right without an account, a GPU or a network."""

import importlib.util
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
from unittest import mock

import pytest
import yaml

from bench import doc_tables, oneshot
from bench.harness.process import ROOT
from tests import spawned, versions
from tests.commands import parsed
from tests.tables import table

read = lambda path: yaml.safe_load(path.read_text())
TASKS = {path: read(path) for path in sorted((ROOT / "cloud" / "sky").glob("*.yaml"))}
TRAIN = {path: x for path, x in TASKS.items() if path.stem.startswith("train_")}
SKY = {path: x for path, x in TASKS.items() if path not in TRAIN}  # of one node
FLOWS = {path.stem: read(path) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
GPU_BENCH = FLOWS["gpu-bench"]
MODAL = ROOT / "cloud" / "modal_app.py"
TABLE = table("test_cloud")
MADE, NO_AUTOSTOP = TABLE["made"], TABLE["no autostop"]
KEYS = {name: {*keys} for name, keys in TABLE["keys"].items()}
README = (ROOT / "cloud" / "README.md").read_text()
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
by_stem = {"ids": lambda path: path.stem}


def check_shell(text: str) -> str:
    """Bash can parse it, and what it calls of this repository is there."""
    text = re.sub(r"\$\{\{.*?\}\}", "expression", text)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert not done.returncode and not done.stderr, done.stderr
    for module in re.findall(r"python\S* -m ([\w.]+)", text):
        assert importlib.util.find_spec(module), module
    assert {*re.findall(r"^\s*make ([\w-]+)", text, re.MULTILINE)} <= {*TARGETS}
    for file in re.findall(r"\btests/\w+\.py", text):
        assert (ROOT / file).is_file(), file
    if found := re.search(r"bench\.oneshot([^\n|;&]*)", text):
        flags = [word for word in shlex.split(found[1]) if word.startswith("--")]
        assert all(flag[2:].partition("=")[0] in oneshot.FLAGS for flag in flags), flags
    return text


each_task = pytest.mark.parametrize("path", TASKS, **by_stem)


@each_task
def test_a_task_is_whole_and_limited(path):
    task = TASKS[path]
    resources = task["resources"]
    assert set(task) <= KEYS["task"] and set(resources) <= KEYS["resources"]
    assert resources["use_spot"] is False
    most = 40 if path in TRAIN else 10
    assert path.stem == "slurm" or 0 < resources["max_hourly_cost"] <= most
    check_shell(task["setup"])


@pytest.mark.parametrize("path", SKY, **by_stem)
def test_a_task_of_one_node_ends(path):
    task = SKY[path]
    resources, (cloud, gpu) = task["resources"], MADE[path.stem]
    assert resources.get("infra") == cloud and resources["accelerators"] == f"{gpu}:1"
    if cloud in NO_AUTOSTOP:
        assert "autostop" not in resources and NO_AUTOSTOP[cloud] in path.read_text()
    else:
        stop = resources["autostop"]
        assert stop["down"] is True and 0 < stop["idle_minutes"] <= 30
    run = check_shell(task["run"])
    assert re.search(
        r"timeout --signal=TERM --kill-after=30 \d+m .*python\S* -m bench\.oneshot", run
    )


def test_there_is_a_task_for_each_cloud_and_they_do_the_same():
    """Those of one node; those of several differ in what they run."""
    assert {path.stem for path in SKY} == set(MADE)
    assert all(f"`{path.stem}`" in README for path in TASKS)
    for tasks, keys in (
        (SKY, ("name", "workdir", "setup", "run")),
        (TRAIN, KEYS["task"] - {"name", "run"}),
    ):
        for key in keys:
            assert len({str(task.get(key)) for task in tasks.values()}) == 1, key
    assert {x["name"] for x in TRAIN.values()} == {"nsa-train-torch", "nsa-train-jax"}


def commands(run: str) -> list[str]:
    """The words that a task hands to `timeout`, as bash on the second node makes them."""
    shell = f"timeout() {{ printf '%s\\0' \"$@\"; }}\n{run}"
    done = subprocess.run(
        ["bash", "-c", shell],
        env=TABLE["node"] | {"PATH": os.environ["PATH"]},
        capture_output=True,
    )
    assert not done.returncode and not done.stderr, done.stderr
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("path", TRAIN, **by_stem)
def test_a_training_task_starts_its_processes(path):
    """A task of several nodes has limits, and every process it starts can be started so."""
    from torch.distributed.run import get_args_parser

    from bench import train
    from bench.lm import config_file

    task = TRAIN[path]
    assert task["num_nodes"] >= 2 and task["resources"]["autostop"]["down"] is True
    signal, kill, limit, program, *words = commands(check_shell(task["run"]))
    assert (signal, kill[:13]) == ("--signal=TERM", "--kill-after=") and limit.endswith("m")
    by_torchrun = program.endswith("torchrun")
    if by_torchrun:
        found = get_args_parser().parse_args(words)
        assert (found.nnodes, found.nproc_per_node) == ("2", "8")
        assert (found.rdzv_backend, found.rdzv_endpoint) == ("c10d", "10.0.0.1:29500")
        assert found.rdzv_id == "sky-1" and found.module
        module, words = found.training_script, found.training_script_args
    else:
        assert program.endswith("python")
        (_, module, *words) = words
    assert module == "bench.train"
    assert parsed(train.FLAGS, "train", *words) == ["train"]
    _, given, _ = config_file.read(train.FLAGS.config, train.FLAGS.set)
    assert given["parallel.strategy"] != "none" and given["parallel.devices"] == 16
    assert not given["train.batch"] % 16
    if not by_torchrun:
        told = [given[f"parallel.{x}"] for x in ("coordinator", "processes", "process")]
        assert told == ["10.0.0.1:29500", 2, 1]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty one, for programs that are no part of this environment."""
    monkeypatch.setenv("HOME", str(tmp_path))


def test_skypilot_takes_every_task(home):
    sky, clouds = pytest.importorskip("sky", reason="of the extra cloud"), set()
    for path in TASKS:
        task = sky.Task.from_yaml_str(path.read_text())
        (found,) = task.resources
        count = 8 if path in TRAIN else 1
        assert set(found.accelerators.values()) == {count} and not found.use_spot, path
        assert task.num_nodes == (2 if path in TRAIN else 1), path
        clouds.add(str(found.infra.cloud).lower())
    assert clouds == {str(cloud or "none") for cloud, _ in MADE.values()}


def test_modal_registers_the_app(home):
    pytest.importorskip("modal", reason="of the extra cloud")
    found = runpy.run_path(str(MODAL))
    assert found["app"].name == "native-sparse-attention"
    kinds = type(found["oneshot"]).__name__, type(found["main"]).__name__
    assert kinds == ("Function", "LocalEntrypoint")


@pytest.fixture
def modal(monkeypatch):
    """The names of the app, made with a stand-in for Modal."""
    monkeypatch.syspath_prepend(ROOT / "cloud")
    monkeypatch.setitem(sys.modules, "modal", mock.MagicMock())
    return lambda: runpy.run_path(str(MODAL))


def test_the_modal_app_has_limits(modal, monkeypatch):
    app = modal()["app"]
    limits = {"gpu": "H100!", "timeout": 25 * 60, "max_containers": 1, "retries": 0}
    assert app.function.call_args.kwargs == limits and app.local_entrypoint.called
    main = MODAL.read_text().partition("def main")[2]
    before, _, after = main.partition(".remote(")
    assert "cost.dollars(" in before and "cost.used(" in after
    offered = GPU_BENCH[True]["workflow_dispatch"]["inputs"]["gpu"]["options"]
    for gpu in offered:
        monkeypatch.setenv("GPU", gpu)
        assert modal()["HOURLY"] > 0
    monkeypatch.setenv("GPU", "RTX4090")
    with pytest.raises(ValueError, match=rf"one of {', '.join(offered)} on .* got 'RTX4090'"):
        modal()


def test_modal_results_lie_in_a_new_folder(modal, tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        entry = tarfile.TarInfo("abc/summary.json")
        entry.size = 2
        archive.addfile(entry, io.BytesIO(b"{}"))
    folder = modal()["unpack"](buffer.getvalue(), tmp_path / "artifacts")
    assert folder.parent == tmp_path / "artifacts"
    assert (folder / "abc" / "summary.json").read_text() == "{}"


def cost(*words):
    """What cloud/cost.py prints, and its exit status."""
    done = spawned.python("cloud/cost.py", *words)
    return done.stdout, done.returncode


def test_the_cost_is_said_before_and_after(tmp_path):
    path = ROOT / "cloud" / "sky" / "l4.yaml"
    limit = SKY[path]["resources"]["max_hourly_cost"]
    (tmp_path / "summary.json").write_text('{"seconds": 600}')
    printed, status = cost(path, tmp_path)
    assert f"at most ${limit * 50 / 60:.2f}: 50 minutes" in printed and status == 0
    assert f"the run took 600 s and costs at most ${limit / 6:.2f} at" in printed
    two = tmp_path / "two.yaml"
    two.write_text(yaml.safe_dump(SKY[path] | {"num_nodes": 2}))
    assert f"at most ${2 * limit * 50 / 60:.2f}: 50 minutes" in cost(two)[0]
    assert cost()[1] == 2


@each_task
def test_what_starts_a_machine_ends_it(path):
    """By `cloud/launch.py`, wherever a reader is told how to run a task; one that nothing else ends
    is said, with the price of an hour.
    """
    name, hourly = path.relative_to(ROOT), TASKS[path]["resources"].get("max_hourly_cost")
    texts = [path.read_text(), README, doc_tables.TABLES["seed_names"]()]
    assert f"python cloud/launch.py {name} " in texts[0]
    assert not any(re.search(rf"sky launch .*{name}", text) for text in texts)
    said = f"automatically, and the machine costs up to ${hourly or 0:.2f} per hour"
    endless = path.stem.startswith("primeintellect")
    assert (said in cost(path)[0]) == endless
    assert not endless or f"${hourly:.2f}" in README


@pytest.fixture
def launch(tmp_path):
    """cloud/launch.py with programs in place of `sky` and `rsync`: status, output, their calls."""
    calls = tmp_path / "calls"
    for name in ("sky", "rsync"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/bash\necho "{name} $*" >> {calls}\ncase "{name} $1" in $BAD) exit 3;; esac\n'
            f'if [ "{name} $1" = "$SLOW" ]; then kill -TERM $PPID; exec sleep 9 >&- 2>&-; fi\n'
        )
        program.chmod(0o755)

    def call(*arguments, bad="-", slow="-"):
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        words = "import sys, launch; launch.WAIT_S = 0; sys.exit(launch.main(sys.argv))"
        task = ROOT / "cloud" / "sky" / "primeintellect_rtx4090.yaml"
        environ = {"PATH": path, "BAD": bad, "SLOW": slow, "PYTHONPATH": str(ROOT / "cloud")}
        done = spawned.python("-c", words, task, "--name=x", *arguments, **environ)
        made = calls.read_text().splitlines() if calls.exists() else []
        return done, [line.replace(str(task), "TASK") for line in made]

    return call


LAUNCH, DOWN = "sky launch --cluster x --yes TASK", "sky down --yes x"
FETCH = "rsync --archive x:sky_workdir/artifacts/ artifacts/"


@pytest.mark.parametrize(
    "bad, slow, status, fetched, ended", table("bench")["ends of a machine"]
)
def test_a_machine_is_ended_however_its_run_ends(launch, bad, slow, status, fetched, ended):
    done, calls = launch("--yes", bad=bad, slow=slow)
    assert calls == [LAUNCH, *[FETCH] * fetched, *[DOWN] * ended], done.stderr
    assert done.returncode == status
    assert "automatically, and the machine costs up to $1.50 per hour" in done.stdout
    lost = (
        "error: sky down failed, so the machine may still be running (at most $1.50 per hour); "
        "end it with: sky down --yes x"
    )
    assert (lost in done.stderr) == (bad == "sky*down")


def test_a_dry_run_starts_nothing(launch):
    done, calls = launch("--dry_run", "--infra=runpod")
    assert done.returncode == 0 and not calls
    first, second, third = done.stdout.splitlines()[1:]
    assert first.startswith("sky launch --cluster x --infra runpod ") and third == DOWN
    assert second == FETCH and "--yes" not in first  # SkyPilot asks


def test_the_body_of_a_pull_request_has_thresholds_and_tables(tmp_path):
    folder = tmp_path / "artifacts" / "modal-1" / "abc"
    (folder / "compare").mkdir(parents=True)
    (folder / "seed_report.md").write_text("| S | x |\n")
    (folder / "compare" / "compare.md").write_text("x" * 70_000)
    (tmp_path / "thresholds.txt").write_text("runtime.sel_triton_min_L: 512\n")
    words = "artifacts", "thresholds.txt", "https://run"
    done = spawned.python(ROOT / "cloud" / "pull_request.py", *words, folder=tmp_path)
    assert done.stdout.startswith(
        "Measured by https://run\n\n## Thresholds\n\n```\nruntime.sel_"
    )
    assert "<summary>modal-1/abc/seed_report.md</summary>\n\n| S | x |\n" in done.stdout
    assert "among the artifacts: modal-1/abc/compare/compare.md\n" in done.stdout
    assert len(done.stdout) < 65_536


def assert_has(found, wanted):
    """`wanted` as in `test_cloud.yaml`."""
    for key, value in wanted.items():
        if key in ("has", "lacks"):
            assert {part in str(found) for part in value} == {key == "has"}, found
        elif isinstance(value, dict):
            assert_has(found[key], value)
        else:
            assert found[key] == value


@pytest.mark.parametrize("name, wanted", TABLE["workflows"].items())
def test_what_workflows_do(name, wanted):
    assert_has(FLOWS[name], wanted)


def test_modal_needs_its_secrets():
    jobs = GPU_BENCH["jobs"]
    assert [name for name, job in jobs.items() if "secrets." in str(job["steps"])] == ["modal"]
    command = [shutil.which("bash"), "-e", "-c", jobs["modal"]["steps"][3]["run"]]
    done = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 1 and "has no secrets MODAL_TOKEN_ID" in done.stdout


@pytest.mark.parametrize("name", FLOWS)
def test_a_workflow_is_whole(name):
    flow = FLOWS[name]
    # YAML 1.1 reads the key `on` as true.
    assert set(flow) == {"name", True, "permissions", "concurrency", "jobs"}
    assert flow["name"] == name and flow["permissions"] == {"contents": "read"}
    for job in flow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 60
        # What publishes the site runs no command.
        publishes = (
            {"pages", "id-token"} if not any("run" in x for x in job["steps"]) else set()
        )
        assert set(job.get("permissions", {})) <= {"contents", "pull-requests"} | publishes
        before = job.get("needs", [])
        assert {*([before] if type(before) is str else before)} <= set(flow["jobs"])
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            if "uses" in step:
                assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
            else:
                # An expression in a command would be pasted into the shell.
                assert "${{" not in step["run"]
                check_shell(step["run"])


def test_parts_of_workflows():
    """All tests, and all versions."""
    matrix = lambda name, job: FLOWS[name]["jobs"][job]["strategy"]["matrix"]
    for name in ("ci", "release"):
        parts = matrix(name, "test")["part"]
        assert parts == [f"{k}/{len(parts)}" for k in range(1, len(parts) + 1)]
    assert tuple(matrix("ci", "versions")["name"]) == versions.NAMES
