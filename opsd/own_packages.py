"""Which packages a process of opsd imports where PYTHONPATH names those of another Python."""

import os.path
import sys


def prefer_own_packages() -> bool:
    """Let what PYTHONPATH names come last if this process is one of opsd's own, and return whether it is.

    ``module load`` of another Python puts its packages there, which may be too old, or compiled for that Python.
    Programs that import opsd keep their order.
    """
    words = iter(sys.orig_argv[1:])
    started = next((word for word in words if word == "-m" or not word.startswith("-")), "")
    if (next(words, "").partition(".")[0] if started == "-m" else os.path.basename(started)) != "opsd":
        return False
    own = (sys.prefix, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    named = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path.sort(key=lambda path: named.count(path) and 1 + (not path.startswith(own)))
    return True
