"""What lay in `nsa_jax` before `nsa_core` was there is found under the old names too."""

import importlib
import pickle

import pytest

from nsa_core.layer import LayerSpec
from nsa_jax import Branches, MLPParams, NSAConfig, PoolParams


def test_pickles_of_before_are_read():
    """What a program may have kept."""
    written = (
        b"\x80\x04\x95\xfa\x01\x00\x00\x00\x00\x00\x00(\x8c\x0ensa_jax.config\x8c\tNSAConfi"
        b"g\x93)\x81}(\x8c\x0ecompress_blockK \x8c\x0fcompress_strideK\x10\x8c\x0cselect_bl"
        b"ockK@\x8c\x0cnum_selectedK\x10\x8c\x0bnum_initial\x94K\x01\x8c\tnum_local\x94K"
        b"\x02\x8c\x06windowM\x00\x01ub\x8c\rnsa_jax.types\x8c\x08Branches\x93K\x01K\x02K"
        b"\x03\x87\x81\x8c\x17nsa_jax.compress_params\x94\x8c\nPoolParams\x93K\x04\x85\x81h"
        b"\x02\x8c\tMLPParams\x93(K\x05K\x06K\x07K\x08K\tt\x81\x8c\rnsa_jax.layer\x94\x8c\t"
        b"LayerSpec\x93)\x81}(\x8c\x03dimK\x10\x8c\x07n_headsK\x02\x8c\x0bn_kv_groupsK\x01"
        b"\x8c\x03d_kK\x08\x8c\x03d_vK\x08\x8c\x01lK \x8c\x01dK\x10\x8c\x05l_selK@\x8c\x05n"
        b"_selK\x10\x8c\x01wM\x00\x02\x8c\x03phih\x03\x8c\x07Unnamed\x93\x94\x8c\x03avg\x85"
        b"\x81\x8c\nphi_hiddenN\x8c\x04gateh\x04\x8c\x07sigmoid\x85\x81\x8c\x0bgate_hiddenN"
        b"\x8c\tgate_tempG?\xf0\x00\x00\x00\x00\x00\x00\x8c\trope_baseG@\xc3\x88\x00\x00"
        b"\x00\x00\x00\x8c\nrope_scaleG?\xf0\x00\x00\x00\x00\x00\x00h\x00K\x01h\x01K\x02ubt"
        b"."
    )
    parts = PoolParams(4), MLPParams(5, 6, 7, 8, 9), LayerSpec(16, 2, 1, 8, 8)
    assert pickle.loads(written) == (NSAConfig(window=256), Branches(1, 2, 3), *parts)


@pytest.mark.parametrize(
    "name", ["compress_params", "config", "debug", "flags", "layer", "types"]
)
def test_the_same_things_are_under_the_old_names(name):
    """So what one module makes, another takes."""
    old, new = (
        importlib.import_module(f"{package}.{name}") for package in ("nsa_jax", "nsa_core")
    )
    assert old.__all__ and all(getattr(old, x) is getattr(new, x) for x in old.__all__)
