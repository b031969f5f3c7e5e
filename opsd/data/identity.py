"""Digests of pipelines: equal as long as code, arguments and files that are named in them are.

Code of the pipeline's own file counts by what it compiles to, with the globals that it uses and the modules that it
imports, so that comments do not count. Modules beside it count by their text and that of the modules that they import,
installed packages by their version. Sets have the same order in every process only with ``PYTHONHASHSEED=0``.
"""

from __future__ import annotations

import dis
import hashlib
import importlib.metadata
import json
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from modulefinder import ModuleFinder
from pathlib import Path, PurePath
from string import Template
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from opsd.checkpoints.manifest import checksum

OWN: Final = "opsd_pipeline"
"""The name under which the file of a pipeline runs."""
_OWN_PACKAGE: Final = "opsd"
_LEFT_OUT: Final = frozenset({"stats", "output_mg"})
"""Attributes of steps that change while they run."""
_LONGEST_PATH: Final = 4096
_LARGEST_SEED: Final = 2**64
"""Without a seed numpy takes 128 random bits."""
ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")
"""Of an object in the memory of a process, as in its repr."""


def digest(value: object) -> str:
    """The digest of a step, a function or any other value of a pipeline."""
    return digest_of(_described(value, set()))


def digest_of(document: object) -> str:
    """The digest of what JSON can hold."""
    return hashlib.blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=16).hexdigest()


def _described(value: object, above: set[int]) -> Any:
    """``value`` as JSON; ``above`` are the ids of the values that contain it."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _text(value)
    if id(value) in above:
        return "contains itself"
    return _compound(value, above | {id(value)})


def _compound(value: object, above: set[int]) -> Any:
    if isinstance(value, bytes | bytearray):
        return ["bytes", hashlib.blake2b(value, digest_size=16).hexdigest()]
    if isinstance(value, list | tuple):
        return [_described(each, above) for each in value]
    if isinstance(value, set | frozenset):
        return ["set", sorted(json.dumps(_described(each, above), sort_keys=True) for each in value)]
    if isinstance(value, Mapping):
        pairs = [[_described(key, above), _described(each, above)] for key, each in value.items()]
        return ["mapping", sorted(pairs, key=lambda pair: json.dumps(pair, sort_keys=True))]
    if isinstance(value, FunctionType):
        return _function(value, above)
    if hasattr(owner := getattr(value, "__self__", None), "bit_generator"):
        return ["method", getattr(value, "__name__", ""), _described(owner, above)]
    if isinstance(value, MethodType):
        return ["method", _described(value.__func__, above)]
    if isinstance(value, ModuleType):
        return ["module", *_module(value.__name__)]
    if isinstance(value, PurePath):
        return ["path", _text(str(value))]
    if isinstance(value, partial):
        return [
            "partial",
            _described(value.func, above),
            _described(value.args, above),
            _described(value.keywords, above),
        ]
    if isinstance(value, type):
        return _class(value, above)
    if isinstance(value, re.Pattern | Template):
        return [
            type(value).__name__,
            *((value.pattern, value.flags) if isinstance(value, re.Pattern) else (value.template,)),
        ]
    return _instance(value, above)


def _text(value: str) -> Any:
    """A text. If it names a file, such as a model, the content of the file counts too."""
    if 0 < len(value) < _LONGEST_PATH and "\n" not in value and "\0" not in value:
        path = Path(value)
        try:
            if path.is_file():
                return ["file", value, checksum(path)]
        except OSError:
            pass
    return value


def _instance(value: object, above: set[int]) -> Any:
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return [
            "array",
            str(value.dtype),
            list(getattr(value, "shape", ())),
            hashlib.sha256(value.tobytes()).hexdigest(),
        ]
    if (folder := place_of(value)) is not None:
        return ["folder", folder]
    if (seeds := getattr(getattr(value, "bit_generator", None), "seed_seq", None)) is not None:
        return ["numpy's random numbers", seeds.entropy if seeds.entropy <= _LARGEST_SEED else "without a seed"]
    names = dict.fromkeys([*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())])
    fields = {name: getattr(value, name, None) for name in names if name not in _LEFT_OUT}
    kind = _class(type(value), above)
    if fields:
        return [kind, {name: _described(each, above) for name, each in fields.items()}]
    return [kind, ADDRESS.sub("", repr(value))]


def place_of(value: object) -> str | None:
    """The address of a folder of datatrove, None of anything else."""
    fs, path = getattr(value, "fs", None), getattr(value, "path", None)
    if isinstance(path, str) and fs is not None and hasattr(value, "list_files"):
        protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
        return path if protocol in ("file", "local") else f"{protocol}://{path}"
    return None


def _class(kind: type, above: set[int]) -> Any:
    if kind.__module__ != OWN:
        return [*_module(kind.__module__), kind.__qualname__]
    if id(kind) in above - {id(kind)}:
        return kind.__qualname__
    above = above | {id(kind)}
    code = {
        name: _described(getattr(member, "__func__", getattr(member, "fget", member)), above)
        for name, member in vars(kind).items()
        if not name.startswith("__") or isinstance(member, FunctionType)
    }
    return [kind.__qualname__, [_described(base, above) for base in kind.__bases__], code]


def _function(function: FunctionType, above: set[int]) -> Any:
    if function.__module__ != OWN:
        return [*_module(function.__module__), function.__qualname__]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    used = {
        name: _described(function.__globals__[name], above)
        for name in sorted(set(_names(function.__code__)))
        if name in function.__globals__
    }
    beside = str(Path(function.__code__.co_filename).parent)
    used |= {f"import {name}": _module(name, beside) for name in sorted(set(_imported(function.__code__)))}
    given = [function.__defaults__, function.__kwdefaults__]
    return ["function", _code(function.__code__), _described(given, above), _described(cells, above), used]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in _inner(code):
        yield from _names(inner)


def _imported(code: CodeType) -> Iterator[str]:
    """The modules that a function imports while it runs."""
    yield from (str(each.argval) for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME")
    for inner in _inner(code):
        yield from _imported(inner)


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _code(code: CodeType) -> Any:
    """What is compiled, without places in the source."""
    constants = [_code(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), list(code.co_varnames), constants]


def _constant(value: object) -> Any:
    """A constant of code. A text is no file here: what a step writes to a node's own disk would count on that node."""
    if isinstance(value, tuple):
        return [_constant(each) for each in value]
    return value if isinstance(value, str) else _described(value, set())


@cache
def _module(name: str, beside: str = "") -> tuple[Any, ...]:
    """A module with the version of its package. One that is not installed: with the checksums of all that it imports.

    Those are in files beside it or in folders there. It is looked for in the folder ``beside`` first.
    """
    if (file := _file_of(name, beside)) is not None and not _is_installed(file, root := _root_of(file, name)):
        finder = _Finder(path=[str(root)], excludes=[_OWN_PACKAGE])
        if name.partition(".")[0] != _OWN_PACKAGE:
            with suppress(ImportError, SyntaxError):
                finder.import_hook(name)
        files = {str(path) for each in finder.modules.values() if (path := getattr(each, "__file__", None))}
        return name, sorted([Path(each).name, checksum(Path(each))] for each in {*files, str(file)})
    if file is None and getattr(sys.modules.get(name), "__path__", None) is not None:  # a folder without __init__.py
        return name, *(_module(each) for each in sorted(sys.modules) if each.startswith(f"{name}."))
    for distribution in _distributions().get(name.partition(".")[0], ()):
        return name, importlib.metadata.version(distribution)
    return name, ""


def _file_of(name: str, beside: str) -> Path | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    if name not in sys.modules:
        path = Path(beside, *name.split("."))
        named = (path.with_suffix(".py"), path / "__init__.py") if beside else ()
        file = next((str(each) for each in named if each.is_file()), None)
    return Path(file) if file and Path(file).is_file() else None


def _root_of(file: Path, name: str) -> Path:
    """The folder from which the module ``name`` is imported."""
    return file.parents[name.count(".") + (file.name == "__init__.py")]


def _is_installed(file: Path, root: Path) -> bool:
    """Whether the file, imported from ``root``, is Python's own or from a folder that pip installs to, in any venv."""
    own = str(Path(sysconfig.get_path("stdlib")).resolve())
    return str(file.resolve()).startswith(f"{own}/") or any(root.glob("*.dist-info"))


_PACKAGE = 5
"""What ModuleFinder calls a folder (``imp.PKG_DIRECTORY``)."""


class _Finder(ModuleFinder):
    """Goes into folders without an ``__init__.py`` too, at which Python's own ends."""

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        try:
            return super().find_module(name, path, parent)
        except AttributeError:
            folder = next(found for each in path or self.path if (found := Path(each, name)).is_dir())
            return None, str(folder), ("", "", _PACKAGE)

    def load_package(self, fqname: str, pathname: str) -> Any:
        if Path(pathname, "__init__.py").exists():
            return super().load_package(fqname, pathname)
        package: Any = self.add_module(fqname)
        package.__path__ = [pathname]
        return package


@cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()
