"""opsd keeps a training run on a GPU cluster at full speed: node agent, job launcher and the tools around them."""

import sys

from opsd.own_packages import is_module_of_opsd, prefer_own_packages

__version__ = "0.1.0"
DISTRIBUTION = "opsd-cluster"
"""The name on the package index, where ``opsd`` is another project. A test compares it with pyproject.toml."""
OWN_PROCESS = is_module_of_opsd(getattr(sys, "orig_argv", []), sys.argv) and prefer_own_packages()
"""Whether this is ``python -m`` with a module of opsd, and no program that imports opsd, which keeps its order.

An assignment: what a standby imports beforehand ends at a statement that is a call (``launch/ranks/imports.py``).
"""


def pip_install(extra: str) -> str:
    """The command that installs what the optional dependency group ``extra`` of pyproject.toml lists."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
