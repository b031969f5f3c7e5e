"""The collectors of this node, made from the settings."""

from __future__ import annotations

import pwd
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Final

from opsd.collectors import plugins
from opsd.collectors.base import Collector, Context
from opsd.collectors.lib.gpu_owners import has_instances
from opsd.collectors.slurm import NodeRecord, SlurmReport
from opsd.config import Settings
from opsd.slurm import gres_devices
from opsd.slurm.commands import CommandSlurm
from opsd.slurm.job_faults import FailedJobs, NodeFaults
from opsd.slurm.port import Given, Job, Slurm, SlurmError, SlurmMissing, SlurmUnavailable

HOLDING: Final = ("running", "suspended", "stopped")
"""The states of jobs that have GPUs: a suspended one keeps its own, and Slurm gives them to no other (22.05.8)."""
COUNT_S: Final = 60.0
"""Seconds between two looks at whether the failures of jobs are to be counted."""


class NodeWatch:
    """The newest report about ``node``. Slurm is polled every ``period_s`` seconds after the first call.

    ``gres`` returns the device files of each GPU that Slurm counts, and is asked while the driver ``has_instances``.
    ``failed_jobs`` has this agent's part in reading Slurm's accounting.
    """

    def __init__(
        self,
        slurm: Slurm,
        node: str,
        *,
        period_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
        gres: Callable[[str], Sequence[Sequence[str]]] = gres_devices.read,
        has_instances: Callable[[], bool] = has_instances,
    ) -> None:
        self._gres, self._has_instances = gres, has_instances
        self._devices: Sequence[Sequence[str]] = ()
        self._filed: frozenset[str] = frozenset()
        """The jobs whose files are known."""
        self._slurm = slurm
        self._node = node
        self._period_s = period_s
        self._clock = clock
        self._report = SlurmReport()
        self._faults = NodeFaults(slurm, node, clock=clock)
        self.failed_jobs = FailedJobs(slurm, node, clock=clock)
        self._thread: threading.Thread | None = None
        self._ids: dict[str, int] = {}
        self._given: dict[tuple[int, int], Given] = {}

    def __call__(self) -> SlurmReport:
        """The newest report; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask_forever, name="slurm-watch", daemon=True)
            self._thread.start()
            threading.Thread(target=self._count_forever, name="slurm-accounting", daemon=True).start()
        return self._report

    def refresh(self) -> SlurmReport:
        """Ask now and return the report; takes as long as Slurm does. Does not raise SlurmError."""
        try:
            _ = self._slurm.version
            nodes = self._slurm.nodes([self._node])
            jobs = self._slurm.jobs(node=self._node) if nodes else ()
            users = {str(job.id): user for job in jobs if (user := self._user_id(job.user)) is not None}
            given = self._given_to(jobs)
            holding = {str(job.id) for job in jobs if job.state in HOLDING}
            held = {job: one for job, one in given.items() if one.gpus is not None and job in holding}
            gpus = {job: (one.gpus or frozenset()) | one.shares for job, one in held.items()}
            shares = {job: one.shares for job, one in held.items() if one.shares}
            record = self._remembered() if nodes else None
            self._report = SlurmReport(
                self._clock(), nodes[0] if nodes else None, jobs, users=users, gpus=gpus, shares=shares,
                files=self._files_of(gpus),
                sluids={one.sluid: job for job, one in given.items() if one.sluid}, record=record,
                jobs_counted=self.failed_jobs.counted,
            )  # fmt: skip
        except SlurmMissing as error:
            self._report = SlurmReport(problem=str(error), absent=True)
        except SlurmError as error:
            self._report = replace(self._report, problem=str(error), absent=False)
        return self._report

    def _remembered(self) -> NodeRecord | None:
        """What Slurm remembers of the node, None while it does not say."""
        try:
            return self._faults.refresh()
        except SlurmError:
            return None

    def _given_to(self, jobs: Sequence[Job]) -> dict[str, Given]:
        """What Slurm gave each job on this node, as far as it tells.

        That is known once the job runs. One that is requeued has its next restart count while it still ends, and gets
        its next GPUs and SLUID later (tested on 26.05.3).
        """
        holding = {(job.id, job.restarts): job.state in HOLDING for job in jobs}
        found = {job: given for job, given in self._given.items() if job in holding}
        for job in sorted(holding.keys() - found.keys()):
            try:
                found[job] = self._slurm.given(job[0], self._node)
            except SlurmUnavailable:  # the next look asks again
                break
            except SlurmError:  # it has ended meanwhile, or is not shown to this user
                found[job] = Given(None)
        self._given = {job: given for job, given in found.items() if holding[job]}
        return {str(job): given for (job, _), given in found.items()}

    def _files_of(self, gpus: Mapping[str, frozenset[int]]) -> dict[str, Sequence[Sequence[str]]]:
        """The device files of each job's GPUs on a node with MIG, whose instances may change while no job has them."""
        if not gpus or not self._has_instances():
            self._filed = frozenset()
            return {}
        if gpus.keys() - self._filed:
            try:
                self._devices = self._gres(self._node)
            except SlurmError:  # not root, or an order that is not known: asked again when the next job comes
                self._devices = ()
        self._filed = frozenset(gpus)
        most = len(self._devices)
        return {job: [self._devices[i] for i in sorted(own)] for job, own in gpus.items() if max(own, default=0) < most}

    def _user_id(self, name: str) -> int | None:
        """The id of a user; asking for it may take as long as the directory service does."""
        if name not in self._ids:
            try:
                self._ids[name] = pwd.getpwnam(name).pw_uid
            except KeyError:
                return None
        return self._ids[name]

    def _ask_forever(self) -> None:
        while True:
            self.refresh()
            time.sleep(self._period_s)

    def _count_forever(self) -> None:
        """Apart from the other questions: an answer of the accounting may take a minute."""
        while True:
            with suppress(SlurmError):
                self.failed_jobs.refresh()
            time.sleep(COUNT_S)


@cache
def _watch(node: str, period_s: float) -> NodeWatch:
    """The same for collectors that are made again, as its thread does not end."""
    return NodeWatch(CommandSlurm(), node, period_s=period_s)


def _reports(settings: Settings, node: str, period_s: float) -> NodeWatch:
    watch = _watch(node, period_s)
    watch.failed_jobs.may_ask = settings.policy.drain
    return watch


def build(settings: Settings, state: Path | None = None) -> list[Collector]:
    """The collectors that are enabled. ``state`` is where they may keep what outlives the agent, None for nowhere."""
    context = Context(settings, settings.agent.node, state, slurm_reports=partial(_reports, settings))
    for plugin in plugins():
        own = settings.section(plugin.settings)
        if own.enabled:
            context.made.append(plugin.make(own, context))
    return context.made
