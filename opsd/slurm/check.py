"""Finds out what opsd may do with this machine's Slurm, without changing anything, and which settings are slow.

Seconds of an advice are those from the power loss of a node until the job runs again, on Slurm 22.05.8 and 25.11.

The promises of ``opsd slurm run`` that a job can keep, from the options of the job. Pure.

Slurm does not tell of a running job whether it has --no-kill and --signal. So the batch script is read, which its owner
may have back from Slurm, and the command line of sbatch where Slurm keeps it (25.11).
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from types import MappingProxyType

from opsd.slurm.port import (
    JobDetails,
    Partition,
    Slurm,
    SlurmDenied,
    SlurmError,
    SlurmMissing,
    SlurmRejected,
    SlurmUnavailable,
    Version,
)
from opsd.slurm.sbatch_script import Script, Signal, read_script, seconds_of, signal_of

PROBE = "opsd-permission-probe"
"""A node that does not exist. Slurm checks permission first, so its answer tells without touching a node."""


LONG_S = 60.0
"""A requeue that waits longer than this is reported to the administrator."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the report. ``ok`` is None for neutral facts."""

    ok: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """The result; ``usable`` is False if opsd can do nothing with Slurm here."""

    usable: bool
    facts: tuple[Fact, ...]
    advice: tuple[Advice, ...] = ()


def check(slurm: Slurm, node: str, *, no_bindings: str = "", clock: Callable[[], float] = time.monotonic) -> Report:
    """Find out what this user may do with ``slurm`` on ``node``.

    ``no_bindings`` is why pyslurm is not used, "" if it is.
    """
    try:
        version = slurm.version
        began = clock()
        config = slurm.configuration()
        facts = (
            Fact(True, f"Slurm {version}, the controller answers in {1000 * (clock() - began):.0f} ms"),
            Fact(None, f"through Slurm's commands: {no_bindings}" if no_bindings else "through pyslurm"),
            *_node(slurm, node),
            *_permissions(slurm, config),
        )
        return Report(True, facts, advise(config, version, slurm.partitions()))
    except (SlurmMissing, SlurmUnavailable) as error:
        return Report(False, (Fact(False, str(error)),))


def _node(slurm: Slurm, name: str) -> Iterator[Fact]:
    found = slurm.nodes([name])
    if not found:
        yield Fact(False, f"Slurm has no node {name}; if it has another name for this machine, set agent.node")
        return
    node = found[0]
    state = "+".join([node.state, *sorted(node.flags)])
    yield Fact(
        node.usable, f"node {name} is {state}" + (f": {node.reason} (by {node.reason_by})" if node.reason else "")
    )


def _permissions(slurm: Slurm, config: Mapping[str, str]) -> Iterator[Fact]:
    may = may_update_nodes(slurm)
    if may:
        yield Fact(True, "may drain, resume and down nodes, requeue any job and keep reservations")
        return
    yield Fact(False, "may not drain, resume or down nodes: that needs root, SlurmUser or an operator (sacctmgr)")
    yield Fact(True, "may submit jobs and requeue, reschedule and cancel its own")
    if (noticed_s := longest_until_noticed(config)) is not None and noticed_s > LONG_S:
        yield Fact(
            False,
            f"where the node of a batch script dies, a requeue waits until Slurm notices, up to {noticed_s:.0f} s: an "
            "administrator shortens that by SlurmdTimeout=30, or to nothing by sacctmgr modify user NAME set "
            "adminlevel=operator; opsd slurm run --pool same needs no requeue while a node is free",
        )
    if "jobs" in config.get("PrivateData", "").lower():
        yield Fact(False, "sees only its own jobs (PrivateData=jobs)")


def longest_until_noticed(config: Mapping[str, str]) -> float | None:
    """Seconds until Slurm itself sets a dead node down: its timeout plus up to a third. None if it never does."""
    timeout_s = seconds(config.get("SlurmdTimeout", ""))
    return timeout_s * 4 / 3 if timeout_s else None


def may_update_nodes(slurm: Slurm) -> bool:
    """Whether this user may change the state of nodes. Raises SlurmError if Slurm does not answer."""
    try:
        slurm.update_nodes([PROBE], "resume")
    except SlurmDenied:
        return False
    except SlurmRejected:
        return True
    raise SlurmError(f"Slurm has a node named {PROBE}")


REQUEUE_DELAY_SINCE = Version(25, 11)


@dataclass(frozen=True, slots=True)
class Advice:
    """A setting of slurm.conf: its value, the recommended one, and why."""

    setting: str
    now: str
    recommended: str
    why: str


def advise(config: Mapping[str, str], version: Version, partitions: Sequence[Partition]) -> tuple[Advice, ...]:
    """Recommended changes to ``config`` (from ``Slurm.configuration``), the one with the largest effect first."""
    waiting = (*_detection(config), *_requeue(config, version), *_scheduling(config), *_stopping(config))
    return (*waiting, *_spares(config, partitions))


def _detection(config: Mapping[str, str]) -> Iterator[Advice]:
    timeout = seconds(config.get("SlurmdTimeout", ""))
    if timeout is not None and not 0 < timeout <= 60:
        yield Advice(
            "SlurmdTimeout", config["SlurmdTimeout"], "SlurmdTimeout=30",
            "Slurm notices a dead node after this time and up to a third more, never at 0; with the default of 300 s "
            "and no opsd on the survivors a requeue takes about 9 minutes instead of 50 s",
        )  # fmt: skip
    if config.get("ReturnToService", "0") == "2":
        yield Advice(
            "ReturnToService", "2", "ReturnToService=1",
            "with 2 a node that reboots quickly is never noticed, and one set down by opsd is idle again within 2 s",
        )  # fmt: skip


def _requeue(config: Mapping[str, str], version: Version) -> Iterator[Advice]:
    expire = _option(config, "AuthInfo", "cred_expire", "120")
    delay = _option(config, "SchedulerParameters", "requeue_delay", expire) if _has_requeue_delay(version) else expire
    if (seconds(delay) or 0) <= 10:
        return
    why = "a requeued job may not start for this many seconds unless its start time is set"
    if _has_requeue_delay(version):
        yield Advice("requeue_delay", delay, "add requeue_delay=0 to SchedulerParameters", why)
    else:
        yield Advice("cred_expire", delay, "add cred_expire=5 to AuthInfo", why)


def _has_requeue_delay(version: Version) -> bool:
    return version >= REQUEUE_DELAY_SINCE


def _scheduling(config: Mapping[str, str]) -> Iterator[Advice]:
    for option, default, most, recommended, why in (
        ("batch_sched_delay", "3", 0, 0, "a submitted job (a spare that is to join) waits this long"),
        ("bf_interval", "30", 10, 5, "the backfill scheduler looks at the queue this often"),
        ("sched_interval", "60", 10, 5, "the main scheduler looks at the whole queue this often"),
    ):
        now = _option(config, "SchedulerParameters", option, default)
        if (seconds(now) or 0) > most:
            yield Advice(option, now, f"add {option}={recommended} to SchedulerParameters", why)


def _stopping(config: Mapping[str, str]) -> Iterator[Advice]:
    if (seconds(config.get("TCPTimeout", "2")) or 0) > 1:
        yield Advice(
            "TCPTimeout", config["TCPTimeout"], "TCPTimeout=1",
            "after the loss of the batch host step daemons try six times to reach it: 17 s to the restart, 11 s with 1",
        )  # fmt: skip
    if (seconds(config.get("KillWait", "30")) or 0) > 10:
        yield Advice(
            "KillWait", config["KillWait"], "KillWait=5",
            "tasks that ignore SIGTERM hold up a requeue this long: 33 s instead of 6 s",
        )  # fmt: skip


def _spares(config: Mapping[str, str], partitions: Sequence[Partition]) -> Iterator[Advice]:
    """Whether evaluations on idle spares are preempted. Preemption by QOS (preempt/qos) is not visible to opsd."""
    kind, mode = config.get("PreemptType", ""), config.get("PreemptMode", "OFF")
    if kind == "preempt/qos" and _ends_jobs(mode):
        return
    if kind != "preempt/partition_prio" or not _ends_jobs(mode):
        yield Advice(
            "PreemptType", f"{kind or 'unset'} with PreemptMode {mode}",
            "PreemptType=preempt/partition_prio PreemptMode=REQUEUE",
            "idle spares can then run evaluations that are preempted within a second; without it they must stay idle",
        )  # fmt: skip
        return
    giving_way = [low for high, low in permutations(partitions, 2) if _evicts(high, low)]
    if not giving_way:
        yield Advice(
            "PriorityTier", "no partition can preempt the jobs of another one on the same nodes",
            "two partitions over the spares: spares with PriorityTier=10, evaluations with PriorityTier=1",
            "a run that needs a spare would not preempt evaluations on it; see deploy/slurm/evaluate.sbatch",
        )  # fmt: skip
    for low in giving_way:
        if low.grace_s > 0:
            yield Advice(
                "GraceTime", f"{low.grace_s} in partition {low.name}", f"PartitionName={low.name} GraceTime=0",
                "a job there may keep a spare that a run is waiting for this long",
            )  # fmt: skip


def _evicts(high: Partition, low: Partition) -> bool:
    return high.tier > low.tier and _ends_jobs(low.preempt_mode) and not set(high.nodes).isdisjoint(low.nodes)


def _ends_jobs(mode: str) -> bool:
    return "REQUEUE" in mode or "CANCEL" in mode


def _option(config: Mapping[str, str], setting: str, option: str, default: str) -> str:
    """The value of one ``option=value`` in a comma-separated setting."""
    options = dict(part.partition("=")[::2] for part in config.get(setting, "").split(","))
    return options.get(option, default)


def seconds(text: str) -> int | None:
    """The number at the start of "300 sec", None if there is none."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None


SAVED_AT = frozenset({signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Signals at which the launchers let the run save and end."""
HETEROGENEOUS = (
    "a heterogeneous job cannot keep what opsd promises: Slurm starts only the first part's batch script, and requeues "
    "that part when a node dies, in spite of --no-kill. Ask for all nodes in one part, or submit each part as a job"
)


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a job, None or "" if not given as far as is known; ``surely`` says whether that is certain.

    ``read`` is False if the batch script could not be read: nothing is known then but what Slurm tells itself.
    ``refused`` says why sbatch does not take the script.
    """

    no_kill: bool | None = None
    requeue: bool | None = None
    signal: Signal | None = None
    open_mode: str = ""
    time: str = ""
    heterogeneous: bool = False
    nodes: str = ""
    tasks_per_node: bool = False
    batch: bool = True
    surely: bool = True
    read: bool = True
    refused: str = ""

    @property
    def appends(self) -> bool:
        """Whether each start appends to the job's output."""
        return self.open_mode[:1].lower() == "a"


def of_script(text: str, environ: Mapping[str, str] = MappingProxyType({})) -> Asked:
    """The options that sbatch takes from a batch script, and from the variables of the user who submits it."""
    return _asked(read_script(text, environ))


def of_job(details: JobDetails, script: str | None, environ: Mapping[str, str] = MappingProxyType({})) -> Asked:
    """The options of a job that Slurm knows, from its batch script and, where Slurm has it, sbatch's command line.

    ``environ`` is that of the job, which has the SBATCH variables of the user.
    """
    found = _asked(read_script(script or "", environ, details.submitted.split()[1:], whole=False))
    return replace(
        found,
        requeue=found.requeue if details.requeues is None else details.requeues,
        heterogeneous=details.heterogeneous,
        batch=details.batch,
        surely=bool(details.submitted),
        read=script is not None or not details.batch,
        refused="",
    )


def _asked(script: Script) -> Asked:
    found = script.options
    requeue = [name == "requeue" for name in found if name in ("requeue", "no-requeue")]
    return Asked(
        no_kill=found["no-kill"].lower() not in ("off", "no") if "no-kill" in found else None,
        requeue=requeue[-1] if requeue else None,
        signal=signal_of(script.signals),
        open_mode=found.get("open-mode", ""),
        time=found.get("time", ""),
        heterogeneous=script.heterogeneous,
        nodes=found.get("nodes", ""),
        tasks_per_node="ntasks-per-node" in found,
        refused=script.refused,
    )


def broken(asked: Asked, job: int = 0) -> Iterator[str]:
    """What opsd promises and the job cannot keep, a sentence each; ``job`` is its number if it runs."""
    submit = "sbatch" if asked.batch else "salloc"
    if not asked.batch:
        yield "salloc has no batch script to start again: the run ends with 75 where a batch job would be requeued"
    if not asked.no_kill and asked.read:
        unless = "" if asked.surely else f", unless --no-kill was on the command line of {submit}"
        yield (
            f"Slurm ends the job once it notices that a node has died, also when a spare has its place{unless}: "
            + ("add #SBATCH --no-kill to the batch script" if asked.batch else "use salloc --no-kill")
        )
    if asked.requeue is False and asked.batch:
        now = f"; scontrol update JobId={job} Requeue=1 changes it now" if job else ""
        yield (
            "the job is never put back into the queue (--no-requeue): where that is needed, the run is saved and the "
            f"job ends with 75. Add #SBATCH --requeue to the batch script{now}"
        )
    if asked.signal is not None:
        yield from _useless(asked.signal, seconds_of(asked.time))


def _useless(asked: Signal, limit_s: float | None) -> Iterator[str]:
    """Why the run may not be saved at the signal before the time limit of ``limit_s`` seconds."""
    given = f"--signal={asked.text}"
    if asked.script_alone:
        yield f"{given} reaches the batch script alone, which may die with its node: leave out B:"
    if asked.number is None:
        yield f"{given} is none that sbatch takes: use --signal=USR1@300"
    elif asked.number not in SAVED_AT:
        yield f"at {given} the run is not saved: use --signal=USR1@300"
    elif asked.notice_s == 0:
        yield f"{given} is never sent, as it would come at the time limit itself: use --signal=USR1@300"
    elif limit_s is not None and asked.notice_s >= limit_s:
        yield f"{given} comes at the start, since the time limit is {limit_s:.0f} s: make the limit longer"


def facts(asked: Asked, job: int = 0) -> tuple[Fact, ...]:
    """All that can be said, for ``opsd slurm check``."""
    if asked.refused:
        return (Fact(False, f"sbatch does not take this script: {asked.refused}"),)
    if asked.heterogeneous:
        return (Fact(False, HETEROGENEOUS),)
    kept = []
    if asked.no_kill:
        kept.append(Fact(True, "a node that dies does not end the job (--no-kill)"))
    if asked.requeue and asked.batch:
        kept.append(Fact(True, "the job goes back into the queue when it needs other nodes (--requeue)"))
    if asked.requeue is None and asked.batch:
        kept.append(Fact(None, "whether the job may be requeued is JobRequeue in slurm.conf: better add --requeue"))
    softer = _softer(asked) if asked.read and asked.batch else ()
    return (*kept, *(Fact(False, text) for text in broken(asked, job)), *softer)


def _softer(asked: Asked) -> Iterator[Fact]:
    """What costs no promise, or only some of the time."""
    if asked.signal is None:
        yield Fact(
            None,
            "without --signal=USR1@300 the run is told to stop only at its time limit, and may be killed before it is "
            "saved",
        )
    elif not any(_useless(asked.signal, seconds_of(asked.time))):
        yield Fact(True, f"the launchers are told to save before the time limit (--signal={asked.signal.text})")
    if not asked.appends:
        yield Fact(None, "each start overwrites the job's output: add --open-mode=append")
    if "-" in asked.nodes and asked.tasks_per_node:
        yield Fact(False, "with --ntasks-per-node Slurm gives a range of nodes its lower number: no spares (22.05)")
    if not asked.surely:
        yield Fact(None, "options on the command line of sbatch are not known to this Slurm, and count as not given")
