"""What a repair changes on the node itself: processes, GPUs and the driver's modules. Each call has a deadline."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from opsd.preflight.checks.leftovers import gpu_holders

DRIVER: Final = "nvidia"
"""The driver's module; those that use it (nvidia_uvm, nvidia_peermem, gdrdrv, nvidia_fs …) are unloaded before it."""
FABRIC: Final = "nvidia-fabricmanager"
"""Stays for a reset: before Hopper it is needed for one. Holds the driver's modules."""
SYSTEM_UIDS: Final = 1000
"""User ids below are no users' (login.defs(5)): their services are stopped by name, and not killed."""
TERM_S, KILL_S = 10.0, 20.0
RESET_S, MODULES_S, SERVICE_S = 300.0, 120.0, 90.0
SAID_BYTES: Final = 16 << 20
"""Four times the longest part of evidence; a broken program may print without end."""


class RungError(Exception):
    """A remedy that failed or cannot be applied; the message says why in one sentence."""


class Machine(Protocol):
    """The node. The remedies return what was done, in a few words, and raise RungError."""

    def boot(self) -> str:
        """Identifies the boot of the node."""

    def recovery_actions(self) -> Sequence[int]:
        """What the driver asks for, for each GPU that answers; empty if it does not say."""

    def end_processes(self) -> str:
        """End what still holds a GPU."""

    def reset_gpus(self) -> str:
        """Reset all GPUs of the node."""

    def reload_driver(self) -> str:
        """Unload the driver's modules and load them again."""

    def restore(self) -> None:
        """Start what a remedy that was cut off may have stopped. Raises nothing."""


Run = Callable[[Sequence[str], float], str]
"""Runs a command within seconds and returns what it printed. Raises RungError."""


def run_command(argv: Sequence[str], deadline_s: float) -> str:
    """See ``Run``. Returns by the deadline even if the command hangs in the driver, where no signal ends it.

    Of what it prints the last ``SAID_BYTES`` are kept.
    """
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        raise RungError(f"{argv[0]} cannot be run: {error.strerror}") from error
    try:
        said = _last_words(process, deadline_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        raise RungError(f"{' '.join(argv)} has not ended within {deadline_s:g} s") from None
    except BaseException:  # Ctrl-C does not reach a session of its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    text = said.decode(errors="replace")
    if process.returncode:
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
        raise RungError(f"{' '.join(argv)} failed: {last[:300]}")
    return text


def _last_words(process: subprocess.Popen[bytes], deadline_s: float) -> bytes:
    """The end of what the process prints, once it has ended. Raises subprocess.TimeoutExpired."""
    assert process.stdout is not None
    deadline, kept = time.monotonic() + deadline_s, bytearray()
    while select.select([process.stdout], [], [], left := max(0.0, deadline - time.monotonic()))[0] and left:
        chunk = os.read(process.stdout.fileno(), 1 << 20)
        if not chunk:
            process.stdout.close()
            process.wait(left)
            return bytes(kept)
        kept += chunk
        del kept[:-SAID_BYTES]
    raise subprocess.TimeoutExpired(process.args, deadline_s)


class NvidiaMachine:
    """A node with NVIDIA's driver.

    ``asked`` reads the recovery actions. ``services`` hold GPUs open: they are stopped for a reset, which is refused
    while anybody does (nvidia-smi(1)).
    """

    def __init__(
        self,
        asked: Callable[[], Sequence[int]],
        *,
        services: Sequence[str] = (),
        run: Run = run_command,
        proc: Path = Path("/proc"),
        kill: Callable[[int, int], None] = os.kill,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._asked, self._services, self._run, self._proc = asked, services, run, proc
        self._kill, self._clock, self._sleep = kill, clock, sleep

    def boot(self) -> str:
        return (self._proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

    def recovery_actions(self) -> Sequence[int]:
        return self._asked()

    def end_processes(self) -> str:
        ended = self._holders()
        for number, patience_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
            deadline = self._clock() + patience_s
            for pid in self._holders():
                with suppress(ProcessLookupError):
                    self._kill(pid, number)
            while self._holders() and self._clock() < deadline:
                self._sleep(0.2)
        if left := self._holders():
            raise RungError(f"processes that hold a GPU do not end: {', '.join(map(str, left))}")
        return f"ended {len(ended)} processes" if ended else "no process holds a GPU"

    def reset_gpus(self) -> str:
        """All of them: the node is empty, and GPUs that NVLink connects may only be resettable together."""
        with self._without(self._services):
            self.end_processes()
            self._run(["nvidia-smi", "--gpu-reset"], RESET_S)
        return "reset all GPUs"

    def reload_driver(self) -> str:
        loaded = self._modules()
        if not loaded:
            raise RungError("no module of the NVIDIA driver is loaded")
        with self._without((*self._services, FABRIC)):
            self.end_processes()
            try:
                for name in loaded:
                    self._run(["modprobe", "--remove", name], MODULES_S)
            finally:
                for name in reversed(loaded):
                    self._run(["modprobe", name], MODULES_S)
        self._start_enabled(FABRIC)  # one that had failed was not running before
        return f"loaded {', '.join(reversed(loaded))} again"

    def restore(self) -> None:
        for name in (FABRIC, *self._services):
            self._start_enabled(name)

    def _start_enabled(self, name: str) -> None:
        with suppress(RungError):  # it is not enabled, or shows in the retest
            self._run(["systemctl", "is-enabled", "--quiet", name], SERVICE_S)
            self._run(["systemctl", "start", name], SERVICE_S)

    def _modules(self) -> list[str]:
        """The driver's module and all that use it, each before those that it needs; empty if it is not loaded."""
        try:
            lines = (self._proc / "modules").read_text(encoding="ascii").splitlines()
        except OSError as error:
            raise RungError(f"{self._proc / 'modules'}: {error.strerror}") from error
        users = {name: by.split(",") for name, _, _, by, *_ in map(str.split, filter(None, lines))}
        found: list[str] = []

        def visit(name: str) -> None:
            for user in users[name]:
                if user in users and user not in found:
                    visit(user)
            found.append(name)

        if DRIVER in users:
            visit(DRIVER)
        return found

    def _holders(self) -> list[int]:
        """Processes of users, and of root outside of services, that hold a GPU."""
        return [pid for pid, _ in gpu_holders(self._proc) if pid not in (1, os.getpid()) and not self._is_service(pid)]

    def _is_service(self, pid: int) -> bool:
        """Whether systemd started it as a service of the system, and not for a user or a job."""
        try:
            uid = (self._proc / str(pid)).stat().st_uid
            groups = (self._proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        path = groups.splitlines()[-1].rpartition(":")[2] if groups else ""
        unit = path.removeprefix("/system.slice/")
        return uid < SYSTEM_UIDS and unit != path and not unit.startswith("slurmstepd")

    @contextmanager
    def _without(self, services: Iterable[str]) -> Iterator[None]:
        """Meanwhile none of ``services`` runs; those that ran are started again, whatever happens."""
        stopped: list[str] = []
        try:
            for name in services:
                if self._is_active(name):
                    stopped.append(name)
                    self._run(["systemctl", "stop", name], SERVICE_S)
            yield
        finally:
            for name in reversed(stopped):
                with suppress(RungError):  # a service that does not start shows in the retest, or as its own incident
                    self._run(["systemctl", "start", name], SERVICE_S)

    def _is_active(self, name: str) -> bool:
        try:
            self._run(["systemctl", "is-active", "--quiet", name], SERVICE_S)
        except RungError:
            return False
        return True
