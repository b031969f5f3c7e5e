"""Where the topology of this cluster is described: a file, Slurm's ``topology.conf``, or the controller."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from opsd.files import read_settings
from opsd.slurm.port import SlurmError
from opsd.slurm.runner import Runner, run_command
from opsd.slurm.topology import Topology, TopologyError, parse

CONFIGLESS: Final = Path("/run/slurm/conf")
"""Where slurmd keeps what the controller sent (slurm.conf(5), "configless")."""
DEADLINE_S: Final = 5.0


def read(
    path: Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    configless: Path = CONFIGLESS,
    run: Runner = run_command,
) -> Topology:
    """The topology in ``path``, or that of Slurm here; an empty one if Slurm has none or does not answer.

    A ``topology.yaml`` takes precedence over ``topology.conf`` in Slurm (25.05 and later); the controller tells what is
    in it. Raises TopologyError if ``path`` cannot be read, or if what stands in a file is no topology.
    """
    if path is not None:
        try:
            return parse(read_settings(path).decode(errors="replace"))
        except OSError as error:
            raise TopologyError(f"{path} cannot be read: {error.strerror}") from error
    own = Path(environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
    folder = own if (own / "slurm.conf").exists() or not configless.is_dir() else configless
    if (folder / "topology.yaml").exists():
        return _told(run)
    try:
        return parse((folder / "topology.conf").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return Topology()


def _told(run: Runner) -> Topology:
    try:
        output = run(["scontrol", "show", "topology"], DEADLINE_S)
    except SlurmError:
        return Topology()
    return parse(output.stdout) if output.code == 0 else Topology()
