"""absl flags that choose the implementation of each branch, for programs that use this library.

Import this module before `app.run`, then pass `implementation=flags.implementation(...)`.
"""

import dataclasses

from absl import flags

from nsa_core import policy
from nsa_core.dispatch import OnUnsupported, Problem, Registry
from nsa_core.types import Branches

NAMES = ("reference", "xla", "sdpa", "fa2", "jax", "mosaic", "triton", "invariant")

_KERNELS = Branches(
    *(
        flags.DEFINE_enum(
            f"{branch}_kernel",
            "auto",
            ["auto", *NAMES],
            f"Implementation of the {branch} branch. auto means the first that can run and that "
            "the thresholds allow.",
        )
        for branch in Branches._fields
    )
)
_ALL = flags.DEFINE_enum(
    "kernels",
    "auto",
    ["auto", *NAMES],
    "Implementation of each branch whose own flag is not given.",
)
_ON_UNSUPPORTED = flags.DEFINE_enum(
    "on_unsupported",
    "error",
    ["error", "fallback"],
    "Whether a named implementation that cannot run raises an error or falls back.",
)


class _LengthParser(flags.ArgumentParser):
    syntactic_help = "an integer from 0, or never"

    def parse(self, argument):
        if argument == policy.NEVER or (argument.isascii() and argument.isdigit()):
            return argument if argument == policy.NEVER else int(argument)
        raise ValueError(f"must be {policy.NEVER} or an integer from 0, got {argument!r}")


_THRESHOLDS = {
    field.name: flags.DEFINE(
        _LengthParser(),
        field.name,
        None,
        f"The {'fewest selected keys (n * block)' if branch == 'selected' else 'smallest length'} "
        f"at which automatic choice takes {'/'.join(kernels)} for the {branch} branch, in place "
        "of the device's.",
        serializer=flags.ArgumentSerializer(),
    )
    for field in dataclasses.fields(policy.Thresholds)
    for branch, kernels in [policy.DECIDES[field.name]]
}


def named() -> Branches[str | None]:
    """Return the names of implementations from the command line, or None for `auto`."""
    each = (_ALL.value if f.value == "auto" else f.value for f in _KERNELS)
    return Branches(*(None if name == "auto" else name for name in each))


def on_unsupported() -> OnUnsupported:
    """Return the value of `--on_unsupported`."""
    return "fallback" if _ON_UNSUPPORTED.value == "fallback" else "error"


def thresholds() -> policy.Thresholds:
    """Return the values of `--fa2_min_len_win`, `--fa2_min_len_cmp`, `--sel_min_len` and
    `--sel_triton_min_L`.
    """
    return policy.Thresholds(**{name: flag.value for name, flag in _THRESHOLDS.items()})


def implementation(registry: Registry, problem: Problem) -> Branches[str]:
    """Return the names that the flags select for `problem`, as the argument `implementation=`.

    Raises:
      ValueError: The framework does not have an implementation that a flag names.
      NotImplementedError: A named implementation cannot run `problem`, and `--on_unsupported`
        is `error`.
    """
    with policy.overridden(thresholds(), "a flag"):
        chosen = registry.choices(problem, named(), on_unsupported())
    return Branches(*(getattr(chosen, b).implementation for b in Branches._fields))
