"""Which packages a process of opsd imports where PYTHONPATH names those of another Python.

Imports only modules that the interpreter itself has imported, and has annotations in quotes. It runs before anything
else of opsd, with a standard library that may be another Python's or too old.
"""

import os
import site
import sys


def is_module_of_opsd(called: "list[str]", argv: "list[str]") -> bool:
    """Whether ``python -m`` runs a module of opsd, or a rank does: its ``called`` (``sys.orig_argv``) says the same."""
    given = max(len(called) - len(argv), -1)
    option, module = ("", "", *called[: given + 1])[-2:]
    if "-m" not in (option, *argv[:1]):
        return False
    return (module.partition("m")[2] if module.startswith("-") else module).partition(".")[0] == "opsd"


def prefer_own_packages(path: "list[str]" = sys.path, named: str = os.environ.get("PYTHONPATH", "")) -> bool:
    """Let the folders ``named`` come last in ``path``, unless opsd or this Python is installed there; returns True.

    ``module load`` of another Python names its packages, which may be too old, or compiled for that Python.
    """
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    kept = {own, os.path.dirname(os.__file__), site.getusersitepackages(), *site.getsitepackages()}
    folders = {os.path.normpath(os.path.join(_here(), name)) for name in named.split(os.pathsep)} if named else set()
    path.sort(key=(folders - kept).__contains__)
    return True


def _here() -> str:
    """The working directory, "" if it does not exist any more."""
    try:
        return os.getcwd()
    except OSError:
        return ""
