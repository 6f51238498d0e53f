"""Problems that are posed to the choice of an implementation, on devices that need not be there."""

from nsa_core.dispatch import Problem
from nsa_torch import NSAConfig
from tests.measured import GPU


def pose(step, length=512, framework="torch", **changes) -> Problem:
    values = dict(platform="cuda", dtype="bfloat16", B=1, T=length, S=length, H=8, Hkv=2)
    values |= dict(D=64, Dv=64, packed=False, config=NSAConfig(), device=GPU)
    # A GPU on which Triton is no default.
    values |= dict(capability=(8, 7), framework=framework, step=step)
    return Problem(**values | changes)
