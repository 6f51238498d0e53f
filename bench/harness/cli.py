"""How every command starts: its flags, the seed system's variables, the debug log, then `main`.

    cli.run(main)                # a command whose flags are the program's
    cli.run(main, FLAGS)         # its own until it is the main program: others have such names

Bad input is one line and exit status 2; `--verbosity=1` shows where it was met.
"""

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags
from absl import logging as absl_logging

from bench.harness import seed_env
from nsa_jax import debug

BAD_INPUT = 2  # exit status
LOG = flags.DEFINE_list(
    "log",
    [],
    f"Events to tell on stderr, of {', '.join(debug.EVENTS)}. timing and compare wait for the "
    "device after every step: the times of the command itself are then no measurements.",
)
LIMIT = flags.DEFINE_integer("log_limit", 100, "Lines an event of --log.", lower_bound=1)
flags.register_validator(
    LOG,
    lambda events: set(events) <= set(debug.EVENTS),
    f"must be some of {','.join(debug.EVENTS)}",
)

log = logging.getLogger(__name__)


def run(
    main: Callable[[Sequence[str]], int | None],
    own: flags.FlagValues | None = None,
    *,
    arguments: bool = False,
) -> None:
    """Parses the command line and exits with what `main` returns.

    Args:
      own: flags that are not in `flags.FLAGS` while the module is only imported.
      arguments: whether the command takes any that are no flags.
    """
    if own is not None:
        for name in own:
            flags.FLAGS[name] = own[name]
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], own[name])
        own.mark_as_parsed()  # by way of flags.FLAGS, which has the same flags
    app.run(functools.partial(_start, main, arguments))


def _start(main, arguments, argv):
    if len(argv) > 1 and not arguments:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    if not flags.FLAGS["verbosity"].present:
        absl_logging.set_verbosity(absl_logging.WARNING)  # commands print what they choose
    try:
        for line in seed_env.apply(flags.FLAGS, Path(argv[0]).stem):
            print(f"warning: {line}", file=sys.stderr)
        _log_events()
        return main(argv)
    except (OSError, ValueError, NotImplementedError) as error:
        log.debug("", exc_info=True)
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def _log_events() -> None:
    """Lines as they are, without the prefix that absl gives to those of a log."""
    perturbing = ",".join(sorted({"timing", "compare"} & set(LOG.value)))
    if perturbing:
        if "save_records" in flags.FLAGS and flags.FLAGS["save_records"].value:
            raise ValueError(f"--log={perturbing} perturbs times: not with --save_records")
        print(f"warning: --log={perturbing}: times are no measurements", file=sys.stderr)
    if not LOG.value:
        return
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    for package in debug.FRAMEWORKS:
        for event in debug.EVENTS:
            logger = logging.getLogger(f"{package}.{event}")
            logger.handlers, logger.propagate = [handler], False
    debug.enable(*LOG.value, limit=LIMIT.value)
