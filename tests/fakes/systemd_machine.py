"""A machine of namespaces on which systemd is the first process and runs the units of a repair as they are installed.

opsd is that of the checkout, /var/lib/opsd a folder of the test. Slurm's commands, nvidia-smi and the service that
holds GPUs are a few lines each; Slurm knows this one node. /dev/nvidia0 is a device without a driver.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fakes.tree import ROOT

NODE = "n1"
SCRIPT = Path(__file__).with_suffix(".sh")
SYSTEMD = Path("/lib/systemd/systemd")
CGROUPS = Path("/sys/fs/cgroup")
_PROGRAM = """#!/bin/sh
export PATH=/opt/tools:$PATH PYTHONPATH=/opt/checkout:/opt/packages LD_LIBRARY_PATH=/opt/python/lib
exec {python} {arguments} "$@"
"""
_TOOL = """#!{python} -IS
import json, os, socket, sys, time
from pathlib import Path
state = Path("/var/lib/opsd")
def can(do, *arguments):
    try:
        do(*arguments)
    except OSError:
        return False
    return True
def note(file):
    rights = dict(line.split(":\\t") for line in Path("/proc/self/status").read_text().splitlines())
    with open(state / file, "a") as seen:
        print(json.dumps({{
            "arguments": sys.argv[1:], "rights": int(rights["CapBnd"], 16),
            "network": can(socket.socket, socket.AF_INET),
            "shm": Path("/dev/shm/opsd").exists(),
            "gpu": Path("/dev/nvidia0").exists(),
            "systemd": can(socket.socket(socket.AF_UNIX).connect, "/run/systemd/private"),
            "settings": can(open, "/etc/opsd/written", "w"),
        }}), file=seen)
"""
_SLURM = """
name, arguments, file = sys.argv[0].rpartition("/")[2], sys.argv[1:], state / "slurm.json"
values = json.loads(file.read_text())
if arguments == ["--version"]:
    print("slurm 24.11.5")
elif name == "sinfo":
    note("seen-repair")
    fields = (field.partition(":") for field in arguments[arguments.index("--Format") + 1].split(","))
    print("".join(values[field] + separator for field, _, separator in fields))
elif arguments[:1] == ["update"]:
    told = dict(one.split("=", 1) for one in arguments[1:])
    if "state" in told:
        out = told["state"].lower().startswith("drain")
        values["StateComplete"], values["Reason"] = ("idle+drain", told["reason"]) if out else ("idle", "none")
    values["Comment"] = told.get("comment", values["Comment"])
    file.write_text(json.dumps(values))
"""
_NVIDIA_SMI = """
if "--query-gpu=persistence_mode" in sys.argv:
    sys.exit("simulated")
note("seen-driver")
if "--gpu-reset" in sys.argv and (state / "hangs").exists():
    time.sleep(600)
"""
_TARGETS = {
    "default.target": "Wants=opsd-repair.path nvidia-persistenced.service",
    **{f"{name}.target": "" for name in ("basic", "sysinit", "sockets", "paths", "shutdown", "network", "multi-user")},
}
_OUTPUT = "Standard{}=append:/var/lib/opsd/said\n"
"""There is no journal."""
_HOLDER = "[Service]\nExecStart=/bin/sleep 600\n"


def why_not() -> str:
    """Why there can be no such machine here, "" if there can."""
    if os.geteuid() != 0:
        return "a machine of namespaces needs root"
    absent = [program for program in ("unshare", "nsenter", "setpriv") if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)}" if absent else "" if SYSTEMD.exists() else "systemd is not installed"


class SystemdMachine:
    """A context manager; ``folder`` is empty and holds what the machine has on its disk."""

    def __init__(self, folder: Path, settings: str) -> None:
        self._folder, self._settings = folder, settings
        self._log = folder / "log"
        self.state = folder / "state"
        self._cgroup = f"opsd-test-{os.getpid()}"

    def __enter__(self) -> Self:
        for name in ("state", "etc", "tools", "opsd/bin", "units"):
            (self._folder / name).mkdir(parents=True)
        self.state.chmod(0o700)
        (self._folder / "etc/opsd.toml").write_text(self._settings)
        python = f"/opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        for name, arguments in (("opsd", "-m opsd"), ("python", "")):
            self._program(f"opsd/bin/{name}", _PROGRAM.format(python=python, arguments=arguments))
        for name in ("sinfo", "squeue", "scontrol"):
            self._program(f"tools/{name}", _TOOL.format(python=python) + _SLURM)
        self._program("tools/nvidia-smi", _TOOL.format(python=python) + _NVIDIA_SMI)
        for unit in (ROOT / "deploy/systemd").glob("opsd-repair*"):
            shutil.copy(unit, self._folder / "units")
            if unit.suffix == ".service":
                (self._folder / "units" / f"{unit.name}.d").mkdir()
                output = "" if "@" in unit.name else _OUTPUT.format("Output")
                text = f"[Service]\n{_OUTPUT.format('Error')}{output}"
                (self._folder / "units" / f"{unit.name}.d/log.conf").write_text(text)
        for name, line in _TARGETS.items():
            (self._folder / "units" / name).write_text(f"[Unit]\nDefaultDependencies=no\n{line}\n")
        (self._folder / "units/nvidia-persistenced.service").write_text(_HOLDER)
        self._boot()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for top in CGROUPS.glob(f"**/{self._cgroup}"):
            for folder in (*sorted(top.rglob("*/"), reverse=True), top):
                self._until(lambda folder=folder: _removed(folder), 10.0)

    def drain(self, reason: str) -> None:
        """Take the node out of service."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 60))
        values = {
            "NodeList": NODE, "StateComplete": "idle+drain", "Timestamp": at, "User": "root", "Reason": reason,
            "Comment": "",
        }  # fmt: skip
        (self.state / "slurm.json").write_text(json.dumps(values))

    def slurm(self) -> dict[str, str]:
        """What Slurm has of the node."""
        values: dict[str, str] = json.loads((self.state / "slurm.json").read_text())
        return values

    def seen(self, who: str) -> list[dict[str, Any]]:
        """What the tools of "repair" or "driver" have seen of the rights with which they ran."""
        file = self.state / f"seen-{who}"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def command(self, *argv: str, user: int = 0) -> list[str]:
        """The command that runs ``argv`` on the machine."""
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        return ["nsenter", f"--target={self._pid}", "--mount", "--pid", "--net", "--ipc", *become, *argv]

    def systemctl(self, *arguments: str) -> str:
        """What systemctl says."""
        done = subprocess.run(self.command("systemctl", *arguments), capture_output=True, text=True, check=False)
        return (done.stdout or done.stderr).strip()

    def log(self) -> str:
        """What the machine and its services have said."""
        said = self.state / "said"
        return self._log.read_text() + (said.read_text() if said.exists() else "")

    def _program(self, path: str, text: str) -> None:
        (self._folder / path).write_text(text)
        (self._folder / path).chmod(0o755)

    def _boot(self) -> None:
        own = (
            f"for top in {CGROUPS} {CGROUPS}/*/; do [ -e $top/cgroup.procs ] || continue; "
            f"mkdir -p $top/{self._cgroup} && echo $$ >$top/{self._cgroup}/cgroup.procs; done 2>/dev/null; "
            'exec unshare --pid --fork --kill-child --mount --cgroup --net --uts --ipc --mount-proc bash "$@"'
        )
        packages = sysconfig.get_path("purelib")
        arguments = [str(SCRIPT), str(self._folder), sys.base_prefix, packages, str(ROOT)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(["sh", "-c", own, "sh", *arguments], stdout=log, stderr=log)
        self._until(self._first, 10.0)
        self._until(lambda: self.systemctl("is-active", "opsd-repair.path") == "active", 30.0)

    def _first(self) -> bool:
        """Whether systemd has begun, whose process id is known then."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        found = [pid for pid in children if _name(pid) == "systemd"]
        self._pid = found[0] if found else "0"
        return bool(found)

    def _until(self, condition: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.1)


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
