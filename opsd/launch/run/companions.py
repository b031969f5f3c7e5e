"""Companions of a run: servers such as vLLM that ranks use, started, watched and ended with each generation.

A companion runs on the first node of a generation. One that ends, refuses, or neither answers nor works, ends the
generation, which then starts again with a new one. The failure names it. One that listens on all addresses ends the
run. While it works, ranks that wait for it are not hung: see ``HangDetector.companion_works``.
"""

from __future__ import annotations

import http.client
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from opsd.events import CompanionFailed, CompanionReady
from opsd.launch.hangs.activity import BUSY_SHARE, Usage, process_tree, read_usage
from opsd.launch.io.loop import Loop
from opsd.launch.io.reporting import EventLog, print_message
from opsd.launch.ranks.process import Child, spawn
from opsd.launch.ranks.settings import Settings
from opsd.rundir import RunFolders
from opsd.words import duration

LOOK_S = 2.0
ANSWER_S = 4.0
REFUSED_S = 10.0
"""How long a companion that was ready may refuse, or answer with an error of its own."""
SILENT_S = 20.0
"""How long one that was ready may be silent and idle: TRL's server answers nothing while it generates."""
BUSY_SILENT_S = 3600.0
"""How long it may be silent while it works."""
_OWN = ("OPSD_RANK_PAGE", "OPSD_GENERATION")


@dataclass(frozen=True, slots=True)
class Beside:
    """A companion as the command line describes it.

    ``health`` is a URL that answers below 400 once it is ready, "" without one. ``gpus`` replaces
    CUDA_VISIBLE_DEVICES, None leaves it. ``public``: it may listen on all addresses.
    """

    words: tuple[str, ...]
    health: str = ""
    gpus: str | None = None
    public: bool = False

    @property
    def name(self) -> str:
        """``vllm serve``."""
        return shlex.join(self.words)[:60]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a health URL has answered. ``status`` is None without one, ``refused`` True if nobody listens there."""

    status: int | None
    refused: bool = False

    @property
    def good(self) -> bool:
        return self.status is not None and self.status < 400

    def __str__(self) -> str:
        return "refuses connections" if self.refused else f"answers {self.status}" if self.status else "does not answer"


def ask(url: str, limit_s: float = ANSWER_S) -> Answer:
    """Ask a health URL."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=limit_s)
    try:
        connection.request("GET", f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}")
        return Answer(connection.getresponse().status)
    except ConnectionRefusedError:
        return Answer(None, refused=True)
    except (OSError, http.client.HTTPException):
        return Answer(None)
    finally:
        connection.close()


@dataclass(slots=True)
class Health:
    """Judges a companion by its answers and its work. Pure: times are monotonic seconds.

    ``ready``: it has answered well once. Before that it may take ``startup_s``.
    """

    startup_s: float
    began: float
    ready: bool = False
    _good: float = 0.0
    _worked: float = 0.0
    _bad_since: float | None = None

    def note(self, answer: Answer, works: bool, now: float) -> str:
        """What is wrong with it, "" if nothing is known to be."""
        if works:
            self._worked = now
        if answer.good:
            self.ready, self._good, self._bad_since = True, now, None
            return ""
        if not self.ready:
            late = now - self.began > self.startup_s
            return f"{answer} {duration(self.startup_s)} after its start" if late else ""
        if answer.status is not None or answer.refused:
            self._bad_since = now if self._bad_since is None else self._bad_since
            return f"{answer}" if now - self._bad_since >= REFUSED_S else ""
        self._bad_since = None
        silent, idle = now - self._good, now - max(self._good, self._worked)
        if idle >= SILENT_S or silent >= BUSY_SILENT_S:
            return f"hangs: it has not answered for {duration(silent)}, and not worked for {duration(idle)}"
        return ""


@dataclass(slots=True)
class _Companion:
    beside: Beside
    child: Child
    health: Health
    log: Path
    usage: Usage | None = None
    looked: float = field(default_factory=time.monotonic)
    answer: Answer = Answer(None)
    ended: bool = False


class Companions:
    """Those of this node.

    ``failed`` is called once a generation with a sentence that names the culprit, or else ``refused`` if that may not
    run as it is configured.
    """

    def __init__(
        self,
        besides: Sequence[Beside],
        folders: RunFolders,
        loop: Loop,
        events: EventLog,
        settings: Settings,
        *,
        startup_s: float,
    ) -> None:
        self._besides = besides
        self._folders = folders
        self._loop = loop
        self._events = events
        self._settings = settings
        self._startup_s = startup_s
        self._running: list[_Companion] = []
        self._failed: Callable[[str], None] = _untold
        self._refused: Callable[[str], None] = _untold
        self.works_at = -float("inf")
        """The monotonic second at which one was last seen to work."""
        if besides:
            loop.every(LOOK_S, self._look)

    @property
    def pids(self) -> frozenset[int]:
        """Their processes, which are collected here."""
        return frozenset(each.child.pid for each in self._running)

    def start(
        self,
        generation: int,
        failed: Callable[[str], None],
        *,
        refused: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Start them anew. Raises OSError with a sentence."""
        self._failed, self._refused = failed, refused
        marks = self._settings.marks(self._folders.folder)
        for number, beside in enumerate(self._besides):
            folder = self._folders.generation_logs(generation)
            folder.mkdir(parents=True, exist_ok=True)
            log = folder / f"beside-{number}.log"
            env = {name: value for name, value in environ.items() if name not in _OWN} | marks
            if beside.gpus is not None:
                env["CUDA_VISIBLE_DEVICES"] = beside.gpus
            try:
                with open(log, "ab") as output:
                    child = spawn(beside.words, env=env, cwd=self._settings.program.cwd, output=output.fileno())
            except OSError as error:
                raise OSError(
                    error.errno, f"the companion `{beside.name}` cannot be started: {error.strerror}"
                ) from error
            started = _Companion(beside, child, Health(self._startup_s, time.monotonic()), log)
            self._running.append(started)
            child.watch(self._loop, partial(self._ended, started))

    def collect(self) -> None:
        """The generation ends: its processes are killed with those of ranks, and collected here."""
        self._failed = self._refused = _untold
        for each in self._running:
            each.child.kill_group()
            each.child.reap(1.0)
        self._running.clear()

    def culprit(self, then: Callable[[str], None]) -> None:
        """Call ``then`` with what is wrong with a companion right now, "" if nothing is: ranks have failed."""
        running = list(self._running)
        if not running:
            then("")
            return

        def ask_all() -> list[Answer]:
            return [ask(each.beside.health) if each.beside.health else Answer(200) for each in running]

        def asked(answers: list[Answer] | OSError) -> None:
            said = ""
            for each, answer in zip(running, answers if isinstance(answers, list) else [], strict=False):
                if (exit := each.child.exit()) is not None:
                    said = said or self._sentence(each, f"has ended: {exit}")
                elif each.health.ready and not answer.good:
                    said = said or self._sentence(each, str(answer))
            then(said)

        self._loop.run_in_thread(ask_all, asked)

    def _ended(self, companion: _Companion) -> None:
        companion.ended = True
        self._fail(companion, f"has ended: {companion.child.exit()}")

    def _sentence(self, companion: _Companion, why: str) -> str:
        return f"its companion `{companion.beside.name}` {why} (log: {companion.log})"

    def _fail(self, companion: _Companion, why: str, *, refused: bool = False) -> None:
        tell = self._refused if refused else self._failed
        self._failed = self._refused = _untold
        if companion in self._running:
            self._events.emit("companion_failed", **CompanionFailed(companion=companion.beside.name, why=why))
            tell(f"the companion `{companion.beside.name}` {why}" if refused else self._sentence(companion, why))

    def _look(self) -> None:
        for each in list(self._running):
            if not each.ended:
                self._loop.run_in_thread(
                    partial(self._read, each), partial(self._judge, each), key=f"companion {each.child.pid}"
                )

    def _read(self, companion: _Companion) -> tuple[Answer, Usage | None, str]:
        """In a thread."""
        beside, pid = companion.beside, companion.child.pid
        usage = read_usage(pid)
        open_to_all = "" if beside.public else listens_on_all(pid)
        return (ask(beside.health) if beside.health else Answer(200)), usage, open_to_all

    def _judge(self, companion: _Companion, found: tuple[Answer, Usage | None, str] | OSError) -> None:
        if isinstance(found, OSError) or companion not in self._running or companion.ended:
            return
        (answer, usage, open_to_all), now = found, time.monotonic()
        before, companion.usage, companion.answer = companion.usage, usage, answer
        span, companion.looked = now - companion.looked, now
        works = usage is not None and before is not None and usage.cpu_s - before.cpu_s >= BUSY_SHARE * span
        if works:
            self.works_at = now
        was_ready = companion.health.ready
        if open_to_all:
            bind = "bind it to 127.0.0.1, by --host 127.0.0.1 with many servers, or allow it with --beside-public"
            self._fail(companion, f"listens on all addresses ({open_to_all}): {bind}", refused=True)
        elif why := companion.health.note(answer, works, now):
            self._fail(companion, why)
        elif companion.health.ready and not was_ready and companion.beside.health:
            seconds = now - companion.health.began
            print_message(f"the companion `{companion.beside.name}` is ready after {duration(seconds)}")
            fields = CompanionReady(companion=companion.beside.name, seconds=round(seconds, 3))
            self._events.emit("companion_ready", **fields)


def _untold(_: str) -> None: ...


def listens_on_all(pid: int) -> str:
    """The address on which the process, or one below it, listens for everybody, "" if there is none."""
    for each in process_tree(pid):
        try:
            for socket in psutil.Process(each).net_connections(kind="tcp"):
                if socket.status == psutil.CONN_LISTEN and socket.laddr.ip in ("0.0.0.0", "::"):  # noqa: S104
                    return f"{socket.laddr.ip}:{socket.laddr.port}"
        except (psutil.Error, OSError):
            continue
    return ""
