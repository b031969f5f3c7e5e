"""One archive with what is known of a node's hardware, for those who replace it: bounded, and without secrets.

Settings, environments and files of users are not in it. Nor are command lines and what users' programs say: these may
hold a password without any mark by which it could be known. What is taken from logs is searched for passwords and
tokens all the same.
The names of files in the archive are fixed; what a part lacks, or why it is cut, stands in ``index.json``.
"""

from __future__ import annotations

import errno
import io
import json
import re
import shutil
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from opsd import __version__
from opsd.durable import replacing
from opsd.preflight.history import History, HistoryError
from opsd.repair import driver
from opsd.repair.case_file import CaseError, CaseFile
from opsd.repair.machine import RemedyError, Run, run_command
from opsd.runbooks import RUNBOOKS

FOLDER = "evidence"
PART_BYTES: Final = 4 << 20
"""A part that is longer keeps its end, where the newest is."""
REPORT_BYTES: Final = 64 << 20
"""NVIDIA's own report, which is compressed already, is left out if it is larger."""
KEPT: Final = 10
INCIDENTS, PREFLIGHTS = 500, 5
COMMAND_S, REPORT_S = 60.0, 600.0
KERNEL_LOG: Final = (
    "journalctl", "_TRANSPORT=kernel", "SYSLOG_FACILITY=0", "--lines=20000", "--no-pager", "--output=short-iso",
)  # fmt: skip
"""Of all boots: --dmesg reads one boot, unless --boot=all is there, which older systemds refuse.

And what the kernel itself has said: programs write to /dev/kmsg as well, with a facility of theirs.
"""
_WORDS: Final = r"""(?: passw(?:or)?d | passphrase | (?:\b|ssh)pass(?= \s{0,4} [=:]) | [;_-]pwd | jwt | secret | token
    | api[ -]?key | [_-]key | accountkey | credentials? | bindpw | (?:\b|_)psk(?= \s{0,4} [=:]) | _auth(?= [=:])
    | auth_config )"""
_QUOTE: Final = r"""\\{0,7}["']"""
"""Also as it stands in JSON within JSON, with backslashes before it."""
_SECRET: Final = re.compile(
    rf"""(?ix) (?P<name> {_WORDS} [\w.-]{{0,40}} (?:{_QUOTE})? \s{{0,4}} [=:] >? \s{{0,20}} )
        (?! (?:{_QUOTE})? -----BEGIN )
        (?: (?P<quote> {_QUOTE}) (?: (?!(?P=quote)) (?: \\{{1,15}} . | [^\\\n] ) ){{0,4096}} | [^\s"',&\\]+ )
    | (?P<said> \b (?: passw(?:or)?d | passphrase ) [ \t]{{1,4}} (?: is [ ] )? ) [^\s"'\\]+
    | (?P<option> -- (?:[a-z0-9]{{1,20}}[_-]){{0,4}} (?: {_WORDS} | key ) [\w-]{{0,40}}
        (?: [ ]{{1,4}} | {_QUOTE} ,? [ ]{{0,4}} {_QUOTE} ) ) [^\s"'\\]+
    | (?P<bare> \b (?-i: hf_ | api_org_ | gh[oprsu]_ | github_pat_ | gl(?:pat|dt|rt|ft|ptt|soat)- | sk- | eyJ | nvapi-
        | xox[a-z]- | xapp- | npm_ | pypi-AgE | dckr_pat_ | AIza | ya29\. | hv[sbr]\. | wandb_v1_ | lsv2_ | tskey-
        | AGE-SECRET-KEY- ) ) [\w-]{{16,4096}}
        (?: \. [\w-]{{1,4096}} ){{0,4}}
    | (?P<block> -----BEGIN [ ] [A-Z ]{{0,20}} PRIVATE [ ] KEY (?: [ ] BLOCK )? ----- )
        (?: (?!-----END) (?s:.) ){{1,16384}}
    | (?P<scheme> authorization (?:{_QUOTE})? \s{{0,4}} [=:] \s{{0,4}} (?:{_QUOTE})?
        (?: (?:bearer|basic|digest|negotiate|token) \s{{1,4}} )? ) [^"\n\\]{{1,4096}}
    | (?P<cookie> \b (?:set-)? cookie (?:{_QUOTE})? \s{{0,4}} : \s{{0,4}} (?:{_QUOTE})? ) [^"\n\\]{{1,4096}}
    | (?P<query> [?&;] (?: sig | x-(?:amz|goog)-[a-z-]{{1,20}} | signature ) = ) [^\s"'&\\]+
    | (?P<login> (?<=\s) (?: -[fgiklsv]{{0,6}}u | --(?:proxy-)?user ) [ =]{{0,4}} (?:{_QUOTE})? [^\s:"'\\]{{1,100}} : )
        [^\s"'\\]+
    | (?P<command> \b (?: sshpass | ipmitool | (?:mysql|mariadb|mongo) [\w-]{{0,20}} ) \b [^\n]{{0,200}}?
        \s -p [ =]{{0,4}} (?:{_QUOTE})? ) [^\s"'\\]+
    | (?P<bearer> \b bearer \s{{1,4}} ) [\w.~+/=-]{{16,4096}}
    | (?P<hook> \b hooks\.slack\.com/services/ | /api/webhooks/ | /incomingwebhook/ ) [^\s"'\\]+
    | (?P<boot> \b netroot=iscsi: ) [^\s@]{{1,1000}} (?= @ )
    | (?P<user> :// (?:[^\s/:@]{{1,100}} :)? ) [^\s/]{{1,1000}} (?= @ )"""
)
"""Bounded everywhere: a long line costs no more than many short ones."""
Part = Callable[[], str]
"""Makes the text of a part. Raises Missing."""


class Missing(Exception):
    """A part that this node does not have; the message says why."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of evidence. ``library`` is that of NVML, None for the driver's own.

    ``slurm_node`` is what Slurm says of the node, "" if it is to be asked.
    """

    node: str
    state_dir: Path
    preflights: Path
    library: str | None = None
    run: Run = run_command
    nvidia_report: str = "nvidia-bug-report.sh"
    slurm_node: str = ""


def without_secrets(text: str) -> str:
    """``text`` with "(left out)" for what stands behind words like password, token or Authorization, and in URLs."""

    def left_out(found: re.Match[str]) -> str:
        kept = found[str(found.lastgroup)] if found["quote"] is None else found["name"]
        return f"{kept}{found['quote'] or ''}(left out)"

    return _SECRET.sub(left_out, text)


def make(sources: Sources, now: float, to: Path | None = None, *, bug_report: bool = True) -> Path:
    """Write the archive to ``to``, by default into the state folder, where the newest are kept. Raises OSError.

    ``bug_report``: with NVIDIA's own report, where its program is installed; that takes minutes.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "_", sources.node).strip(".")[:64] or "node"
    stem = f"{FOLDER}-{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}"
    path = to or sources.state_dir / FOLDER / f"{stem}.tar.gz"
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if to is None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(path, 0o600) as draft, tarfile.open(fileobj=draft, mode="w:gz") as archive:
        _fill(archive, stem, sources, now, bug_report)
    if to is None:
        for old in sorted(path.parent.glob(f"{FOLDER}-*.tar.gz"), key=lambda one: one.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    return path


def _fill(archive: tarfile.TarFile, stem: str, sources: Sources, now: float, bug_report: bool) -> None:
    index: dict[str, object] = {}
    for name, part in _parts(sources).items():
        try:
            content = without_secrets(part()).encode(errors="replace")
        except Missing as error:
            index[name] = {"missing": str(error)}
            continue
        index[name] = {"bytes": len(content), "cut": len(content) > PART_BYTES}
        _add(archive, f"{stem}/{name}", content[-PART_BYTES:], now)
    name = "nvidia-bug-report.log.gz"
    try:
        content = _nvidia_report(sources, wanted=bug_report)
    except Missing as error:
        index[name] = {"missing": str(error)}
    else:
        index[name] = {"bytes": len(content), "cut": False}
        _add(archive, f"{stem}/{name}", content, now)
    said = {"node": sources.node, "at": now, "opsd": __version__, "parts": index}
    _add(archive, f"{stem}/index.json", json.dumps(said, indent=1).encode(), now)


def _add(archive: tarfile.TarFile, name: str, content: bytes, now: float) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), int(now), 0o600
    archive.addfile(member, io.BytesIO(content))


def _parts(sources: Sources) -> Mapping[str, Part]:
    def reading(read: Part) -> Part:
        def part() -> str:
            try:
                return read()
            except RemedyError as error:
                raise Missing(str(error)) from error

        return part

    def said(*argv: str, of: Callable[[str], str] = str) -> Part:
        return reading(lambda: of(sources.run(argv, COMMAND_S)))

    return {
        "slurm-node.txt": reading(lambda: sources.slurm_node or slurm_node(sources.node, sources.run)),
        "kernel.txt": said(*KERNEL_LOG, of=kernel),
        "kernel-ring.txt": said("dmesg", "--kernel", "--time-format=iso", of=kernel),
        "nvidia-smi.txt": said("nvidia-smi", "-q", of=processes),
        "pci.txt": said("lspci", "-vvv", "-d", "10de:"),
        "nvml.json": reading(lambda: json.dumps(driver.read(sources.library, sources.run), indent=1)),
        "incidents.json": lambda: _incidents(sources.state_dir / "journal.db"),
        "repairs.json": lambda: _repairs(CaseFile(sources.state_dir)),
        "preflights.json": lambda: _preflights(History(sources.preflights), sources.node),
    }


def slurm_node(node: str, run: Run) -> str:
    """What Slurm says of ``node``. Raises RemedyError."""
    return run(("scontrol", "show", "node", node), COMMAND_S)


def _incidents(journal: Path) -> str:
    query = "SELECT document FROM incidents ORDER BY opened_at DESC LIMIT ?"
    try:
        with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=10)) as database:
            database.text_factory = lambda raw: raw.decode(errors="replace")
            documents = [_incident(document) for (document,) in database.execute(query, (INCIDENTS,))]
    except sqlite3.Error as error:
        raise Missing(f"{journal}: {error}") from error
    return json.dumps(documents[::-1], indent=1)


def _incident(document: str) -> Mapping[str, object]:
    try:
        return incident(json.loads(document))
    except (ValueError, TypeError, AttributeError):
        return {"cannot be read": "it is no record of this opsd"}


def _repairs(file: CaseFile) -> str:
    cases = [asdict(case) for case in file.past()]
    try:
        current = file.current()
        cases += [asdict(current)] if current is not None else []
    except CaseError as error:
        cases.append({"cannot be read": str(error)})
    return json.dumps(cases, indent=1)


def _preflights(history: History, node: str) -> str:
    try:
        reports = [_report(history, run.id) for run in history.runs(node, PREFLIGHTS)[::-1]]
    except HistoryError as error:
        raise Missing(str(error)) from error
    return json.dumps(reports, indent=1)


def _report(history: History, run: int) -> object:
    try:
        return json.loads(history.report(run).to_json())
    except HistoryError as error:
        return {"cannot be read": str(error)}


def _nvidia_report(sources: Sources, *, wanted: bool) -> bytes:
    if not wanted:
        raise Missing("it was not wanted")
    if shutil.which(sources.nvidia_report) is None:
        raise Missing(f"{sources.nvidia_report} is not installed")
    with tempfile.TemporaryDirectory(prefix="opsd-evidence-") as folder:
        file = Path(folder) / "report.log"
        try:
            sources.run([sources.nvidia_report, "--safe-mode", "--output-file", str(file)], REPORT_S)
            made = next(path for path in (file.with_name("report.log.gz"), file) if path.exists())
            if made.stat().st_size > REPORT_BYTES:
                raise Missing(f"it is larger than {REPORT_BYTES >> 20} MiB")
            return made.read_bytes()
        except RemedyError as error:
            raise Missing(str(error)) from error
        except (StopIteration, OSError) as error:
            raise Missing(f"{sources.nvidia_report} has made no file") from error


MACHINE: Final = frozenset({
    "NVML", "DCGM", "driver", "nvml", "dcgm", "kmsg", "kmsg, inferred", "kernel", "kernel log", "Xid catalogue", "host",
    "infiniband", "SMART log", "Slurm and the driver", "agent",
})  # fmt: skip
"""Sources of evidence that speak of hardware, in words of the kernel, of drivers and of opsd."""
TOLD_BY_USERS: Final = frozenset(
    runbook.kind for runbook in RUNBOOKS if runbook.told_by_runs or "ranks" in runbook.needs
)
_BARE: Final = (
    "id", "kind", "severity", "state", "opened_at", "last_seen_at", "resolved_at", "confidence", "attempts", "relapses",
    "cause",
)  # fmt: skip
_BEGINNING: Final = 60
"""Characters by which a text is known in another one, where it may be cut."""
_PROCESS: Final = re.compile(r"(?ms)^([ \t]+(?:Process )?Name[ \t]+: \S+).*?(?=\n[ \t]+Used GPU |\nGPU |\n?\Z)")
"""To the line that follows it in all releases: an argument may have lines of its own (``python -c``)."""
_AUDIT: Final = re.compile(r"(?m)^([^\n]*?\baudit(?:\(|: type=)\d+)[^\n]*")


def incident(document: Mapping[str, Any]) -> dict[str, Any]:
    """An incident of the journal. Of one that rests on what runs say only its kind, time and place remain."""
    told = {name: document.get(name) for name in _BARE}
    culprit = document.get("culprit") or {}
    told["culprit"] = {name: culprit.get(name) for name in ("component", "node", "gpu", "rank")}
    facts = document.get("evidence") or ()
    told["evidence"] = [fact for fact in facts if fact.get("source") in MACHINE]
    unsaid = [str(fact.get("text"))[:_BEGINNING] for fact in facts if fact.get("source") not in MACHINE]
    done = document.get("actions") or ()
    told["actions"] = [{name: action.get(name) for name in ("verb", "at", "outcome")} for action in done]
    if document.get("kind") in {runbook.kind for runbook in RUNBOOKS} - TOLD_BY_USERS:
        told |= {name: document.get(name) for name in ("key", "summary", "culprit")}
        if any(text and text in str(told["summary"]) for text in unsaid):
            del told["summary"]  # a runbook quotes there what it rests on
    return told


def processes(text: str) -> str:
    """What nvidia-smi says, with the program of each process and none of its arguments."""
    return _PROCESS.sub(r"\1", text)


def kernel(text: str) -> str:
    """The kernel's log without the bodies of audit records, which are command lines where no daemon takes them."""
    return _AUDIT.sub(r"\1: (left out)", text)
