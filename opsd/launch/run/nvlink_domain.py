"""The NVLink domain of this node, and whether memory can be shared there.

``python -m opsd.launch.run.nvlink_domain`` prints what the driver says of the domain.

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

IMEX_CONTROL: Final = Path("/usr/bin/nvidia-imex-ctl")
IMEX_ANSWER_S: Final = 1.5


def own_domain(environ: Mapping[str, str] = os.environ, run: Runner = run_command) -> str:
    """The domain that this node shares with others, "" if it shares none or the driver does not say within 10 s."""
    if not Path("/dev/nvidiactl").exists() and STATE_ENV not in environ:
        return ""
    try:
        output = run([sys.executable, "-P", "-m", "opsd.launch.run.nvlink_domain"], ANSWER_S)
    except SlurmError:
        return ""
    return output.stdout.strip()[:100] if output.code == 0 else ""


def imex_problem(domain: str, control: Path = IMEX_CONTROL, run: Runner = run_command) -> str:
    """What keeps GPUs of other nodes from this node's memory over NVLink, "" if nothing is known to.

    The daemon is asked once. One that does not answer is a problem where the node is known to share a ``domain``.
    It stops no run: ranks of other nodes may be reached through the network, and the daemon may be waiting for a node
    that the run does not use.
    """
    said, why = "", f"{control} is not there"
    if control.exists():
        try:
            output = run([str(control), "-q"], IMEX_ANSWER_S)
            said = output.stdout.strip()[:100] if output.code == 0 else ""
            why = " ".join((output.stderr or output.stdout).split())[:200] or f"exit code {output.code}"
        except SlurmError:
            why = f"no answer within {IMEX_ANSWER_S:g} s"
    if said == "READY" or not (said or domain):
        return ""
    state = f"is {said}, not READY" if said else f"cannot be asked: {why}"
    return (
        f"the IMEX daemon of this node {state}; tensor or expert parallel groups that span nodes may not start, or "
        "leave NVLink for the network: see `nvidia-imex-ctl -N` and the runbook imex_not_ready"
    )


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
