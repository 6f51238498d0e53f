"""Where the programs of warps run while kernels are interpreted.

Pallas' interpreter has no instructions of a warp. Who interprets kernels, which are the tests,
hands over a machine that has them (`use`); a kernel that is compiled never asks for one.
"""

from typing import Any

_machine: Any = None


def use(machine: Any) -> None:
    """From now on warps run on `machine`, whose functions `run` and `warpgroup` run programs on the
    functions of `warp.py`.
    """
    global _machine
    _machine = machine


def machine() -> Any:
    """What warps run on.

    Raises:
      RuntimeError: nobody handed one over.
    """
    if _machine is None:
        raise RuntimeError(
            "interpreted kernels need a machine for programs of warps: interpreter.use(machine)"
        )
    return _machine
