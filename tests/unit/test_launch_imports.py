"""A standby carries out the imports of the program, and no others."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from opsd.launch.observe.imports import when_imported
from tests.fakes.tree import ROOT

# A standby carries out the imports that the program's top level begins with, as the program would, and no others.


CARRY_OUT = """
import sys
from opsd.launch.ranks.imports import ImportPrelude
names = {"colorsys", "wave", "sched", "queue", "fractions", "statistics", "tomllib", "xml.dom", "cgi", "netrc", "mine",
         "mine.model", "broken", "optional", "chunk", "filecmp"}
for name in names & sys.modules.keys():
    del sys.modules[name]
before = set(sys.modules)
prelude = ImportPrelude()
prelude.execute(*[word or None for word in sys.argv[1:3]])
print(*sorted(names & (set(sys.modules) - before)))
print(prelude.edited)
"""


def carried_out(root: Path, files: dict[str, str], module: str = "", *, site: dict[str, str] | None = None) -> set[str]:
    """Which of some modules are there once the imports of ``train.py``, or of a module, have been carried out."""
    for folder, texts in ((root, files), (root / "site-packages", site or {})):
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    script = "" if module else str(root / "train.py")
    environment = {"PYTHONPATH": f"{root}:{root / 'site-packages'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", CARRY_OUT, script, module], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, edited = done.stdout.splitlines()[-2:]
    assert edited == "False"
    return set(first.split())


def test_local_modules_are_followed_and_not_imported(tmp_path: Path) -> None:
    """The way goes through the program's own modules to what they take from elsewhere."""
    files = {
        "train.py": "import colorsys\nfrom mine.model import Net\nimport helper\n",
        "helper.py": "import wave, xml.dom\n",
        "mine/__init__.py": "import sched\n",
        "mine/model.py": "from . import layers\nfrom .layers import Layer\nimport queue\n",
        "mine/layers.py": "import fractions\n",
        "unrelated.py": "import filecmp\n",
    }
    assert carried_out(tmp_path, files) == {"colorsys", "wave", "xml.dom", "sched", "queue", "fractions"}


def test_module_with_relative_imports(tmp_path: Path) -> None:
    """``python -m package`` begins at its __main__, and relative imports climb as Python does."""
    files = {
        "mine/__init__.py": "",
        "mine/__main__.py": "from .train import main\nmain()\n",
        "mine/train.py": "from .parts.model import Net\n",
        "mine/parts/__init__.py": "",
        "mine/parts/model.py": "from .. import config\nimport filecmp\n",
        "mine/config.py": "import tomllib\n",
    }
    assert carried_out(tmp_path, files, "mine") == {"filecmp", "tomllib"}


def test_an_installed_module_is_imported_up_to_its_main_file(tmp_path: Path) -> None:
    """``python -m`` of a package from elsewhere imports the packages above first, as Python does."""
    site = {"mine/__init__.py": "import wave\nprint('here')\n", "mine/model.py": "from . import x\n", "mine/x.py": ""}
    assert carried_out(tmp_path, {}, "mine.model", site=site) == {"mine", "wave"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import colorsys\ndef f():\n    import wave\n", {"colorsys"}),
        ("import os\nimport colorsys\nos.environ['X'] = '1'\nimport wave\n", {"colorsys"}),
        ("import sys, colorsys\nsys.path.insert(0, '/x')\nimport wave\n", {"colorsys"}),
        ("import colorsys\nprint('hello')\nimport wave\n", {"colorsys"}),
        ("import colorsys\nx = colorsys.rgb_to_hsv(1, 1, 1)\nimport wave\n", {"colorsys"}),
        ("import os, colorsys\nx = os.environ.setdefault('A', 'b')\nimport wave\n", {"colorsys"}),
        ("import colorsys\ncolorsys.ONE_THIRD = 3\nimport wave\n", {"colorsys"}),
        ("import colorsys\nfor x in range(3):\n    pass\nimport wave\n", {"colorsys"}),
        ("import os, colorsys\nif os.environ.get('X'):\n    import sched\nimport wave\n", {"colorsys"}),
        ("import colorsys\nX: int = 3\nY = [X, -X]\nclass A:\n    pass\nimport wave\n", {"colorsys", "wave"}),
        ("import logging\nlog = logging.getLogger(__name__)\nimport wave\n", {"wave"}),
        ("from pathlib import Path\nHERE = Path(__file__).resolve().parent / 'x'\nimport wave\n", {"wave"}),
        ("import os\nRANK = int(os.environ.get('RANK', 0))\nimport wave\n", {"wave"}),
        ("import typing\nif typing.TYPE_CHECKING:\n    import sched\nelse:\n    import queue\n", {"queue"}),
        ("from typing import TYPE_CHECKING as T\nif T:\n    import sched\nimport wave\n", {"wave"}),
        ("import sys\nif sys.version_info >= (3, 8):\n    import sched\nelse:\n    import queue\n", {"sched"}),
        ("if __name__ == '__main__':\n    import sched\n", {"sched"}),
        ("import part\nimport wave\n", {"wave"}),
        ("try:\n    import sched\nexcept ImportError:\n    import queue\n", {"sched"}),
        ("try:\n    import no_such\nexcept ImportError:\n    import queue\nimport wave\n", {"queue", "wave"}),
        ("try:\n    from wave import no_such\nexcept (KeyError, ImportError):\n    import queue\n", {"queue", "wave"}),
        ("try:\n    import no_such\nexcept ImportError:\n    HAS = False\nimport wave\n", {"wave"}),
        ("try:\n    import no_such\nexcept ImportError:\n    print('x')\nimport wave\n", set()),
        ("try:\n    import no_such\nexcept KeyError:\n    import queue\nimport wave\n", set()),
        ("import sched\nimport no_such\nimport wave\n", {"sched"}),
        ("from wave import *\n", {"wave"}),
        ("import sched\ndef (:\n", set()),
    ],
)
def test_what_a_top_level_imports(tmp_path: Path, text: str, expected: set[str]) -> None:
    """Imports are carried out in their order up to the first statement that could be of consequence to the next."""
    part = "if __name__ == '__main__':\n    import sched\n"
    assert carried_out(tmp_path, {"train.py": text, "part.py": part}) == expected


def test_a_statement_of_consequence_in_a_module_ends_it_too(tmp_path: Path) -> None:
    """What stands behind the import of such a module is left to the program."""
    files = {"train.py": "import part\nimport wave\n", "part.py": "import sched\nimport os\nos.umask(7)\n"}
    assert carried_out(tmp_path, files) == {"sched"}


def test_an_import_that_breaks_off_is_told(tmp_path: Path) -> None:
    """What has run of the module cannot be undone, so the process is of no use as a standby any more."""
    (tmp_path / "train.py").write_text("try:\n    import broken\nexcept ImportError:\n    pass\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/broken.py").write_text("import no_such_module\n")
    program = (
        f"from opsd.launch.ranks.imports import ImportPrelude as P; P().execute({str(tmp_path / 'train.py')!r}, None)"
    )
    environment = {"PYTHONPATH": f"{tmp_path / 'site-packages'}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"Broken: {tmp_path}/train.py:2: import broken" in done.stderr


def test_an_edited_file_is_noticed(tmp_path: Path) -> None:
    """A program that was changed may import something else by now."""
    (tmp_path / "train.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("import json\n")
    program = (
        "from opsd.launch.ranks.imports import ImportPrelude\nfrom pathlib import Path\nprelude = ImportPrelude()\n"
        "prelude.execute('train.py', None)\nprint(prelude.edited)\n"
        "Path('helper.py').write_text('import wave, json')\nprint(prelude.edited)"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\nTrue\n"


def test_a_standby_leaves_the_trainer_nothing_to_load() -> None:
    """Of other packages the included trainer loads at its start what the standby has loaded for it, and no more."""
    pytest.importorskip("torch")
    program = """
import sys
from opsd.launch.ranks.imports import ImportPrelude
ImportPrelude().execute(None, "opsd.trainer")
warm = set(sys.modules)
import opsd.trainer.train
print(*{name.partition(".")[0] for name in set(sys.modules) - warm})
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) - {"pydantic"} == {"opsd"}


# Functions that are called once modules have been imported.


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
