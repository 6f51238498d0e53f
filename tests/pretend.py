"""What tests put in the place of their world: a GPU, the words of a command, folders, packages.

One place for all names of ours and of others that tests replace for it.
"""

import functools
import importlib.metadata
import pkgutil
import sys
import types
from unittest import mock

import jax
import torch

from kernels_pallas.runtime import store
from kernels_pallas.triton import capability
from nsa_core import policy
from nsa_jax import ffi
from tests.tables import table


def asked_again(monkeypatch, place, name):
    """A function that asks its machine once asks in this test, and again after it."""
    monkeypatch.setattr(place, name, functools.cache(getattr(place, name).__wrapped__))


def gpu(monkeypatch, capability=(9, 0), name="a GPU", count=1):
    """torch says that there are GPUs of a compute capability; None: that there is none."""
    for attribute, found in {
        "is_available": capability is not None,
        "device_count": count if capability else 0,
        "get_device_name": name,
        "get_device_capability": capability,
    }.items():
        monkeypatch.setattr(torch.cuda, attribute, lambda *_, found=found: found)


def jax_gpu(monkeypatch, capability=(9, 0), **answers):
    """The library takes JAX's default device for a GPU of a compute capability."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    asked_again(monkeypatch, ffi, "_is_hopper")
    machine(monkeypatch, jax_capability=capability, jax_device_name="a GPU", **answers)


def triton_launches(function, *arrays, capability=(9, 0)):
    """How many kernels JAX would launch, from a program that it lowers for a GPU."""
    with mock.patch(ASKED["jax_capability"], lambda: capability):
        lowered = function.trace(*arrays).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("@triton_kernel_call")


def no_module(monkeypatch, *names):
    """An import of one of them fails."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def module(monkeypatch, name, **functions):
    """An import of this name gives a module that has these functions."""
    made = types.ModuleType(name)
    vars(made).update(functions)
    monkeypatch.setitem(sys.modules, name, made)


def packages(monkeypatch, **versions):
    """Only these packages are installed, in these versions; `_` stands for `-` in a name."""
    installed = {name.replace("_", "-"): version for name, version in versions.items()}

    def distribution(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return types.SimpleNamespace(version=installed[name], requires=[])

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    asked_again(monkeypatch, store, "_jax_version")
    asked_again(monkeypatch, capability, "_missing")


# What the library asks about its machine, by a name of this file.
ASKED = table("pretend")


def machine(monkeypatch, **answers):
    """The library is told these, by the names of `ASKED`, whatever it asks about, or what they
    return if they are functions.
    """
    for name, answer in answers.items():
        told = answer if callable(answer) else lambda *_, answer=answer, **__: answer
        monkeypatch.setattr(ASKED[name], told)


FOLDERS = {"records": "bench.harness.records.FOLDER", "devices": "nsa_core.policy.FOLDER"}


def folder(monkeypatch, kind, path):
    """The repository's folder of `FOLDERS` is another one."""
    monkeypatch.setattr(FOLDERS[kind], path)
    if kind == "devices":  # of which each file is read once
        asked_again(monkeypatch, policy, "of")


def calls_of(monkeypatch, place, name, note=lambda *arguments, **options: arguments):
    """What `note` says of each call of a function or method, which runs as ever."""
    found, function = [], getattr(place, name)

    @functools.wraps(function)
    def noted(*arguments, **options):
        found.append(note(*arguments, **options))
        return function(*arguments, **options)

    monkeypatch.setattr(place, name, noted)
    return found


def original(name):
    """A function of the library, by a name of `ASKED`."""
    return pkgutil.resolve_name(ASKED[name])


def watched(monkeypatch, name, *note):
    """`calls_of` a function of the library, by a name of `ASKED`."""
    place, _, function = ASKED[name].rpartition(".")
    return calls_of(monkeypatch, pkgutil.resolve_name(place), function, *note)
