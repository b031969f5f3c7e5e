"""Other Pythons than opsd's that ranks run with: whether they can, and what the active one has installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

OLDEST = (3, 11)
"""The first that can run ``worker.py``."""
_ANSWER_S = 60.0


def why_unfit(python: str) -> str:
    """Why ``python`` cannot run ranks, in words; "" if it can, or does not say."""
    if shutil.which(python) is None:
        return "cannot be executed"
    ask = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        said = subprocess.run(
            ask,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
        )
        version = tuple(map(int, said.stdout.splitlines()[-1].split()))
    except subprocess.CalledProcessError as error:
        last = (error.stderr.splitlines() or [f"exit code {error.returncode}"])[-1]
        return f"does not start: {last}"
    except OSError as error:
        return f"cannot be executed: {error.strerror}"
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return ""
    oldest, found = (".".join(map(str, each)) for each in (OLDEST, version))
    return f"is Python {found}; ranks need {oldest} or later" if version < OLDEST else ""


def python_with(module: str, environ: Mapping[str, str] = os.environ, own: str = sys.prefix) -> str:
    """The sentence that ``PYTHON_EXEC=python`` takes a Python which has ``module``; "" if that is not seen.

    Looks at files and runs nothing. ``own`` is the prefix of the ranks' Python, as ``sys.prefix`` is.
    """
    python = shutil.which("python", path=environ.get("PATH"))
    named = all(part.isidentifier() for part in module.split("."))
    if not (named and python) or environ.get("PYTHON_EXEC"):
        return ""
    prefix = Path(python).absolute().parent.parent
    try:
        if prefix.samefile(own) or not any(_has(folder, module) for folder in _packages(prefix)):
            return ""
    except OSError:
        return ""
    return f". The ranks run with {sys.executable}; PYTHON_EXEC=python takes that of {prefix}, which has {module}"


def _packages(prefix: Path) -> list[Path]:
    """The folders of packages below ``prefix``, of a Python that can run ranks, and those that they name."""
    folders = []
    for folder in prefix.glob("lib*/python3*/*-packages"):
        minor = folder.parent.name.removeprefix("python3").removeprefix(".").rstrip("t")
        if not minor or (minor.isdecimal() and (3, int(minor)) >= OLDEST):
            named = (line for file in folder.glob("*.pth") for line in file.read_text(errors="replace").splitlines())
            folders += [folder, *(folder / line for line in named if line and not line.startswith(("import", "#")))]
    return folders


def _has(folder: Path, module: str) -> bool:
    path = folder.joinpath(*module.split("."))
    return path.is_dir() or path.with_name(f"{path.name}.py").is_file() or any(path.parent.glob(f"{path.name}.*.so"))
