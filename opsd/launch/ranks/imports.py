"""Executes the imports at a program's top level without running the program, to warm up a standby.

Runs in the rank's interpreter, loaded by path like ``worker.py``, so it uses the standard library only. The statements
of the main file are processed in order. Imports are executed as they stand, within their ``try`` and fallbacks;
statements that cannot affect imports (definitions, constants) are skipped. At the first statement that may affect a
later import, ``os.environ["X"] = …`` or a function call, processing ends: the program itself imports what follows. The
program's own modules are processed in the same way but not imported: they may be edited before the program runs, and
may have side effects when imported.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
import sysconfig
import typing
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

MAX_FILES = 500
_LIBRARIES = tuple(sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib"))
_HARMLESS = frozenset(
    [
        *("collections", "contextvars", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools"),
        *("itertools", "logging", "math", "numpy", "operator", "opsd", "pathlib", "posixpath", "pydantic", "re"),
        *("string", "struct", "textwrap", "time", "torch", "types", "typing", "uuid"),
    ]
)
"""Modules whose functions and classes, called for a value, change nothing that an import could notice."""
_QUESTIONS = frozenset(["os.getenv", "os.environ.get", "os.getcwd", "os.getpid", "os.cpu_count", "os.fspath"])
_VALUES = frozenset(
    [
        *("abs", "all", "any", "bool", "bytes", "callable", "dict", "enumerate", "filter", "float", "frozenset"),
        *("getattr", "hasattr", "int", "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next"),
        *("object", "property", "range", "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple"),
        *("type", "zip"),
    ]
)
_METHODS = frozenset(
    [
        *("copy", "decode", "encode", "endswith", "format", "get", "items", "join", "keys", "lower", "replace"),
        *("split", "startswith", "strip", "union", "upper", "values"),
    ]
)
"""Methods of mappings and strings, for names that no import has bound."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass, ast.Global)


class Broken(Exception):
    """An import failed after code of the module had run: repeating it would not find the same state."""


class _End(Exception):
    """Only the program itself may execute the next statement."""


class _Source:
    """A file of the program, which runs as the module ``name``. ``names`` are the names bound by its imports."""

    def __init__(self, file: str, name: str, package: str) -> None:
        self.file = file
        self.name = name
        self.package = package
        self.origins: dict[str, str] = {}
        """The qualified names that imports have bound: ``Path`` for ``pathlib.Path``."""
        self.names: dict[str, object] = {"__name__": name, "__file__": file, "__package__": package or None}


class ImportPrelude:
    """The imports of a program; ``files`` are those that were read, with what identifies their version."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, int]] = {}

    def execute(self, script: str | None, module: str | None) -> None:
        """Import what the script, or the module run with ``-m``, imports first. Raises Broken."""
        try:
            for source in self._main(script, module):
                self._go_through(source)
        except (_End, ImportError):
            return

    @property
    def edited(self) -> bool:
        """Whether a file has changed since it was read."""
        return any(_version(file) != version for file, version in self.files.items())

    def _main(self, script: str | None, module: str | None) -> Iterator[_Source]:
        if script is not None:
            yield _Source(script, "__main__", "")
        spec = find(module) if module else None
        if module is None or spec is None:
            return
        if spec.submodule_search_locations is not None:
            module = f"{module}.__main__"
            spec = find(module)
        above = _above(module)
        for package in above:
            yield from self._package(package)
        if spec is not None and spec.origin is not None:
            yield _Source(spec.origin, "__main__", above[-1] if above else "")

    def _package(self, name: str) -> Iterator[_Source]:
        spec = find(name)
        if spec is not None and spec.origin is not None and is_local(spec):
            yield _Source(spec.origin, name, name)
        else:
            _run(ast.Import([ast.alias(name)]), _Source("-m", "__main__", ""))

    def _go_through(self, source: _Source) -> None:
        if source.file in self.files:
            return
        self.files[source.file] = _version(source.file)
        if len(self.files) > MAX_FILES:
            raise _End
        try:
            tree = ast.parse(Path(source.file).read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            raise _End from None
        self._block(tree.body, source)

    def _block(self, statements: Sequence[ast.stmt], source: _Source) -> None:
        for statement in statements:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    self._import(ast.copy_location(ast.Import([alias]), statement), alias.name, (), source)
            elif isinstance(statement, ast.ImportFrom):
                module = _absolute(statement, source.package)
                if module != "__future__":
                    self._import(statement, module, [alias.name for alias in statement.names], source)
            elif isinstance(statement, ast.If) and (holds := _truth(statement.test, source)) is not None:
                self._block(statement.body if holds else statement.orelse, source)
            elif isinstance(statement, ast.Try):
                self._attempt(statement, source)
            elif not _is_harmless(statement, source.origins):
                raise _End

    def _attempt(self, statement: ast.Try, source: _Source) -> None:
        try:
            self._block(statement.body, source)
        except ImportError as error:
            handler = next((handler for handler in statement.handlers if _catches(handler, error)), None)
            if handler is None:
                raise
            self._block(handler.body, source)
        else:
            self._block(statement.orelse, source)
        self._block(statement.finalbody, source)

    def _import(self, node: ast.Import | ast.ImportFrom, module: str, names: Sequence[str], source: _Source) -> None:
        own = False
        for name in [*_above(module), module, *(f"{module}.{name}" for name in names)]:
            spec = find(name)
            if spec is not None and spec.origin is not None and not own and not is_local(spec):
                break
            if spec is not None and spec.origin is not None and is_local(spec):
                own = True
                self._go_through(_Source(spec.origin, name, spec.parent or ""))
        if not own:
            _run(node, source)
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            meant = alias.name if isinstance(node, ast.Import) and alias.asname else bound
            source.origins[bound] = f"{module}.{alias.name}" if isinstance(node, ast.ImportFrom) else meant


def _run(node: ast.Import | ast.ImportFrom, source: _Source) -> None:
    """Execute an import as if in its place. Raises ImportError if it had no effect, Broken otherwise."""
    code = compile(ast.fix_missing_locations(ast.Module([node], [])), source.file, "exec", dont_inherit=True)
    try:
        exec(code, source.names)  # noqa: S102  # an import statement of the program
    except Exception as error:
        within = error.__traceback__.tb_next if error.__traceback__ else None
        if isinstance(error, ImportError) and within is not None and within.tb_next is None:
            raise
        raise Broken(f"{source.file}:{node.lineno}: {ast.unparse(node)}") from error


def find(name: str) -> ModuleSpec | None:
    """The spec of a module as the import system finds it, without importing its parents."""
    spec: ModuleSpec | None = None
    path: list[str] | None = None
    for package in [*_above(name), name]:
        spec = _find_in(package, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _find_in(name: str, path: list[str] | None) -> ModuleSpec | None:
    if path == []:
        return None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except (ImportError, ValueError, AttributeError):
            continue
        if spec is not None:
            return spec
    return None


def is_local(spec: ModuleSpec) -> bool:
    """True for source files that are neither the standard library's nor an installed package's."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return False
    parts = Path(spec.origin).parts
    return "site-packages" not in parts and "dist-packages" not in parts and not spec.origin.startswith(_LIBRARIES)


def _version(file: str) -> tuple[int, int]:
    try:
        info = os.stat(file)  # noqa: PTH116
    except OSError:
        return (0, 0)
    return info.st_mtime_ns, info.st_size


def _above(name: str) -> list[str]:
    """The packages above a module, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, node.module] if node.module else above)


def _catches(handler: ast.ExceptHandler, error: ImportError) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    caught = [getattr(builtins, kind.id, None) if isinstance(kind, ast.Name) else None for kind in kinds]
    return handler.type is None or any(isinstance(kind, type) and isinstance(error, kind) for kind in caught)


def _truth(test: ast.expr, source: _Source) -> bool | None:
    """The value of a condition, None if only the program can know it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        holds = _truth(test.operand, source)
        return None if holds is None else not holds
    if source.origins.get(_dotted(test).partition(".")[0], "").partition(".")[0] == "typing":
        return False if _meaning(test, source.origins) == "typing.TYPE_CHECKING" else None
    known = {"__name__": source.name, "sys": sys, "os": os, "True": True, "False": False}
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    parts = (ast.Compare, ast.Name, ast.Attribute, ast.Constant, ast.Tuple, ast.Subscript, ast.Slice)
    simple = all(isinstance(node, (*parts, ast.expr_context, ast.cmpop)) for node in ast.walk(test))
    if not simple or not names <= known.keys() or not attributes <= {"version_info", "platform", "name"}:
        return None
    return bool(eval(compile(ast.Expression(test), "", "eval"), {}, known))  # noqa: S307  # comparisons of these alone


def _dotted(node: ast.expr) -> str:
    """``a.b.c`` for attributes of a name, "" for anything else."""
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def _meaning(node: ast.expr, origins: typing.Mapping[str, str]) -> str:
    """The full name of what ``node`` names if an import has bound it, "" otherwise."""
    first, _, rest = _dotted(node).partition(".")
    origin = origins.get(first, "")
    return f"{origin}.{rest}" if origin and rest else origin


def _is_harmless(node: ast.AST, origins: typing.Mapping[str, str]) -> bool:
    """Whether a statement, with all its parts, cannot affect a later import."""
    if isinstance(node, (*_DEFINITIONS, ast.Lambda)):
        return True
    if isinstance(node, ast.Call) and not _is_harmless_call(node, origins):
        return False
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
        return False
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return False
    statements = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Assert, ast.If, ast.Expr)
    if isinstance(node, ast.stmt) and not isinstance(node, statements):
        return False
    return all(_is_harmless(child, origins) for child in ast.iter_child_nodes(node))


def _is_harmless_call(call: ast.Call, origins: typing.Mapping[str, str]) -> bool:
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call | ast.Constant | ast.BinOp):
        return True  # a method of a value; what makes the value is looked at as well
    if isinstance(function, ast.Attribute) and function.attr in _METHODS and not _meaning(function, origins):
        return True
    if isinstance(function, ast.Name) and function.id in _VALUES:
        return function.id not in origins
    meaning = _meaning(function, origins)
    return meaning.partition(".")[0] in _HARMLESS or meaning in _QUESTIONS or meaning.startswith("os.path.")
