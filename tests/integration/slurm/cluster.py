"""A real Slurm cluster on one machine: a controller and compute nodes, each a host of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from opsd.slurm.port import Version
from opsd.slurm.runner import Output, Runner, run_command
from tests.fakes.clock import eventually
from tests.fakes.tree import ROOT
from tests.integration.slurm.accounting import SETTINGS as ACCOUNTED
from tests.integration.slurm.accounting import Accounting
from tests.integration.slurm.host import USUAL_DEADLINE_S, Host, Network

KEEPS_REASON = Version(25, 11)
"""From this release on a node that is given back keeps the reason why it was not in service, for a while."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "ip", "nsenter", "setpriv", "tc", "unshare")
CONTROLLER = "ctl"
DEFAULT_NODES = ("n1", "n2", "n3", "n4")

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=ctl
SlurmUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile=/run/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile={folder}/log/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{settings}
{nodes}
PartitionName=train Nodes=ALL Default=YES PriorityTier=10 State=UP
PartitionName=dev Nodes=ALL PriorityTier=1 State=UP
"""

FAST: Mapping[str, str] = {
    "SlurmdTimeout": "30",
    "ReturnToService": "1",
    "TCPTimeout": "1",
    "KillWait": "5",
    "AuthInfo": "cred_expire=5",
    "SchedulerParameters": "batch_sched_delay=0,bf_interval=5,sched_interval=5",
}
"""The settings that opsd recommends; pass others (or none) to see what a cluster without them does."""


def missing() -> str:
    """Why no cluster can be made here, as a sentence; "" if one can be made."""
    if os.geteuid() != 0:
        return "a Slurm cluster in namespaces needs root"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)} (see tests/debian-packages.txt)" if absent else ""


def wait_until(condition: Callable[[], object], what: str, timeout: float = 120.0) -> None:
    """Poll ``condition`` until it is true. Raises TimeoutError with ``what`` otherwise."""
    if not eventually(condition, timeout):
        raise TimeoutError(f"not within {timeout:g} s: {what}")


class Cluster:
    """A context manager: the cluster is up, with every node idle, inside the block and gone without a trace after it.

    ``shared`` is a folder that all hosts and the test see (the shared file system). Each host has its own /dev/shm,
    /run and a small disk at /mnt. ``nodes`` may lack hosts, ``controller`` is one as well. Each node has as many
    ``gpus``, which are files to Slurm, or as ``parts`` names: the type and the files of each. ``topology`` is the
    content of a topology.conf. With ``dbd``, settings of slurmdbd.conf, the cluster has ``accounting``.
    """

    accounting: Accounting

    def __init__(
        self,
        names: Sequence[str] = DEFAULT_NODES,
        settings: Mapping[str, str] = FAST,
        *,
        gpus: int = 0,
        parts: Sequence[tuple[str, Sequence[str]]] = (),
        topology: str = "",
        dbd: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="opsd-slurm-"))
        self.shared = self.folder / "shared"
        self._names = (CONTROLLER, *names)
        self._settings = settings if dbd is None else {**settings, **ACCOUNTED}
        self._gpus, self._parts, self._topology, self._dbd = gpus, parts, topology, dbd

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder)
            self._write_files()
            self.network = Network(self.folder)
            stack.callback(self.network.spaces.close)
            self._start_munge()
            self.hosts = {name: Host(self.network, name, address) for name, address in self._addresses()}
            for host in self.hosts.values():
                stack.callback(host.close)
                host.connect()
            if self._dbd is not None:
                self.accounting = Accounting(self.controller, self.folder, self._dbd)
                self.accounting.start()
            self.start_controller()
            for node in self.nodes.values():
                self.start_node(node)
            self.wait_idle()
            self._close = stack.pop_all().close
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    @property
    def controller(self) -> Host:
        """The host on which slurmctld runs."""
        return self.hosts[CONTROLLER]

    @property
    def nodes(self) -> dict[str, Host]:
        """The compute nodes by name."""
        return {name: host for name, host in self.hosts.items() if name != CONTROLLER}

    def start_controller(self) -> None:
        """Start slurmctld; its state survives a stop."""
        self.controller.run("slurmctld")

    def stop_controller(self) -> None:
        """Kill slurmctld as a crash would."""
        self._signal_controller("-KILL")

    def freeze_controller(self) -> None:
        """Stop slurmctld so that it accepts connections and answers nothing."""
        self._signal_controller("-STOP")

    def thaw_controller(self) -> None:
        """Undo ``freeze_controller``."""
        self._signal_controller("-CONT")

    def _signal_controller(self, signal: str) -> None:
        self.controller.run("sh", "-c", f"kill {signal} $(cat /run/slurmctld.pid)")

    def start_node(self, node: Host) -> None:
        """Start slurmd on a node that has booted."""
        node.run("slurmd", "-N", node.name)

    def partition(self, names: Sequence[str]) -> None:
        """Split the network: ``names`` reach each other and nobody else."""
        for name in names:
            self.hosts[name].plug("br1")

    def heal(self) -> None:
        """Undo ``partition``."""
        for host in self.hosts.values():
            if host.on:
                host.plug()

    def states(self) -> dict[str, str]:
        """The state of each node as sinfo shows it: idle, mixed, drained, down*."""
        lines = self.controller.run("sinfo", "--noheader", "--Node", "--partition=train", "--format=%N %T").stdout
        return dict(line.split() for line in lines.splitlines())

    def wait_idle(self, timeout: float = 120.0) -> None:
        """Wait until every node is idle."""

        def idle() -> bool:
            done = self.controller.run("sinfo", "-h", "-N", "-p", "train", "-o", "%T", check=False)
            return done.returncode == 0 and set(done.stdout.split()) == {"idle"}

        wait_until(idle, "all nodes idle", timeout)

    def restore(self, timeout: float = 120.0) -> None:
        """Cancel all jobs, repair the network, give power to the nodes without, and wait until every node is idle."""
        self.heal()
        for host in self.nodes.values():
            if not host.on:
                host.power_on()
                self.start_node(host)
        wait_until(self._resumed, "all nodes idle again", timeout)

    def _resumed(self) -> bool:
        jobs = self.controller.run("squeue", "--noheader", "--format=%i", check=False).stdout.split()
        if jobs:
            self.controller.run("scancel", *jobs, check=False)
        states = self.states()
        for name, state in states.items():
            if state.startswith(("down", "drain")):
                self.controller.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
        return set(states.values()) == {"idle"}

    def _addresses(self) -> list[tuple[str, str]]:
        return [(name, f"10.77.0.{index}") for index, name in enumerate(self._names, start=1)]

    def _write_files(self) -> None:
        self.folder.chmod(0o755)
        for name in ("etc", "log", "munge", "shared", "spool", "state"):
            (self.folder / name).mkdir()
        self.shared.chmod(0o777)
        hosts = [f"{address} {name}" for name, address in self._addresses()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        types = Counter(kind for kind, _ in self._parts)
        told = ",".join(f"gpu:{kind}:{number}" for kind, number in types.items()) or f"gpu:{self._gpus}"
        gres = f" Gres={told}" if self._gpus or self._parts else ""
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs=8 RealMemory=16000{gres} State=UNKNOWN"
            for name, address in self._addresses()[1:]
        )
        chosen = {**self._settings, **({"GresTypes": "gpu"} if gres else {})}
        if self._topology:
            chosen["TopologyPlugin"] = "topology/tree"
            (self.folder / "etc/topology.conf").write_text(self._topology)
        settings = "\n".join(f"{key}={value}" for key, value in chosen.items())
        if self._parts:
            (self.folder / "etc/gres.conf").write_text("".join(map(self._gres_line, self._parts)))
        elif self._gpus:
            for number in range(self._gpus):
                (self.folder / f"etc/gpu{number}").symlink_to("/dev/null")
            devices = f"{self.folder}/etc/gpu[0-{self._gpus - 1}]"
            (self.folder / "etc/gres.conf").write_text(f"Name=gpu File={devices}\n")
        text = _CONFIGURATION.format(folder=self.folder, settings=settings, nodes=nodes)
        (self.folder / "etc/slurm.conf").write_text(text)
        (self.folder / "open.sh").write_text("\n".join(_opened(self.folder / "open")) + "\n")
        (self.folder / "etc/cgroup.conf").write_text(f"CgroupPlugin={_cgroup_plugin()}\n")

    def _gres_line(self, part: tuple[str, Sequence[str]]) -> str:
        kind, files = part
        paths = [self.folder / "etc" / name for name in files]
        for path in paths:
            path.touch()
        option = "MultipleFiles" if len(paths) > 1 else "File"
        return f"Name=gpu Type={kind} {option}={','.join(map(str, paths))}\n"

    def _start_munge(self) -> None:
        key = self.folder / "munge/key"
        key.write_bytes(bytes(range(256)))
        key.chmod(0o400)
        folder = self.folder / "munge"
        subprocess.run(
            [
                *self.network.spaces.enter("net", "mount", "pid"),
                *("munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket.2"),
                *(f"--pid-file={folder}/pid", f"--seed-file={folder}/seed", f"--log-file={self.folder}/log/munged.log"),
            ],
            check=True,
            capture_output=True,
            timeout=USUAL_DEADLINE_S,
        )


def _opened(aside: Path) -> Iterator[str]:
    """Shell commands that let ordinary users run this Python and this checkout where a folder above is root's alone.

    Such a folder is covered by one that has nothing but these in it, for the cluster's hosts only.
    """
    needed = dict.fromkeys(Path(path).resolve() for path in (sys.base_prefix, sys.prefix, ROOT))
    closed: dict[Path, list[Path]] = {}
    for path in needed:
        above = next((one for one in reversed(path.parents) if one.stat().st_mode & 0o5 != 0o5), None)
        if above is not None:
            closed.setdefault(above, []).append(path)
    for number, (above, paths) in enumerate(closed.items()):
        kept = [(aside / f"{number}-{index}", path) for index, path in enumerate(paths)]
        for held, path in kept:
            yield f"mkdir -p {held}; mount --bind '{path}' {held}"
        yield f"mount -t tmpfs -o mode=755 tmpfs '{above}'"
        for held, path in kept:
            yield f"mkdir -p '{path}'; mount --bind {held} '{path}'"


def _cgroup_plugin() -> str:
    """Slurm 22.05 insists on a plugin, from 23.11 on it can do without."""
    said = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True, timeout=USUAL_DEADLINE_S).stdout
    return "cgroup/v1" if said.split()[-1] < "23.11" else "disabled"


def runner_on(host: Host, user: str = "root") -> Runner:
    """A runner for ``CommandSlurm`` that runs Slurm's commands on ``host`` as ``user``."""

    def run(argv: Sequence[str], deadline_s: float, stdin: str = "") -> Output:
        return run_command(host.command(*argv, user=user), deadline_s, stdin)

    return run
