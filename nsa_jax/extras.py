"""Optional packages: a missing one is an error that names the extra which brings it."""

import importlib.util


def missing(extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """What to raise from `error`, the failed import of a package of `extra`."""
    return ModuleNotFoundError(_text(extra, str(error.name)), name=error.name)


def require(extra: str, *packages: str) -> None:
    """Raises `ModuleNotFoundError` unless all `packages` of `extra` are installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(_text(extra, package), name=package)


def _text(extra: str, package: str) -> str:
    return (
        f"{package} must be installed, got no such package: "
        f"pip install 'native-sparse-attention[{extra}]'"
    )
