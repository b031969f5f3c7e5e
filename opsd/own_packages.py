"""Which packages a process of opsd imports where PYTHONPATH names those of another Python."""

import os.path
import sys
from collections.abc import Sequence


def prefer_own_packages() -> bool:
    """Let what PYTHONPATH names come last if this process is one of opsd's own, and return whether it is.

    ``module load`` of another Python puts its packages there, which may be too old, or compiled for that Python.
    Programs that import opsd keep their order.
    """
    if started(sys.orig_argv) != "opsd":
        return False
    own = (sys.prefix, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    named = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = foreign_last(sys.path, named, own)
    return True


def started(argv: Sequence[str]) -> str:
    """What a command line of Python starts: the top package of a module, the name of a file, or "" for neither.

    Short options may be one word; c, m, W and X take the rest of theirs, or the next one (Python/getopt.c in CPython).
    """
    words = iter(argv[1:])
    for word in words:
        if word == "--":
            return os.path.basename(next(words, ""))
        if not word.startswith("-") or word == "-":
            return os.path.basename(word)
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, "")
            continue
        option = next((letter for letter in word if letter in "cmWX"), "")
        value = option and (word.partition(option)[2] or next(words, ""))
        if option in ("c", "m"):
            return value.partition(".")[0] if option == "m" else ""
    return ""


def foreign_last(paths: Sequence[str], named: Sequence[str], own: Sequence[str]) -> list[str]:
    """``paths`` with those ``named`` at the end, of which those below the folders ``own`` come before others."""
    folders = tuple(os.path.join(folder, "") for folder in own)
    return sorted(paths, key=lambda path: path in named and 1 + (not os.path.join(path, "").startswith(folders)))
