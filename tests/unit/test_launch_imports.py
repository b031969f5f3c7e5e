"""What a standby imports is what the program will import from outside its own sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from opsd.checkout import ROOT
from opsd.launch.ranks.imports import external_imports


def project(root: Path, files: dict[str, str]) -> Path:
    """Write ``files`` below ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_local_modules_are_followed_and_not_imported(tmp_path: Path) -> None:
    """The way goes through the program's own modules to what they take from elsewhere."""
    root = project(
        tmp_path,
        {
            "train.py": "import json\nfrom mine.model import Net\nimport helper\n",
            "helper.py": "import decimal, xml.dom\n",
            "mine/__init__.py": "import colorsys\n",
            "mine/model.py": "from . import layers\nfrom .layers import Layer\nfrom concurrent.futures import thread\n",
            "mine/layers.py": "import fractions\n",
            "unrelated.py": "import wave\n",
        },
    )
    found = external_imports(root / "train.py", None, [str(root)])
    assert set(found) == {"json", "decimal", "xml.dom", "colorsys", "concurrent.futures", "fractions"}
    assert found["concurrent.futures"] == ["thread"]


def test_module_with_relative_imports(tmp_path: Path) -> None:
    """``python -m package`` begins at its __main__, and relative imports climb as Python does."""
    root = project(
        tmp_path,
        {
            "trainer/__init__.py": "",
            "trainer/__main__.py": "from .train import main\nmain()\n",
            "trainer/train.py": "from .parts.model import Net\n",
            "trainer/parts/__init__.py": "",
            "trainer/parts/model.py": "from .. import config\nimport statistics\n",
            "trainer/config.py": "import tomllib\n",
        },
    )
    assert set(external_imports(None, "trainer", [str(root)])) == {"statistics", "tomllib"}


def test_only_what_runs_at_import_counts(tmp_path: Path) -> None:
    """Imports for type checkers and inside functions of other modules are left out; guarded ones count."""
    root = project(
        tmp_path,
        {
            "train.py": (
                "import typing\nimport lib\n"
                "if typing.TYPE_CHECKING:\n    import wave\nelse:\n    import bisect\n"
                "try:\n    import heapq\nexcept ImportError:\n    import queue\n"
                "def main():\n    import random\n"
            ),
            "lib.py": "def f():\n    import sched\n",
        },
    )
    found = set(external_imports(root / "train.py", None, [str(root)]))
    assert found == {"typing", "bisect", "heapq", "queue", "random"}


def test_what_cannot_be_read_imports_nothing(tmp_path: Path) -> None:
    """A program with a syntax error, or none at all, is the rank's business."""
    root = project(tmp_path, {"broken.py": "import json\ndef (:\n"})
    assert external_imports(root / "broken.py", None, [str(root)]) == {}
    assert external_imports(None, "no_such_module", [str(root)]) == {}


def test_star_import_takes_no_name(tmp_path: Path) -> None:
    """``from x import *`` needs the module only."""
    root = project(tmp_path, {"train.py": "from math import *\n"})
    assert external_imports(root / "train.py", None, [str(root)]) == {"math": []}


def test_a_standby_leaves_the_trainer_nothing_to_load() -> None:
    """Of other packages the included trainer loads at its start what the standby has loaded for it, and no more."""
    pytest.importorskip("torch")
    program = """
import contextlib, sys
from opsd.launch.ranks.imports import external_imports
for name, names in external_imports(None, "trainer", sys.path).items():
    with contextlib.suppress(ModuleNotFoundError):
        __import__(name, fromlist=names)
warm = set(sys.modules)
import trainer.train
print(*{name.partition(".")[0] for name in set(sys.modules) - warm})
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) - {"pydantic"} == {"opsd", "trainer"}
