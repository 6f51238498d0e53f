"""Names of other packages that these do not document, as the library's sources use them."""

import ast
import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness.process import ROOT

PACKAGES = "kernels_pallas", "nsa_core", "nsa_jax", "nsa_torch", "interop"
FOREIGN = "flax", "jax", "jax_triton", "jaxlib", "torch", "transformers", "triton"
# What no version promises to the next, though no part of its name begins with "_".
UNDOCUMENTED = "jax.experimental", "jaxlib", "triton.compiler", "triton.runtime"


class Use(NamedTuple):
    """A name where it is used; a call with how many positional arguments and which keywords."""

    name: str
    file: str
    line: int
    positional: int | None = (
        None  # None: it is not called, or with arguments that are not known
    )
    keywords: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def uses() -> list[Use]:
    """Those of all packages."""
    files = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    return [use for path in files for use in uses_in(path.read_text(), path)]


def uses_in(text: str, path: Path) -> Iterator[Use]:
    """Those of one source."""
    tree, file = ast.parse(text), str(path.relative_to(ROOT))
    aliases: dict[str, str] = {}
    calls = {id(x.func): x for x in ast.walk(tree) if isinstance(x, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                aliases[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = name
                if undocumented(name):
                    yield Use(name, file, node.lineno)
    inner = {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
            name = _dotted(node, aliases)
            if name and undocumented(name):
                yield _use(name, file, node, calls.get(id(node)))


def undocumented(name: str) -> bool:
    parts = name.split(".")
    private = any(x.startswith("_") and not x.endswith("__") for x in parts)
    known = any(f"{name}.".startswith(f"{prefix}.") for prefix in UNDOCUMENTED)
    return parts[0] in FOREIGN and (private or known)


def resolved(name: str) -> Any:
    """What a dotted name stands for.

    Raises:
      AttributeError, ImportError: there is nothing of this name.
    """
    first, *rest = name.split(".")
    found, path = __import__(first), first
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part) and inspect.ismodule(found):
            __import__(path)
        found = getattr(found, part)
    return found


def refusal(use: Use) -> str | None:
    """Why a call as it is written would be refused, or None."""
    if use.positional is None:
        return None
    function = resolved(use.name)
    if isinstance(function, enum.Enum):
        function = function.__call__
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C
        return None
    try:
        signature.bind(*[None] * use.positional, **dict.fromkeys(use.keywords))
    except TypeError as error:
        return f"{use.name}{signature}: {error}"
    return None


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return None
    return ".".join([aliases[node.id], *reversed(parts)])


def _use(name: str, file: str, node: Any, call: ast.Call | None) -> Use:
    if call is None or any(isinstance(x, ast.Starred) for x in call.args):
        return Use(name, file, node.lineno)
    keywords = tuple(x.arg for x in call.keywords if x.arg is not None)
    if len(keywords) < len(call.keywords):
        return Use(name, file, node.lineno)
    return Use(name, file, node.lineno, len(call.args), keywords)
