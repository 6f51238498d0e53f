"""Names of other packages that these may take away any day: which one went, and where to mend it.

What is found in the sources is tested, so a name that is added to them needs no word here.
transformers' are in tests/test_huggingface_compatibility.py, XLA's call frame in tests/test_ffi.py.
"""

import itertools

import jax.experimental.mosaic.gpu as mgpu
import pytest

from tests import foreign_names
from tests.canaries import said
from tests.foreign_names import Use

USES = [x for x in foreign_names.uses() if not x.name.startswith("transformers.")]
BY_NAME = {
    name: list(found)
    for name, found in itertools.groupby(sorted(USES), key=lambda use: use.name)
}


def fault(uses: list[Use]) -> str | None:
    """One sentence: what broke, and where to mend it."""
    name, places = uses[0].name, ", ".join(dict.fromkeys(use.place for use in uses))
    try:
        foreign_names.resolved(name)
    except (AttributeError, ImportError):
        return f"{said(name)} has no {name}: mend {places}"
    for use in uses:
        if reason := foreign_names.refusal(use):
            return f"{said(name)} calls {reason}: mend {use.place}"
    return None


@pytest.mark.parametrize("name", BY_NAME)
def test_a_private_name_is_there_and_takes_what_is_given(name):
    assert fault(BY_NAME[name]) is None


def test_private_names_are_found():
    names = {
        "jax.experimental.mosaic.gpu.FragmentedArray",
        "jax.experimental.mosaic.gpu._wgmma.wgmma_m64",
        "torch._C._cuda_getCurrentRawStream",
    }
    assert names <= BY_NAME.keys()
    assert any("_registers" in use.keywords for use in USES)


def test_what_broke_and_where_to_mend_it_is_one_sentence(monkeypatch):
    (first, *_) = (x for x in USES if "_registers" in x.keywords)
    name = "jax.experimental.mosaic.gpu.FragmentedArray"
    assert first.name == name and fault([first]) is None
    refused = fault([first._replace(keywords=("_layout", "_is_signed"))])
    assert refused.startswith(f"{said(name)} calls {name}(*, _registers")
    assert refused.endswith(f"required keyword-only argument: '_registers': mend {first.place}")
    monkeypatch.delattr(mgpu, "FragmentedArray")
    assert fault([first]) == f"{said(name)} has no {name}: mend {first.place}"
