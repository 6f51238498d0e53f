"""Task files, the Modal app and the workflows: right without an account, a GPU or a network."""

import ast
import datetime
import importlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from bench.harness import seed_names
from bench.harness.process import ROOT
from tests import versions

TASKS = sorted((ROOT / "cloud" / "sky").glob("*.yaml"))
TRAIN = [path for path in TASKS if path.stem.startswith("train_")]  # several nodes
SKY = [path for path in TASKS if path not in TRAIN]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MODAL = ROOT / "cloud" / "modal_app.py"
CLOUDS = {"lambda", "runpod", "aws", "primeintellect", "vast", "slurm"}
# On any cloud.
GPUS = {"a100": "A100", "a10g": "A10G", "l4": "L4", "l40s": "L40S", "rtx4090": "RTX4090"}
# Cloud and GPU of each file.
MADE = {name: (name, "H100") for name in CLOUDS} | {name: (None, x) for name, x in GPUS.items()}
MADE |= {f"primeintellect_{x.lower()}": ("primeintellect", x) for x in ("L40S", "RTX4090")}
# SkyPilot refuses autostop there; what ends the machine in its place.
NO_AUTOSTOP = {"primeintellect": "cloud/launch.py", "slurm": "time:"}
TASK_KEYS = {"name", "workdir", "num_nodes", "resources", "config", "setup", "run"}
# What SkyPilot sets on each node of a task.
NODE = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-1",
}
RESOURCE_KEYS = {"infra", "accelerators", "use_spot", "max_hourly_cost", "autostop"}
README = (ROOT / "cloud" / "README.md").read_text()
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def check_shell(text: str, bench: bool = False) -> None:
    """Bash can parse it, and what it calls of this repository is there."""
    text = re.sub(r"\$\{\{.*?\}\}", "expression", text)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert not done.returncode and not done.stderr, done.stderr
    modules = re.findall(r"python\S* -m ([\w.]+)", text)
    for module in modules:
        assert importlib.util.find_spec(module), module
    assert not bench or "bench.oneshot" in modules
    for target in re.findall(r"^\s*make ([\w-]+)", text, re.MULTILINE):
        assert target in TARGETS, target
    for file in re.findall(r"\btests/\w+\.py", text):
        assert (ROOT / file).is_file(), file
    if found := re.search(r"bench\.oneshot([^\n|;&]*)", text):
        flags = [word for word in shlex.split(found[1]) if word.startswith("--")]
        from bench import oneshot

        assert all(flag[2:].partition("=")[0] in oneshot.FLAGS for flag in flags), flags


def test_there_is_a_task_for_each_cloud():
    assert {path.stem for path in SKY} == set(MADE)
    assert all(f"`{name}`" in README for name in MADE)


@pytest.mark.parametrize("path", SKY, ids=lambda path: path.stem)
def test_a_task_is_whole_and_limited(path):
    text = path.read_text()
    task = yaml.safe_load(text)
    assert set(task) <= TASK_KEYS, set(task) - TASK_KEYS
    resources, (cloud, gpu) = task["resources"], MADE[path.stem]
    assert set(resources) <= RESOURCE_KEYS, set(resources) - RESOURCE_KEYS
    assert resources.get("infra") == cloud and resources["accelerators"] == f"{gpu}:1"
    assert resources["use_spot"] is False
    if cloud in NO_AUTOSTOP:
        assert "autostop" not in resources and NO_AUTOSTOP[cloud] in text
    else:
        stop = resources["autostop"]
        assert stop["down"] is True and 0 < stop["idle_minutes"] <= 30
    assert cloud == "slurm" or 0 < resources["max_hourly_cost"] <= 10
    assert re.search(
        r"timeout --signal=TERM --kill-after=30 \d+m .*bench\.oneshot", task["run"]
    )
    check_shell(task["setup"])
    check_shell(task["run"], bench=True)


def test_tasks_do_the_same():
    tasks = [yaml.safe_load(path.read_text()) for path in SKY]
    for key in ("name", "workdir", "setup", "run"):
        assert len({task[key] for task in tasks}) == 1, key


def commands(run: str) -> list[str]:
    """The words that a task hands to `timeout`, as bash on the second node makes them."""
    shell = f"timeout() {{ printf '%s\\0' \"$@\"; }}\n{run}"
    done = subprocess.run(
        ["bash", "-c", shell], env=NODE | {"PATH": os.environ["PATH"]}, capture_output=True
    )
    assert not done.returncode and not done.stderr, done.stderr
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("path", TRAIN, ids=lambda path: path.stem)
def test_a_training_task_starts_its_processes(path):
    """A task of several nodes has limits, and every process it starts can be started so."""
    from absl import flags
    from torch.distributed.run import get_args_parser

    from bench import train
    from bench.lm import config_file

    task = yaml.safe_load(path.read_text())
    assert set(task) <= TASK_KEYS and task["num_nodes"] >= 2
    resources = task["resources"]
    assert set(resources) <= RESOURCE_KEYS and resources["use_spot"] is False
    assert 0 < resources["max_hourly_cost"] <= 40 and resources["autostop"]["down"] is True
    check_shell(task["setup"])
    check_shell(task["run"])
    signal, kill, limit, program, *words = commands(task["run"])
    assert (signal, kill[:13]) == ("--signal=TERM", "--kill-after=") and limit.endswith("m")
    if program.endswith("torchrun"):
        found = get_args_parser().parse_args(words)
        assert (found.nnodes, found.nproc_per_node) == ("2", "8")
        assert (found.rdzv_backend, found.rdzv_endpoint) == ("c10d", "10.0.0.1:29500")
        assert found.rdzv_id == "sky-1" and found.module
        module, words = found.training_script, found.training_script_args
    else:
        assert program.endswith("python")
        (_, module, *words) = words
    assert module == "bench.train"
    own = flags.FlagValues()
    for name in train.FLAGS:
        own[name] = train.FLAGS[name]
    train.FLAGS.unparse_flags()
    try:
        assert own(["train", *words]) == ["train"]
        _, given, _ = config_file.read(train.CONFIG.value, train.SET.value)
    finally:
        for name in train.FLAGS:
            train.FLAGS[name].unparse()
    assert given["parallel.strategy"] != "none" and given["parallel.devices"] == 16
    assert not given["train.batch"] % 16
    if not program.endswith("torchrun"):
        told = [given[f"parallel.{x}"] for x in ("coordinator", "processes", "process")]
        assert told == ["10.0.0.1:29500", 2, 1]


def test_training_tasks_differ_in_the_run_alone():
    tasks = [yaml.safe_load(path.read_text()) for path in TRAIN]
    assert {task.pop("name") for task in tasks} == {"nsa-train-torch", "nsa-train-jax"}
    assert len({task.pop("run") for task in tasks}) == 2 and tasks[0] == tasks[1]
    assert all(f"`{path.stem}`" in README for path in TRAIN)


def in_scratch(program: str, tmp_path: Path, *arguments: str) -> str:
    """The output of a program in a process of its own, whose home is empty."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def needs(package: str):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}, of the extra cloud")


@needs("sky")
def test_skypilot_takes_every_task(tmp_path):
    program = """
import sys, sky, yaml
for path in sys.argv[1:]:
    task = sky.Task.from_yaml_str(open(path).read())
    (found,) = task.resources
    alone = "train_" not in path
    assert set(found.accelerators.values()) == {1 if alone else 8} and not found.use_spot, path
    assert task.num_nodes == (1 if alone else 2), path
    print(found.infra.cloud)
"""
    printed = in_scratch(program, tmp_path, *map(str, TASKS))
    assert {word.lower() for word in printed.split()} == CLOUDS | {"none"}


@needs("modal")
def test_modal_registers_the_app(tmp_path):
    program = """
import sys, runpy
found = runpy.run_path(sys.argv[1])
print(found["app"].name, type(found["oneshot"]).__name__, type(found["main"]).__name__)
"""
    printed = in_scratch(program, tmp_path, str(MODAL))
    assert printed.split() == ["native-sparse-attention", "Function", "LocalEntrypoint"]


def test_the_modal_app_has_limits():
    tree = ast.parse(MODAL.read_text())
    functions = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
    (decorator,) = functions["oneshot"].decorator_list
    given = {word.arg: ast.unparse(word.value) for word in decorator.keywords}
    limits = {"gpu": "GPU", "timeout": "TIMEOUT_S", "max_containers": "1", "retries": "0"}
    assert given == limits
    assert "bench.oneshot" in ast.unparse(functions["oneshot"])
    assert [ast.unparse(x) for x in functions["main"].decorator_list] == [
        "app.local_entrypoint()"
    ]


def test_modal_results_lie_in_a_new_folder(tmp_path):
    tree = ast.parse(MODAL.read_text())
    wanted = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "unpack"]
    space = {"datetime": datetime, "io": io, "tarfile": tarfile, "Path": Path}
    exec(ast.unparse(wanted[0]), space)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        entry = tarfile.TarInfo("abc/summary.json")
        entry.size = 2
        archive.addfile(entry, io.BytesIO(b"{}"))
    folder = space["unpack"](buffer.getvalue(), tmp_path / "artifacts")
    assert folder.parent == tmp_path / "artifacts"
    assert (folder / "abc" / "summary.json").read_text() == "{}"


@pytest.fixture
def cost(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "cloud")
    return importlib.import_module("cost")


def test_the_cost_is_said_before_and_after(cost, tmp_path, capsys):
    task = yaml.safe_load((ROOT / "cloud" / "sky" / "l4.yaml").read_text())
    limit = task["resources"]["max_hourly_cost"]
    assert cost.task_minutes(task) == 15 + 20 + 15
    assert f"at most ${limit * 50 / 60:.2f}: 50 minutes" in cost.estimate(task)
    two = task | {"num_nodes": 2}
    assert f"at most ${2 * limit * 50 / 60:.2f}: 50 minutes" in cost.estimate(two)
    (tmp_path / "summary.json").write_text('{"seconds": 600}')
    assert cost.main(["cost", str(ROOT / "cloud" / "sky" / "l4.yaml"), str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"the run took 600 s: ${limit / 6:.2f} of" in printed and "at most" in printed
    assert cost.main(["cost"]) == 2
    assert cost.modal_hourly("A100") < cost.modal_hourly("H100")
    with pytest.raises(ValueError, match=r"gpu must be one of .* got 'RTX4090'"):
        cost.modal_hourly("RTX4090")
    main = MODAL.read_text().partition("def main")[2]
    before, _, after = main.partition(".remote(")
    assert "cost.dollars(" in before and "cost.used(" in after


def test_a_machine_that_nothing_ends_says_so(cost):
    """With the price of an hour."""
    for path in TASKS:
        task = yaml.safe_load(path.read_text())
        hourly = task["resources"].get("max_hourly_cost")
        said = f"nothing ends the machine there by itself: at most ${hourly or 0:.2f} an hour"
        assert (said in cost.estimate(task)) == path.stem.startswith("primeintellect"), path
        assert hourly is None or said not in cost.estimate(task) or f"${hourly:.2f}" in README


def test_modal_has_the_gpus_of_the_workflow(cost):
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu-bench.yml").read_text())
    offered = flow[True]["workflow_dispatch"]["inputs"]["gpu"]["options"]
    assert set(offered) == set(cost.MODAL_GPUS)
    assert all(cost.modal_hourly(gpu) > 0 for gpu in offered)


@pytest.fixture
def launch(tmp_path):
    """cloud/launch.py with programs in place of `sky` and `rsync`: status, output, their calls."""
    calls = tmp_path / "calls"
    for name in ("sky", "rsync"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/bash\necho "{name} $*" >> {calls}\ncase "{name} $1" in $BAD) exit 3;; esac\n'
            f'if [ "{name} $1" = "$SLOW" ]; then kill -TERM $PPID; exec sleep 9; fi\n'
        )
        program.chmod(0o755)

    def call(*arguments, bad="-", slow="-"):
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        words = "import sys, launch; launch.WAIT_S = 0; sys.exit(launch.main(sys.argv))"
        task = ROOT / "cloud" / "sky" / "primeintellect_rtx4090.yaml"
        done = subprocess.run(
            [sys.executable, "-c", words, str(task), "--name=x", *arguments],
            env=os.environ
            | {"PATH": path, "BAD": bad, "SLOW": slow, "PYTHONPATH": str(ROOT / "cloud")},
            capture_output=True,
            text=True,
        )
        made = calls.read_text().splitlines() if calls.exists() else []
        return done, [line.replace(str(task), "TASK") for line in made]

    return call


LAUNCH, DOWN = "sky launch --cluster x --yes TASK", "sky down --yes x"
FETCH = "rsync --archive x:sky_workdir/artifacts/ artifacts/"


@pytest.mark.parametrize(
    ("bad", "slow", "status", "expected"),
    [
        ("-", "-", 0, [LAUNCH, FETCH, DOWN]),
        ("sky*launch", "-", 3, [LAUNCH, FETCH, DOWN]),
        ("rsync*", "-", 3, [LAUNCH, FETCH, DOWN]),
        ("sky*down", "-", 1, [LAUNCH, FETCH, DOWN, DOWN, DOWN]),
        ("-", "sky launch", 143, [LAUNCH, DOWN]),
    ],
    ids=["well", "the run fails", "nothing comes back", "it cannot be ended", "SIGTERM"],
)
def test_a_machine_is_ended_however_its_run_ends(launch, bad, slow, status, expected):
    done, calls = launch("--yes", bad=bad, slow=slow)
    assert done.returncode == status and calls == expected, done.stderr
    assert "nothing ends the machine there by itself: at most $1.50 an hour" in done.stdout
    lost = "error: the machine may still be there, at most $1.50 an hour: sky down --yes x"
    assert (lost in done.stderr) == (bad == "sky*down")


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_what_starts_a_machine_ends_it(path):
    """By `cloud/launch.py`, wherever a reader is told how to run a task."""
    name = path.relative_to(ROOT)
    texts = [path.read_text(), README, seed_names.markdown()]
    assert f"python cloud/launch.py {name} " in texts[0]
    assert not any(re.search(rf"sky launch .*{name}", text) for text in texts)


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
    words = [
        str(ROOT / "cloud" / "pull_request.py"),
        "artifacts",
        "thresholds.txt",
        "https://run",
    ]
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(
        "Measured by https://run\n\n## Thresholds\n\n```\nruntime.sel_"
    )
    assert "<summary>modal-1/abc/seed_report.md</summary>\n\n| S | x |\n" in done.stdout
    assert "among the artifacts: modal-1/abc/compare/compare.md\n" in done.stdout
    assert len(done.stdout) < 65_536


def test_modal_runs_by_hand_alone():
    """What has its secrets runs no code of a pull request from elsewhere."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu-bench.yml").read_text())[
        "jobs"
    ]
    modal, bench = jobs["modal"], jobs["bench"]
    assert modal["if"] == "github.event_name == 'workflow_dispatch' && inputs.where == 'modal'"
    assert "ref" not in modal["steps"][0]["with"] and "inputs.where != 'modal'" in bench["if"]
    (run,) = [x for x in modal["steps"] if "modal run cloud/modal_app.py" in x.get("run", "")]
    assert run["env"]["MODAL_TOKEN_SECRET"] == "${{ secrets.MODAL_TOKEN_SECRET }}"
    kept = [x for x in modal["steps"] if "upload-artifact" in x.get("uses", "")]
    assert kept[0]["if"] == "always()"
    body = "\n".join(x.get("run", "") for x in jobs["propose"]["steps"])
    assert "cloud/pull_request.py artifacts thresholds.txt" in body and "--body-file" in body
    for name, job in jobs.items():
        secret = any("secrets." in str(step) for step in job["steps"])
        assert secret == (name == "modal"), name


def test_the_modal_step_without_secrets_says_so():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu-bench.yml").read_text())[
        "jobs"
    ]
    (run,) = [x for x in jobs["modal"]["steps"] if "MODAL_TOKEN_ID" in x.get("run", "")]
    done = subprocess.run(
        [shutil.which("bash"), "-e", "-c", run["run"]],
        env={"PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "has no secrets MODAL_TOKEN_ID" in done.stdout


def test_a_comment_starts_the_benchmark_for_those_who_may():
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu-bench.yml").read_text())
    assert flow[True]["issue_comment"] == {"types": ["created"]}
    bench, answer = flow["jobs"]["bench"], flow["jobs"]["answer"]
    for part in (
        "github.event.issue.pull_request &&",
        "startsWith(github.event.comment.body, '/benchmark')",
        """contains(fromJSON('["OWNER", "MEMBER", "COLLABORATOR"]'), """
        "github.event.comment.author_association)",
    ):
        assert part in bench["if"], part
    checkout = bench["steps"][0]["with"]
    assert "refs/pull/{0}/head" in checkout["ref"] and checkout["persist-credentials"] is False
    # What may write runs no code of the pull request.
    assert not any("uses" in step for step in answer["steps"])
    assert "github.event_name != 'issue_comment'" in flow["jobs"]["propose"]["if"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_whole(path):
    flow = yaml.safe_load(path.read_text())
    # YAML 1.1 reads the key `on` as true.
    assert set(flow) == {"name", True, "permissions", "concurrency", "jobs"}
    assert flow["name"] == path.stem and flow["permissions"] == {"contents": "read"}
    for job in flow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 60
        assert set(job.get("permissions", {})) <= {"contents", "pull-requests"}
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


def test_workflows_run_the_checks_and_the_gpu():
    flows = {path.stem: yaml.safe_load(path.read_text())["jobs"] for path in WORKFLOWS}
    commands = {
        name: [step.get("run", "") for job in jobs.values() for step in job["steps"]]
        for name, jobs in flows.items()
    }
    assert {"make check", 'make test PART="$PART"'} <= set(commands["ci"])
    assert 'make test mutants PART="$PART"' in commands["release"]
    for name in ("ci", "release"):  # the parts are all tests
        parts = flows[name]["test"]["strategy"]["matrix"]["part"]
        assert parts == [f"{k}/{len(parts)}" for k in range(1, len(parts) + 1)]
    assert tuple(flows["ci"]["versions"]["strategy"]["matrix"]["name"]) == versions.NAMES
    assert any("bench.oneshot" in text for text in commands["gpu-bench"])
    bench, propose = flows["gpu-bench"]["bench"], flows["gpu-bench"]["propose"]
    assert bench["runs-on"] == ["self-hosted", "gpu"] and "permissions" not in bench
    assert any("bench.tune_thresholds" in step.get("run", "") for step in propose["steps"])
    kept = [step for step in bench["steps"] if "upload-artifact" in step.get("uses", "")]
    assert kept[0]["if"] == "always()"
