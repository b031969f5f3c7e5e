"""Runs `opsd launch` on small programs as a user would, and what it leaves.

Runs ``opsd launch`` on small programs, as a user would, and reads what it leaves.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.fakes.clock import eventually
from tests.fakes.schemas import unknown_fields

TRAIN = """
import os, signal, sys, time
from opsd.client import Reporter

rank, generation = int(os.environ["RANK"]), int(os.environ["OPSD_GENERATION"])
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
reporter = Reporter.from_env()

def train(steps, first=0, at=None, do=None, step_s=0.01):
    for step in range(first, steps):
        with reporter.phase("forward"):
            time.sleep(step_s)
        reporter.step(step=step)
        if step == at:
            do()
        if reporter.stop_requested:
            break
    reporter.close()
"""
"""The beginning of programs that behave like a trainer: ``train(steps, at=…, do=…)``.

The first generation of several nodes need not have the number 1: on a busy machine it may be agreed on a second time.
"""


class Launched:
    """One ``opsd launch`` below ``folder``; killed with all of its ranks when the ``with`` block ends."""

    def __init__(
        self,
        folder: Path,
        source: str,
        *flags: str,
        args: tuple[str, ...] = (),
        program: tuple[str, ...] | None = None,
        env: Mapping[str, str] | None = None,
        within: tuple[str, ...] = (),
        stdin: int = subprocess.DEVNULL,
        cwd: Path | None = None,
    ) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.memory = folder / "shm/r"
        script = folder / "prog.py"
        script.write_text(textwrap.dedent(source))
        options = ("--run-id", "r", "--run-dir", str(self.run), "--events", str(folder / "events.jsonl"), *flags)
        command = [*within, sys.executable, "-m", "opsd", "launch", *options, *(program or (str(script), *args))]
        environment = {**os.environ, "OPSD_SHM": str(folder / "shm"), **(env or {})}
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                command, cwd=cwd or folder, env=environment, stdin=stdin, stdout=out, stderr=err
            )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        if error is not None:
            print(self.err, json.dumps(self.events(), indent=1), sep="\n")

    @property
    def out(self) -> str:
        """What the launcher has printed."""
        return (self.folder / "out").read_text(errors="replace")

    @property
    def rank_err(self) -> str:
        """What the ranks wrote to stderr: without the launcher's messages and the lines that belong to them."""
        return re.sub(r"^opsd: .*\n(  .*\n)*", "", self.err, flags=re.MULTILINE)

    @property
    def err(self) -> str:
        """What the launcher has said."""
        return (self.folder / "err").read_text(errors="replace")

    @property
    def state(self) -> dict[str, Any]:
        """The content of run.json."""
        state: dict[str, Any] = json.loads((self.memory / "run.json").read_text())
        return state

    def log(self, rank: int = 0, generation: int = 1) -> str:
        """What a rank has printed."""
        log = self.run / f"logs/gen-{generation:04d}/rank-{rank:04d}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The events so far, all or of one kind."""
        try:
            lines = (self.folder / "events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        events = [json.loads(line) for line in lines]
        assert [(event["event"], odd) for event in events if (odd := unknown_fields(event))] == []
        return [event for event in events if kind in (None, event["event"])]

    def event(self, kind: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """The first event of a kind, waited for."""
        self.until(lambda: bool(self.events(kind)), timeout_s)
        return self.events(kind)[0]

    def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait for something that the launcher or a rank brings about."""
        assert eventually(condition, timeout_s), f"waited in vain; {self.err}"

    def ask(self, **request: str) -> dict[str, Any]:
        """The launcher's answer to a request on its control socket, whose path may be longer than a socket's may be."""
        folder = os.open(self.memory, os.O_PATH)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(20)
                connection.connect(f"/proc/self/fd/{folder}/control.sock")
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile() as answers:
                    answer: dict[str, Any] = json.loads(answers.readline())
        finally:
            os.close(folder)
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Signal the launcher."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code of the launcher."""
        return self.process.wait(timeout_s)


def alive(pid: int) -> bool:
    """True if a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# A launcher's control socket without a launcher.


class SwappingLauncher:
    """A run on ``nodes`` with ``spares`` that swaps when asked, ``slowly`` meaning never; listens at ``control``.

    Without spares it has those of the ``pool`` once it was asked to swap.
    ``requests`` are those that it got, questions for its status left out.
    """

    def __init__(
        self,
        nodes: list[str],
        spares: list[str],
        *,
        control: Path | None = None,
        run: str = "r",
        slowly: bool = False,
        pool: list[str] | None = None,
    ) -> None:
        self.nodes, self.spares, self._run, self._slowly, self._pool = nodes, spares, run, slowly, pool
        self.requests: list[dict[str, Any]] = []
        if control is not None:
            control.parent.mkdir(parents=True, exist_ok=True)
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(control))
            self._listener.listen()
            threading.Thread(target=self._serve, daemon=True).start()

    def __call__(self, request: Any) -> dict[str, Any]:
        """The answer to one request."""
        if request["cmd"] == "status":
            members = {"nodes": self.nodes, "spares": self.spares, "head": self.nodes[0]}
            return {"ok": True, "run": self._run, "waits": self._pool is not None, **members}
        self.requests.append(dict(request))
        if not self.spares and self._pool is not None:
            self.spares = self._pool
            return {"ok": False, "error": "the run has no spare; one has been asked for", "coming": True}
        if not self.spares:
            return {"ok": False, "error": "the run has no spare"}
        if not self._slowly:
            spare, *self.spares = self.spares
            self.nodes = [spare if name == request["node"] else name for name in self.nodes]
        return {"ok": True}

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rwb") as stream:
                stream.write(json.dumps(self(json.loads(stream.readline()))).encode() + b"\n")
