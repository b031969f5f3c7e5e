"""A node with a root agent in act mode, a simulated driver, a rank folder for all, and a Slurm that notes orders."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

from opsd.simulated.gpus import SimulatedGpus
from tests.fakes.process import Opsd

NAME = "node1"

_POLICY = """
[policy]
mode = "act"
drain = true
"""

_SLURM = """#!{python} -ISu
import json, sys
name, arguments = sys.argv[0].rpartition("/")[2], sys.argv[1:]
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([name, *arguments]) + "\\n")
values = dict(NodeList="{node}", StateComplete="idle", Timestamp="Unknown", User="Unknown", Reason="none", Comment="")
if arguments == ["--version"]:
    print("slurm 24.11.5")
elif name == "sinfo":
    fields = arguments[arguments.index("--Format") + 1].split(",")
    print("".join(values[field] + separator for field, _, separator in (field.partition(":") for field in fields)))
"""
"""Stands for Slurm's commands: a cluster of this one node, which writes down what is asked of it."""


class Node(Opsd):
    """The agent's node. Other users may enter ``folder`` and write to ``shm``, and to nothing else of it."""

    def __init__(self, folder: Path, library: Path, gpus: SimulatedGpus) -> None:
        super().__init__(folder, library, gpus)
        folder.chmod(0o755)
        self.gpus = gpus
        self.shm = folder / "shm"
        self.shm.mkdir()
        self.shm.chmod(0o1777)
        config = self.config.read_text().replace("[agent]\n", f'[agent]\nnode = "{NAME}"\n')
        self.config.write_text(config + _POLICY)
        self._calls = folder / "slurm-calls"
        self.environment["PATH"] = f"{self._fake_slurm(folder / 'bin')}:{os.environ['PATH']}"

    def configure(self, *lines: str) -> None:
        """Append ``lines`` to the configuration, sections with their keys."""
        with self.config.open("a") as config:
            config.write("\n".join((*lines, "")))

    def _fake_slurm(self, folder: Path) -> Path:
        folder.mkdir()
        for name in ("sinfo", "squeue", "scontrol"):
            command = folder / name
            command.write_text(
                _SLURM.format(python=os.path.realpath(sys.executable), calls=str(self._calls), node=NAME)
            )
            command.chmod(0o755)
        return folder

    def slurm_orders(self) -> list[list[str]]:
        """What the agent had Slurm change: the arguments of each ``scontrol update``."""
        with contextlib.suppress(FileNotFoundError):
            calls = [json.loads(line) for line in self._calls.read_text().splitlines()]
            return [call for call in calls if call[:2] == ["scontrol", "update"]]
        return []

    def status(self) -> dict[str, Any]:
        """What the agent says of itself; empty while it does not answer."""
        status: dict[str, Any] = json.loads(self.get("/api/v1/status") or "{}")
        return status

    def incidents(self) -> list[dict[str, Any]]:
        """The incidents that the agent shows, the current and the ended ones."""
        found: list[dict[str, Any]] = json.loads(self.get("/api/v1/incidents") or '{"incidents": []}')["incidents"]
        return found

    def kinds(self) -> set[str]:
        """Kinds of the incidents that the agent shows."""
        return {incident["kind"] for incident in self.incidents()}

    def actions(self) -> list[tuple[str, str]]:
        """Verb and target of every action in the journal: what the agent has begun."""
        path = self.folder / "state/journal.db"
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return [(verb, target) for verb, target in database.execute("SELECT verb, target FROM actions")]

    def series(self, name: str) -> dict[str, float]:
        """The series called ``name`` in a scrape, by the text of their labels."""
        found = {}
        for line in (self.get("/metrics") or "").splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name:
                found[series.partition("{")[2].rstrip("}")] = float(value)
        return found

    def ticks(self) -> float:
        """How many ticks the agent has made."""
        return self.series("opsd_agent_ticks_total").get("", 0.0)
