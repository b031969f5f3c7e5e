"""A repair with a cluster in memory, and a node that does as it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opsd.repair.attend import Dependencies, Repair
from opsd.repair.case_file import CaseFile
from opsd.repair.machine import RemedyError
from opsd.repair.repair_plan import Case, Remedy
from opsd.repair.retest import Retested
from opsd.settings.policy import PolicySettings
from opsd.settings.sections import RepairSettings
from opsd.slurm.ownership import PreflightResult
from opsd.slurm.port import Job, Node
from tests.fakes.slurm import FakeSlurm

REASON = "opsd:gpu_xid-1 gpu_xid: Xid 95"
DRAINED = Node("n1", "idle", frozenset({"drain"}), REASON, "root", 100.0)
BOOTED = Node("n1", "down", frozenset(), f"{REASON} : reboot issued : reboot complete", "root", 100.0)
JOB = Job(7, "running", "", "ann", "train", ("n1",), "n1", None, None, None, 0, "run")
REBOOTS = {"RebootProgram": "/sbin/reboot"}


class PowerLoss(Exception):
    """The end of the program, as a reboot brings it."""


@dataclass
class Bench:
    """A node and all around it. ``cured_by`` is the remedy that helps, ``refused`` are those that fail."""

    folder: Path
    cured_by: Remedy | None = None
    refused: Sequence[Remedy] = ()
    asks: Sequence[int] = ()
    slurm: FakeSlurm = field(default_factory=lambda: FakeSlurm([DRAINED, Node("n2", "idle")], config=REBOOTS))
    now: float = 1000.0
    boots: int = 1
    done: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    cured: bool = False
    waits: int = 0
    uptime: float = 5000.0
    by_policy: bool = False
    loads: list[str] = field(default_factory=list)
    clock_step: float = 0.0
    pairs: list[tuple[bool, bool, str]] = field(default_factory=list)
    paired: Retested | None = None
    booted: Node = BOOTED

    def boot(self) -> str:
        return f"boot-{self.boots}"

    def uptime_s(self) -> float:
        return self.uptime

    def recovery_actions(self) -> Sequence[int]:
        return self.asks

    def end_processes(self) -> str:
        return self._remedy(Remedy.PROCESSES)

    def reset_gpus(self) -> str:
        return self._remedy(Remedy.RESET)

    def reload_driver(self) -> str:
        return self._remedy(Remedy.RELOAD)

    def restore(self) -> None:
        self.done.append("restore")

    def _remedy(self, remedy: Remedy) -> str:
        current = self.cases.current()
        assert current is not None and current.last is not None
        assert (current.last.what, current.last.ok) == (remedy, None), "it is on the disk before it begins"
        self.done.append(remedy)
        if remedy in self.refused:
            raise RemedyError(f"{remedy} failed")
        self.cured |= remedy is self.cured_by
        return "done"

    def retest(self, checks: Sequence[str], stop: Callable[[], str]) -> Retested:
        assert {"gpu_health", "infiniband"} & {*checks}
        current = self.cases.current()
        assert current is not None and current.last is not None
        assert (current.last.what, current.last.ok) == ("retest", None), "it is on the disk before it begins"
        self.done.append("retest")
        return Retested(self.cured, "gpu_health passed" if self.cured else "gpu_health failed")

    def pair(self, passed: Retested, needed: bool, stop: Callable[[], str]) -> Retested:
        self.pairs.append((self.slurm.by_name["n1"].out_of_service, needed, stop()))
        return self.paired or passed

    def as_spare(self, stop: Callable[[], str]) -> str:
        assert (stop(), self.slurm.by_name["n1"].out_of_service) == ("", True), "a load on a node in service"
        self.loads.append("spare")
        return "ready as a spare"

    def sleep(self, seconds: float) -> None:
        """Time goes by; a reboot that was asked for takes the node and this program down."""
        self.now += seconds
        self.uptime += seconds
        self.waits += 1
        if self.slurm.reboots and "reboot" not in self.done:
            self.done.append("reboot")
            self.boots += 1
            self.now += self.clock_step
            self.uptime = 30.0
            self.cured |= self.cured_by is Remedy.REBOOT
            self.slurm.by_name["n1"] = self.booted
            raise PowerLoss

    @property
    def cases(self) -> CaseFile:
        return CaseFile(self.folder)

    def repair(self) -> Repair:
        dependencies = Dependencies(
            slurm=self.slurm,
            machine=self,
            release=lambda jobs: f"asked {len(jobs)} jobs",
            retest=self.retest,
            proof=lambda: PreflightResult(self.now, self.cured),
            bundle=lambda case: f"/evidence/{case.node}.tar.gz",
            as_spare=self.as_spare,
            say=self.said.append,
            pair=self.pair,
            clock=lambda: self.now,
            sleep=self.sleep,
            by_policy=self.by_policy,
        )
        return Repair("n1", self.cases, dependencies, PolicySettings(), RepairSettings())

    def run(self) -> Case:
        """The whole repair, taken up again after each reboot."""
        case = self.cases.current()
        while True:
            work = self.repair()
            if case is None:
                case = work.proposed()
                self.cases.keep(case)
            try:
                return work.attend(case)
            except PowerLoss:
                case = self.cases.current()
