"""Processes in which what users wrote is made sense of, so that it takes none of the memory of who asks for it."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path


def confine(process: subprocess.Popen[bytes] | subprocess.Popen[str], memory: int) -> None:
    """Limit a child to ``memory`` bytes. Raises OSError.

    Where it and its parent do not fit into the service's memory, the kernel ends the child and not the parent.
    """
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (memory, memory))
    Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
