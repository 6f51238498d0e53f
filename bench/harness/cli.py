"""Starts every command: reads flags and the variables `NSA_*` (`seed_env`), opens the debug
log, and calls `main`.

    cli.run(main)                # a command without flags of its own, or with global flags
    cli.run(main, FLAGS)         # a command with flags of its own

`FLAGS` are in `flags.FLAGS` only if the command is the main program, since other commands define
flags with the same names. Invalid input is reported in one line, and `--verbosity=1` adds the
traceback. `exit_status` defines the exit statuses of commands. If a command prints nothing for a
while, a line on stderr reports that the command is still running (`heartbeat`).
"""

import dataclasses
import functools
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from absl import logging as absl_logging

from nsa_core import debug, policy

from . import exit_status, heartbeat, launchers, process, records, seed_env

LOG = flags.DEFINE_list(
    "log",
    [],
    f"Events to print on stderr: any of {', '.join(debug.EVENTS)}. The events timing and compare "
    "wait for the device after every step, so times that the command measures are not valid.",
)
LIMIT = flags.DEFINE_integer(
    "log_limit", 100, "Maximum number of lines per event of --log.", lower_bound=1
)
flags.register_validator(
    LOG,
    lambda events: set(events) <= set(debug.EVENTS),
    f"must contain only names in {','.join(debug.EVENTS)}",
)

log = logging.getLogger(__name__)

# flags that are defined below belong to the command that defines them
flags.disclaim_key_flags()


def define(own: flags.FlagValues | None = None, /, **known: Any) -> flags.FlagValues:
    """Define the flags of a command and return their values.

    Args:
      own: The values to which the flags are added, by default new values that also have the flag
        `--commit`.
      known: For each flag the default, the help, and optionally a bound or the allowed values. An
        entry can also be the name of another flag, of which the new flag becomes an alias. A flag
        has the type of its default. The values of a list are separated by commas. A tuple means
        that the flag may be repeated, and that each occurrence has one value. A type instead of a
        default means that the default is None, or empty for a tuple. A bound is the minimum, or a
        pair of minimum and maximum. The bound defaults to the minimum 1 for integers and 0 for
        other numbers. The bound None means that there is no bound.
    """
    if own is None:
        own = flags.FlagValues()
        # The commit is what `records.environment` reads.
        known["commit"] = (
            str,
            "Commit of this source tree; default: the commit that git reports.",
        )
    define_as: dict[type, Any] = {
        bool: flags.DEFINE_bool,
        list: flags.DEFINE_list,
        str: flags.DEFINE_string,
    }
    define_as |= {int: flags.DEFINE_integer, float: flags.DEFINE_float}
    for name, about in known.items():
        if isinstance(about, str):
            flags.DEFINE_alias(name, about, flag_values=own)
            continue
        default, what, *more = about
        kind = default if isinstance(default, type) else type(default)
        values: Any = default if default is not kind else [] if kind is tuple else None
        how: dict[str, Any] = {"flag_values": own}
        if kind in (int, float):
            bound = more[0] if more else int(kind is int)
            ends = bound if isinstance(bound, tuple) else (bound, None)
            how |= dict(zip(("lower_bound", "upper_bound"), ends, strict=True))
            define_as[kind](name, values, what, **how)
            flags.register_validator(name, _is_finite, "must be finite", flag_values=own)
        elif kind is tuple and more:
            flags.DEFINE_multi_enum(name, [*values], [*more[0]], what, **how)
        elif kind is tuple:
            flags.DEFINE_multi_string(name, [*values], what, **how)
        elif more:
            flags.DEFINE_enum(name, values, [*more[0]], what, **how)
        else:
            define_as[kind](name, values, what, **how)
    return own


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def define_lines(own: flags.FlagValues) -> flags.FlagHolder[str | None]:
    """Define `--out`, the file to which lines are appended. If lines cannot be appended to the
    file, the command ends before anything is measured."""
    what = "JSON Lines file to which the lines are appended."
    holder = flags.DEFINE_string("out", None, what, flag_values=own)
    flags.register_validator(holder, _takes_lines, flag_values=own)
    return holder


def _takes_lines(path: str | None) -> bool:
    try:
        if path is not None:
            records.check_appendable(path)
    except (ValueError, OSError) as error:
        raise flags.ValidationError(str(error)) from None
    return True


ONLY = (
    (),
    "Run only rows whose names begin with this text (repeatable).",
)  # a flag, as `define` takes it


def chosen(only: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the names that begin with one of `only`, or all names if `only` is empty.

    Raises:
      ValueError: There is no such name.
    """
    names = list(names)
    if found := [name for name in names if name.startswith(tuple(only) or "")]:
        return found
    raise ValueError(
        f"--only must be the beginning of a row's name, got {', '.join(only)}; the names are "
        f"{'; '.join(names)}"
    )


def refuse_beside(
    mode: flags.Flag | flags.FlagHolder, others: Iterable[flags.Flag | flags.FlagHolder]
) -> None:
    """Raise an error for flags that have no effect together with the flag `mode`.

    Raises:
      ValueError: One of the flags `others`, which have no effect with `mode`, differs from its
        default.
    """
    if given := [other.name for other in others if other.value != other.default]:
        raise ValueError(f"--{given[0]} has no effect with --{mode.name}")


def run(
    main: Callable[[Sequence[str]], int | None],
    own: flags.FlagValues | None = None,
    *,
    arguments: bool = False,
    several: bool = False,
) -> None:
    """Parse the command line and exit with the result of `main`.

    Args:
      main: The function that receives the arguments and returns the exit status.
      own: The flags of the command. If the module of the command is only imported, the flags in
        `own` are not in `flags.FLAGS`. `own` defaults to the flags that the main module defines in
        `flags.FLAGS`.
      arguments: Whether the command accepts arguments that are not flags.
      several: Whether the command itself supports several processes of a launcher.
    """
    main_flags = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    if own is not None:
        main_flags = [own[name] for name in own]
        for name in own:
            flags.FLAGS[name] = own[name]
        own.mark_as_parsed()  # flags.FLAGS, which has the same flags, parses them
    program = sys.modules["__main__"]
    sys.argv[0] = _typed(program.__spec__)
    for flag in main_flags:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    own_name = rf"python -m bench\.{_command(sys.argv[0])}\b"
    told = process.module(re.sub(own_name, sys.argv[0], program.__doc__ or ""))
    program.__doc__ = f"{told.rstrip()}\n{exit_status.TABLE}"
    app.run(functools.partial(_start, main, arguments, several=several), flags_parser=_parse)


def _typed(spec) -> str:
    """Return the form of the call: `nsa-compare` or `python -m bench.compare`."""
    script = Path(sys.orig_argv[-len(sys.argv) :][0]).name
    return script if script.startswith("nsa-") else f"python -m {spec.name}"


def _command(program: str) -> str:
    """Return the name of the command in `bench`."""
    return re.split(r"[.-]", program)[-1]


def _fault(error: Exception, program: str) -> int:
    """Report an error of the command line, and return the exit status."""
    print(
        f"error: {process.module(str(error))}\n{program} --help shows the flags",
        file=sys.stderr,
    )
    return exit_status.USAGE


def _parse(argv: Sequence[str]) -> list[str]:
    """Parse the command line. An invalid command line ends the process with status 2. absl would
    use status 1. `--help` is valid.
    """
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        raise SystemExit(_fault(error, argv[0])) from None
    except SystemExit as end:
        asked = any(word.lstrip("-").startswith("help") for word in argv[1:])
        raise SystemExit(exit_status.OK if asked or "-?" in argv else end.code) from None


def _start(main, arguments, argv, several=False):
    if not flags.FLAGS["verbosity"].present:
        # commands themselves print what they choose
        absl_logging.set_verbosity(absl_logging.WARNING)
    try:
        if len(argv) > 1 and not arguments:
            raise app.UsageError(f"unexpected argument {argv[1]!r}")
        if not several:
            launchers.check_one()
        for line in seed_env.apply(flags.FLAGS, _command(argv[0])):
            print(f"warning: {process.module(line)}", file=sys.stderr)
        _log_events()
        if "commit" in flags.FLAGS:
            # the value at the start of the command
            records.environment(flags.FLAGS["commit"].value)
        with heartbeat.beating(), policy.overridden(_thresholds(), "a flag"):
            return main(argv)
    except app.UsageError as error:
        return _fault(error, argv[0])
    except (OSError, ValueError, NotImplementedError) as error:
        log.debug("", exc_info=True)
        print(f"error: {process.module(str(error))}", file=sys.stderr)
        refused = isinstance(error, NotImplementedError)
        return exit_status.NOT_MEASURED if refused else exit_status.USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return exit_status.INTERRUPTED


def _thresholds() -> policy.Thresholds:
    """Return the thresholds of the command line, if the command has such flags."""
    names = (field.name for field in dataclasses.fields(policy.Thresholds))
    given = {name: flags.FLAGS[name].value for name in names if name in flags.FLAGS}
    return policy.Thresholds(**given)


def _log_events() -> None:
    """Print the events of `--log` without the prefix of absl. Print only events of the frameworks
    that the flags select.

    Raises:
      ValueError: `--log` has events that change times, and `--save_records` is given.
    """
    perturbing = ",".join(sorted({"timing", "compare"} & set(LOG.value)))
    if perturbing:
        if "save_records" in flags.FLAGS and flags.FLAGS["save_records"].value:
            raise ValueError(
                f"--log={perturbing} must not be combined with --save_records, since these events "
                "change times"
            )
        print(
            f"warning: with --log={perturbing} the times are not valid measurements",
            file=sys.stderr,
        )
    if not LOG.value:
        return
    asked = flags.FLAGS["framework"].value if "framework" in flags.FLAGS else "both"
    for package in debug.FRAMEWORKS:
        told = asked in ("both", package.removeprefix("nsa_"))
        handler: logging.Handler = logging.NullHandler()
        if told:
            handler = logging.StreamHandler(sys.stderr)
        for event in debug.EVENTS:
            logger = logging.getLogger(f"{package}.{event}")
            logger.handlers, logger.propagate = [handler], False
    debug.enable(*LOG.value, limit=LIMIT.value)
