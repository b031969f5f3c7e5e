"""What the leader of a run says on its stderr: how the run begins, each failure, and how it went on afterwards.

A failure and its restart are two lines. The text of the opening is made by ``opening_block``.
"""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from opsd.files import SYSTEM_FILE, read_settings
from opsd.launch.io.reporting import Tone, print_message
from opsd.launch.io.run_log import EventRecord, EventText, RunEventLog, names, without_numbers
from opsd.launch.run.notices import Notices

DEFAULT_LISTEN = "127.0.0.1:9477"
"""``agent.listen`` where no file says otherwise."""
_CONNECT_S = 0.2
_EVERYWHERE = ("0.0.0.0", "[::]", "", "*")  # noqa: S104  # compared with, not listened on


class Announcer:
    """A ``RunEventLog`` that passes everything on to ``log`` and tells people what they want to know.

    Those at the terminal by ``say``, the others by ``notices``.

    ``opening`` makes the opening block from the event of the first generation; it is None in a launcher that takes over
    a run which has begun.
    """

    def __init__(
        self,
        log: RunEventLog,
        opening: Callable[[EventRecord], str] | None,
        notices: Notices,
        say: Callable[[str, Tone], None] = lambda text, tone: print_message(text, tone=tone),
    ) -> None:
        self._log = log
        self._opening = opening
        self._notices = notices
        self._say = say
        self._nodes: tuple[str, ...] = ()
        self._moved = ""
        self._loaded: EventRecord | None = None
        self._resumed = 0

    @property
    def generation(self) -> int:
        """The generation that runs."""
        return self._log.generation

    @generation.setter
    def generation(self, number: int) -> None:
        self._log.generation = number

    def emit(self, event: str, age_s: float = 0.0, /, **fields: object) -> None:
        self._log.emit(event, age_s, **fields)
        self._note({"event": event, "generation": self.generation, **fields})

    def relay(self, record: Mapping[str, Any], age_s: float) -> None:
        self._log.relay(record, age_s)
        self._note(record)

    def interrupted(self, why: str) -> None:
        """Ranks or a node have failed, which is ``why`` all ranks are restarted."""
        self._say(f"{why}; restarting all ranks", "bad")
        self._notices.interrupted(why)

    def _note(self, event: EventRecord) -> None:
        kind = event["event"]
        if kind == "generation_started" and "nodes" in event:
            self._begun(event)
        elif kind == "checkpoint_loaded" and not event.get("rank"):
            self._loaded = event
        elif kind == "resumed" and event.get("generation") == self.generation != self._resumed:
            self._resumed = self.generation
            how = f"{restarted(event, self._loaded)}{self._moved}"
            self._say(f"restarted: {how}", "good")
            self._notices.resumed(how, int(event.get("lost_steps") or 0))
        elif kind == "segment_split":
            self._say(EventText().sentence(event), "bad")
        elif kind in ("restart_requested", "node_retired"):
            self._notices.interrupted(EventText().sentence(event))

    def _begun(self, event: EventRecord) -> None:
        nodes = tuple(map(str, event["nodes"]))
        came, went = [n for n in nodes if n not in self._nodes], [n for n in self._nodes if n not in nodes]
        self._moved = f"; {names(came)} took the place of {names(went)}" if came and went else ""
        self._moved = self._moved or (f"; without {names(went)}" if went else "")
        self._nodes, self._loaded = nodes, None
        if self._opening is None:
            self._notices.ranks_started()
        else:
            self._say(self._opening(event), "title")
            self._notices.began(event)
            self._opening = None


def restarted(event: EventRecord, loaded: EventRecord | None) -> str:
    """How a run went on, from its event ``resumed`` and the checkpoint that it has ``loaded``."""
    if event.get("step") is None:
        return without_numbers(event)
    lost = int(event.get("lost_steps") or 0)
    again = f"{lost:,} step{'s are' if lost != 1 else ' is'} done again" if lost else "no step is lost"
    seconds = float(event.get("recovered_s") or 0.0)
    source = f" from the checkpoint of step {loaded.get('step')}" if loaded is not None else ""
    return f"it goes on with step {event.get('step')}{source} after {seconds:.1f} s; {again}"


def opening_block(run: str, event: EventRecord, *, folder: Path, logs: Path, page: str, resume: str) -> str:
    """The first words of a run: its shape, where its files are, how to look at it and how to go on later."""
    nodes: Sequence[object] = event.get("nodes") or ()
    spares: Sequence[object] = event.get("spares") or ()
    ranks = int(event.get("world_size") or 0)
    shape = f"{ranks:,} rank{'s' * (ranks != 1)} on {names(nodes)}"
    lines = {
        "spares": names(spares),
        "folder": str(folder),
        "logs": str(logs),
        "page": page,
        "resume": resume,
    }
    return "\n".join([f"{run}: {shape}", *(f"  {name:<10}{text}" for name, text in lines.items() if text)])


def agent_page(run: str, node: str, environ: Mapping[str, str] = os.environ, system: Path = SYSTEM_FILE) -> str:
    """The URL of the run on its node's agent; "" if none listens."""
    file = Path(environ.get("OPSD_CONFIG") or system)
    settings: Any = {}
    with suppress(OSError, ValueError):
        if file.is_file():  # a pipe can be read only once
            settings = tomllib.loads(read_settings(file).decode()).get("agent", {})
    settings = settings if isinstance(settings, dict) else {}
    listen = str(settings.get("listen", DEFAULT_LISTEN))
    host, _, port = listen.rpartition(":")
    everywhere = host in _EVERYWHERE
    try:
        with socket.create_connection(("127.0.0.1" if everywhere else host.strip("[]"), int(port)), _CONNECT_S):
            pass
    except (OSError, ValueError):
        return ""
    scheme = "https" if settings.get("web_config") else "http"
    return f"{scheme}://{node if everywhere else host}:{port}/job/{run}"
