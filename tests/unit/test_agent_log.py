"""The agent's log on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys


def test_what_users_write_has_no_effect_on_a_terminal() -> None:
    """A line of a rank's log is part of an incident, and may have escape sequences and line ends in it."""
    code = (
        "from opsd.agent.logs import configure; configure().info('x', text='a\\x1b[2J\\r\\nb\\x9b', exception='c\\nd')"
    )
    ours, terminal = os.openpty()
    try:
        subprocess.run([sys.executable, "-c", code], stderr=terminal, check=True, timeout=60)
        said = os.read(ours, 4096).decode()
    finally:
        os.close(terminal)
        os.close(ours)
    assert "=a [2J  b " in said
    assert said.count("\n") == 2  # the end, and that in the traceback
