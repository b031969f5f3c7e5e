"""Calls functions once modules have been imported, by whomever and whenever."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Imported = Callable[[ModuleType], None]


def when_imported(first: str, callbacks: Mapping[str, Imported]) -> None:
    """Call each of ``callbacks`` with the module of its name, at once or when it has been imported.

    Those for submodules of the package ``first`` wait until ``first`` itself is complete: what its parts import from
    each other is then the original. An exception in a callback is dropped.
    """
    watch = _Watch(first, dict(callbacks))
    sys.meta_path.insert(0, watch)
    if first in sys.modules:
        watch.imported(first)
    for name in [name for name in callbacks if name in sys.modules]:
        watch.imported(name)


class _Watch:
    """A finder that finds nothing itself: it has the others find, and watches the module being executed."""

    def __init__(self, first: str, callbacks: dict[str, Imported]) -> None:
        self._first = first
        self._complete = False
        self._waiting = callbacks

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As ``MetaPathFinder.find_spec``."""
        if name not in self._waiting and (name != self._first or self._complete):
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None

    def imported(self, name: str) -> None:
        """The module ``name`` is complete."""
        if name == self._first:
            self._complete = True
            for part in [name for name in self._waiting if name in sys.modules]:
                self._call(part)
        elif self._complete or not name.startswith(f"{self._first}."):
            self._call(name)
        if not self._waiting and self in sys.meta_path:
            sys.meta_path.remove(self)

    def _call(self, name: str) -> None:
        callback = self._waiting.pop(name, None)
        if callback is not None:
            with contextlib.suppress(Exception):
                callback(sys.modules[name])


class _Loader:
    """Executes a module by its own loader, which the module sees as its own, and says when that is done."""

    def __init__(self, loader: Any, watch: _Watch) -> None:
        self._loader = loader
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        spec.loader = self._loader
        module: ModuleType | None = self._loader.create_module(spec)
        spec.loader = self  # type: ignore[assignment]
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._watch.imported(spec.name)
