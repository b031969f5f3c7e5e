"""opsd keeps a training run on a GPU cluster at full speed: node agent, job launcher and the tools around them."""

import os.path
import sys

__version__ = "0.1.0"


def _prefer_own_packages() -> None:
    """Let what PYTHONPATH names come last in a process that is opsd's own; programs that import opsd keep their order.

    ``module load`` of another Python puts its packages there, which may be too old, or compiled for that Python.
    """
    words = iter(sys.orig_argv[1:])
    started = next((word for word in words if word == "-m" or not word.startswith("-")), "")
    if (next(words, "").partition(".")[0] if started == "-m" else os.path.basename(started)) == __name__:
        own = (sys.prefix, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        named = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path.sort(key=lambda path: named.count(path) and 1 + (not path.startswith(own)))


_prefer_own_packages()
