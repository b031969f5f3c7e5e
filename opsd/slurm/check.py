"""Finds out what opsd may do with this machine's Slurm, without changing anything, and which settings are slow.

Seconds of an advice are those from the power loss of a node until the job runs again, on Slurm 22.05.8 and 25.11.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from opsd.slurm.port import (
    Partition,
    Slurm,
    SlurmDenied,
    SlurmError,
    SlurmMissing,
    SlurmRejected,
    SlurmUnavailable,
    Version,
)

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
