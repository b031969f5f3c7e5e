"""The verbs that a runbook may ask for: the only place where the agent changes anything.

The targets of actions come from rank pages and ``run.json``, which the job's user can write, while the agent may be
root. Every verb therefore checks with the kernel that the process or socket belongs to the owner of that page.
Otherwise a user could make root act on another user's process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from opsd.agent.lifecycle import Outcome
from opsd.agent.policy import HARMLESS, OF_A_RUN
from opsd.agent.swap import NotInRun, SwapError, UnderWay, planned_swap, swapped_out
from opsd.collectors.lib.host_pids import HostPids
from opsd.control import ControlError, ask_launcher
from opsd.inodes import look, open_folder
from opsd.rank_page import PageError, RankPage, read_page
from opsd.runbooks.base import Action
from opsd.slurm.ownership import reason
from opsd.slurm.port import SlurmError
from opsd.threads import Deadlines, FairQueue

VERBS = ("kill_process", "set_power_limit", "restart_generation", "swap_node", "drain_node", "comment_job", "notify")

ACTION_DEADLINE_S = 30.0
SWAP_SHARE = 2 / 3
"""Share of the deadline in which to wait for a swap; the rest is for the journal and the drain."""
LANE_THREADS, LANE_SHARE = 8, 2
"""Threads for notifications, for actions on runs and for those on the node, and how many of them one kind gets."""
JOURNAL_SHARE = 1 / 6
"""Share of the deadline in which to wait until the intention is on the disk."""


class ActionError(Exception):
    """An action that was refused before it changed anything; the message says why in one sentence."""


Intended = Callable[[float], bool]
"""Waits for seconds until the intention of an action is on the disk; False if it is not."""
PowerLimiter = Callable[[int, float], None]
"""Sets a GPU to a power limit in watts. Raises an exception whose text says why if that is not possible."""
Drainer = Callable[[str, str], str]
"""Lets a node, for a reason, finish its jobs and take no new ones; returns what was done. Raises SlurmError."""
Commenter = Callable[[int, str], None]
"""Writes a sentence into the comment of a Slurm job. Raises SlurmError."""
Notifier = Callable[[str, Mapping[str, object]], None]
"""Tells people a text, with fields: ``id`` is that of the incident. Raises ActionError if that failed."""


class Executor:
    """Executes actions in the background and passes their outcomes to ``outcomes``.

    The threads are bounded, as users bring about notifications and actions on their own runs. Kinds of incidents take
    turns, and what is done about the node shares no thread with either.
    """

    def __init__(
        self,
        *,
        shm: Path,
        notify: Notifier,
        set_power_limit: PowerLimiter | None = None,
        drain_node: Drainer | None = None,
        comment_job: Commenter | None = None,
        deadline_s: float = ACTION_DEADLINE_S,
    ) -> None:
        self.outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._shm, self._host = shm, HostPids(look_s=deadline_s)
        self._notify = notify
        self._power = set_power_limit
        self._drain, self._comment = drain_node, comment_job
        self._deadline_s = deadline_s
        self._queues = {name: FairQueue(f"act-{name}", LANE_THREADS, LANE_SHARE) for name in ("tell", "run", "node")}
        self._deadlines = Deadlines()
        self._verbs: Mapping[str, Callable[[Action], str]] = {
            "kill_process": self._kill_process,
            "set_power_limit": self._set_power_limit,
            "restart_generation": self._restart_generation,
            "swap_node": self._swap_node,
            "drain_node": self._drain_node,
            "comment_job": self._comment_job,
            "notify": self._tell,
        }

    def take_over(self, former: Executor) -> None:
        """Pass on the outcomes of what ``former`` has under way, and go on with its threads."""
        self.outcomes, self._queues, self._deadlines = former.outcomes, former._queues, former._deadlines

    def submit(self, incident: str, number: int, action: Action, intended: Intended) -> None:
        """Execute ``action``, the ``number``-th of ``incident``, in the background, once its intention is on the disk.

        Exactly one outcome follows, a failure after ``deadline_s`` if the action has not ended by then; what has not
        begun by then is not done.
        """
        once, reported = threading.Lock(), threading.Event()

        def report(ok: bool, detail: str, refused: bool = False, put_off: bool = False) -> None:
            if once.acquire(blocking=False):
                reported.set()
                self.outcomes.put(Outcome(incident, number, ok, detail, refused, put_off))

        def work() -> None:
            patience_s = self._deadline_s * JOURNAL_SHARE
            if action.verb in HARMLESS or intended(patience_s):
                report(*self._attempt(replace(action, args={**action.args, "incident": incident})))
            else:
                why = f"not carried out: the journal was not written within {patience_s:g} s"
                report(ok=False, detail=why, refused=True, put_off=True)

        self._deadlines.after(self._deadline_s, lambda: report(False, f"has not ended within {self._deadline_s:g} s"))
        queue = "tell" if action.verb in HARMLESS else "run" if action.verb in OF_A_RUN else "node"
        kind = incident.partition("-")[0]
        self._queues[queue].submit(kind, work, lambda: not reported.is_set())

    def perform(self, action: Action) -> tuple[bool, str]:
        """Execute ``action`` now; returns whether it worked, and what was done or why not."""
        ok, detail, _ = self._attempt(action)
        return ok, detail

    def _attempt(self, action: Action) -> tuple[bool, str, bool]:
        """The same, and whether it was refused: then nothing has been changed."""
        verb = self._verbs.get(action.verb)
        if verb is None:
            return False, f"no such action: {action.verb}", True
        try:
            return True, verb(action), False
        except ActionError as error:
            return False, str(error), True
        except (ControlError, SlurmError) as error:
            return False, str(error), False
        except Exception as error:
            # A driver or library may raise anything; the incident must record the failure.
            return False, f"{type(error).__name__}: {error}", False

    def _kill_process(self, action: Action) -> str:
        pid, rank = _integer(action, "pid"), _integer(action, "rank")
        page, owner = read_owned_page(self._shm / _name(action, "run"), rank)
        with _process(pid) as descriptor:
            check_killable(pid, page, owner, self._host)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return f"sent SIGKILL to process {pid} of rank {rank}"

    def _set_power_limit(self, action: Action) -> str:
        gpu, watts = _integer(action, "gpu"), action.args.get("watts")
        if not isinstance(watts, int | float) or isinstance(watts, bool):
            raise ActionError(f"watts must be a number, not {watts!r}")
        if self._power is None:
            raise ActionError("the GPU driver is not available to this agent")
        self._power(gpu, float(watts))
        return f"power limit of GPU {gpu} set to {watts:g} W"

    def _restart_generation(self, action: Action) -> str:
        control = self._control(action)
        answer = ask_launcher(control, {"cmd": "restart", "reason": str(action.args.get("reason") or action.reason)})
        if answer.get("ok") is not True:
            raise ActionError(f"the launcher refused: {answer.get('error') or answer}")
        return "the launcher restarts the generation"

    def _swap_node(self, action: Action) -> str:
        """Replace the node by a spare, and drain it whether that worked or not. Other jobs on it continue."""
        node, control = _name(action, "node"), self._control(action)
        why = " ".join(action.reason.split())
        try:
            patience_s = self._deadline_s * SWAP_SHARE
            came = planned_swap(lambda request: ask_launcher(control, request), node, why, patience_s=patience_s)
            swapped = swapped_out(node, came)
        except UnderWay as agreed:
            swapped = str(agreed)
        except (SwapError, ControlError) as error:
            left = isinstance(error, NotInRun) and action.args.get("resumed") is True
            swapped, refusal = f"{node} has left the run" if left else "", str(error)
        if self._drain is None:
            if not swapped:
                raise ActionError(refusal)
            return f"{swapped}; not drained, which policy.drain would allow"
        drained = self._drain(node, _told(action))
        return f"{swapped or f'not swapped: {refusal}'}; {drained}"

    def _control(self, action: Action) -> Path:
        control = Path(str(action.args.get("control", "")))
        if control.parent.parent != self._shm or ".." in control.parts:
            raise ActionError(f"{control} is not the control socket of a run under {self._shm}")
        return control

    def _drain_node(self, action: Action) -> str:
        if self._drain is None:
            raise ActionError("opsd is not allowed to drain nodes; policy.drain allows it")
        return self._drain(_name(action, "node"), _told(action))

    def _comment_job(self, action: Action) -> str:
        job = _integer(action, "job")
        if self._comment is None:
            raise ActionError("no Slurm is known to this agent")
        self._comment(job, " ".join(action.reason.split()))
        return f"wrote it into the comment of job {job}"

    def _tell(self, action: Action) -> str:
        text = str(action.args.get("text") or action.reason)
        self._notify(text, {"target": action.target, "id": action.args.get("incident", "")})
        return "told"


def read_owned_page(folder: Path, rank: int) -> tuple[RankPage, int]:
    """The page of ``rank`` in the run's ``folder`` and the page's owner. Raises ActionError.

    The folder is held open, so that it cannot be replaced by a link to another user's folder meanwhile.
    """
    name = f"rank-{rank:04d}.page"
    try:
        descriptor = open_folder(folder)
        try:
            owner = look(name, descriptor, follow=False).user
            if owner != os.fstat(descriptor).st_uid:
                raise ActionError(f"{folder / name} does not belong to the owner of its folder")
            return read_page(Path(name), folder=descriptor), owner
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ActionError(f"{folder / name}: {error.strerror}") from error
    except PageError as error:
        raise ActionError(str(error)) from error


def check_killable(pid: int, page: RankPage, owner: int, host: HostPids) -> None:
    """Raise ActionError unless ``pid`` is a process of user ``owner`` and the page's rank lists it or started it."""
    rank = host.find(owner, page.pid, page.pid_start)
    if pid <= 1 or pid in (os.getpid(), rank):
        raise ActionError(f"process {pid} is not a helper of rank {page.rank}")
    if rank is None:
        raise ActionError(f"rank {page.rank} (process {page.pid}) is gone")
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError as error:
        raise ActionError(f"process {pid} is gone") from error
    if uid != owner:
        raise ActionError(f"process {pid} belongs to another user than rank {page.rank}")
    listed = {listed if rank == page.pid else host.beside(owner, rank, listed) for listed, _ in page.workers}
    if pid not in listed and rank not in ancestors(pid):
        raise ActionError(f"process {pid} is neither listed by rank {page.rank} nor a descendant of it")


def ancestors(pid: int) -> list[int]:
    """Parents of ``pid``, nearest first; empty if it is gone."""
    found: list[int] = []
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        pid = int(text.rpartition(")")[2].split()[1])
        if pid in found:
            break
        found.append(pid)
    return found


@contextlib.contextmanager
def _process(pid: int) -> Any:
    """A descriptor of the process, so that only the checked process can get the signal even if its pid is reused."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, OverflowError, ValueError) as error:
        raise ActionError(f"process {pid} is gone") from error
    try:
        yield descriptor
    except ProcessLookupError as error:
        raise ActionError(f"process {pid} is gone") from error
    except PermissionError as error:
        raise ActionError(f"no permission to stop process {pid}") from error
    finally:
        os.close(descriptor)


def _told(action: Action) -> str:
    """The reason of a drain. It names kind and incident, and `opsd repair` reads the kind."""
    kind, incident = str(action.args.get("kind", "")), str(action.args.get("incident", ""))
    return reason(kind, action.reason, incident=incident, evidence=f"opsd incidents show {incident}")


def _integer(action: Action, name: str) -> int:
    value = action.args.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ActionError(f"{name} must be a whole number, not {value!r}")
    return value


def _name(action: Action, name: str) -> str:
    """An argument that becomes part of a path: one plain component."""
    value = str(action.args.get(name, ""))
    if not value or value in (".", "..") or "/" in value or "\0" in value:
        raise ActionError(f"{name} {value!r} is not a name")
    return value
