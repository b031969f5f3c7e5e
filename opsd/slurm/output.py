"""Pure parsers of the output of Slurm's commands, and the formats that are requested.

Nodes and jobs are read through explicit sinfo and squeue formats, the same in every version, not as JSON. The releases
22.05 to 25.11 have five different JSON shapes, and 22.05 ignores filters when it prints JSON. For 10,000 nodes
``scontrol show nodes --json`` of 25.11 took 2.9 s and 25 MB on this project's test cluster. The format below took 0.06
s and a few hundred bytes, because sinfo merges nodes that agree in all fields.

Job names and reasons may hold any character, newlines included. So fields end with a separator that the caller draws at
random for each call: a crafted job name cannot forge another job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from opsd.slurm.hostlist import HostlistError, expand
from opsd.slurm.port import (
    OLDEST,
    Given,
    Job,
    JobDetails,
    Node,
    Partition,
    Reservation,
    SlurmDenied,
    SlurmError,
    SlurmMissing,
    SlurmRejected,
    SlurmUnavailable,
    Version,
)
from opsd.slurm.runner import Output

NODE_FIELDS = ("NodeList", "StateComplete", "Timestamp", "User", "Reason")
COMMENT_FIELDS = ("NodeList", "Comment")
JOB_FIELDS = (
    "JobID", "State", "Reason", "UserName", "Partition", "NodeList", "BatchHost", "SubmitTime", "StartTime", "EndTime",
    "RestartCnt", "Name",
)  # fmt: skip
JOB_COMMENT_FIELDS = ("JobID", "Comment", "admin_comment")
NAME_FIELDS = ("JobID", "JobArrayID")
STEP_FIELDS = ("StepID", "Nodes")
_DETAILS = re.compile(r"^ +Nodes=(\S+) CPU_IDs=\S* Mem=\S+ GRES=(\S*)", re.MULTILINE)
_SLUID = re.compile(r"^ +SLUID=(s[0-9A-Z]{13})$", re.MULTILINE)
_REQUEUES = re.compile(r"^ +Requeue=([01]) Restarts=\d+ BatchFlag=(\d)", re.MULTILINE)
_COMMAND = re.compile(r"^   (Command|SubmitLine)=(.+)$", re.MULTILINE)
_GPUS = re.compile(r"(?:^|,)gpu(?:(?::(?:\(null\)|[^:(),]+))?:(\d+)(?:\(IDX:([\d,-]+)\))?)?")
"""``gpu:h100:2(IDX:0-1)``, one for each type of GPU; its name may be (null). What is of another form has no count."""
_SHARES = re.compile(r"(?:^|,)(?:shard|mps)(?::(?:\(null\)|[^:(),]+))?:\d+\((?:IDX:([\d,-]+)|([\d/,]+))\)")
"""``shard:3(3/4,0/4)``: three of the four parts of the first of two GPUs; 22.05.8 prints ``shard:3(IDX:0)``."""
_GRES = re.compile(r"(?:^|,)([^:,(]+)(?::(\(null\)|[^:,()]+))?:(\d+)(?:\([^)]*\))?")
"""Any GRES, its type, its count, and in brackets which ones."""
CONFIGURED_NOT = ("(null)", "none", "")


def format_option(fields: Sequence[str], separator: str) -> str:
    """The argument of ``-O`` for ``fields``, each followed by ``separator`` and none truncated."""
    return ",".join(f"{field}:{separator}" for field in fields)


def records(text: str, separator: str, width: int) -> Iterator[list[str]]:
    """The fields of each line of output requested with ``format_option``. Raises SlurmRejected."""
    fields = text.split(separator)
    if len(fields) % width != 1 or fields[-1].strip():
        raise SlurmRejected(f"Slurm's answer was cut short or is of another form: {text[-80:]!r}")
    for start in range(0, len(fields) - 1, width):
        first, *rest = fields[start : start + width]
        yield [first.removeprefix("\n").strip(), *rest]


def parse_nodes(text: str, separator: str) -> tuple[Node, ...]:
    """The nodes in sinfo's output with ``NODE_FIELDS``, by name. Raises SlurmRejected."""
    found: dict[str, Node] = {}
    for names, state, at, by, reason in records(text, separator, len(NODE_FIELDS)):
        base, *flags = state.strip().lower().rstrip("*$~#!%@^-").split("+")
        told = "" if at == "Unknown" and reason.strip() == "none" else reason
        for name in _hosts(names):
            found[name] = Node(
                name, base, frozenset(flags), told.strip(), by.strip() if told else "", epoch(at) if told else None
            )
    return tuple(found[name] for name in sorted(found))


def parse_comments(text: str, separator: str) -> dict[str, str]:
    """The comments in sinfo's output with ``COMMENT_FIELDS``, by name of the node. Raises SlurmRejected."""
    return {
        name: "" if comment.strip() in CONFIGURED_NOT else comment.strip()
        for names, comment in records(text, separator, len(COMMENT_FIELDS))
        for name in _hosts(names)
    }


def parse_jobs(text: str, separator: str) -> tuple[Job, ...]:
    """The jobs in squeue's output with ``JOB_FIELDS``, oldest id first. Raises SlurmRejected."""
    jobs = []
    for job, state, reason, user, partition, nodes, batch, submit, start, end, restarts, name in records(
        text, separator, len(JOB_FIELDS)
    ):
        jobs.append(
            Job(
                id=_integer(job),
                state=state.lower(),
                reason="" if reason == "None" else reason,
                user=user,
                partition=partition,
                nodes=_hosts(nodes),
                batch_host="" if batch == "n/a" else batch,
                submitted_at=epoch(submit),
                starts_at=epoch(start),
                ends_at=epoch(end),
                restarts=_integer(restarts),
                name=name,
            )
        )
    return tuple(sorted(jobs, key=lambda job: job.id))


def parse_name(text: str, separator: str, job: int) -> str:
    """The name of ``job`` in squeue's output with ``NAME_FIELDS``, asked for by its number: 7, 7_3 or 7+0.

    Raises SlurmRejected if Slurm has only others under that number.
    """
    names = dict(records(text, separator, len(NAME_FIELDS)))
    if names and str(job) not in names:
        raise SlurmRejected(f"Slurm has forgotten job {job}, and not the others of its array")
    return names.get(str(job), str(job))


def parse_steps(text: str, separator: str) -> dict[str, frozenset[str]]:
    """The nodes of each step in squeue's output with ``STEP_FIELDS``, by its name. Raises SlurmRejected."""
    steps = ((id.rpartition(".")[2], nodes) for id, nodes in records(text, separator, len(STEP_FIELDS)))
    return {name: frozenset(_hosts(nodes)) for name, nodes in steps if name not in ("batch", "extern")}


def parse_given(text: str, node: str) -> Given:
    """The part of ``node`` in the output of ``scontrol --details show job``.

    Two lines that say the same of a job are worth nothing: its name may hold a forged one.
    """
    sluids = _SLUID.findall(text)
    sluid = sluids[0] if len(sluids) == 1 else ""
    lines = [match[2] for match in _DETAILS.finditer(text) if node in _hosts(match[1])]
    return Given(_gpus(lines[0]), sluid, _shares(lines[0])) if len(lines) == 1 else Given(None, sluid)


def parse_details(text: str) -> JobDetails:
    """The first job in the output of ``scontrol --details show job``: of a heterogeneous one all parts are shown."""
    first = text.split("\nJobId=", 1)[0]
    gres = {}
    for nodes, told in _DETAILS.findall(first):
        counts: dict[str, int] = {}
        for name, kind, count in _GRES.findall(told):
            key = f"{name}:{kind}" if kind not in ("", "(null)") else name
            counts[key] = counts.get(key, 0) + int(count)
        gres.update(dict.fromkeys(_hosts(nodes), counts))
    flags = set(_REQUEUES.findall(first))
    requeues, batch = flags.pop() if len(flags) == 1 else ("", "1")
    told = dict(_COMMAND.findall(first))
    return JobDetails(
        gres,
        requeues=requeues == "1" if requeues else None,
        batch=batch != "0",
        heterogeneous=" HetJobId=" in first.partition(" JobName=")[0],
        command=_set(told, "Command"),
        submitted=_set(told, "SubmitLine"),
    )


def _shares(gres: str) -> frozenset[int]:
    found = set[int]()
    for indexes, parts in _SHARES.findall(gres):
        found.update(map(int, _hosts(f"[{indexes}]") if indexes else ()))
        found.update(gpu for gpu, part in enumerate(parts.split(",")) if part.partition("/")[0].strip("0"))
    return frozenset(found)


def _gpus(gres: str) -> frozenset[int] | None:
    counted, found = 0, set[int]()
    for count, indexes in _GPUS.findall(gres):
        if not count:
            return None
        counted += int(count)
        found.update(map(int, _hosts(f"[{indexes}]") if indexes else ()))
    return frozenset(found) if len(found) == counted else None


def parse_job_comments(text: str, separator: str, job: int) -> tuple[str, str]:
    """Comment and AdminComment of ``job`` in squeue's output with ``JOB_COMMENT_FIELDS``. Raises SlurmRejected."""
    for number, *comments in records(text, separator, len(JOB_COMMENT_FIELDS)):
        if number == str(job):
            own, admin = ("" if comment.strip() in CONFIGURED_NOT else comment.strip() for comment in comments)
            return own, admin
    return "", ""


def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """The reservations in the output of ``scontrol show reservations --oneliner``. Raises SlurmRejected."""
    found = []
    for line in text.splitlines():
        if not line.startswith("ReservationName="):
            continue
        name, start, rest = line.removeprefix("ReservationName=").partition(" StartTime=")
        words = f"{start}{rest}".split()  # a comment comes last, with whatever words
        values = dict(word.partition("=")[::2] for word in reversed(words))
        found.append(
            Reservation(
                name=name,
                state=values.get("State", "").lower(),
                nodes=_hosts(_set(values, "Nodes")),
                node_count=_integer(values.get("NodeCnt", "0")),
                partition=_set(values, "PartitionName"),
                users=tuple(filter(None, _set(values, "Users").split(","))),
                flags=frozenset(filter(None, _set(values, "Flags").split(","))),
                starts_at=epoch(values.get("StartTime", "")),
                ends_at=epoch(values.get("EndTime", "")),
            )
        )
    return tuple(found)


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """The partitions in the output of ``scontrol show partitions --oneliner``. Raises SlurmRejected."""
    found = []
    for line in text.splitlines():
        if line.startswith("PartitionName="):
            values = dict(word.partition("=")[::2] for word in line.split())
            found.append(
                Partition(
                    name=line.removeprefix("PartitionName=").partition(" AllowGroups=")[0],
                    nodes=_hosts(_set(values, "Nodes")),
                    tier=_integer(values.get("PriorityTier", "1")),
                    preempt_mode=values.get("PreemptMode", "OFF"),
                    grace_s=_integer(values.get("GraceTime", "0")),
                    state=values.get("State", "UP").lower(),
                )
            )
    return tuple(found)


def parse_configuration(text: str) -> dict[str, str]:
    """The settings in the output of ``scontrol show config``; unset ones are left out."""
    settings: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        if separator and name[:1].isalpha() and value.strip() not in CONFIGURED_NOT:
            settings.setdefault(name.strip(), value.strip())
    return settings


def parse_version(text: str) -> Version:
    """The release in the output of ``scontrol --version``. Raises SlurmMissing if it cannot be read or is too old."""
    match = re.search(r"slurm(?:-wlm)? (\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise SlurmMissing(f"scontrol --version said {text.strip()[:80]!r}, which is not a Slurm release")
    version = Version(*map(int, match.groups()))
    if version < OLDEST:
        raise SlurmMissing(f"Slurm {version} is too old: opsd needs {OLDEST} or newer")
    return version


def parse_excluded(text: str) -> tuple[str, ...]:
    """A job's excluded nodes in the output of ``scontrol show job --oneliner``. Raises SlurmRejected."""
    match = re.search(r" ExcNodeList=(\S*)", text)
    return () if match is None or match[1] in CONFIGURED_NOT else _hosts(match[1])


def parse_job_id(text: str) -> int:
    """The job id printed by ``sbatch --parsable``. Raises SlurmRejected."""
    return _integer(text.strip().partition(";")[0])


_UNAVAILABLE = re.compile(
    r"unable to contact slurm controller|socket timed out|zero bytes were transmitted"
    r"|connection (refused|timed out|reset)|broken pipe|no route to host|network is unreachable"
    r"|communication connection failure|munge encode failed|failed to create socket|protocol authentication error"
    r"|slurmctld.*(shutting down|standby)|host is down|temporarily unable|transport endpoint",
    re.IGNORECASE,
)
_UNCONFIGURED = re.compile(
    r"could not establish a configuration source|unable to process configuration file", re.IGNORECASE
)
_DENIED = re.compile(
    r"invalid user id|access/permission denied|permission denied|not authorized|security violation", re.IGNORECASE
)


def failure(argv: Sequence[str], output: Output) -> SlurmError:
    """The error of a failed command, with the last line of its output as the reason."""
    said = output.stderr.strip() or output.stdout.strip()
    reason = said.splitlines()[-1].strip() if said else f"exit code {output.code}"
    command = " ".join(argv[:2]) if argv[0] == "scontrol" else argv[0]
    if _UNCONFIGURED.search(said):
        return SlurmMissing(f"{command}: this machine has no Slurm configuration; set SLURM_CONF or install slurm.conf")
    if _UNAVAILABLE.search(said):
        return SlurmUnavailable(f"{command}: {reason}")
    if _DENIED.search(said):
        return SlurmDenied(f"{command}: {reason}; this needs root, SlurmUser, an operator or the owner of the job")
    return SlurmRejected(f"{command}: {reason}")


def epoch(text: str) -> float | None:
    """A time printed with SLURM_TIME_FORMAT=%s; None for Unknown, N/A and the like."""
    text = text.strip()
    return float(text) if text.isdecimal() else None


def _integer(text: str) -> int:
    if not text.strip().isdecimal():
        raise SlurmRejected(f"Slurm's answer has {text[:40]!r} where a number should be")
    return int(text)


def _hosts(text: str) -> tuple[str, ...]:
    try:
        return expand(text)
    except HostlistError as error:
        raise SlurmRejected(f"Slurm's answer has a {error}") from error


def _set(values: Mapping[str, str], name: str) -> str:
    value = values.get(name, "")
    return "" if value in CONFIGURED_NOT else value
