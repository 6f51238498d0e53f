"""Kernels on disk: what is kept is found, and no fault of a folder gives wrong machine code."""

import errno
import json
import logging
import os
import re
import shutil
import signal
from multiprocessing.pool import ThreadPool
from pathlib import Path
from unittest import mock

import pytest

from kernels_pallas.kernel import LENGTHS
from kernels_pallas.runtime import store as module
from kernels_pallas.runtime.store import Store, key_of
from nsa_interop import build as command
from tests import pretend, spawned
from tests.cross_compile import ROOT
from tests.limits import set_limits
from tests.runtime_samples import built_of, kernel
from tests.tables import table

TABLE = table("test_runtime")


@pytest.fixture
def builds(monkeypatch):
    """Kernels are not compiled; what would have been, in order. D = 13 cannot be."""
    done = []

    def build(kernels, jobs=None, progress=None):
        for i, x in enumerate(kernels):
            done.append(x.spec.D)
            bad = RuntimeError(f"{x.name} could not be built:\n13")
            yield i, bad if x.spec.D == 13 else built_of(x)

    pretend.machine(monkeypatch, compiler=build)
    module._warn.cache_clear()
    return done


@pytest.fixture
def store(tmp_path, builds):
    return Store(tmp_path / "kernels")


def warnings(caplog):
    return [x.getMessage() for x in caplog.records if x.levelno >= logging.WARNING]


def the_file(store):
    (path,) = store.folder.glob("*.kernel")
    return path


def put(store, *kernels, image=b"\x7fELF image"):
    """As if they had been compiled."""
    for x in kernels:
        store.put(x, built_of(x, image))


def check_fetched(store, *numbers):
    kernels = [*map(kernel, numbers)]
    assert store.fetch(kernels) == [*map(built_of, kernels)]


# What is kept


def test_what_is_put_is_got(store, caplog):
    assert store.get(kernel(1)) is None
    put(store, kernel(1))
    assert Store(store.folder).get(kernel(1)) == built_of(kernel(1))
    assert store.get(kernel(2)) is None
    assert the_file(store).stat().st_mode & 0o077 == 0
    assert store.folder.stat().st_mode & 0o777 == 0o700
    the_file(store).unlink()
    assert store.get(kernel(1)) is None and warnings(caplog) == []


def test_what_is_missing_is_built_once(store, builds):
    check_fetched(store, 2, 1, 2)
    assert builds == [2, 1]
    check_fetched(Store(store.folder), 3, 1)
    assert builds == [2, 1, 3]


def test_a_kernel_that_cannot_be_built_does_not_take_the_others_along(store, builds):
    with pytest.raises(RuntimeError, match=r"^sample could not be built:\n13$"):
        store.fetch([kernel(13), kernel(1)])
    assert store.get(kernel(1)) == built_of(kernel(1))
    words = r"2 of 3 kernels \(sample, other\); the first: sample"
    with pytest.raises(RuntimeError, match=words):
        store.fetch([kernel(13), kernel(13, "other"), kernel(1)])


def test_a_key_is_of_the_kernel_its_sources_and_the_architecture(monkeypatch):
    keys = {key_of(x) for x in (kernel(1), kernel(1), kernel(2), kernel(1, "other"))}
    assert len(keys) == 3 and {*map(len, keys)} == {64}
    with monkeypatch.context() as patch:
        pretend.machine(patch, kernel_sources="other sources")
        keys.add(key_of(kernel(1)))
    set_limits(monkeypatch, architecture="sm_100a")
    assert len(keys | {key_of(kernel(1))}) == 5


# Prints the files of the package that Python imports to build kernels.
IMPORTED = """
import sys, types
package = types.ModuleType("kernels_pallas")
package.__path__ = ["kernels_pallas"]
sys.modules["kernels_pallas"] = package
for name in sys.argv[1:]:
    __import__(name)
found = [m for x, m in sys.modules.items() if x.startswith("kernels_pallas.")]
print(*(m.__file__ for m in found if m.__file__))
"""


def test_a_change_of_any_source_changes_the_key(tmp_path):
    """Of what builds kernels; others do not count."""
    presets = ("paper", "seed")
    kernels = [x for name in presets for x in command.kernels_of(name, True, LENGTHS[:1])]
    places = {place.partition(":")[0] for x in kernels for place in (x.source, x.body)}
    done = spawned.python("-c", IMPORTED, "kernels_pallas.runtime.build_child", *places)
    assert not done.returncode, done.stderr
    files = {(ROOT / x).relative_to(ROOT / "kernels_pallas") for x in done.stdout.split()}
    assert len(files) > 40
    for path in (Path("runtime/recorder.c"), *files):
        (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / path).write_text(path.name)
    digest = lambda: module.sources.__wrapped__(tmp_path)
    found = {digest()}
    for path in (tmp_path / "runtime" / "recorder.c", *[tmp_path / x for x in files]):
        path.write_text(f"{path.name[:-1]}#")  # of the same length
        found.add(digest())
    path.rename(path.with_stem(f"{path.stem}0"))
    found.add(digest())
    assert len(found) == len(files) + 3
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "kernel.py").touch()
    assert digest() in found


@pytest.mark.parametrize("kind", ["as built", "of another jax", "links"])
def test_presets_are_looked_at_first_and_never_written(store, builds, tmp_path, caplog, kind):
    """Whichever JAX made them; a package manager may link to them."""
    made = Store(tmp_path / "made", presets=None)
    put(made, kernel(1), image=b"preset")
    file, folder = the_file(made), made.folder
    if kind == "of another jax":
        other_jax(file)
    if kind == "links":
        folder = tmp_path / "presets"
        folder.mkdir()
        (folder / file.name).symlink_to(file)
    both = Store(store.folder, presets=folder)
    (found,) = both.fetch([kernel(1)])
    assert found.image == b"preset1" and builds == [] and warnings(caplog) == []
    put(both, kernel(2))
    assert [entry.preset for entry in both.entries()] == [True, False]
    assert both.clear() == 1 and both.get(kernel(1))


LAYER = {"heads": 64, "dtype": "bfloat16", "config": {"window": 512}}


def test_layers_that_kernels_are_there_of(store, builds, tmp_path):
    presets = Store(tmp_path / "presets", presets=None)
    both = Store(store.folder, presets=presets.folder)
    assert not both.serves(LAYER) and both.layers() == []
    put(presets, kernel(1))
    assert not both.serves(LAYER)  # of a package all are noted
    presets.add_layers([LAYER])
    other = LAYER | {"heads": 32}
    assert both.serves(LAYER) and not both.serves(other) and both.layers() == [LAYER]
    put(store, kernel(2))
    assert both.serves(other)  # it may: of what was built here nothing is noted
    store.add_layers([LAYER, LAYER | {"heads": 1}])
    assert both.serves(LAYER | {"heads": 1}) and not both.serves(other)
    store.folder.chmod(0o777)
    assert not both.serves(LAYER | {"heads": 1})
    store.folder.chmod(0o700)
    (store.folder / module.LAYERS).write_text("{")
    assert both.serves(other) and both.layers() == [LAYER]
    store.clear()
    assert not both.serves(other)


def test_entries_and_room(store, monkeypatch):
    """Past the limit those go that were not used for longest."""
    assert store.entries() == [] and store.clear() == 0
    *kernels, last = (kernel(i, f"of-{i}") for i in range(4))
    put(store, *kernels)
    for i, x in enumerate(kernels):
        os.utime(store.folder / f"{x.name}-{key_of(x)}.kernel", (i, i))
    entries = store.entries()
    expected = [(x.name, key_of(x), float(x.spec.D)) for x in kernels[::-1]]
    assert [(x.name, x.key, x.used) for x in entries] == expected
    assert store.get(kernels[0])  # a use
    set_limits(monkeypatch, store_bytes=3 * entries[0].bytes)
    put(store, last)
    assert {x.name for x in store.entries()} == {"of-3", "of-0", "of-2"}
    (store.folder / "left.tmp").touch()
    assert store.clear() == 3 and [x.name for x in store.folder.iterdir()] == []


# Faults. What is built anew is right, whatever lay there.


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def other_jax(path):
    """With a checksum that fits."""
    _, line, image = path.read_bytes().split(b"\n", 2)
    rest = json.dumps(json.loads(line) | {"versions": {"jax": "0.1"}}).encode() + b"\n" + image
    key = path.stem.rpartition("-")[2]
    path.write_bytes(module._checksum(key, rest) + b"\n" + rest)


def other_kernel(path):
    store = Store(path.parent / "other", presets=None)
    put(store, kernel(2))
    the_file(store).rename(path)


FAULTS = {
    "a bit of the image": lambda path: flip(path, -1),
    "a bit of the manifest": lambda path: flip(path, 200),
    "a bit of the checksum": lambda path: flip(path, 10),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "another kernel": other_kernel,
    "another jax": other_jax,
}
SAID = {
    "a folder": "directory",
    "another jax": "the file was built with jax 0.1, but jax .* is installed",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_file_is_built_anew_with_a_warning(store, builds, name, caplog):
    store.fetch([kernel(1)])
    FAULTS[name](the_file(store))
    check_fetched(Store(store.folder), 1)
    assert builds == [1, 1]
    (warning, *rest) = warnings(caplog)
    words = SAID.get(name, "the file is damaged")
    assert re.search(f"is ignored, and its kernel is built again.*{words}", warning)
    if name == "a folder":  # which stays in the way
        assert "cannot store kernels" in rest.pop()
    else:
        assert Store(store.folder).get(kernel(1)) == built_of(kernel(1))
    assert rest == [] and list(store.folder.glob("*.tmp")) == []


@pytest.mark.parametrize("what", ["jax", "its plugin"])
def test_where_jax_cannot_build_its_version_is_not_compared(store, monkeypatch, builds, what):
    store.fetch([kernel(1)])
    other_jax(the_file(store))
    if what == "jax":
        pretend.packages(monkeypatch)
    else:
        pretend.machine(monkeypatch, plugin=False)
    assert store.get(kernel(1)).cubin.versions == {"jax": "0.1"}


@pytest.mark.parametrize("name", TABLE["names"])
def test_a_name_that_leads_out_of_the_folder_is_refused(store, builds, name):
    for use in (store.get, lambda x: put(store, x), lambda x: store.fetch([x])):
        with pytest.raises(ValueError, match="a kernel's name must be letters"):
            use(kernel(1, name))
    assert not store.folder.exists()


def failing(place, number):
    """A call that writes fails."""
    call = mock.Mock(side_effect=OSError(number, os.strerror(number)))
    return lambda store, patch: patch.setattr(place, call)


def another_user(store, patch):
    user = os.geteuid()
    patch.setattr(os, "geteuid", lambda: user + 1)


def a_file_in_the_way(store, patch):
    shutil.rmtree(store.folder)
    store.folder.touch()


UNFIT = {
    "full": (failing("os.fsync", errno.ENOSPC), os.strerror(errno.ENOSPC)),
    "closed": (failing("tempfile.NamedTemporaryFile", errno.EACCES), os.strerror(errno.EACCES)),
    "read only": (failing("os.replace", errno.EROFS), os.strerror(errno.EROFS)),
    "no folder": (a_file_in_the_way, "stay in memory"),
    "another user's": (another_user, f"it must belong to user {os.geteuid() + 1}, got"),
} | {
    f"{mode:o}": (
        lambda store, patch, mode=mode: store.folder.chmod(mode),
        "is refused, since others may write to it.*chmod go-w",
    )
    for mode in (0o720, 0o702, 0o777, 0o1777)
}


@pytest.mark.parametrize("name", UNFIT)
def test_where_nothing_can_be_kept_kernels_stay_in_memory(
    store, builds, caplog, monkeypatch, name
):
    """It is said once, and what another may have written is not read."""
    spoil, words = UNFIT[name]
    put(store, kernel(1), image=b"planted")
    refused = words.startswith("i")
    if not refused:
        store.clear()
    spoil(store, monkeypatch)
    store = Store(store.folder)
    assert store.get(kernel(1)) is None
    for i in (1, 2, 1):
        check_fetched(store, i)
    assert builds == [1, 2]
    (warning,) = warnings(caplog)
    assert re.search(words, warning)
    assert "is refused" in warning if refused else "stay in memory" in warning
    monkeypatch.undo()
    if store.folder.is_dir():
        kept = [path for path in store.folder.iterdir() if path.suffix in (".kernel", ".tmp")]
        assert len(kept) == refused  # what was planted
    else:
        assert store.clear() == 0


# Processes


def fetched(folder, script="", count=1):
    """How processes without JAX and torch end that fetch kernels at the same time."""
    script = (
        "import os, sys\n"
        "sys.modules.update(dict.fromkeys(('jax', 'torch')))\n"
        "from pathlib import Path\n"
        "from tests.runtime_samples import fetch\n"
        f"{script}\nfetch(Path({str(folder)!r}))"
    )
    with ThreadPool(count) as pool:
        return pool.starmap(spawned.python, [("-c", script)] * count)


def test_processes_at_once_build_once(tmp_path):
    for done in fetched(tmp_path, count=4):
        assert done.returncode == 0 and done.stdout.split() == ["1", "2"], done.stderr
    assert sorted((tmp_path / "builds").read_text().split()) == ["1", "2"]


def test_a_process_that_is_killed_leaves_no_half_file_and_no_lock(tmp_path, builds):
    (done,) = fetched(tmp_path, "os.replace = lambda *_: os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = tmp_path / "kernels"
    assert len(list(folder.glob("*.tmp"))) == 1 and list(folder.glob("*.kernel")) == []
    check_fetched(Store(folder), 1)


# The command


def test_the_command_builds_lists_and_clears(tmp_path, builds, monkeypatch, capsys):
    asked = []

    def kernels_of(name, decode):
        asked.append(decode)
        return [kernel(len(name)), kernel(1)]

    pretend.machine(monkeypatch, kernels_of_preset=kernels_of)
    out = f"--out={tmp_path / 'out'}"
    assert command.main(["--preset=paper,seed", "--jobs=2", out, "--list"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("4 kernels of paper, seed in ") and builds == [5, 1, 4]
    assert Store(tmp_path / "out").layers() == list(map(command.layer_of, ("paper", "seed")))
    assert [line.split()[0] for line in lines] == ["sample"] * 3 + ["3"]
    assert command.main(["--preset=paper", "--decode", out]) == 0 and asked[-1]
    assert not any(asked[:-1]) and "2 kernels of paper in " in capsys.readouterr().out
    assert command.main(["--clear", "--preset=paper", out]) == 0
    removed, built = capsys.readouterr().out.splitlines()
    assert removed == f"3 kernels removed from {tmp_path / 'out'}"
    assert built.startswith("2 kernels of paper in ")
    assert command.main(["--clear", out]) == 0
    assert capsys.readouterr().out == f"2 kernels removed from {tmp_path / 'out'}\n"
    pretend.machine(monkeypatch, kernels_of_preset=[kernel(13)])
    assert command.main(["--preset=seed", out]) == 1
    assert "sample could not be built:\n13" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, words", TABLE["arguments"])
def test_flags_that_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit) as error:
        command.main(arguments.split())
    assert error.value.code == 2 and words in capsys.readouterr().err
