"""The console scripts of the package. If the extra `bench` is not installed, the error message of
a script names the extra."""

import runpy
import sys


def compare() -> None:
    """Run `nsa-compare`, which is `python -m nsa_bench.compare`."""
    _run("nsa_bench.compare")


def oneshot() -> None:
    """Run `nsa-oneshot`, which is `python -m nsa_bench.oneshot`."""
    _run("nsa_bench.oneshot")


def _run(module: str) -> None:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if "pip install 'native-sparse-attention[" not in str(error):
            raise
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
