"""Nodes that are apart: each launcher in a network namespace of its own, on a bridge, with ways that can be cut."""

from __future__ import annotations

import json
import math
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from opsd.checkpoints.claims import FOLDER
from tests.fakes.namespaces import Namespaces
from tests.fakes.nodes import Nodes

STEPPER = """
import os, sys, time
from opsd.checkpoints.claims import EXIT_FENCED, Fence, Fenced
from opsd.client import Reporter

name = ".".join(os.environ[key] for key in ("OPSD_GENERATION", "RANK", "WORLD_SIZE", "OPSD_NODE"))
fence, reporter, step = Fence.of(os.environ), Reporter.from_env(), 0
with open(os.path.join(sys.argv[1], name), "a", buffering=1) as log:
    while not reporter.stop_requested:
        with reporter.phase("forward"):
            time.sleep(0.05)
        reporter.step(step=step)
        print("step", time.time(), file=log)
        if step % 5 == 0:
            try:
                fence.check()
            except Fenced:
                sys.exit(EXIT_FENCED)
            print("commit", time.time(), file=log)
        step += 1
reporter.close()
"""
"""A program that takes a step every 50 ms, and commits every fifth unless it is fenced; it writes down when."""

BUSY_S = 1.0
"""How much later than it should something may happen here, because the machine is busy."""
LOST_S, LOOK_S = 2.0, 1.0
"""A silent node is lost after the first; every second a launcher looks whether its generation is the newest."""


class NodeNetwork(Namespaces):
    """The network between the nodes, numbered from 0."""

    def __init__(self, count: int) -> None:
        super().__init__(count, mbit=1000.0, prefix="opsdmx")
        self._beyond = f"{self._prefix}b"

    def give_ipv6(self) -> None:
        """Let every node have such an address as well, see ``address6``."""
        for node in range(self.count):
            own = f"{self.address6(node)}/64"
            _run(*self.command(node), "ip", "-6", "address", "add", own, "dev", "eth0", "nodad")

    def address6(self, node: int) -> str:
        """The IPv6 address of a node on the bridge."""
        return f"fd13::{node + 1}"

    def part(self, nodes: Iterable[int]) -> None:
        """Let these reach each other and nobody else, and nobody else them."""
        for node in nodes:
            _run("ip", "link", "set", self._link(node), "master", self._beyond)

    def mute(self, nodes: Iterable[int]) -> None:
        """Drop what these say; they hear the others."""
        for node in nodes:
            _run(*self.command(node), "tc", "qdisc", "replace", "dev", "eth0", "root", "pfifo", "limit", "0")

    def deafen(self, nodes: Iterable[int]) -> None:
        """Drop what these are told; the others hear them."""
        for node in nodes:
            _run("tc", "qdisc", "replace", "dev", self._link(node), "root", "pfifo", "limit", "0")

    def heal(self) -> None:
        """Undo all of it."""
        for node in range(self.count):
            _run("ip", "link", "set", self._link(node), "master", self._prefix)
            self.set_speed(node, self._mbit)

    def _build(self) -> None:
        super()._build()
        _run("ip", "link", "add", self._beyond, "type", "bridge")
        _run("ip", "link", "set", self._beyond, "up")

    def _remove(self) -> None:
        super()._remove()
        subprocess.run(["ip", "link", "delete", self._beyond], check=False, capture_output=True, timeout=20)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@dataclass(frozen=True, slots=True)
class Trace:
    """What one rank of one generation has done: when it took steps, and when it committed, in wall seconds."""

    generation: int
    rank: int
    world: int
    node: str
    steps: tuple[float, ...]
    commits: tuple[float, ...]


class PartitionedNodes(Nodes):
    """Launchers n1, n2, … of one run, each with a rank that steps, on the ``wires``; from 1 to all of them may run."""

    def __init__(self, folder: Path, wires: NodeNetwork, *flags: str, ipv6: bool = False) -> None:
        self.steps = folder / "steps"
        self.steps.mkdir()
        self.wires = wires
        self._ipv6 = ipv6
        if ipv6:
            wires.give_ipv6()
        least_and_most = f"--nnodes=1:{wires.count}"
        super().__init__(folder, STEPPER, least_and_most, *flags, count=wires.count)
        self._program = [*self._program, str(self.steps)]

    def start(self, name: str) -> None:
        """Start the launcher of one node in its namespace."""
        self._within = self.wires.command(self._index(name))
        super().start(name)

    def address(self, name: str) -> str:
        """Its address on the bridge."""
        node = self._index(name)
        return self.wires.address6(node) if self._ipv6 else self.wires.address(node)

    def __exit__(self, *error: object) -> None:
        for process in self._launchers():
            process.send_signal(signal.SIGCONT)
        super().__exit__(*error)  # type: ignore[arg-type]

    def _index(self, name: str) -> int:
        return self.names.index(name)

    def _launchers(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes.values() if process.poll() is None]

    # -- what is done to them ------------------------------------------------------------------------------------

    def stop_launchers(self, names: Iterable[str]) -> None:
        """Stop the launchers and not their ranks."""
        for name in names:
            self.processes[name].send_signal(signal.SIGSTOP)

    def continue_launchers(self, names: Iterable[str]) -> None:
        """Undo it."""
        for name in names:
            self.processes[name].send_signal(signal.SIGCONT)

    def kill_launchers(self, names: Iterable[str]) -> None:
        """Kill the launchers; what becomes of their ranks is their affair."""
        for name in names:
            self.processes[name].kill()
            self.processes[name].wait(20)

    def numbers(self, names: Iterable[str]) -> list[int]:
        """The nodes as the wires know them."""
        return [self._index(name) for name in names]

    # -- what they do --------------------------------------------------------------------------------------------

    @property
    def leader(self) -> str:
        """The node whose launcher leads the newest generation."""
        return str(self.events("generation_started")[-1]["node"])

    def traces(self) -> list[Trace]:
        """What all ranks have done so far."""
        found = []
        for path in self.steps.iterdir():
            generation, rank, world, node = path.name.split(".")
            done = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            times = {kind: tuple(float(at) for what, at in done if what == kind) for kind in ("step", "commit")}
            found.append(Trace(int(generation), int(rank), int(world), node, times["step"], times["commit"]))
        return [trace for trace in found if trace.steps]

    def whole(self, since: float, nodes: int = 1) -> bool:
        """Whether since then just one generation has stepped, with all its ranks, on at least so many nodes."""
        going = [trace for trace in self.traces() if trace.steps[-1] > since]
        ranks = sorted(trace.rank for trace in going)
        return (
            len({trace.generation for trace in going}) == 1
            and len(ranks) >= nodes
            and ranks == list(range(going[0].world))
        )

    def ranks_alive(self) -> list[str]:
        """The files that ranks have open, on all nodes, whichever launcher has started them."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                targets = [descriptor.readlink() for descriptor in (process / "fd").iterdir()]
                found += [target.name for target in targets if target.parent == self.steps]
        return found

    def claims(self) -> dict[int, tuple[float, int]]:
        """When each generation was claimed (linked, in wall seconds), and whose ranks it keeps, 0 if nobody's."""
        found = (self.run / FOLDER).glob("[0-9]*.json")
        return {int(path.stem): (path.stat().st_ctime, json.loads(path.read_bytes())["keeps"]) for path in found}


def check_steps(traces: Iterable[Trace], healed_at: float) -> None:
    """Fails if two generations step at once for longer than a launcher may take to find out that it is passed over."""
    spans: dict[int, tuple[float, float]] = {}
    for trace in traces:
        first, last = spans.get(trace.generation, (trace.steps[0], trace.steps[-1]))
        spans[trace.generation] = (min(first, trace.steps[0]), max(last, trace.steps[-1]))
    for older, (_, last) in spans.items():
        for newer, (first, _) in spans.items():
            if older < newer:
                both = last - max(first, healed_at)
                assert both < LOST_S + LOOK_S + BUSY_S, (
                    f"{older} and {newer} both stepped, for {both:.1f} s after healing"
                )


def check_commits(traces: Iterable[Trace], claims: dict[int, tuple[float, int]]) -> None:
    """Fails if a generation has committed after a later one was claimed without its ranks; a commit takes a moment."""
    for trace in traces:
        own = trace.generation
        passed_over = min((at for number, (at, keeps) in claims.items() if number > own != keeps), default=math.inf)
        late = [at - passed_over for at in trace.commits if at > passed_over + BUSY_S]
        assert not late, f"generation {own} committed {max(late):.1f} s after a later one was claimed"
