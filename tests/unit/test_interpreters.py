"""What the launcher says of another Python that is active."""

from __future__ import annotations

from pathlib import Path

import pytest

from opsd.launch.ranks.failure import RankError, missing_module
from opsd.launch.ranks.settings import python_with


@pytest.fixture
def active(tmp_path: Path) -> Path:
    """The prefix of an active Python 3.11, with an editable package beside the installed ones."""
    prefix, code = tmp_path / "env", tmp_path / "code"
    for folder in (prefix / "bin", prefix / "lib/python3.11/site-packages/apex", code / "mine"):
        folder.mkdir(parents=True)
    (prefix / "bin/python").symlink_to("/bin/true")
    packages = prefix / "lib/python3.11/site-packages"
    for name in ("one_file.py", "apex/fused.py", "compiled.cpython-311-x86_64-linux-gnu.so"):
        (packages / name).touch()
    (packages / "numpy.libs").mkdir()
    (packages / "__editable__.mine.pth").write_text(f"import sys\n\n{code}\n")
    return prefix


def environ(active: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"/no/such/folder:{active}/bin:/usr/bin", **more}


@pytest.mark.parametrize("module", ["apex", "apex.fused", "one_file", "compiled", "mine"])
def test_a_module_that_the_active_python_has(active: Path, module: str) -> None:
    """The sentence names both Pythons."""
    assert f"PYTHON_EXEC=python takes that of {active}, which has {module}" in python_with(module, environ(active))


@pytest.mark.parametrize("module", ["", "numpy", "apex.other", "utils", "one", "..", "/etc", "**", "a\0b"])
def test_a_module_that_it_has_not(active: Path, module: str) -> None:
    """Another Python would not help, least of all with what names no module: a slip after ``-m``."""
    assert python_with(module, environ(active)) == ""


def test_nothing_is_said_where_it_would_mislead(active: Path) -> None:
    """The ranks have run with it; they were told which; it is first for a variable only; it is too old."""
    assert python_with("apex", environ(active), own=str(active)) == ""
    assert python_with("apex", environ(active, PYTHON_EXEC="/apps/python")) == ""
    assert python_with("apex", {"PATH": "/usr/bin", "VIRTUAL_ENV": str(active), "CONDA_PREFIX": str(active)}) == ""
    (active / "lib/python3.11").rename(active / "lib/python3.9")
    assert python_with("apex", environ(active)) == ""


@pytest.mark.parametrize(
    ("error", "module"),
    [
        (RankError("ModuleNotFoundError", "No module named 'apex.fused'", "train.py:3 in <module>"), "apex.fused"),
        (RankError("ModuleNotFoundError", "No module named 'a.b'; 'a' is not a package", ""), ""),
        (RankError("ModuleNotFoundError", "install apex first", ""), ""),
        (RankError("ImportError", "No module named 'apex'", ""), ""),
        (None, ""),
    ],
)
def test_the_module_that_a_rank_lacks(error: RankError | None, module: str) -> None:
    """It is known from Python's own words."""
    assert missing_module(error) == module
