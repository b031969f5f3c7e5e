"""Which packages come first where PYTHONPATH names those of another Python."""

from __future__ import annotations

import ast
import site
import subprocess
import sys
from pathlib import Path

import pytest

import opsd
from opsd import exitcodes
from opsd.own_packages import is_module_of_opsd, prefer_own_packages

OWN = str(Path(opsd.__file__).parents[1])
SITE = site.getsitepackages()[0]


@pytest.mark.parametrize(
    ("named", "path", "expected"),
    [
        ("/apps/python", ["/apps/python", "/lib", SITE], ["/lib", SITE, "/apps/python"]),
        (f"/apps/a/:{OWN}", ["/apps/a", OWN, "/lib", SITE], [OWN, "/lib", SITE, "/apps/a"]),
        (f"/apps/a:{SITE}", ["/apps/a", SITE, "/lib"], [SITE, "/lib", "/apps/a"]),
        ("", ["/work", "/lib"], ["/work", "/lib"]),
    ],
    ids=["a module", "pip install --target", "its own site-packages", "nothing"],
)
def test_what_pythonpath_names_comes_last(named: str, path: list[str], expected: list[str]) -> None:
    """But for what opsd itself is installed in, which comes before an older package of the Python that runs it."""
    prefer_own_packages(path, named)
    assert path == expected


@pytest.mark.parametrize(
    ("called", "argv", "answer"),
    [
        ("python -m opsd top", "-m top", True),
        ("python -X dev -W ignore -Pm opsd.trainer c.toml", "-m c.toml", True),
        ("python -X importtime -umopsd.trainer", "-m", True),
        ("python -u -m opsd.trainer c.toml", "/site/opsd/trainer/__main__.py c.toml", True),
        ("python -m opsdata -m opsd", "-m -m opsd", False),
        ("python opsd top", "opsd top", False),
        ("python -m pytest", "-m", False),
        ("python train.py", "train.py --with more than there was", False),
        ("", "", False),
    ],
)
def test_a_module_of_opsd_is_known_by_its_command_line(called: str, argv: str, answer: bool) -> None:
    """However the options of Python are written, and as a rank, which has the command line of its program."""
    assert is_module_of_opsd(called.split(), argv.split()) is answer


def test_an_older_python_says_so() -> None:
    """In a sentence, as a checkout has no installer that would."""
    program = "import sys; sys.version_info = (3, 10, 4); import opsd.commands.main"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    said = f"opsd: {sys.executable} is Python 3.10; opsd needs 3.11 or later\n"
    assert (done.returncode, done.stderr) == (exitcodes.USAGE, said)


@pytest.mark.parametrize("name", ["__init__.py", "__main__.py", "own_packages.py", "commands/__init__.py"])
def test_what_an_older_python_reads_until_then_it_understands(name: str) -> None:
    """By the grammar of 3.7."""
    ast.parse(Path(OWN, "opsd", name).read_text(), feature_version=(3, 7))
