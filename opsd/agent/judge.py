"""Call the runbooks. Their functions are plug-ins: an exception is counted and logged, and the others continue."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from opsd.agent.lifecycle import IncidentRules
from opsd.agent.logs import Log
from opsd.runbooks.base import Action, Finding, Incident, Runbook, View
from opsd.runbooks.lib.gpus import gpu_of, loaded, rank_on
from opsd.runbooks.lib.kernel_faults import BOOT_TIME
from opsd.runbooks.lib.runs import ranks_of, run_of, with_job
from opsd.runbooks.lib.signals import latest

T = TypeVar("T")

HOLD_S, MAX_RELAPSES = 300.0, 3
SHARE, LONGEST_WAIT_S = 0.02, 15.0
"""Share of a core that looking for one kind of fault may take, and the longest wait between two looks because of it.

What users write makes some looks long.
"""
TICK_S = 0.1
"""Seconds of processor time after which the other looks wait for the next tick, in which they are the first."""

SHORT_S = 0.002


class ProcessorTime:
    """Processor time of the thread that calls, in seconds.

    Stretches below ``SHORT_S`` count with the time of the clock, which is no less and takes no system call.
    """

    def __init__(self) -> None:
        self._at, self._used, self._sum = time.monotonic(), time.thread_time(), 0.0

    def __call__(self) -> float:
        at = time.monotonic()
        passed, self._at = at - self._at, at
        if passed >= SHORT_S:
            used = time.thread_time()
            passed, self._used = min(passed, max(0.0, used - self._used)), used
        self._sum += passed
        return self._sum


class _Look(NamedTuple):
    """The last look for a kind of fault: what it found and took, and when the next one is due, monotonic seconds."""

    due: float = -math.inf
    findings: Sequence[Finding] = ()
    took_s: float = 0.0


class Judge:
    """All runbooks. ``errors`` counts exceptions by kind; ``told_by_users`` are the kinds that rest on what runs say.

    After two slow looks in a row there are fewer. ``used_s`` is the processor time of this thread. For ``hold_s``
    and ``max_relapses`` see ``incidents``.
    """

    def __init__(
        self,
        runbooks: Sequence[Runbook],
        log: Log,
        *,
        hold_s: float = HOLD_S,
        max_relapses: int = MAX_RELAPSES,
        used_s: Callable[[], float] | None = None,
    ) -> None:
        self.runbooks = {runbook.kind: runbook for runbook in runbooks}
        self.rules = {
            r.kind: IncidentRules(
                r.open_after_s, r.clear_after_s, r.verify_s, r.max_attempts,
                hold_s if r.hold_s is None else r.hold_s, max_relapses,
            )
            for r in self.runbooks.values()
        }  # fmt: skip
        self.told_by_users = frozenset(r.kind for r in runbooks if r.told_by_runs or "ranks" in r.needs)
        self.errors: Counter[str] = Counter()
        self._log, self._used_s = log, used_s or ProcessorTime()
        self._looks: dict[str, _Look] = {}

    def findings(self, view: View) -> list[Finding]:
        """The diagnosed findings of all runbooks that are not blind in this tick.

        Of a runbook that fails there are those that it had found before: what is wrong with one user's data, or one
        GPU's, must not hide all others.
        """

        def ask(runbook: Runbook, found: list[Finding]) -> None:
            for finding in runbook.detect(view):
                found.append(with_job(_completed(runbook, finding, view), view))

        seeing = [runbook for runbook in self.runbooks.values() if sees(runbook, view)]
        looks = {runbook.kind: self._looks.get(runbook.kind, _Look()) for runbook in seeing}
        began = start = self._used_s()
        for runbook in sorted(seeing, key=lambda runbook: looks[runbook.kind].due):
            look = looks[runbook.kind]
            if view.now < look.due or start - began > TICK_S:
                continue
            findings, before = list[Finding](), start
            self._try(runbook, partial(ask, runbook, findings), None)
            start = self._used_s()
            took_s = start - before
            wait_s = min(min(took_s, look.took_s) / SHARE, LONGEST_WAIT_S)
            looks[runbook.kind] = _Look(view.now + max(runbook.look_every_s, wait_s), findings, took_s)
        self._looks = looks
        return [finding for look in looks.values() for finding in look.findings]

    def healed(self, incidents: Iterable[Incident], view: View) -> dict[str, bool | None]:
        """Incident id -> whether the fault is over; None or missing if that is not known now."""
        return {i.id: self._try(r, partial(r.healed, i, view), None) for i, r in self._seen(incidents, view)}

    def unprovable(self, incidents: Iterable[Incident], view: View) -> frozenset[str]:
        """The ids of the incidents whose end nobody can see now: their run has ended, or their GPU is idle."""
        return frozenset(
            i.id for i, r in self._seen(incidents, view) if self._try(r, partial(_ended, i, r, view), False)
        )

    def remedies(self, incidents: Iterable[Incident], view: View) -> Mapping[str, Sequence[Action]]:
        """Incident id -> the actions that its runbook wants; incidents whose runbook is blind now are left out."""
        return {i.id: tuple(self._try(r, partial(r.remedy, i, view), ())) for i, r in self._seen(incidents, view)}

    def confirmed(self, incident: Incident, view: View) -> Sequence[Action]:
        """The actions that the runbook wants by what ``view`` shows; () if none.

        Nothing of the incident's past counts, unless the runbook says what confirms it.
        """
        runbook = self.runbooks[incident.kind]

        def ask() -> Sequence[Action]:
            if runbook.confirmed is not None:
                return tuple(runbook.remedy(incident, view)) if runbook.confirmed(incident, view) else ()
            found = (runbook.diagnose(finding, view) for finding in runbook.detect(view))
            now = next((finding for finding in found if finding.key == incident.key), None)
            if now is None:
                return ()
            fresh = replace(incident, severity=now.severity, summary=now.summary, culprit=now.culprit, data=now.data)
            return tuple(runbook.remedy(fresh, view))

        return self._try(runbook, ask, ())

    def _seen(self, incidents: Iterable[Incident], view: View) -> Iterator[tuple[Incident, Runbook]]:
        """The incidents that can be judged now, with their runbooks."""
        for incident in incidents:
            runbook = self.runbooks.get(incident.kind)
            if runbook is not None and sees(runbook, view):
                yield incident, runbook

    def _try(self, runbook: Runbook, question: Callable[[], T], otherwise: T) -> T:
        try:
            return question()
        except Exception:
            self.errors[runbook.kind] += 1
            self._log.exception("runbook failed", kind=runbook.kind)
            return otherwise


def sees(runbook: Runbook, view: View) -> bool:
    """True if every collector that the runbook needs has delivered in this tick."""
    return all(view.known(name) for name in runbook.needs)


def _ended(incident: Incident, runbook: Runbook, view: View) -> bool:
    """True if what the proof of health needs has ended: the run, if one is known, or else the load of the GPU.

    A boot ends the node's part in a run, so that what only its ranks or its launcher can prove stays unproven.
    """
    if not view.known("ranks"):
        return False
    proved_by_run = runbook.needs in ((), ("ranks",)) and (latest(view, BOOT_TIME) or 0.0) > incident.last_seen_at
    if not runbook.proved_by and not proved_by_run:
        return False
    if incident.run:
        fact = run_of(view, incident.run)
        working = fact is not None and fact.alive and fact.takes_part
        return not working and not any(rank.live for rank in ranks_of(view, incident.run))
    gpu = gpu_of(view, str(incident.data.get("uuid", "")))
    return runbook.proved_by == "load" and gpu is not None and not loaded(view)(gpu.uuid, rank_on(view, gpu.index))


def _completed(runbook: Runbook, finding: Finding, view: View) -> Finding:
    """``finding``, diagnosed, with its kind and run: the one that it names, else that of its GPU, or of all ranks."""
    finding = runbook.diagnose(finding, view)
    run = finding.run or finding.data.get("run")
    if not isinstance(run, str) or not run:
        gpu, supervised = finding.culprit.gpu, {fact.run for fact in view.runs if fact.alive}
        runs = {
            rank.run
            for rank in view.ranks
            if (rank.live or rank.run in supervised) and gpu in (None, rank.gpu) and finding.job in ("", rank.job)
        }
        run = runs.pop() if len(runs) == 1 else ""
    folder = next((fact.folder for fact in view.runs if fact.run == run), "") if run else ""
    data = {**finding.data, "folder": folder} if folder else finding.data
    return replace(finding, kind=runbook.kind, run=run, data=data)
