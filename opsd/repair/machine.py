"""What a repair changes on the node itself. Each call has a deadline."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from opsd.collectors.lib.clock import boot_id, uptime_s
from opsd.collectors.lib.processes import gpu_holders, identify, is_dynamic, is_service, service_of, start_time, user_of
from opsd.repair.repair_plan import HELD

TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")
TERM_S, KILL_S = 10.0, 20.0
FABRIC: Final = "nvidia-fabricmanager"
"""Runs on during a reset: before Hopper it is needed for one."""
SAID_BYTES: Final = 16 << 20
"""Four times the longest part of evidence; a broken program may print without end."""


class RemedyError(Exception):
    """A remedy that failed or cannot be applied; the message says why in one sentence."""


class Driver(Protocol):
    """The driver of the node's GPUs. The remedies return what was done, in a few words, and raise RemedyError."""

    def recovery_actions(self) -> Sequence[int]:
        """What the driver asks for, for each GPU that answers; empty if it does not say."""

    def reset_gpus(self, services: Sequence[str] = ()) -> str:
        """Reset all GPUs of the node. No process of users holds one; of ``services`` with DynamicUser= some do."""

    def reload_driver(self, services: Sequence[str] = ()) -> str:
        """Unload the driver's modules and load them again. Nobody holds a GPU, but ``services`` as for a reset."""

    def restore(self) -> None:
        """Start what a remedy that was cut off may have stopped. Raises nothing."""


class Machine(Protocol):
    """The node. Its remedies end the processes first that hold a GPU; they raise RemedyError."""

    def boot(self) -> str:
        """Identifies the boot of the node."""

    def uptime_s(self) -> float:
        """Seconds since the boot, by a clock that nobody sets."""

    def recovery_actions(self) -> Sequence[int]:
        """As a ``Driver``'s."""

    def end_processes(self) -> str:
        """End what still holds a GPU."""

    def reset_gpus(self) -> str:
        """Reset all GPUs of the node."""

    def reload_driver(self) -> str:
        """Unload the driver's modules and load them again."""

    def restore(self) -> None:
        """As a ``Driver``'s."""


Run = Callable[[Sequence[str], float], str]
"""Runs a command within seconds and returns what it printed. Raises RemedyError."""


def run_command(argv: Sequence[str], deadline_s: float) -> str:
    """See ``Run``. Returns by the deadline even if the command hangs in the driver, where no signal ends it.

    Of what it prints the last ``SAID_BYTES`` are kept.
    """
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        raise RemedyError(f"{argv[0]} cannot be run: {error.strerror}") from error
    try:
        said = _last_words(process, deadline_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1.0)
        raise RemedyError(f"{' '.join(argv)} has not ended within {deadline_s:g} s") from None
    except BaseException:  # Ctrl-C does not reach a session of its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    text = said.decode(errors="replace")
    if process.returncode:
        raise RemedyError(f"{' '.join(argv)} failed: {_reason(text)}")
    return text


def _reason(said: str) -> str:
    """The last line that says something: nvidia-smi adds one that does not."""
    lines = (line.strip() for line in reversed(said.splitlines()))
    return next((line[:300] for line in lines if line and not line.startswith("Terminating early")), "it said nothing")


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


class NodeMachine:
    """This node, with a ``driver`` that stops the units ``services`` for a reset, whoever runs them."""

    def __init__(
        self,
        driver: Driver,
        services: Sequence[str] = (),
        *,
        proc: Path = Path("/proc"),
        kill: Callable[[int, int], None] = os.kill,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._driver, self._proc = driver, proc
        self._stopped = services
        self._kill, self._clock, self._sleep = kill, clock, sleep

    def boot(self) -> str:
        return boot_id(self._proc)

    def uptime_s(self) -> float:
        return uptime_s()

    def recovery_actions(self) -> Sequence[int]:
        return self._driver.recovery_actions()

    def end_processes(self) -> str:
        began, ended = self.uptime_s(), self._holders()
        for number, patience_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
            deadline = self._clock() + patience_s
            for pid in self._holders():
                self._spare_new_job(pid, began)
                with suppress(ProcessLookupError):
                    self._kill(pid, number)
            while self._holders() and self._clock() < deadline:
                self._sleep(0.2)
        if left := self._holders():
            raise RemedyError(f"{HELD}{', '.join(map(self._named, sorted(left)))}")
        return f"ended {len(ended)} process{'es' * (len(ended) != 1)}" if ended else "no process holds a GPU"

    def reset_gpus(self) -> str:
        return self._without_users(self._driver.reset_gpus)

    def reload_driver(self) -> str:
        return self._without_users(self._driver.reload_driver)

    def _without_users(self, remedy: Callable[[Sequence[str]], str]) -> str:
        """Says which services are not stopped and hold a GPU, if the remedy fails: it may be because of them."""
        self.end_processes()
        in_the_way = sorted(map(self._named, self._unstopped()))
        try:
            return remedy(self._services())
        except RemedyError as error:
            held = f"; {', '.join(in_the_way)} held a GPU: name the service in repair.services" if in_the_way else ""
            raise RemedyError(f"{error}{held}") from error

    def restore(self) -> None:
        self._driver.restore()

    def _holders(self) -> list[int]:
        """Processes of users, and of root outside of services, that hold a GPU."""
        found = (pid for pid, _ in gpu_holders(self._proc) if pid not in (1, os.getpid()))
        return [pid for pid in found if not is_service(pid, self._stopped, self._proc)]

    def _spare_new_job(self, pid: int, began_s: float) -> None:
        """Raise RemedyError for a job's process that has begun since: somebody has given the node back meanwhile."""
        ticks, identity = start_time(pid, self._proc), identify(pid, self._proc)
        if ticks is not None and identity is not None and identity.job and ticks / TICKS_A_SECOND > began_s:
            raise RemedyError(f"process {pid} of job {identity.job} has begun meanwhile")

    def _unstopped(self) -> list[int]:
        """Processes of services that nobody stops and that hold a GPU."""
        services = ((pid, service_of(pid, self._proc)) for pid, _ in gpu_holders(self._proc))
        stopped = {name.removesuffix(".service") for name in (*self._stopped, *self._services(), FABRIC)}
        return [pid for pid, unit in services if unit and unit.removesuffix(".service") not in stopped]

    def _services(self) -> list[str]:
        """Services with a user id from systemd that hold a GPU."""
        found = {pid: service_of(pid, self._proc) for pid, _ in gpu_holders(self._proc)}
        return sorted({unit for pid, unit in found.items() if unit and is_dynamic(user_of(pid, self._proc))})

    def _named(self, pid: int) -> str:
        unit = service_of(pid, self._proc)
        return f"{pid} ({unit})" if unit else str(pid)
