"""What a program will import from outside its own sources, found by reading those sources.

A standby interpreter imports these modules before it is needed. The program's own modules are followed but not
imported: they are quick to load, may have been edited since, and may do things when imported.
"""

from __future__ import annotations

import ast
import sysconfig
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

MAX_FILES = 500


@dataclass(frozen=True, slots=True)
class _Source:
    """A file to read; ``package`` is what its relative imports are relative to, ``deep`` includes function bodies."""

    file: Path
    package: str
    deep: bool = False


@dataclass(frozen=True, slots=True)
class _Import:
    """``import module`` or ``from module import names``, relative imports made absolute."""

    module: str
    names: tuple[str, ...] = ()


def external_imports(script: Path | None, module: str | None, search: Sequence[str]) -> dict[str, list[str]]:
    """The modules that a script, or a module run with ``-m``, imports from elsewhere, with the names taken from each.

    ``search`` is the program's ``sys.path``. In the program's main file the bodies of functions are read too, since
    they have run by the time anybody asks. Files that cannot be read or parsed count as importing nothing.
    """
    own = module.partition(".")[0] if module else None
    found: dict[str, list[str]] = {}
    queue = deque(_main_sources(script, module, search))
    seen = {source.file for source in queue}
    while queue and len(seen) <= MAX_FILES:
        for item in _imports(queue.popleft()):
            local = False
            for name in _with_parents(item):
                spec = _find(name, search)
                if spec is not None and _is_local(spec, own):
                    local = True
                    file = Path(str(spec.origin))
                    if file not in seen:
                        seen.add(file)
                        queue.append(_Source(file, spec.parent or ""))
            if not local:
                names = found.setdefault(item.module, [])
                names += [name for name in item.names if name not in names and name != "*"]
    return found


def _main_sources(script: Path | None, module: str | None, search: Sequence[str]) -> Iterator[_Source]:
    if script is not None:
        yield _Source(script, "", deep=True)
    if module is None:
        return
    spec = _find(module, search)
    if spec is not None and spec.submodule_search_locations is not None:
        if spec.origin:
            yield _Source(Path(spec.origin), module)
        spec = _find(f"{module}.__main__", search)
    if spec is not None and spec.origin:
        yield _Source(Path(spec.origin), spec.name.rpartition(".")[0], deep=True)


def _imports(source: _Source) -> Iterator[_Import]:
    try:
        tree = ast.parse(source.file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in _nodes(tree, source.deep):
        if isinstance(node, ast.Import):
            yield from (_Import(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = source.package.split(".")[: len(source.package.split(".")) - node.level + 1]
                base = ".".join([*above, base]) if base else ".".join(above)
            if base and base != "__future__":
                yield _Import(base, tuple(alias.name for alias in node.names))


def _nodes(node: ast.AST, deep: bool) -> Iterator[ast.AST]:
    """The statements that run at import, with ``deep`` those inside functions too; none that are for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if isinstance(child, ast.If) and _is_for_type_checkers(child.test):
            yield from (found for branch in child.orelse for found in (branch, *_nodes(branch, deep)))
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not deep:
            continue
        yield child
        yield from _nodes(child, deep)


def _is_for_type_checkers(test: ast.expr) -> bool:
    """True for ``TYPE_CHECKING`` and ``typing.TYPE_CHECKING``."""
    return (test.id if isinstance(test, ast.Name) else getattr(test, "attr", "")) == "TYPE_CHECKING"


def _with_parents(item: _Import) -> Iterator[str]:
    """The module, the packages above it, and what is imported from it, which may be modules too."""
    parts = item.module.split(".")
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)))
    yield from (f"{item.module}.{name}" for name in item.names)


def _find(name: str, search: Sequence[str]) -> ModuleSpec | None:
    """The spec of a module, without importing its parents."""
    spec: ModuleSpec | None = None
    path: Sequence[str] = search
    parts = name.split(".")
    for count in range(len(parts)):
        try:
            spec = PathFinder.find_spec(".".join(parts[: count + 1]), list(path))
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        path = spec.submodule_search_locations or ()
    return spec


def _is_local(spec: ModuleSpec, own: str | None) -> bool:
    if spec.origin is None or not spec.origin.endswith(".py"):
        return False
    if own is not None and spec.name.partition(".")[0] == own:
        return True
    libraries = tuple(sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    parts = Path(spec.origin).parts
    return "site-packages" not in parts and "dist-packages" not in parts and not spec.origin.startswith(libraries)
