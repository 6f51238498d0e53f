"""What a CUDA graph reads is held until the graph is gone."""

import ctypes
import gc
import weakref

import pytest

from kernels_pallas.runtime import captures, driver
from kernels_pallas.runtime.captures import Capture

DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Thing:
    pass


@pytest.fixture
def objects(monkeypatch):
    """In place of the driver: `[owner, destructor, its argument]` of each user object."""
    found = []

    def call(name, *given):
        if name == "cuUserObjectCreate":
            made, argument, destructor, references, options = given
            assert (references.value, options.value) == (1, 1)
            found.append([None, DESTRUCTOR(destructor.value), argument])
            made._obj.value = len(found)
        else:
            assert name == "cuGraphRetainUserObject"
            graph, made, references, options = given
            assert (references.value, options.value) == (1, 1)
            found[made.value - 1][0] = graph.value

    monkeypatch.setattr(driver, "call", call)
    monkeypatch.setattr(captures, "_held", [])
    return found


def test_held_until_the_driver_has_destroyed_the_object(objects):
    things = [Thing() for _ in range(3)]
    there = [weakref.ref(x) for x in things]
    for graph, x in zip((5, 5, 6), things, strict=True):
        captures.hold(graph, [x])
    del things, x
    gc.collect()
    assert [owner for owner, *_ in objects] == [5, 5, 6]
    captures.release()
    assert all(x() for x in there)
    _, destroy, argument = objects[1]
    destroy(argument)
    captures.release()
    gc.collect()
    assert [x() is None for x in there] == [False, True, False]


def test_the_next_one_drops_those_of_graphs_that_are_gone(objects):
    there = [weakref.ref(x := Thing()), captures.hold(5, x)][0]
    del x
    _, destroy, argument = objects[0]
    destroy(argument)
    captures.hold(6, Thing())
    gc.collect()
    assert there() is None and len(captures._held) == 1


@pytest.mark.parametrize(("status", "found"), [(0, None), (1, Capture(7, 5)), (2, None)])
def test_what_a_stream_is_captured_into(monkeypatch, status, found):
    """Of a capture that has failed the driver gives neither number nor graph."""

    def call(name, stream, state, number, graph, *rest):
        assert (name, stream.value) == ("cuStreamGetCaptureInfo_v2", 3)
        state._obj.value = status
        if status == 1:
            number._obj.value, graph._obj.value = 7, 5

    monkeypatch.setattr(driver, "call", call)
    assert captures.of_stream(3) == found


def test_a_refusal_is_an_error_and_holds_nothing(monkeypatch):
    def refuse(name, *given):
        raise RuntimeError(name)

    monkeypatch.setattr(driver, "call", refuse)
    monkeypatch.setattr(captures, "_held", [])
    with pytest.raises(RuntimeError, match="cuUserObjectCreate"):
        captures.hold(5, Thing())
    assert not captures._held
