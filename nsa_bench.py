"""In a checkout: the package in the folder `bench`, by its name where it is installed."""

from pathlib import Path

_FOLDER = Path(__file__).with_name("bench")
__path__ = [str(_FOLDER)]
exec((_FOLDER / "__init__.py").read_text())
