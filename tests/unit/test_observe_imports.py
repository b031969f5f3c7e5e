"""Functions that are called once modules have been imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from opsd.launch.observe.imports import when_imported


@pytest.fixture
def library(tmp_path: Path) -> Iterator[str]:
    """A package ``observed_library`` that imports its part ``early``, and not ``late``."""
    name = "observed_library"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("from .early import value\nlast = 1\n")
    (tmp_path / name / "early.py").write_text("value = 1\n")
    (tmp_path / name / "late.py").write_text("value = 2\n")
    (tmp_path / name / "broken.py").write_text("raise ValueError('broken')\n")
    finders = list(sys.meta_path)
    sys.path.insert(0, str(tmp_path))
    yield name
    sys.path.remove(str(tmp_path))
    sys.meta_path[:] = finders
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_parts_wait_for_the_whole(library: str) -> None:
    """A part is told of when its package is complete, and a later part at once."""
    seen: list[tuple[str, bool]] = []

    def note(module: ModuleType) -> None:
        seen.append((module.__name__, hasattr(sys.modules[library], "last")))

    when_imported(library, {f"{library}.early": note, f"{library}.late": note})
    importlib.import_module(library)
    assert seen == [(f"{library}.early", True)]
    importlib.import_module(f"{library}.late")
    assert seen[1:] == [(f"{library}.late", True)]


def test_what_is_there_is_told_of_at_once(library: str) -> None:
    """A warm interpreter has imported it already."""
    importlib.import_module(library)
    seen: list[str] = []
    when_imported(library, {f"{library}.early": lambda module: seen.append(module.__name__)})
    assert seen == [f"{library}.early"]


def test_modules_look_as_without(library: str) -> None:
    """Loader and spec of a module that was watched are its own, and the finder goes once all are there."""
    when_imported(library, {f"{library}.early": lambda module: None})
    before = [type(finder).__name__ for finder in sys.meta_path]
    module = importlib.import_module(f"{library}.early")
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert "_Watch" in before
    assert "_Watch" not in [type(finder).__name__ for finder in sys.meta_path]


def test_a_module_that_fails_fails_as_it_would(library: str) -> None:
    """The error is the module's own, and there is nothing to tell of."""
    seen: list[ModuleType] = []
    when_imported(library, {f"{library}.broken": seen.append})
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module(f"{library}.broken")
    assert not seen


def test_a_callback_that_fails_harms_no_import(library: str) -> None:
    """A release of a library without what a hook looks for works as without hooks."""

    def fail(module: ModuleType) -> None:
        raise AttributeError(module.__name__)

    when_imported(library, {f"{library}.early": fail})
    assert importlib.import_module(library).value == 1
