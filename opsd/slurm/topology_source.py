"""Reads the topology of this cluster from Slurm, or from opsd's own file if Slurm has none.

Everything that uses the topology reads it here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Final

from opsd.files import SYSTEM_FILE, read_settings
from opsd.slurm.port import SlurmError
from opsd.slurm.runner import Runner, run_command
from opsd.slurm.topology import Topology, TopologyError, parse

CONFIGLESS: Final = Path("/run/slurm/conf")
"""Where slurmd keeps what the controller sent (slurm.conf(5), "configless")."""
MEASURED: Final = SYSTEM_FILE.with_name("topology.conf")
"""The file of `opsd nodes topology`, unless OPSD_TOPOLOGY names another one."""
DEADLINE_S: Final = 5.0
_INCLUDE: Final = re.compile(r"^[ \t]*include[ \t]+(\S+)", re.IGNORECASE | re.MULTILINE)
_DEPTH: Final = 8
"""Files that may include each other."""
_NAME: Final = re.compile(r"""(?:^|[\s{,])["']?topology["']?\s*:\s*["']?([^\s"',}]+)""", re.MULTILINE)
_COMMENT: Final = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)


def read(
    path: Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    configless: Path = CONFIGLESS,
    measured: Path = MEASURED,
    run: Runner = run_command,
    say: Callable[[str], None] = lambda _: None,
) -> Topology:
    """The topology in ``path``, or that of this cluster; an empty one if none is known.

    Slurm's own counts; one whose switches Slurm does not know is completed by the file that ``OPSD_TOPOLOGY`` names, or
    ``measured``. ``say`` gets a sentence if that file contradicts Slurm. Raises TopologyError if ``path``, a file that
    counts or one that is included cannot be read, or if what stands in it is no topology.
    """
    if path is not None:
        return _described(path)
    own = _slurms(environ, configless, run)
    named = environ.get("OPSD_TOPOLOGY")
    file = Path(named) if named else measured
    if not named and not file.exists():
        return own
    if not own.has_switches:
        return own.joined(_described(file))
    try:
        if found := own.contradiction(_described(file)):
            say(f"{file} contradicts Slurm's topology, which counts: {found}")
    except TopologyError as error:
        say(f"{error}; Slurm's topology counts")
    return own


def _slurms(environ: Mapping[str, str], configless: Path, run: Runner) -> Topology:
    """That of Slurm here; an empty one if it has none or does not answer. Raises TopologyError.

    A ``topology.yaml`` takes precedence over ``topology.conf`` in Slurm (25.05 and later); the controller tells what is
    in each of its topologies, of which the default one counts first.
    """
    own = Path(environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
    folder = own if (own / "slurm.conf").exists() or not configless.is_dir() else configless
    if (several := folder / "topology.yaml").exists():
        return _told(_names(several), run)
    usual = folder / "topology.conf"
    return _parsed(_content(usual), str(usual)) if os.access(usual, os.R_OK) else Topology()


def _described(path: Path) -> Topology:
    """The topology in a file that is there to describe one. Raises TopologyError."""
    found = _parsed(_content(path), str(path))
    if not found.leaf:
        raise TopologyError(
            f"{path} has no nodes below a switch or in a block; `opsd nodes topology` makes it from the fabric"
        )
    return found


def _parsed(text: str, where: str) -> Topology:
    try:
        return parse(text)
    except TopologyError as error:
        raise TopologyError(f"{where}: {error}") from error


def _content(path: Path, depth: int = _DEPTH) -> str:
    """The file with those that it includes, whose names are relative to its folder. Raises TopologyError."""
    try:
        text = read_settings(path).decode(errors="replace")
    except OSError as error:
        raise TopologyError(f"{path} cannot be read: {error.strerror}") from error
    if depth == 0:
        raise TopologyError(f"{path} cannot be read: its files include each other")
    return _INCLUDE.sub(lambda match: _content(path.parent / match[1], depth - 1), text)


def _names(path: Path) -> list[str]:
    """The names of the topologies in a ``topology.yaml``, none if it cannot be read."""
    try:
        return _NAME.findall(_COMMENT.sub("", path.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return []


def _told(names: Iterable[str], run: Runner) -> Topology:
    """The controller's default topology, and others beside it."""
    return reduce(Topology.joined, [_ask(run), *(_ask(run, name) for name in names)])


def _ask(run: Runner, *name: str) -> Topology:
    try:
        output = run(["scontrol", "show", "topology", *name], DEADLINE_S)
    except SlurmError:
        return Topology()
    return _parsed(output.stdout, "scontrol show topology") if output.code == 0 else Topology()
