"""The sources that a kernel's machine code follows from, and one hash of them.

They are the modules that describe the kernel, its body and what builds it, with all that these
import of this package. What is not code does not count: comments and docstrings. Nor do emulators,
which stand in for a GPU, and modules that none of these imports, such as those that launch.

The hash is of syntax trees, written so that every version of Python writes them alike: kernels that
one has built are found by another. To parse all modules takes longer than the rest of a process's
first call, so what was parsed is kept beside kernels, by the content of each module.
"""

import ast
import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "kernels_pallas"
FOLDER = Path(__file__).parents[1]
BUILDER = "kernels_pallas.runtime.build_child"
RECORDER = Path("runtime", "recorder.c")
EMULATOR = "_emulation"  # what the names of emulators end with
# Of a syntax tree: what follows from the place of a node, and what only type checkers read.
REDUNDANT = ("ctx", "kind", "type_comment")
C_STRING = r'"(?:\\.|[^"\\])*"'
C_SPACE = re.compile(rf"({C_STRING})|(?:\s|//[^\n]*|/\*.*?\*/)+", re.DOTALL)


class Module(NamedTuple):
    """A module: the hash of its code, and what it imports of the package: `module:name`."""

    digest: str
    imports: tuple[str, ...]


class Sources:
    """The modules of the package in `folder`, each read once.

    Attributes:
      used: the modules that were asked for, by name and content.
    """

    def __init__(self, folder: Path = FOLDER):
        self.folder = folder
        files = {x.relative_to(folder): x for x in folder.rglob("*.py")}
        self._paths = {_name(place): file for place, file in files.items()}
        self._modules: dict[str, Module] = {}
        self._edges: dict[str, tuple[str, ...]] = {}
        self._digests: dict[frozenset[str], str] = {}
        self._known: dict[str, Module] = {}
        self.used: dict[str, Module] = {}

    def learn(self, parsed: Mapping[str, Module]) -> None:
        """Modules that another process `used`, and that are not parsed again."""
        self._known |= parsed

    def digest(self, roots: Iterable[str]) -> str:
        """Of what builds kernels and of the modules `roots`, with what they import."""
        key = frozenset(roots)
        if (found := self._digests.get(key)) is None:
            parts = {name: self.module(name).digest for name in self.closure(key)}
            found = self._digests[key] = _hash([parts, self._recorder])
        return found

    @functools.cached_property
    def _recorder(self) -> str:
        return plain_c((self.folder / RECORDER).read_text())

    def closure(self, roots: Iterable[str]) -> list[str]:
        """The names of the modules that `digest` reads."""
        found: set[str] = set()
        rest = [BUILDER, *roots]
        while rest:
            if (name := rest.pop()) not in found:
                found.add(name)
                rest += self._imported(name)
        return sorted(name for name in found if not name.endswith(EMULATOR))

    def module(self, name: str) -> Module:
        """
        Raises:
          ModuleNotFoundError: there is none of this name.
        """
        if (found := self._modules.get(name)) is None:
            content = self._path(name).read_bytes()
            parts = _own_digest(), name.encode(), content
            key = hashlib.sha256(b"\0".join(parts)).hexdigest()
            found = self._known.get(key) or parse(content, name)
            self._modules[name] = self.used[key] = found
        return found

    def _imported(self, name: str) -> tuple[str, ...]:
        """The modules that one imports."""
        if (found := self._edges.get(name)) is None:
            found = self._edges[name] = tuple(map(self._target, self.module(name).imports))
        return found

    def _target(self, place: str) -> str:
        """The module that an import of `module:name` reads."""
        module, _, name = place.partition(":")
        inner = f"{module}.{name}"
        return inner if inner in self._paths else module

    def _path(self, name: str) -> Path:
        if name.partition(".")[0] == PACKAGE:
            if name not in self._paths:
                raise ModuleNotFoundError(f"{self.folder} has no module {name}")
            return self._paths[name]
        spec = importlib.util.find_spec(name)  # of tests
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no module {name}")
        return Path(spec.origin)


@functools.cache
def _own_digest() -> bytes:
    """Of the rules by which modules are hashed: those of other rules are parsed anew."""
    return hashlib.sha256(Path(__file__).read_bytes()).digest()


def _name(path: Path) -> str:
    """Of a module of the package."""
    parts = path.parts[:-1] if path.stem == "__init__" else path.with_suffix("").parts
    return ".".join((PACKAGE, *parts))


def parse(content: bytes, name: str) -> Module:
    """The code of a module called `name`."""
    tree = ast.parse(content)
    return Module(_hash(_plain(tree)), tuple(sorted(set(_imports(tree, name)))))


def plain_c(text: str) -> str:
    """C without comments, with one space for any white space."""
    return C_SPACE.sub(lambda found: found[1] or " ", text).strip()


def _imports(tree: ast.AST, name: str) -> Iterator[str]:
    package = name.rpartition(".")[0]
    if name.endswith(EMULATOR):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level + (node.module or "")
            module = importlib.util.resolve_name(dots, package)
            found = [f"{module}:{alias.name}" for alias in node.names]
        else:
            continue
        yield from (x for x in found if re.split("[.:]", x)[0] == PACKAGE)


def _plain(node: Any) -> Any:
    """A tree of lists and strings, without docstrings and fields that are empty."""
    if isinstance(node, list):
        return [_plain(x) for x in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    found = [type(node).__name__]
    documented = isinstance(
        node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ) and ast.get_docstring(node, clean=False)
    for field, value in ast.iter_fields(node):
        if field == "body" and documented:
            value = value[1:]
        if isinstance(node, ast.JoinedStr):  # Python 3.12.1 has empty strings in formats
            value = [x for x in value if not (isinstance(x, ast.Constant) and x.value == "")]
        if field not in REDUNDANT and value is not None and value != []:
            found += field, _plain(value)
    return found


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
