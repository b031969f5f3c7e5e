"""The user's program: what the ranks run."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class ProgramNotFound(Exception):
    """The program does not exist or cannot be executed; the message says which."""


@dataclass(frozen=True, slots=True)
class Program:
    """A Python script, a module as in ``python -m``, or any executable. ``python`` runs the former two.

    ``given`` is ``name`` as it was given: ``sys.argv[0]`` of a script.
    """

    kind: Literal["script", "module", "executable"]
    name: str
    args: tuple[str, ...]
    python: str
    cwd: Path
    given: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """What stands behind ``python`` where Python itself runs the program."""
        return (*(("-m",) if self.kind == "module" else ()), self.given or self.name, *self.args)

    @property
    def path(self) -> str:
        """``sys.path[0]`` of the program, as Python itself would set it."""
        return str(Path(self.name).resolve().parent) if self.kind == "script" else str(self.cwd)

    @classmethod
    def find(cls, kind: Literal["script", "module", "executable"], name: str, args: tuple[str, ...]) -> Program:
        """The program ``name`` as seen from the working directory. Raises ProgramNotFound.

        A module is looked for by the rank itself: only its interpreter knows all places.
        """
        cwd, given = Path.cwd(), name
        if kind == "script":
            name = os.path.join(cwd, name)  # noqa: PTH118  # Python's __file__ keeps what a Path would tidy up
            if not Path(name).is_file():
                raise ProgramNotFound(f"there is no file {name}")
            if not os.access(name, os.R_OK):
                raise ProgramNotFound(f"{name} may not be read by this user")
        elif kind == "executable":
            found = shutil.which(name)
            if found is None:
                raise ProgramNotFound(f"there is no program {name} that can be executed")
            name = str(Path(found).absolute()) if os.sep in name else found
        python = os.environ.get("PYTHON_EXEC") or sys.executable
        if shutil.which(python) is None:
            named = ", named by PYTHON_EXEC," if os.environ.get("PYTHON_EXEC") else ""
            raise ProgramNotFound(f"the interpreter {python}{named} cannot be executed")
        return cls(kind, name, args, python, cwd, given)
