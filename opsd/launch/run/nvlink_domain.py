"""The NVLink domain of this node. ``python -m opsd.launch.run.nvlink_domain`` prints what the driver says of it.

The driver is asked by a process of its own: its calls can hang, and the launcher waits for nothing that the kernel may
hold.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from opsd.simulated.gpus import STATE_ENV
from opsd.slurm.port import SlurmError
from opsd.slurm.runner import Runner, run_command

ANSWER_S: Final = 10.0
"""Without persistence mode the driver initializes every GPU first, which takes seconds."""


def own_domain(environ: Mapping[str, str] = os.environ, run: Runner = run_command) -> str:
    """The domain that this node shares with others, "" if it shares none or the driver does not say within 10 s."""
    if not Path("/dev/nvidiactl").exists() and STATE_ENV not in environ:
        return ""
    try:
        output = run([sys.executable, "-P", "-m", "opsd.launch.run.nvlink_domain"], ANSWER_S)
    except SlurmError:
        return ""
    return output.stdout.strip()[:100] if output.code == 0 else ""


def main() -> None:
    """Ask the driver; prints nothing where there is none, or where a GPU does not answer."""
    from opsd.collectors.lib.nvml import driver  # 15 ms, which the launcher need not spend

    with suppress(driver.NvmlError):
        session = driver.Driver()
        with driver.translated():
            domains = [driver.fabric_domain(session.handle(index)) for index in range(session.count)]
        print(driver.common_domain(domains))


if __name__ == "__main__":
    main()
