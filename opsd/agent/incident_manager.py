"""Turns findings into incidents and incidents into actions, and records everything.

It connects the pure parts (``incidents``, ``policy``) with those that have effects (``journal``, ``actions``).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from opsd.agent import correlate, incidents, lifecycle
from opsd.agent.actions import Executor
from opsd.agent.incidents import Transition
from opsd.agent.journal import Journal
from opsd.agent.judge import Judge
from opsd.agent.lifecycle import Outcome, unfinished
from opsd.agent.logs import Log
from opsd.agent.policy import HARMLESS, OF_A_RUN, UNCONFIRMED, Decision, PastAction, Ruling, decide, needs_witness
from opsd.agent.repairs import Repairs
from opsd.agent.store import KEEP_ACTIONS_S, MAX_ENDED, JournalContent
from opsd.agent.window import Window
from opsd.collectors.base import Event
from opsd.runbooks.base import Action, Done, Finding, Incident, State
from opsd.settings.policy import PolicySettings

MAX_OF_USER: Final = 64
"""Incidents of one user, current ones and those of the last ``REST_S``.

A fault of a whole run is one; one of each rank of a node makes eight or sixteen.
"""
MAX_OF_OTHERS: Final = 256
"""Incidents of all users together of whom no rank works on a GPU: a user namespace gives a user 65,536 user ids."""
OTHERS: Final = -1
"""Stands for these users."""
REST_S: Final = 600.0
"""An incident counts for so long after its end, or runs that last for seconds would open any number of them."""

Name = tuple[str, str]


class Quota:
    """Remembers whose each incident is; ``exceeded`` are the users of whom the last tick had more than that.

    Findings whose run was never seen with its user count together, as those of one user more. ``OTHERS`` is among
    ``exceeded`` if their limit leaves findings out.
    """

    def __init__(self) -> None:
        self._held: dict[Name, tuple[int | None, float]] = {}
        self._users: dict[str, int] = {}
        self._working: dict[int | None, float] = {}
        self.exceeded: frozenset[int | None] = frozenset()

    def admit(
        self,
        findings: Sequence[Finding],
        told_by_users: Collection[str],
        current: Collection[Name],
        users: Mapping[str, int | None],
        now: float,
        working: Collection[int] = (),
    ) -> list[Finding]:
        """The findings that may be, or become, an incident, at the monotonic second ``now``.

        Only findings about a run are limited, of the kinds ``told_by_users``. ``current`` are kind and key of the
        incidents there are, ``users`` those of the runs on this node, ``working`` those with a rank on a GPU.
        """
        self._held = {
            name: (user, now if name in current else since)
            for name, (user, since) in self._held.items()
            if name in current or now - since < REST_S
        }
        self._learn_users(findings, users)
        self._working = {user: at for user, at in self._working.items() if now - at < REST_S}
        self._working.update(dict.fromkeys(working, now))
        counts, admitted, exceeded = Counter(user for user, _ in self._held.values()), [], set[int | None]()
        others = sum(number for user, number in counts.items() if user not in self._working)
        for finding in findings:
            name, run = (finding.kind, finding.key), finding.run
            if run and finding.kind in told_by_users and name not in self._held:
                user = self._users.get(run)
                own, shared = counts[user] >= MAX_OF_USER, user not in self._working and others >= MAX_OF_OTHERS
                if name not in current and (own or shared):
                    exceeded.add(user if own else OTHERS)
                    continue
                counts[user] += 1
                others += user not in self._working
                self._held[name] = user, now
            admitted.append(finding)
        self.exceeded = frozenset(exceeded)
        return admitted

    def _learn_users(self, findings: Sequence[Finding], users: Mapping[str, int | None]) -> None:
        """A run that is gone is still found in the events of the last minutes: it keeps its user for so long."""
        known = {run: user for run, user in users.items() if user is not None}
        found = {finding.run for finding in findings}
        self._users = {run: user for run, user in self._users.items() if run in found} | known


MAX_NEWS = 200
"""Events of one tick that are kept for the next agent: the newest."""
REWRITE_S = 30.0
"""An incident without changes is written to the journal this often, in seconds."""

_OVER_QUOTA: Mapping[int | None, str] = {
    None: f"runs that are gone have {MAX_OF_USER} incidents",
    OTHERS: f"all users without a rank on a GPU have {MAX_OF_OTHERS} incidents together",
}
Listener = Callable[[Incident, Transition], None]
Announce = Callable[[Incident, str], Future[str] | None]
"""Tells people of an incident, with the news as ``incidents.news`` has them; the result is why that failed, or ""."""
TELL_AGAIN_S: Final = 30.0
"""A page that no receiver has taken is sent again after so many seconds."""


class IncidentManager:
    """Holds the incidents of the node. Used in one thread.

    ``opened`` counts by kind, ``cost`` is GPU-seconds by kind, ``actions`` counts by (verb, outcome).
    ``ended`` has the most recently ended incident first.
    """

    def __init__(
        self,
        judge: Judge,
        executor: Executor,
        journal: Journal,
        log: Log,
        *,
        policy: PolicySettings,
        started_at: float,
        listeners: Sequence[Listener] = (),
        announce: Announce = lambda _incident, _news: None,
    ) -> None:
        self._judge, self._executor, self._journal, self._log = judge, executor, journal, log
        self.policy, self._listeners, self._announce = policy, listeners, announce
        self._started_at = started_at
        self.opened: Counter[str] = Counter()
        self.cost: dict[str, float] = defaultdict(float)
        self.actions: Counter[tuple[str, str]] = Counter()
        self._book = incidents.IncidentTable(watching_since=started_at)
        self.ended: deque[Incident] = deque(maxlen=MAX_ENDED)
        self._history: list[PastAction] = []
        self._done: list[Done] = []
        self._told: list[Event] = []
        self.kept_window = b""
        """The window of an earlier agent."""
        self._written: dict[str, tuple[Incident, float]] = {}
        self._idle: frozenset[str] = frozenset()
        self._unprovable: dict[str, float] = {}
        self._pages: dict[str, tuple[Future[str], str]] = {}
        self._tell_again: dict[str, float] = {}
        self._quota, self._over_quota = Quota(), frozenset[int | None]()
        self._users: Mapping[str, int | None] = {}
        """Whose each run on the node is."""
        self._unfinished = ActionRecovery()
        self.repairs = Repairs(journal)
        self.orders: SimpleQueue[lifecycle.Order] = SimpleQueue()
        """Of people, from any thread; the next tick carries them out."""
        self._remember(journal.open(), started_at)

    @property
    def over_quota(self) -> int:
        """How many users have more incidents than are shown."""
        return len(self._over_quota)

    @property
    def current(self) -> tuple[Incident, ...]:
        """The incidents that are not over."""
        return tuple(self._book.incidents.values())

    def replace_policy(
        self,
        judge: Judge,
        executor: Executor,
        policy: PolicySettings,
        listeners: Sequence[Listener],
        announce: Announce,
    ) -> Sequence[object]:
        """Judge, act and tell by these from now on; returns the former ones who told.

        Incidents, history and counters stay, and so do the outcomes of actions that are under way.
        """
        executor.take_over(self._executor)
        self._judge, self._executor, self.policy = judge, executor, policy
        former = (*self._listeners, self._announce)
        self._listeners, self._announce = listeners, announce
        return former

    def clock_stepped(self, seconds: float) -> None:
        """Shift all times by a step of the wall clock."""
        self._book = incidents.shifted(self._book, seconds)
        self._started_at += seconds
        self._journal.clock_stepped(seconds)
        self._unprovable = {name: at + seconds for name, at in self._unprovable.items()}
        self._history = [replace(past, at=past.at + seconds) for past in self._history]

    def respond(self, view: Window) -> None:
        """One tick: update incidents from ``view`` and start actions."""
        if (late := self._journal.remembered()) is not None:
            self._remember(late, view.wall)
            self.kept_window = b""  # the window has begun without it
        self._users = {run.run: run.user for run in view.runs} | {rank.run: rank.user for rank in view.ranks}
        for done in self._done:
            view.note(done)
        view.remember(self._told)
        for event in view.news[-MAX_NEWS:]:
            self._journal.event(event)
        self._done.clear()
        self._told.clear()
        self.repairs.take(view)
        while not self.orders.empty():
            self._obey(self.orders.get(), view.wall)
        self._resume(view)
        now_unprovable = self._judge.unprovable(self.current, view)
        self._unprovable = {name: self._unprovable.get(name, view.wall) for name in now_unprovable}
        observed = lifecycle.Observed(
            findings=self._admitted(view),
            healed=self._judge.healed((*self.current, *self._book.closed.values()), view),
            idle=self._idle,
            held=correlate.held(self.current),
            outcomes=self._outcomes(),
            unprovable=self._unprovable,
        )
        before = self._book
        self._book, ended, transitions = incidents.reduce(before, observed, self._judge.rules, view.wall)
        self._forget_returned()
        self._correlate(view, ended)
        remedies = self._propose(view)
        for kind, gpu_seconds in incidents.cost_growth(before, self._book):
            self.cost[kind] += gpu_seconds
        lapses = [*self._lapse(transitions, view.wall)]
        by_id = {incident.id: incident for incident in (*self.current, *ended)}
        for transition in (*transitions, *lapses):
            self._tell(by_id[transition.incident], transition)
        for incident in ended:
            self._end(incident)
        for name in before.closed.keys() - self._book.closed.keys():
            self._journal.incident(lifecycle.gone(before.closed[name], view.wall))
        self._take_back_pages(view.wall)
        self._act(view, remedies)
        for incident in self.current:
            if incident.untold:
                self._put(self._page(incident, view.wall))
        for incident in self.current:
            self._record(incident, view.wall)
        self._journal.copy()

    def _obey(self, order: lifecycle.Order, wall: float) -> None:
        """Carry out what a person asks for, or say why not."""
        incident = next((i for i in (*self.current, *self.ended) if i.id == order.incident), None)
        try:
            if incident is None:
                raise lifecycle.ByHandError(f"the agent knows no incident {order.incident!r}")
            if order.verb == "close":
                self._book, after, transition = incidents.close(self._book, incident, order.by, order.reason, wall)
                self._end(after)
                self._tell(after, transition)
                order.done = f"closed {after.id}"
            else:
                after = lifecycle.acknowledged(incident, order.by, order.for_s, wall)
                self._put(after)
                self._record(after, wall)
                order.done = f"{after.id} is acknowledged: {lifecycle.who_has_it(after)}"
                said = Transition(after.id, after.kind, after.state, after.state, wall, order.done)
                self._journal.transition(said)
                self._log.info("acknowledged", incident=after.id, by=order.by, text=order.done)
        except lifecycle.ByHandError as error:
            order.error = str(error)

    def _lapse(self, transitions: Sequence[Transition], wall: float) -> Iterator[Transition]:
        """End acknowledgements whose time is over, and those of incidents that are worse now (already notified)."""
        worse = {transition.incident for transition in transitions if transition.worse}
        for incident in self.current:
            after, why = lifecycle.lapsed(incident, wall, worse=incident.id in worse)
            if why:
                self._put(after)
            if why and incident.id not in worse:
                yield Transition(after.id, after.kind, after.state, after.state, wall, why)

    def _put(self, incident: Incident) -> None:
        self._book = replace(self._book, incidents={**self._book.incidents, (incident.kind, incident.key): incident})

    def _admitted(self, view: Window) -> Sequence[Finding]:
        """The findings within the quotas of users; each user who begins to exceed it is a line in the log."""
        told, found, gpus = self._judge.told_by_users, self._judge.findings(view), {gpu.index for gpu in view.gpus}
        working = {rank.user for rank in view.ranks if rank.user is not None and rank.gpu in gpus}
        findings = self._quota.admit(found, told, self._book.incidents, self._users, view.now, working)
        for user in self._quota.exceeded - self._over_quota:
            who = _OVER_QUOTA.get(user, f"runs of the user {user} have {MAX_OF_USER} incidents")
            text = f"{who}; no more are opened until some have been over for {REST_S:g} s"
            self._log.warning("quota of incidents", user=user, text=text)
        self._over_quota = self._quota.exceeded
        return findings

    def _remember(self, memory: JournalContent, wall: float) -> None:
        """Go on from what an earlier agent knew. It may be read late; then incidents of this one are kept."""
        self.repairs.remember(memory.repairs)
        known = dict(self._book.incidents)
        for incident in memory.current:
            name = (incident.kind, incident.key)
            if name in known and known[name].id == incident.id:
                continue
            if name in known:
                old = lifecycle.superseded(incident, known[name].id, wall)
                self.ended.append(old)
                self._journal.incident(old)
            else:
                known[name] = lifecycle.resumed(incident, wall)
                self._unfinished.add(known[name])
        recent = {(i.kind, i.key): i for i in reversed(memory.ended) if not i.closed} | dict(self._book.recent)
        settled = incidents.settled_by(memory.ended, wall) | dict(self._book.settled)
        closed = {name: old for name, old in lifecycle.goes_on(memory.ended).items() if name not in known}
        self._book = replace(self._book, incidents=known, recent=recent, settled=settled, closed=closed)
        here = {incident.id for incident in self.ended}
        self.ended.extend([old for old in memory.ended if old.id not in here][: MAX_ENDED - len(self.ended)])
        self._history = [*memory.actions, *self._history]
        self._told += memory.events
        self.kept_window = memory.window
        of_all = [action for incident in (*memory.ended, *memory.current) for action in incident.actions]
        self._done += [_done(action) for action in of_all if action["outcome"] == "ok"]

    def _resume(self, view: Window) -> None:
        """Carry out what the end of the earlier agent cut off, or give it up. What is carried out is recorded first."""
        due = self._unfinished.due(self.current, self._judge, self.policy, view)
        for number, action, incident, refusal in due:
            if refusal:
                detail = f"{lifecycle.GIVEN_UP}{refusal}"
                self._executor.outcomes.put(Outcome(incident.id, number, False, detail))
                continue
            after = lifecycle.resuming(incident, number)
            self._put(after)
            self._record(after, view.wall)
            said = {"verb": action.verb, "target": action.target, "reason": "cut off by the end of the earlier agent"}
            self._log.warning("acting", incident=incident.id, **said)
            self._executor.submit(incident.id, number, action, self._journal.flush)

    def _user_of(self, action: Action) -> int | None:
        """Whose processes an action is about; None for hardware and for a run that is gone."""
        run = action.args.get("run") or Path(str(action.args.get("control", ""))).parent.name
        return self._users.get(str(run)) if action.verb in OF_A_RUN else None

    def _find(self, id: str) -> Incident | None:
        return next((incident for incident in self.current if incident.id == id), None)

    def _forget_returned(self) -> None:
        """Remove incidents that have come back from the ended ones."""
        current = {incident.id for incident in self.current if incident.relapses}
        if any(incident.id in current for incident in self.ended):
            self.ended = deque((i for i in self.ended if i.id not in current), maxlen=MAX_ENDED)

    def _correlate(self, view: Window, ended: Sequence[Incident]) -> None:
        """Update which incidents are symptoms of which."""
        if not self._book.incidents:
            return
        causes = correlate.correlate(self.current, (*ended, *self.ended), view.ranks, view.wall)
        before, self._book = self._book, correlate.linked(self._book, causes)
        for name, incident in self._book.incidents.items():
            if incident.cause != before.incidents[name].cause:
                said = f"a symptom of {incident.cause}" if incident.cause else "an incident of its own again"
                self._log.warning("correlated", incident=incident.id, text=said)
                state = incident.state
                self._journal.transition(Transition(incident.id, incident.kind, state, state, view.wall, said))

    def _outcomes(self) -> list[Outcome]:
        verbs = {(i.id, n): str(a["verb"]) for i in self.current for n, a in enumerate(i.actions)}
        outcomes = []
        while not self._executor.outcomes.empty():
            outcome = self._executor.outcomes.get()
            verb = verbs.get((outcome.incident, outcome.number), "unknown")
            if outcome.refused:
                self._take_back(outcome)
            self.actions[verb, "ok" if outcome.ok else "failed"] += 1
            if outcome.ok and (incident := self._find(outcome.incident)) is not None:
                self._done.append(_done(incident.actions[outcome.number]))
            self._log.info("action ended", incident=outcome.incident, verb=verb, ok=outcome.ok, detail=outcome.detail)
            outcomes.append(outcome)
        return outcomes

    def _take_back(self, outcome: Outcome) -> None:
        """Refused actions have changed nothing and do not count against the budget."""
        if (incident := self._find(outcome.incident)) is None:
            return
        action = incident.actions[outcome.number]
        wanted = incident.kind, action["verb"], action["target"], action["at"]
        self._history = [
            replace(past, refused=True) if (past.kind, past.verb, past.target, past.at) == wanted else past
            for past in self._history
        ]

    def _propose(self, view: Window) -> Mapping[str, Sequence[Action]]:
        """What runbooks ask for now, by incident id. Incidents keep it: people see it in every mode.

        Nobody is notified of an acknowledged one.
        """
        silent = {incident.id for incident in self.current if lifecycle.holder(incident)}
        remedies = {
            id: [action for action in actions if id not in silent or action.verb not in HARMLESS]
            for id, actions in self._judge.remedies(self._waiting(), view).items()
        }
        table = dict(self._book.incidents)
        for incident in self._waiting():
            wanted = [a for a in remedies.get(incident.id, ()) if a.verb not in HARMLESS]
            proposed = tuple({"verb": a.verb, "target": a.target, "args": dict(a.args)} for a in wanted)
            said = [str(a.args["advice"]) for a in remedies.get(incident.id, ()) if a.args.get("advice")]
            after = replace(incident, proposed=proposed or incident.proposed, advice="; ".join(said) or incident.advice)
            table[incident.kind, incident.key] = after
        self._book = replace(self._book, incidents=table)
        return remedies

    def _waiting(self) -> list[Incident]:
        """Incidents that are not acted on yet and are no symptoms."""
        return [i for i in self.current if i.state is State.OPEN and i.cause is None]

    def _act(self, view: Window, remedies: Mapping[str, Sequence[Action]]) -> None:
        """Decide about every open incident and start the actions that the policy admits."""
        waiting = self._waiting()
        self._idle = frozenset(name for name, actions in remedies.items() if not actions)
        self._history = [past for past in self._history if view.wall - past.at < KEEP_ACTIONS_S]
        changed = {}
        for incident in waiting:
            actions, mode = remedies.get(incident.id, ()), self.policy.mode_of(incident.kind)
            confirmed = self._judge.confirmed(incident, view.witnessed) if any(map(needs_witness, actions)) else ()
            decisions = decide(
                incident, actions, mode, self._history, self.policy, self._started_at, view.wall,
                self._user_of, confirmed, self._journal.problem,
            )  # fmt: skip
            noted = self._note([d for d in decisions if d.verdict is not Ruling.RUN], incident, view.wall)
            after = self._page(noted, view.wall)  # before anything is begun
            admitted = [decision.action for decision in decisions if decision.verdict is Ruling.RUN]
            refused = any(d.verdict is Ruling.REFUSE and d.action.verb not in HARMLESS for d in decisions)
            start = self._start_notifications if refused else self._start
            changed[incident.kind, incident.key] = start(admitted, after, view.wall) if admitted else after
        self._book = replace(self._book, incidents={**self._book.incidents, **changed})

    def _note(self, decisions: Sequence[Decision], incident: Incident, wall: float) -> Incident:
        """Record what is recommended or refused, once."""
        after = lifecycle.noted(incident, [_recorded(d.action, d.verdict, d.reason, wall) for d in decisions])
        for note in after.actions[len(incident.actions) :]:
            verb, outcome = str(note["verb"]), str(note["outcome"])
            self.actions[verb, outcome] += 1
            self._log.info("not done", incident=incident.id, verb=verb, outcome=outcome, reason=note["detail"])
        return after

    def _start(self, actions: Sequence[Action], incident: Incident, wall: float) -> Incident:
        """Start one attempt. It is in the journal first: the executor waits for that."""
        records = [_recorded(action, "running", "", wall) for action in actions]
        after = lifecycle.started(incident, records, wall)
        self._record(after, wall)
        text = f"attempt {after.attempts}"
        self._journal.transition(Transition(after.id, after.kind, incident.state, after.state, wall, text))
        self._submit(actions, incident, wall)
        return after

    def _start_notifications(self, actions: Sequence[Action], incident: Incident, wall: float) -> Incident:
        """Notify, once, of an incident whose other actions are refused for now; it waits for these."""
        known = {(past["verb"], past["target"]) for past in incident.actions if past["outcome"] != str(Ruling.REFUSE)}
        new = [action for action in actions if (action.verb, action.target) not in known]
        if not new:
            return incident
        after = lifecycle.told(incident, [_recorded(action, "running", "", wall) for action in new])
        self._record(after, wall)
        self._submit(new, incident, wall)
        return after

    def _submit(self, actions: Sequence[Action], incident: Incident, wall: float) -> None:
        """Hand ``actions`` to the executor; ``incident`` is as before them."""
        for number, action in enumerate(actions, len(incident.actions)):
            past = PastAction(incident.kind, action.verb, action.target, wall, self._user_of(action))
            if action.verb not in HARMLESS:  # the policy asks for no others, and users can bring them about
                self._history.append(past)
            intention = self._journal.action(incident.id, past)
            said = {"verb": action.verb, "target": action.target, "reason": action.reason}
            self._log.warning("acting", incident=incident.id, **said)
            self._executor.submit(incident.id, number, action, intention.wait)

    def _end(self, incident: Incident) -> None:
        self.ended.appendleft(incident)
        self._written.pop(incident.id, None)
        self._journal.incident(incident)

    def _tell(self, incident: Incident, transition: Transition) -> None:
        if transition.before is None:
            self.opened[incident.kind] += 1
        self._journal.transition(transition)
        said = {"state": transition.after.value, "severity": incident.severity.value, "text": transition.text}
        say = self._log.info if incidents.is_over(incident, transition) else self._log.warning
        say("incident", id=incident.id, culprit=str(incident.culprit), **said)
        for listener in self._listeners:
            listener(incident, transition)
        news = incidents.news(incident, transition)
        if news and lifecycle.is_current(incident):
            self._put(replace(incident, untold=incident.untold or news))
        elif news and incident.cause is None and not self.policy.muted(incident.kind, transition.at):
            self._announce(incident, news)

    def _page(self, incident: Incident, wall: float) -> Incident:
        """Tell people what they have not been told yet, unless somebody has it, it is a symptom, or that is muted."""
        silent = incident.cause is not None or lifecycle.holder(incident) or self.policy.muted(incident.kind, wall)
        if silent or not incident.untold or abs(wall - self._tell_again.get(incident.id, 0.0)) < TELL_AGAIN_S:
            return incident
        if (page := self._announce(incident, incident.untold)) is not None:
            self._pages[incident.id] = page, incident.untold
        return replace(incident, untold="")

    def _take_back_pages(self, wall: float) -> None:
        """What no receiver has taken people have not been told, also by an agent after this one."""
        for id, (page, news) in [*self._pages.items()]:
            if page.done():
                del self._pages[id]
                self._tell_again.pop(id, None)
                if page.result() and (incident := self._find(id)) is not None:
                    self._tell_again[id] = wall
                    self._put(replace(incident, untold=incident.untold or news))

    def _record(self, incident: Incident, wall: float) -> None:
        """Write the incident to the journal if anything but its times has changed, and periodically."""
        before, at = self._written.get(incident.id, (None, 0.0))
        if before is None or _essence(before) != _essence(incident) or abs(wall - at) >= REWRITE_S:
            self._written[incident.id] = (incident, wall)
            self._journal.incident(incident)


def _done(record: Mapping[str, Any]) -> Done:
    """An action that was carried out, from how it stands in ``Incident.actions``."""
    return Done(record["verb"], record["target"], record["args"], record["at"])


def _recorded(action: Action, outcome: str, detail: str, at: float) -> Mapping[str, object]:
    """An action as it stands in ``Incident.actions``; ``at`` is the epoch second of the decision."""
    return {
        "verb": action.verb, "target": action.target, "args": dict(action.args), "reason": action.reason, "at": at,
        "outcome": str(outcome), "detail": detail,
    }  # fmt: skip


def _essence(incident: Incident) -> tuple[object, ...]:
    return (
        incident.state, incident.severity, incident.culprit, incident.attempts, incident.actions, incident.verdict,
        incident.cause, incident.relapses, incident.proposed, incident.ack, incident.advice, incident.untold,
    )  # fmt: skip


REPEATABLE = HARMLESS | {"set_power_limit", "swap_node", "drain_node", "comment_job"}
"""Verbs whose second execution changes nothing."""
RESUME_WITHIN_S = 900.0
CONFIRM_WITHIN_S = 30.0
"""How long the drivers have to say again why an action is needed."""
_REMOVAL = ("swap_node", "drain_node")
"""Verbs that take the node out; which of them is wanted depends on whether it still has ranks."""


class ActionRecovery:
    """Actions that the end of an earlier agent cut off, until they are carried out or given up."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, int, float | None]] = []

    def add(self, incident: Incident) -> None:
        """Take in what is under way in an incident that was loaded."""
        self._waiting += [(incident.id, number, None) for number, _ in unfinished(incident)]

    def due(
        self, current: Sequence[Incident], judge: Judge, policy: PolicySettings, view: Window
    ) -> Iterator[tuple[int, Action, Incident, str]]:
        """Actions to carry out, or with why they are given up: number, action, incident, "" or the reason.

        What changes hardware waits for the word of kernel or driver.
        """
        by_id = {incident.id: incident for incident in current}
        waiting, self._waiting = self._waiting, []
        for name, number, since in waiting:
            incident = by_id.get(name)
            if incident is None:
                continue
            record: Mapping[str, Any] = incident.actions[number]
            action = Action(record["verb"], record["target"], {**record["args"], "resumed": True}, record["reason"])
            refusal = why_not(incident.kind, record, policy, view.wall)
            if not refusal and needs_witness(action) and not _confirmed(action, incident, judge, view):
                first_asked = view.now if since is None else since
                if view.now - first_asked < CONFIRM_WITHIN_S:
                    self._waiting.append((name, number, first_asked))
                    continue
                refusal = UNCONFIRMED
            yield number, action, incident, refusal


def why_not(kind: str, record: Mapping[str, Any], policy: PolicySettings, now: float) -> str:
    """Why an action that the end of an agent cut off is not to be carried out now, "" if it may be.

    ``record`` is its entry in ``Incident.actions``, ``now`` is in epoch seconds.
    """
    if record.get("resumed"):
        return "the agent has ended twice while this was under way"
    if record["verb"] not in REPEATABLE:
        return "doing it twice could do harm"
    if not abs(now - record["at"]) < RESUME_WITHIN_S:
        return f"it was begun more than {RESUME_WITHIN_S / 60:.0f} minutes ago"
    if record["verb"] not in HARMLESS and (mode := policy.mode_of(kind)) != "act":
        return f"policy mode is now {mode}"
    return policy.muted(kind, now)


def _confirmed(action: Action, incident: Incident, judge: Judge, view: Window) -> bool:
    verbs = _REMOVAL if action.verb in _REMOVAL else (action.verb,)
    wanted = judge.confirmed(incident, view.witnessed) if incident.kind in judge.runbooks else ()
    return any(one.verb in verbs and one.target == action.target for one in wanted)
