"""The network of a node in repair under load: it is drained, so that a job on another node runs the other half."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from opsd.lemons import judge
from opsd.preflight.network.rendezvous import port_of
from opsd.repair.repair_plan import NO_HARDWARE
from opsd.repair.retest import Retested
from opsd.slurm import topology_source
from opsd.slurm.candidates import candidates, faults, free
from opsd.slurm.leaf_paths import with_bad
from opsd.slurm.node_comment import domains
from opsd.slurm.port import Slurm, SlurmError, SlurmRejected
from opsd.slurm.topology import Topology, TopologyError

PARTNERS: Final = 2
"""A pair that fails blames one of two; if another one fails as well, it is the node that both have in common."""
POLL_S: Final = 3.0
LOOKS: Final = 40
"""Looks, ``POLL_S`` apart, at whether the partner's job has started; two minutes."""
MINUTES: Final = 20
"""Longer than the start of both halves and ``retest.PAIR_S``: Slurm ends what a repair that was killed has left."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

Half = Callable[[Sequence[str], int, Callable[[], str]], Retested]
"""``opsd.repair.retest.Tests.with_partner``."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Measures the network between ``node``, where ``half`` does its part, and idle nodes of ``partition``."""

    slurm: Slurm
    node: str
    partition: str
    half: Half
    topology: Callable[[], Topology] = topology_source.read
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, passed: Retested, needed: bool, stop: Callable[[], str]) -> Retested:
        """``passed``, what a test of the node alone has found, with what the network is like.

        That must be known if it is ``needed``, or if one partner has found it bad.
        """
        bad: dict[str, str] = {}
        unknown: dict[str, str] = {}
        while len(tried := [*bad, *unknown]) < PARTNERS:
            partner = ""
            try:
                partner = self._partner(tried)
                found = self._with(partner, stop)
            except SlurmError as error:
                unknown[partner] = f"Slurm: {error}"
                if not partner:
                    break
                continue
            if found.stopped:
                return found
            if found.passed:
                others = "".join(f"; not with {name}, whose way is bad: {why}" for name, why in bad.items())
                warned = f" ({found.detail})" * bool(found.detail)
                return Retested(True, f"{passed.detail}, and the network with {partner}{warned}{others}")
            (unknown if found.detail.startswith(NO_HARDWARE) else bad)[partner] = found.detail.removeprefix(NO_HARDWARE)
        if len(bad) == PARTNERS:
            return Retested(False, f"the network is bad with {_told(bad)}")
        if bad:
            why = f"the network is bad with {_told(bad)}, and no other node could tell whose fault that is"
            return Retested(False, f"{NO_HARDWARE}{why}: {_told(unknown)}")
        why = f"the network was not tested: {_told(unknown)}"
        return Retested(False, f"{NO_HARDWARE}{why}") if needed else Retested(True, f"{passed.detail}; {why}")

    def _partner(self, tried: Collection[str]) -> str:
        """The best idle node without a bad way to this one, of those the nearest. Raises SlurmError.

        None below a switch that is not connected with this one's: the two could not meet whatever the network is like.
        """
        offered = next((one.nodes for one in self.slurm.partitions() if one.name == self.partition), None)
        if offered is None:
            raise SlurmRejected(f"there is no partition {self.partition} (repair.pair_partition)")
        nodes, comments, now = self.slurm.nodes(), self.slurm.comments(), self.clock()
        judged = judge([node.name for node in nodes], faults(comments), now)
        idle = free(candidates(nodes, comments, judged, now))
        tree = with_bad(self._tree(), comments, now).with_domains(domains(comments))
        apart = {name for name in idle if tree.apart(name, self.node)}
        known = {name: idle[name] for name in offered if name in idle.keys() - apart - {*tried, self.node}}
        if not known:
            raise SlurmRejected(f"no {'other ' * bool(tried)}node of partition {self.partition} is idle")
        bad, here = tree.bad_towards([self.node]), [self.node]
        return min(known, key=lambda name: (bad[tree.leaf.get(name, "")], known[name], *tree.cost(name, here), name))

    def _tree(self) -> Topology:
        try:
            return self.topology()
        except TopologyError:
            return Topology()

    def _with(self, partner: str, stop: Callable[[], str]) -> Retested:
        """What is measured with ``partner``. Raises SlurmError; the job has ended in any case."""
        hosts = self.node, partner
        if wrong := [name for name in hosts if not _NAME.fullmatch(name)]:
            return Retested(False, f"{NO_HARDWARE}{wrong[0]!r} is no name of a machine")
        try:
            self._clear()
            job = self.slurm.submit(self._script(hosts), self._options(partner))
            if (absent := self._started(job, stop)) is not None:
                return absent
            found = self.half(hosts, port_of(job), stop)
            judged = not (found.passed or found.stopped or found.detail.startswith(NO_HARDWARE))
            if judged and self._state(job) != "running":
                return Retested(False, f"{NO_HARDWARE}its job has ended meanwhile")
            return found
        finally:
            self._clear()

    def _script(self, hosts: Sequence[str]) -> str:
        """The other half, which meets this one at the port of its job, and stays: if it is gone, it was ended."""
        half = [sys.executable, "-P", "-m", "opsd", "preflight", "network"]
        half += [f"--hosts={','.join(hosts)}", "--node=1", f"--rendezvous={self.node}"]
        return f"#!/bin/sh\n{shlex.join(half)}\nexec sleep {MINUTES * 60}\n"

    def _options(self, partner: str) -> list[str]:
        """Limits are those of its slurmd: a service that may lock no memory would have a job that cannot use RDMA."""
        return [
            f"--job-name={self._job_name}", f"--partition={self.partition}", f"--nodelist={partner}", "--nodes=1",
            "--exclusive", "--mem=0", "--no-requeue", f"--time={MINUTES}", "--propagate=NONE", "--output=/dev/null",
            "--chdir=/",
        ]  # fmt: skip

    @property
    def _job_name(self) -> str:
        return f"opsd-pair-{self.node}"

    def _started(self, job: int, stop: Callable[[], str]) -> Retested | None:
        """None once the job runs, otherwise why it does not. Raises SlurmError."""
        for _ in range(LOOKS):
            if (state := self._state(job)) == "running":
                return None
            if state not in ("pending", "configuring"):
                return Retested(False, f"{NO_HARDWARE}its job has ended at once")
            if why := stop():
                return Retested(False, f"the test of the network was stopped: {why}", stopped=True)
            self.sleep(POLL_S)
        return Retested(False, f"{NO_HARDWARE}its job has not started within {LOOKS * POLL_S:.0f} s")

    def _state(self, job: int) -> str:
        return next((found.state for found in self.slurm.jobs([job])), "gone")

    def _clear(self) -> None:
        """End the job, also one that a repair that was killed has left. Slurm's time limit does it otherwise."""
        with suppress(SlurmError):
            for job in self.slurm.jobs():
                if job.name == self._job_name:
                    self.slurm.cancel(job.id)


def _told(found: dict[str, str]) -> str:
    return "; ".join(f"{name}: {why}" if name else why for name, why in found.items())
