"""Reads the environment variables of the seed system. `seed_env.yaml` has the meanings of these
variables in this library.

Commands have flags and no environment variables of their own. For each variable of the seed system
that is still set, `apply` prints one line on stderr. The line has the flag that replaces the
variable, or the reason why no flag does. `apply` sets a flag with the same meaning, unless the
command line
sets this flag. Settings that would be lost are errors: a name that is not in the table, a value
without a counterpart, a kernel that the command does not support, or `CONFIG` if the command
reads no file. `bench/reports/seed_env.md.jinja` is the table in the documentation.
"""

import dataclasses
import difflib
import fnmatch
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import yaml
from absl import flags

from nsa_core import policy

TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclasses.dataclass(frozen=True)
class Meaning:
    """The meaning of a variable. `flags` maps flags to texts. If the variable is true, each flag
    is set to its text, or to the value of the variable if the text is None.
    """

    flags: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    reason: str = ""  # the reason why there is no flag
    command: str = ""  # the only command in which the variable has this meaning
    # another flag with the same meaning; if it is set, the variable is not used
    instead: str = ""
    convert: Callable[[str], str] = str  # converts the variable's value to that of the flag
    # `only` applies to a variable without flags. `only=None` means that any value is ignored.
    # Otherwise the text is the default of the seed system, the only value that is not an error.
    only: str | None = None
    required: bool = False  # another command that measures must not ignore the variable


def truthy(text: str) -> bool:
    """Return whether the text of a variable means true. Upper and lower case have the same meaning.

    Raises:
      ValueError: the text means neither true nor false.
    """
    word = text.strip().lower()
    if word not in TRUE + FALSE:
        raise ValueError(f"expected one of {TRUE} or {FALSE}, got {text!r}")
    return word in TRUE


def _length(text: str) -> str:
    """Return the threshold that a text means. In the seed system, 0 and negative values disabled
    the kernel."""
    try:
        return text if int(text) > 0 else policy.NEVER
    except ValueError:
        if text == policy.NEVER:
            return text
        raise ValueError(f"expected a length, got {text!r}") from None


def _seconds(text: str) -> str:
    try:
        return str(float(text) * 60)
    except ValueError:
        raise ValueError(f"expected minutes, got {text!r}") from None


_CONVERT: Mapping[str, Callable[[str], str]] = {
    "length": _length,
    "minutes": _seconds,
    "version": lambda text: "v2" if truthy(text) else "v1",
}
FOUND = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
TABLE: dict[str, Meaning] = {
    name: Meaning(**about | {"convert": _CONVERT.get(about.get("convert"), str)})
    for name, about in FOUND["flags"].items()
}
TABLE |= {
    name: Meaning(reason=reason)
    for reason, names in FOUND["meaningless"].items()
    for name in names
}
TABLE |= {
    name: Meaning(reason=reason, only=default)
    for reason, names in FOUND["refused"].items()
    for name, default in names.items()
}


def apply(
    values: flags.FlagValues, command: str, environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Set the flags that correspond to environment variables.

    Args:
      values: The parsed flags of `bench.<command>`.
      command: Name of the command.
      environ: The environment variables, by default the variables of this process.

    Yields:
      One line per variable.

    Raises:
      ValueError: A variable would be lost (see the module), a switch is neither true nor false,
        or a flag cannot have the value.
    """
    environ = os.environ if environ is None else environ
    present = {name for name in values if values[name].present}
    for name in sorted(environ):
        if name in TABLE or name.startswith("NSA_"):
            told = _one(name, environ[name], values, command, present)
            yield f"{name}={environ[name]}: {told}"


def _one(name, text, values, command, present) -> str:
    known = next((key for key in TABLE if fnmatch.fnmatchcase(name, key)), None)
    if known is None:
        nearest = difflib.get_close_matches(name, TABLE, n=1, cutoff=0)[0]
        raise ValueError(
            f"{name}={text} is not a known variable; the nearest known name is {nearest}; unset "
            f"{name}"
        )
    meaning = TABLE[known]
    measures = "iters" in values or "row_seconds" in values  # the command times attention
    if name == "CONFIG" and "config" not in values and measures:
        raise ValueError(
            f"CONFIG={text} is not read by bench.{command}, whose sizes are flags; unset"
            " CONFIG, or run a command with --config (compare, indices, train)"
        )
    if not meaning.flags:
        if meaning.only is not None and not _same(text, meaning.only):
            raise ValueError(f"{name}={text} must be unset: {meaning.reason}")
        return f"this variable is ignored; {meaning.reason}"
    try:
        if None not in meaning.flags.values() and not truthy(text):
            return "this value means the same as an unset variable"
        text = meaning.convert(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    wanted = {flag: text if x is None else x for flag, x in meaning.flags.items()}
    switch = {"true": "--{}", "false": "--no{}"}
    words = (switch.get(x, "--{} {}").format(flag, x) for flag, x in wanted.items())
    use = f"use {' '.join(words)}"
    if meaning.command and meaning.command != command:
        if meaning.required and measures:
            raise ValueError(
                f"{name}={text} has no meaning for bench.{command}; only "
                f"bench.{meaning.command} uses it, as --{' --'.join(wanted)}; unset {name}"
            )
        return f"{use} of bench.{meaning.command}; this command ignores the variable"
    lacking = [flag for flag in wanted if flag not in values]
    if lacking and not meaning.command and measures:
        raise ValueError(
            f"{name}={text} has no meaning for bench.{command}, which has no "
            f"--{' --'.join(lacking)}; unset {name}"
        )
    notes = []
    for flag, x in wanted.items():
        if flag in lacking:
            notes.append(f"this command has no --{flag} and ignores the variable")
        elif given := present & {flag, meaning.instead}:
            notes.append(f"--{given.pop()} of the command line wins")
        else:
            notes.append(f"--{flag} is set")
            _set(values[flag], x, name)
    return f"{use} ({'; '.join(dict.fromkeys(notes))})"


def _same(text: str, default: str) -> bool:
    """Return whether a value equals the default, possibly in another spelling."""
    given, known = text.strip().lower(), default.lower()
    if given == known or not given:
        return True
    words = TRUE + FALSE
    if given in words and known in words:
        return (given in TRUE) == (known in TRUE)
    try:
        return float(given) == float(known)
    except ValueError:
        return False


def _set(flag, text: str, name: str) -> None:
    """Set a flag as the command line would. If the flag is a list, the value is added to the
    list."""
    if isinstance(flag.value, list) and flag.value:
        text = ",".join([*flag.value, text])
    try:
        flag.parse(text)
    except flags.IllegalFlagValueError as error:
        raise ValueError(f"{name}: {error}") from None
    flag.using_default_value = False
