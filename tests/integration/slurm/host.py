"""Machines made of Linux namespaces: each has its own network, host name, mounts and processes, and can lose power.

A host lives as long as its first process, which ends when the pipe to it closes. So everything on all hosts is gone as
soon as the Python process that made them is, however that one ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pwd import getpwnam

HERE = Path(__file__).parent
USUAL_DEADLINE_S = 30.0
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
"""Gives a process another wall clock; the kernel has one for all (there are namespaces for the monotonic one only)."""


class Namespaces:
    """A set of namespaces held by one process that runs ``script`` with the arguments ``name`` and ``folder``.

    ``inside`` is the set in which this one is nested: it ends with that one. Call ``wait`` before anything else;
    apart from that the start of several sets overlaps.
    """

    def __init__(
        self, script: Path, name: str, folder: Path, kinds: Sequence[str], inside: Namespaces | None = None
    ) -> None:
        self.name = name
        self.pid = 0
        enter = () if inside is None else inside.enter("net", "mount", "pid")
        self._log = folder / "log" / f"{name}.log"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*enter, "unshare", *(f"--{kind}" for kind in kinds), "--fork", "bash", str(script), name, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Return once the first process is ready. Raises RuntimeError if it is not going to be."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the namespaces of {self.name} could not be made: {self._log.read_text()}")
        self.pid = int(line)

    def enter(self, *kinds: str) -> tuple[str, ...]:
        """The command prefix that runs a command in these namespaces, or in those ``kinds`` of them."""
        flags = [f"--{kind}" for kind in kinds or ("net", "uts", "mount", "pid")]
        return ("nsenter", "--target", str(self.pid), *flags)

    def kill(self) -> None:
        """End every process inside at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Let the first process end, and with it every process inside; wait for that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(USUAL_DEADLINE_S)
        self._process.stdout.close()


class Network:
    """A bridge in a network of its own and the files that all hosts on it share. Nothing of it is outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spaces = Namespaces(HERE / "network.sh", "network", folder, ("net", "mount", "pid"))
        self.spaces.wait()

    def configure(self, *lines: str) -> None:
        """Run ``ip`` commands in the bridge's network; process ids in them are those of the caller."""
        subprocess.run(
            [*self.spaces.enter("net"), "ip", "-batch", "-"],
            input="\n".join(lines),
            text=True,
            check=True,
            timeout=USUAL_DEADLINE_S,
        )


class Host:
    """One machine on a ``network``. It has booted when the constructor or ``boot`` returns and can then be used."""

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._network = network
        self.on = True
        self.clock_ahead_s = 0
        """By how much the wall clock of what is started from now on is wrong."""
        self._port = f"port-{name}"
        self._spaces = self._begin()

    def _begin(self) -> Namespaces:
        kinds = ("net", "uts", "mount", "pid")
        return Namespaces(HERE / "init.sh", self.name, self._network.folder, kinds, inside=self._network.spaces)

    def connect(self) -> None:
        """Wait until the host has started and plug its cable into the bridge."""
        self._spaces.wait()
        self._network.configure(
            f"link add {self._port} type veth peer name eth0 netns {self._spaces.pid}",
            f"link set {self._port} master br0 up",
        )
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def power_off(self) -> None:
        """Lose power: peers get neither a FIN nor a reset."""
        self._network.configure(f"link delete {self._port}")
        self._spaces.kill()
        self.on = False

    def power_on(self) -> None:
        """Boot again after ``power_off``; daemons have to be started again."""
        self._spaces = self._begin()
        self.connect()
        self.on = True

    def unplug(self) -> None:
        """Cut the network cable."""
        self._network.configure(f"link set {self._port} down")

    def plug(self, bridge: str = "br0") -> None:
        """Plug the cable in again, or put it into another bridge (``br1``): hosts on one bridge reach each other."""
        self._network.configure(f"link set {self._port} master {bridge} up")

    def slow(self, kbit: int) -> None:
        """Limit the link to ``kbit`` a second both ways, with up to 400 ms of packets waiting."""
        shape = ("root", "tbf", "rate", f"{kbit}kbit", "burst", "16kb", "latency", "400ms")
        self.run("tc", "qdisc", "replace", "dev", "eth0", *shape)
        port = [*self._network.spaces.enter("net"), "tc", "qdisc", "replace", "dev", self._port, *shape]
        subprocess.run(port, check=True, timeout=USUAL_DEADLINE_S)

    def unslow(self) -> None:
        """Take the limit of ``slow`` away."""
        self.run("tc", "qdisc", "del", "dev", "eth0", "root")
        port = [*self._network.spaces.enter("net"), "tc", "qdisc", "del", "dev", self._port, "root"]
        subprocess.run(port, check=True, timeout=USUAL_DEADLINE_S)

    @property
    def root(self) -> Path:
        """The root folder of this host as others see it."""
        return Path(f"/proc/{self._spaces.pid}/root")

    def command(self, *argv: str, user: str = "root") -> list[str]:
        """The command to be run outside that runs ``argv`` on this host as ``user``, in the same working folder."""
        become = (
            ()
            if user == "root"
            else ("setpriv", f"--reuid={user}", f"--regid={getpwnam(user).pw_gid}", "--init-groups")
        )
        ahead = f"FAKETIME={self.clock_ahead_s:+d}s"
        clock = ("env", f"LD_PRELOAD={FAKETIME}", ahead, "FAKETIME_DONT_FAKE_MONOTONIC=1") if self.clock_ahead_s else ()
        return [*self._spaces.enter(), f"--wd={self._network.folder / 'shared'}", "--", *become, *clock, *argv]

    def run(
        self, *argv: str, user: str = "root", check: bool = True, timeout: float = USUAL_DEADLINE_S, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host. Raises CalledProcessError (with what it said) unless ``check`` is False."""
        done = subprocess.run(
            self.command(*argv, user=user), input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise RuntimeError(
                f"{self.name}: {' '.join(argv)} exited with {done.returncode}: {done.stderr or done.stdout}"
            )
        return done

    @contextlib.contextmanager
    def process(self, *argv: str, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
        """Run a command on this host beside the test; it is killed at the end of the block."""
        process = subprocess.Popen(self.command(*argv), text=True, env=env, start_new_session=True)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(USUAL_DEADLINE_S)

    def close(self) -> None:
        """Switch the host off for good."""
        self._spaces.close()
