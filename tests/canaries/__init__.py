"""What other packages do not document and this library stands on: a file for each.

A canary that fails says in one sentence which version broke what, and where to mend it. The names
themselves are found in the sources (`test_names.py`); the other files try what names do not show.
"""

import contextlib
import importlib.metadata
from collections.abc import Iterator


def said(name: str) -> str:
    """`torch 2.14.1`, of `torch._C`."""
    package = name.partition(".")[0]
    return f"{package} {importlib.metadata.version(package.replace('_', '-'))}"


@contextlib.contextmanager
def canary(package: str, broke: str, mend: str) -> Iterator[None]:
    """Within: an error is told as one sentence, `broke` and `mend` completing it.

    Raises:
      AssertionError: the sentence.
    """
    try:
        yield
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
        raise AssertionError(f"{said(package)} {broke} ({why}): mend {mend}") from error
