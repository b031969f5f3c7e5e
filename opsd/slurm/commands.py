"""The Slurm port on top of Slurm's own commands: sinfo, squeue, scontrol, sbatch, scancel."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Final

from opsd.slurm import complete
from opsd.slurm.hostlist import compress
from opsd.slurm.output import (
    COMMENT_FIELDS,
    JOB_COMMENT_FIELDS,
    JOB_FIELDS,
    NAME_FIELDS,
    NODE_FIELDS,
    STEP_FIELDS,
    failure,
    format_option,
    parse_comments,
    parse_configuration,
    parse_details,
    parse_excluded,
    parse_given,
    parse_job_comments,
    parse_job_id,
    parse_jobs,
    parse_name,
    parse_nodes,
    parse_partitions,
    parse_reservations,
    parse_steps,
    parse_version,
)
from opsd.slurm.port import (
    Given,
    Job,
    JobDetails,
    Node,
    NodeUpdate,
    Partition,
    Reservation,
    SlurmDenied,
    SlurmMissing,
    SlurmRejected,
    SlurmUnavailable,
    Version,
)
from opsd.slurm.runner import Output, Runner, run_command
from opsd.words import printable

DEADLINE_S = 12.0
"""A little more than the 9 to 10 s that Slurm's commands need to notice that no controller answers."""
NOTES: Final = 8
"""Of the nodes of a job, those about which a note is kept in its comment."""
_AVOIDED = re.compile(r"\s*\[opsd1 avoids([^\[\]]*)\]")
"""What opsd says of a run in a comment of its job."""
_TASK = re.compile(r"\d+_\d+")
"""A task of an array that is a job of its own; several that wait are ``7_[1-3]``."""
_NODE = re.compile(r"([\w.-]+)@(\d+)")
"""The nodes that opsd excludes from a job, in the job's comment with the time of exclusion.

Slurm's own list does not distinguish them from the user's ``--exclude``, which must stay. The comment survives requeues
and can be changed together with that list. opsd owns the part in brackets only: ``tuning run 12 [opsd1 avoids
n2@1763711000 n3@1763712000]``.
"""


def random_separator() -> str:
    """A string that does not occur in job names, by chance or on purpose."""
    return f"\x1f{secrets.token_hex(8)}\x1f"


class CommandSlurm:
    """Slurm through its commands. ``run`` runs one command; each call takes at most ``deadline_s`` seconds."""

    def __init__(
        self,
        run: Runner = run_command,
        *,
        deadline_s: float = DEADLINE_S,
        separator: Callable[[], str] = random_separator,
    ) -> None:
        self._runner = run
        self._deadline_s = deadline_s
        self._separator = separator

    @cached_property
    def version(self) -> Version:
        return parse_version(self._run("scontrol", "--version").stdout)

    def responds(self) -> bool:
        try:
            output = self._runner(["scontrol", "ping"], self._deadline_s)
        except SlurmUnavailable:
            return False
        if output.code and "slurmctld" not in output.stdout.lower():
            raise failure(["scontrol", "ping"], output)
        return " is UP" in output.stdout

    def configuration(self) -> Mapping[str, str]:
        return parse_configuration(self._run("scontrol", "show", "config").stdout)

    def nodes(self, names: Sequence[str] = ()) -> Sequence[Node]:
        separator = self._separator()
        chosen = [f"--nodes={compress(names)}"] if names else []
        output = self._run("sinfo", "--noheader", "--all", *chosen, "--Format", format_option(NODE_FIELDS, separator))
        return parse_nodes(output.stdout, separator)

    def update_nodes(self, names: Sequence[str], update: NodeUpdate, reason: str = "") -> None:
        told = [f"reason={reason}"] if reason else []
        self._run("scontrol", "update", f"nodename={compress(names)}", f"state={update}", *told)

    def reboot(self, name: str, reason: str) -> None:
        # Without nextstate a drained node is idle after the reboot, and its reason is gone (22.05.8).
        self._run("scontrol", "reboot", "ASAP", "nextstate=down", f"reason={reason}", name)

    def comments(self, names: Sequence[str] = ()) -> Mapping[str, str]:
        separator = self._separator()
        chosen = [f"--nodes={compress(names)}"] if names else []
        output = self._run(
            "sinfo", "--noheader", "--all", *chosen, "--Format", format_option(COMMENT_FIELDS, separator)
        )
        return parse_comments(output.stdout, separator)

    def set_comment(self, name: str, text: str) -> None:
        self._run("scontrol", "update", f"nodename={name}", f"comment={text}")

    def jobs(self, ids: Sequence[int] = (), *, node: str = "") -> Sequence[Job]:
        separator = self._separator()
        chosen = [f"--jobs={','.join(map(str, ids))}"] if ids else []
        where = [f"--nodelist={node}"] if node else []
        try:
            output = self._run(
                "squeue", "--noheader", "--all", *chosen, *where, "--Format", format_option(JOB_FIELDS, separator)
            )
        except SlurmRejected as error:
            if ids and "Invalid job id" in str(error):
                return ()
            raise
        return tuple(job for job in parse_jobs(output.stdout, separator) if not ids or job.id in ids)

    def steps(self, job: int) -> Mapping[str, frozenset[str]]:
        separator = self._separator()
        option = format_option(STEP_FIELDS, separator)
        output = self._run("squeue", "--steps", "--noheader", f"--jobs={self._task(job)}", "--Format", option)
        return parse_steps(output.stdout, separator)

    def given(self, job: int, node: str) -> Given:
        return parse_given(self._shown(job), node)

    def details(self, job: int) -> JobDetails:
        return parse_details(self._shown(job))

    def _shown(self, job: int) -> str:
        return self._run("scontrol", "--details", "show", "job", self._name(job)).stdout

    def script(self, job: int) -> str:
        return self._run("scontrol", "write", "batch_script", str(job), "-").stdout

    def complete(self, job: int, code: int) -> None:
        argv = complete.command(self.configuration().get("PluginDir", ""), job, code)
        output = self._runner(argv, self._deadline_s)
        if output.code == complete.NO_LIBRARY:
            raise SlurmMissing(output.stderr.strip())
        if output.code:
            raise failure(["slurm_complete_job"], output)

    def requeue(self, job: int) -> None:
        self._run("scontrol", "requeue", self._task(job))

    def set_start_time(self, job: int, at: float | None = None) -> None:
        self._run("scontrol", "update", f"jobid={self._task(job)}", f"starttime={_when(at)}")

    def start_after(self, job: int, other: int) -> None:
        self._run("scontrol", "update", f"jobid={self._task(job)}", f"dependency=afterany:{other}")

    def exclude(self, job: int, names: Sequence[str], at: float) -> None:
        comment, before = self._comment(job), self._avoided(job)
        own = _avoided_in(comment)
        fresh = dict.fromkeys(set(names) - (before - own.keys()), at)
        self._avoid(job, before | set(names), _with_avoided(comment, own | fresh))

    def excluded(self, job: int) -> Mapping[str, float]:
        return _avoided_in(self._comment(job))

    def include(self, job: int, names: Sequence[str]) -> None:
        comment = self._comment(job)
        own = _avoided_in(comment)
        left = {name: at for name, at in own.items() if name not in names}
        self._avoid(job, self._avoided(job) - (own.keys() - left.keys()), _with_avoided(comment, left))

    def summarize(self, job: int, text: str, topic: str = "run") -> None:
        (comment, admin_comment), name = self._comments(job), self._task(job)
        try:
            told = f"admincomment={_with_summary(admin_comment, text, topic)}"
            self._run("scontrol", "update", f"jobid={name}", told)
        except SlurmDenied:
            self._run("scontrol", "update", f"jobid={name}", f"comment={_with_summary(comment, text, topic)}")

    def _comments(self, job: int) -> tuple[str, str]:
        separator = self._separator()
        option = format_option(JOB_COMMENT_FIELDS, separator)
        output = self._run("squeue", "--noheader", "--all", f"--jobs={job}", "--Format", option)
        return parse_job_comments(output.stdout, separator, job)

    def _comment(self, job: int) -> str:
        return self._comments(job)[0]

    def _avoided(self, job: int) -> set[str]:
        return set(parse_excluded(self._run("scontrol", "show", "job", self._task(job), "--oneliner").stdout))

    def _avoid(self, job: int, names: set[str], comment: str) -> None:
        told = (f"excnodelist={compress(names)}", f"comment={comment}")
        self._run("scontrol", "update", f"jobid={self._task(job)}", *told)

    def shrink(self, job: int, names: Sequence[str]) -> None:
        self._run("scontrol", "update", f"jobid={self._task(job)}", f"nodelist={compress(names)}")

    def release(self, job: int) -> None:
        self._run("scontrol", "release", self._task(job))

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        return parse_job_id(self._run("sbatch", "--parsable", *options, stdin=script).stdout)

    def cancel(self, job: int) -> None:
        self._run("scancel", self._task(job))

    def partitions(self) -> Sequence[Partition]:
        return parse_partitions(self._run("scontrol", "show", "partitions", "--oneliner").stdout)

    def reservations(self) -> Sequence[Reservation]:
        return parse_reservations(self._run("scontrol", "show", "reservations", "--oneliner").stdout)

    def reserve(self, name: str, settings: Mapping[str, str]) -> None:
        chosen = [f"{key}={value}" for key, value in settings.items()]
        self._run("scontrol", "create", "reservation", f"ReservationName={name}", *chosen)

    def unreserve(self, name: str) -> None:
        self._run("scontrol", "delete", f"ReservationName={name}")

    def _task(self, job: int) -> str:
        """The name under which commands take this job alone.

        The last task of an array has the number of the array, which Slurm takes for all tasks: ``scancel 7`` ends them
        all.
        """
        name = self._name(job)
        return name if _TASK.fullmatch(name) else str(job)

    def _name(self, job: int) -> str:
        separator = self._separator()
        chosen = ("--states=all", f"--jobs={job}", "--Format", format_option(NAME_FIELDS, separator))
        try:
            output = self._run("squeue", "--noheader", "--all", *chosen)
        except SlurmRejected as error:
            if "Invalid job id" in str(error):  # as the command itself will tell
                return str(job)
            raise
        return parse_name(output.stdout, separator, job)

    def _run(self, *argv: str, stdin: str = "") -> Output:
        output = self._runner(argv, self._deadline_s, stdin)
        if output.code:
            raise failure(argv, output)
        return output


def _when(at: float | None) -> str:
    return "now" if at is None else datetime.fromtimestamp(at).isoformat(timespec="seconds")


def _avoided_in(comment: str) -> dict[str, float]:
    """The nodes with the epoch second of their exclusion; unreadable parts are skipped."""
    match = _AVOIDED.search(comment)
    words = match[1].split() if match else []
    return {found[1]: float(found[2]) for word in words if (found := _NODE.fullmatch(word))}


def _with_summary(comment: str, text: str, topic: str) -> str:
    """``comment`` with ``text`` in place of what it has about ``topic``, without the oldest notes beyond ``NOTES``."""
    plain = printable(text).replace("[", "(").replace("]", ")")
    others = re.sub(rf"\s*\[opsd {re.escape(topic)}: [^\[\]]*\]", "", comment)
    alike = re.findall(rf"\s*\[opsd {re.escape(topic.split()[0])} [^:\[\]]*: [^\[\]]*\]", others)
    for note in alike[: max(0, len(alike) + 1 - NOTES)]:
        others = others.replace(note, "", 1)
    return f"{others.strip()} [opsd {topic}: {plain}]".strip()


def _with_avoided(comment: str, avoided: Mapping[str, float]) -> str:
    """``comment`` with ``avoided`` in place of its previous record; without nodes there is no record."""
    others = _AVOIDED.sub("", comment).strip()
    words = " ".join(f"{name}@{at:.0f}" for name, at in sorted(avoided.items()))
    return f"{others} [opsd1 avoids {words}]".strip() if words else others
