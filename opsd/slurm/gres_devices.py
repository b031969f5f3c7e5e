"""The device files of each GPU that Slurm counts on this node: which GPUs, or instances of MIG, a job's indexes mean.

Neither version of control groups shows it. v1 shows a group that begins with all devices as ``a *:* rwm``, whatever was
denied since (devcgroup_seq_show in security/device_cgroup.c). v2 has a program instead of a list. But
``slurmd -G`` prints the GPUs in the order in which ``scontrol --details show job`` numbers them, found by NVML or not
(tested on 22.05.8, 24.11.5, 25.11.7 and 26.05.3). Its ``Index=`` is the number in the file's name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from opsd.slurm.hostlist import HostlistError, expand
from opsd.slurm.output import failure
from opsd.slurm.port import SlurmRejected
from opsd.slurm.runner import Runner, run_command
from opsd.slurm.topology_source import CONFIGLESS

DEADLINE_S: Final = 10.0
"""It may have to initialize the driver."""
Files = tuple[str, ...]
_LINE: Final = re.compile(r"^.* Gres Name=gpu Type=\S* Count=(\d+) (?:Index=-?\d+ )?ID=\d+ File=(\S+)", re.MULTILINE)
"""A log line: it begins with ``slurmd:`` on 22.05, with the time in brackets on 25.11 and 26.05."""
_FOLDER: Final = re.compile(r"[^,\[\]]*/")


def read(
    node: str,
    run: Runner = run_command,
    *,
    environ: Mapping[str, str] = os.environ,
    configless: Path = CONFIGLESS,
) -> tuple[Files, ...]:
    """The names of the device files of each GPU of ``node``, by the index of Slurm's GRES. Raises SlurmError.

    They are ("nvidia0",) for a GPU, ("nvidia0", "nvidia-cap12", "nvidia-cap13") for an instance of MIG.
    """
    sent = configless / "slurm.conf"
    named = Path(environ.get("SLURM_CONF", "/etc/slurm/slurm.conf"))
    argv = ["slurmd", "-G", "-N", node, *(["-f", str(sent)] if sent.exists() and not named.exists() else [])]
    output = run(argv, DEADLINE_S)
    if output.code:
        raise failure(argv, output)
    return parse(output.stderr + output.stdout)


def parse(text: str) -> tuple[Files, ...]:
    """The files in the output of ``slurmd -G``. Raises SlurmRejected if a GPU has none: the order is unknown then."""
    if text.count("Gres Name=gpu ") != len(_LINE.findall(text)):
        raise SlurmRejected("slurmd -G prints GPUs without files or in another form")
    return tuple(files for count, told in _LINE.findall(text) for files in _of_line(int(count), told))


def _of_line(count: int, told: str) -> Iterator[Files]:
    """A line has a file for each GPU that it counts, or all files of a single one."""
    try:
        names = expand(_FOLDER.sub("", told))
    except HostlistError as error:
        raise SlurmRejected(f"slurmd -G prints a {error}") from error
    if count == 1:
        yield names
    elif count == len(names):
        yield from ((name,) for name in names)
    else:
        raise SlurmRejected(f"slurmd -G counts {count} GPUs with {len(names)} files")
