"""Checks optional packages and their versions. The error for a missing package names the extra
that installs it.
"""

import importlib.metadata
import importlib.util

from packaging.version import Version


def version(package: str) -> str | None:
    """Return the installed version of `package`, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error to raise if a package of `extra` could not be imported. `error` is the
    error of the import.
    """
    return ModuleNotFoundError(_text(extra, str(error.name)), name=error.name)


def require(extra: str, *packages: str, minimum: str | None = None) -> None:
    """Raise `ModuleNotFoundError` unless all `packages` of `extra` are installed.

    Args:
      minimum: The lowest supported version. An installed package with a lower version raises
        `ImportError`.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(_text(extra, package), name=package)
        if minimum is None:
            continue
        found = importlib.metadata.version(package)
        if Version(found) < Version(minimum):
            raise ImportError(
                f"{package} must be at least {minimum}, got {found}; run pip install --upgrade "
                f"'native-sparse-attention[{extra}]'",
                name=package,
            )


def _text(extra: str, package: str) -> str:
    return f"{package} must be installed; run pip install 'native-sparse-attention[{extra}]'"
