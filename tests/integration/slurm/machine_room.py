"""What surrounds the nodes of the test cluster in a repair: firmware, driver and systemd, each a few lines.

Every node has simulated GPUs whose fault a reset, a reboot or nothing cures, an agent, and a shell loop that starts
`opsd repair --ordered` as ``opsd-repair.path`` does. RebootProgram asks for a power cycle, which ends every process of
the host, shared memory and all; what was on the disk of the node is still there when it boots.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from opsd.preflight.checks import CHECKS
from opsd.simulated.gpus import STATE_ENV, SimulatedGpus
from tests.integration.slurm.cluster import Cluster

Cure = Literal["reset", "reboot", "nothing"]
CHECKED = ("gpu_inventory", "gpu_health", "infiniband", "leftovers", "numa")
"""What a preflight can judge on simulated GPUs within a second."""
GPUS = 2

_NVIDIA_SMI = """#!{python}
import os, sys
sys.path[:0] = {path}
from pathlib import Path
from tests.integration.slurm.machine_room import heal
folder = Path({folder!r}) / os.environ["OPSD_TEST_NODE"]
if "--query-gpu=persistence_mode" in sys.argv:
    sys.exit("simulated")
with open(folder / "commands", "a") as log:
    print("nvidia-smi", *sys.argv[1:], file=log)
if sys.argv[1:] == ["--gpu-reset"]:
    heal(folder, "reset")
print("simulated")
"""
_ATTENDANT = """while sleep 0.3; do
  [ -e {state}/repair/order ] || [ -e {state}/repair/case.json ] || continue
  {opsd} repair --ordered --config {config} >>{log} 2>&1
done"""
_PORT = """set -e
mount -t tmpfs tmpfs /sys/class
mkdir -p /sys/class/infiniband/mlx5_0/ports/1
cd /sys/class/infiniband/mlx5_0/ports/1
echo '4: ACTIVE' >state
echo '5: LinkUp' >phys_state
echo '400 Gb/sec (4X NDR)' >rate"""
_SETTINGS = """[agent]
node = "{node}"
state_dir = "{state}"
interval_s = 0.5
[nvml]
library = "{library}"
[policy]
mode = "act"
drain = true
repair = "act"
max_drained_share = 0.5
return_profile = "quick"
[preflight]
skip = {skip}
gpus = {gpus}
[repair]
remedies = ["end_processes", "reset_gpus", "reboot"]
pair_partition = "{pairs}"
attempts = {attempts}
[spare]
software = {{opsd = "0"}}
"""


def heal(folder: Path, by: Cure) -> None:
    """Cure the GPUs of the node in ``folder`` if that does; otherwise they stay as they are."""
    if (folder / "cure").read_text() == by:
        with SimulatedGpus.open(folder / "gpus") as gpus:
            for gpu in gpus:
                gpu.set_recovery_action(0)
                gpu.set_ecc()


class MachineRoom:
    """The nodes ``names`` of a ``cluster`` with all that; ``folder`` is seen by all hosts. A context manager.

    Without ``agents`` only Slurm's prolog looks at the nodes. Each has an InfiniBand port, and a repair measures the
    network with an idle node of the partition ``pairs``, if that is given.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        library: Path,
        names: Sequence[str],
        *,
        agents: bool = True,
        pairs: str = "",
        attempts: int = 3,
    ) -> None:
        self._cluster, self._folder, self._library, self._names = cluster, folder, library, names
        self._agents, self._pairs, self._attempts = agents, pairs, attempts
        self._stop, self._stack = threading.Event(), ExitStack()
        self.reboots: list[str] = []
        self.gpus: dict[str, SimulatedGpus] = {}

    @staticmethod
    def reboot_program(folder: Path) -> Path:
        """A program for slurm.conf that has the node's power switched off and on."""
        program = folder / "reboot.sh"
        program.write_text(f'#!/bin/sh\ntouch "{folder}/reboot-$(hostname)"\n')
        program.chmod(0o755)
        return program

    def __enter__(self) -> Self:
        tools = self._folder / "bin"
        tools.mkdir()
        smi = _NVIDIA_SMI.format(python=sys.executable, path=sys.path, folder=str(self._folder))
        (tools / "nvidia-smi").write_text(smi)
        (tools / "nvidia-smi").chmod(0o755)
        for name in self._names:
            self._equip(name)
            self._boot(name)
        self._thread = threading.Thread(target=self._watch, name="machine-room", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(30)
        self._stack.close()

    def state(self, name: str) -> Path:
        """The state folder of a node."""
        return self._folder / name / "state"

    def fail(self, name: str, *, cured_by: Cure, xid: int = 95) -> None:
        """An uncorrectable error of a GPU, which stays until something cures it."""
        (self._folder / name / "cure").write_text(cured_by)
        gpu = self.gpus[name][0]
        gpu.set_recovery_action(1)
        gpu.raise_xid(xid)

    def cut_off(self, name: str) -> None:
        """Break the paths of a node to others, but for services: they meet, and no collective ends."""
        away = self._cluster.nodes[name].address
        for other in self._names:
            for chain, end in (("INPUT", "--source"), ("OUTPUT", "--destination")):
                rule = (
                    "iptables",
                    "-A",
                    chain,
                    end,
                    away,
                    "-p",
                    "tcp",
                    "--syn",
                    "--dport",
                    "32768:65535",
                    "-j",
                    "DROP",
                )
                if other != name:
                    self._cluster.nodes[other].run(*rule)

    def commands(self, name: str) -> list[str]:
        """What was asked of the driver's tools on a node."""
        log = self._folder / name / "commands"
        return log.read_text().splitlines() if log.exists() else []

    def history(self, name: str) -> str:
        """What the agent of a node tells of its incidents and repairs, one a line."""
        home = self._folder / name
        asked = (str(home / "opsd"), "incidents", "--config", str(home / "opsd.toml"))
        return self._cluster.nodes[name].run(*asked, check=False).stdout

    def log(self, name: str) -> str:
        """What the repair and the agent of a node have said."""
        files = (self._folder / name / "repair.log", self._folder / name / "agent.log")
        return "\n".join(file.read_text()[-6000:] for file in files if file.exists())

    def _equip(self, name: str) -> None:
        home = self._folder / name
        home.mkdir()
        self.gpus[name] = self._stack.enter_context(SimulatedGpus.create(home / "gpus", count=GPUS))
        (home / "cure").write_text("nothing")
        skip = [check.name for check in CHECKS if check.name not in CHECKED]
        text = _SETTINGS.format(
            node=name, state=self.state(name), library=self._library, skip=skip, gpus=GPUS, pairs=self._pairs,
            attempts=self._attempts,
        )  # fmt: skip
        (home / "opsd.toml").write_text(text)
        (home / "opsd").write_text(
            f"#!/bin/sh\nexport PYTHONPATH={':'.join(sys.path)} {STATE_ENV}={home / 'gpus'} OPSD_TEST_NODE={name} "
            f'PATH={self._folder / "bin"}:{os.environ["PATH"]}\nexec {sys.executable} -m opsd "$@"\n'
        )
        (home / "opsd").chmod(0o755)

    def _boot(self, name: str) -> None:
        """Start what systemd starts at boot."""
        home, host = self._folder / name, self._cluster.nodes[name]
        if self._pairs:
            host.run("sh", "-c", _PORT)
        agent = f"exec {home / 'opsd'} agent --config {home / 'opsd.toml'} >>{home / 'agent.log'} 2>&1"
        attendant = _ATTENDANT.format(
            state=self.state(name), opsd=home / "opsd", config=home / "opsd.toml", log=home / "repair.log"
        )
        for script in (agent, attendant) if self._agents else (attendant,):
            self._stack.enter_context(host.process("sh", "-c", script))

    def _watch(self) -> None:
        while not self._stop.is_set():
            for name in self._names:
                wanted = self._folder / f"reboot-{name}"
                if wanted.exists():
                    wanted.unlink()
                    self._power_cycle(name)
            time.sleep(0.1)

    def _power_cycle(self, name: str) -> None:
        host = self._cluster.nodes[name]
        host.power_off()
        heal(self._folder / name, "reboot")
        host.power_on()
        host.run(
            "sh", "-c", f"echo {uuid.uuid4()} >/run/boot_id; mount --bind /run/boot_id /proc/sys/kernel/random/boot_id"
        )
        host.run("slurmd", "-b", "-N", name)  # as after a boot: the kernel, which is not this host's alone, runs on
        self.reboots.append(name)
        self._boot(name)
