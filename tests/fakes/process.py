"""The real ``opsd`` as a process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from opsd.ports import free_port
from opsd.simulated.gpus import STATE_ENV, SimulatedGpus
from tests.fakes.clock import eventually, until


class Opsd:
    """Runs ``opsd`` in a folder of its own."""

    def __init__(self, folder: Path, library: str | None = None, gpus: SimulatedGpus | None = None) -> None:
        self.port = free_port()
        self.folder = folder
        self.config = folder / "opsd.toml"
        nvml = f'library = "{library}"' if library else "enabled = false"
        self.config.write_text(f'[agent]\nlisten = "127.0.0.1:{self.port}"\n[nvml]\n{nvml}\n')
        self.environment = {
            **os.environ,
            "OPSD_STATE_DIR": str(folder / "state"),
            "OPSD_SHM": str(folder / "shm"),
            **({STATE_ENV: str(gpus.path)} if gpus else {}),
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "opsd", *arguments],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @contextlib.contextmanager
    def agent(self, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """A running agent that is ready."""
        process = self.start("agent", "--config", str(self.config), *arguments, **environment)
        try:
            assert eventually(lambda: self.get("/readyz") is not None), "the agent did not become ready"
            yield process
        finally:
            process.kill()
            process.communicate()

    def get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                return answer.read().decode()
        except OSError:
            return None

    def shows(self, *lines: str) -> Callable[[], bool]:
        """Whether all ``lines`` are among the metrics."""
        return lambda: set(lines) <= set((self.get("/metrics") or "").splitlines())


_DEAD_BUT_FOR_A_THREAD = """
import ctypes, fcntl, os, sys, threading, time
fcntl.flock(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), fcntl.LOCK_EX)
threading.Thread(target=time.sleep, args=(60,)).start()
print("locked", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@contextlib.contextmanager
def stuck_agent(folder: Path) -> Iterator[int]:
    """A process that has the journal in ``folder`` and is not ended yet, as one that waits for a disk; its number."""
    command = [sys.executable, "-c", _DEAD_BUT_FOR_A_THREAD, str(folder / "journal.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        until(lambda: " Z " in Path(f"/proc/{process.pid}/stat").read_text())
        yield process.pid
        process.kill()
