"""Several nodes on one machine: each a launcher with its own address and shared memory; the run folder is common."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from opsd.ports import free_port
from tests.fakes.clock import until
from tests.fakes.schemas import unknown_fields


class Nodes:
    """``opsd launch`` on ``count`` nodes n1, n2, …; everything is killed when the ``with`` block ends.

    ``environ`` has variables that only some nodes have, by their name. ``within`` is a command that starts another one,
    which it becomes.
    """

    def __init__(
        self,
        folder: Path,
        source: str,
        *flags: str,
        count: int,
        program: Sequence[str] | None = None,
        environ: Mapping[str, Mapping[str, str]] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.names = [f"n{number}" for number in range(1, count + 1)]
        self._flags = flags
        self.port = free_port()
        self._net = os.getpid() % 200 + 20
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        script = folder / "prog.py"
        script.write_text(textwrap.dedent(source))
        self._program = list(program or [str(script)])
        self._environ = environ or {}
        self._within = within

    def __enter__(self) -> Nodes:
        for name in self.names:
            self.start(name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for name in self.processes:
            self.kill(name)
        if error is not None:
            print(json.dumps(self.events(), indent=1), *(self.said(name) for name in self.processes), sep="\n")

    def start(self, name: str) -> None:
        """Start the launcher of one node."""
        nodes = ",".join(f"{other}={self.address(other)}" for other in self.names)
        command = [
            *self._within, sys.executable, "-m", "opsd", "launch", "--run-id=r", f"--run-dir={self.run}",
            f"--nodes={nodes}", f"--node-name={name}", f"--port={self.port}", *self._flags, *self._program,
        ]  # fmt: skip
        environment = {**os.environ, "OPSD_SHM": str(self.folder / name), **self._environ.get(name, {})}
        with (self.folder / f"{name}.err").open("ab") as err:
            self.processes[name] = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=err, stderr=err)

    def address(self, name: str) -> str:
        """Where the launcher of a node listens."""
        return f"127.{self._net}.1.{name[1:]}"

    def kill(self, name: str) -> None:
        """Kill the launcher of a node and all that it has started, as a power loss would."""
        self._signal(name, signal.SIGKILL)
        self.processes[name].wait(20)

    def everything(self, name: str) -> list[psutil.Process]:
        """The launcher of a node and all below it."""
        try:
            launcher = psutil.Process(self.processes[name].pid)
            return [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def freeze(self, name: str) -> None:
        """Stop everything on a node: it says nothing any more, and its connections stand."""
        self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Undo ``freeze``."""
        self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, number: signal.Signals) -> None:
        for process in self.everything(name):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def said(self, name: str) -> str:
        """What the launcher of a node and its ranks have printed."""
        return (self.folder / f"{name}.err").read_text(errors="replace")

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The events of the run, all or of one kind."""
        try:
            lines = (self.run / "events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        events = [json.loads(line) for line in lines]
        assert [(event["event"], odd) for event in events if (odd := unknown_fields(event))] == []
        return [event for event in events if kind in (None, event["event"])]

    def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Wait for something that the launchers or ranks bring about."""
        until(condition, timeout_s)

    def state(self, name: str) -> dict[str, Any]:
        """The run.json of a node."""
        try:
            state: dict[str, Any] = json.loads((self.folder / name / "r/run.json").read_text())
        except FileNotFoundError:
            return {"state": "starting"}
        return state

    def ask(self, name: str, **request: str) -> dict[str, Any]:
        """The answer of a node's launcher on its control socket."""
        from opsd.control import ask_launcher

        return dict(ask_launcher(self.folder / name / "r/control.sock", dict(request), timeout_s=10.0))

    def wait(self, timeout_s: float = 60.0) -> dict[str, int]:
        """The exit codes of all launchers."""
        return {name: process.wait(timeout_s) for name, process in self.processes.items()}
