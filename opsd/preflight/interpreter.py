"""The Python for checks that need torch: opsd's own, or that of the training.

Whether it has torch depends on the installation, not on the node, so it is checked before anything is measured.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterable
from typing import Final

from opsd import __version__
from opsd.preflight.base import Check, Context
from opsd.preflight.engine import SelectionError, unmet_need

_QUESTION: Final = """
from importlib.util import find_spec
from opsd import __version__
print(__version__, find_spec("torch") is not None)
"""
_PATIENCE_S: Final = 60.0
"""The first start from a cold network file system takes many seconds."""


def ensure(python: str, checks: Iterable[Check], context: Context, optional: Collection[str] = ()) -> None:
    """Check that ``python`` can run those of ``checks`` that need torch and apply here; ``optional`` ones may lack it.

    Raises SelectionError with the remedy.
    """
    root = os.geteuid() == 0
    wanting = [c.name for c in checks if "torch" in c.needs and unmet_need(c, context, root=root) is None]
    if not wanting:
        return
    has_torch = _ask(python)
    demanded = ",".join(name for name in wanting if name not in optional)
    if demanded and not has_torch:
        raise SelectionError(
            f"torch is not installed in {python}: install it with `deploy/install --train`, name the Python of the "
            f"training in preflight.python, or leave out what needs it with --skip {demanded}"
        )


def _ask(python: str) -> bool:
    """Whether ``python`` has torch. Raises SelectionError if it cannot be started or lacks this opsd."""
    command = [python, "-P", "-c", _QUESTION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except OSError as error:
        raise SelectionError(f"preflight.python: {python} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise SelectionError(f"preflight.python: {python} did not start within {_PATIENCE_S:.0f} s") from error
    version, _, torch = done.stdout.strip().partition(" ")
    if done.returncode or version != __version__:
        found = f"has opsd {version}" if version else "has no opsd that works"
        raise SelectionError(f"preflight.python: {python} {found}; install opsd {__version__} there, as it is here")
    return torch == "True"
