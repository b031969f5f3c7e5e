"""The whole agent: loop, journal, HTTP server and orders to Slurm, from the start to the end."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from opsd.agent import collectors
from opsd.agent.actions import Drainer, Executor
from opsd.agent.heap import Trim
from opsd.agent.incident_manager import IncidentManager, Listener
from opsd.agent.journal import Journal
from opsd.agent.judge import Judge
from opsd.agent.kept_window import KeptWindowError, SavedWindow, newest
from opsd.agent.lifecycle import PATIENCE_S, SOCKET, WRITE_S, Order
from opsd.agent.logs import Log
from opsd.agent.loop import Loop
from opsd.agent.metrics import brief_samples, log_samples, reload_samples
from opsd.agent.notify import Annotator, Announcer, Notifications
from opsd.agent.web.access import WebConfig, WebConfigError, load
from opsd.agent.web.admission import own_hosts
from opsd.agent.web.app import App
from opsd.agent.web.fleet import PeerError, Peers, connect
from opsd.agent.web.history import History
from opsd.agent.web.ledgers import Ledgers, RunSeconds
from opsd.agent.web.server import Server
from opsd.agent.window import Window
from opsd.collectors import plugins, witnesses
from opsd.collectors.base import Sample
from opsd.collectors.nvml import NvmlSettings, PowerControl
from opsd.collectors.ranks import RanksSettings
from opsd.collectors.slurm import SlurmSettings
from opsd.config import ConfigError, Settings
from opsd.launch.io.control import ControlServer
from opsd.launch.io.loop import Loop as SocketLoop
from opsd.runbooks import RUNBOOKS
from opsd.slurm.connect import choose
from opsd.slurm.deferred import DeferredUpdates, SlurmDrainer, keep_applying
from opsd.words import printable


def sd_notify(state: str, env: Mapping[str, str] = os.environ) -> None:
    """Send ``state`` ("READY=1", "WATCHDOG=1", "STOPPING=1"); does nothing where systemd is not listening."""
    address = env.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram:
        datagram.setblocking(False)
        datagram.sendto(state.encode(), address)


def runtime_folder(env: Mapping[str, str] = os.environ) -> Path | None:
    """The service's folder in memory (``RuntimeDirectory=``), which outlives a killed agent; None without systemd."""
    folder = env.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    return Path(folder) if folder else None


class ListenError(Exception):
    """The address cannot be listened on; the message is the reason."""


class Daemon:
    """The agent. It listens from the beginning, answers once it runs, and ``read``s its settings again if ``wanted``.

    Raises ConfigError for a web configuration that cannot be used, ListenError, and InUseError if another agent has the
    journal.
    """

    def __init__(self, settings: Settings, log: Log, read: Callable[[], Settings], wanted: threading.Event) -> None:
        self._log = log
        web, peers = web_parts(settings)
        agent = settings.agent
        try:
            self._server = Server(agent.listen, log, web, own_hosts(agent.node, agent.names))
        except OSError as error:
            raise ListenError(error.strerror) from error
        self._journal = Journal(agent.state_dir, self._say, memory=runtime_folder())
        self._loop, incident_manager = _loop(settings, self._journal, log)
        self._incident_manager, self._history, self._orders = incident_manager, History(), Orders(log)
        self._control = Control(incident_manager, self._journal, log)
        self._reloader, self._trim = Reloader(settings, read, self._apply, log, wanted), Trim()
        self._loop.others += self._server.samples, self._reloader.samples, lambda: log_samples(log.lost())
        self._loop.others.append(
            lambda: brief_samples(incident_manager.current, incident_manager.policy.mode_of, agent.node)
        )
        ledgers = Ledgers()
        if agent.run_seconds:
            seconds = RunSeconds(ledgers)
            self._loop.others.append(lambda: seconds.samples(self._loop.snapshot))
        self._facts = {"node": agent.node, "started_at": time.time(), **_policy_facts(settings)}
        self._app = App(
            lambda: self._loop.snapshot, self._facts, stale_s=max(5.0, 3 * agent.interval_s), history=self._history,
            ledgers=ledgers, job_nodes=peers.jobs if peers else None, fleet=peers.fleet if peers else None,
            config=self._reloader.status, job_label=agent.job_label,
        )  # fmt: skip
        self._orders.take(settings)

    def run(self, stop: threading.Event) -> None:
        """Run until ``stop`` is set."""
        self._server.start(self._app)
        self._log.info("agent started", listen=self._server.address, **self._facts)
        sd_notify("READY=1")
        self._loop.run(stop, after_tick=self._after_tick)
        sd_notify("STOPPING=1")
        self._server.close()
        self._control.close()
        self._loop.keep_window()
        self._journal.close()
        self._log.info("agent stopped")

    def _say(self, problem: str) -> None:
        """When writing the journal fails, and when it works again."""
        if problem:
            self._log.error("journal is not written", problem=problem)
        else:
            self._log.info("journal is written", folder=str(self._journal.path.parent))

    def _after_tick(self) -> None:
        sd_notify("WATCHDOG=1")
        self._control.after_tick()
        self._history.note(self._loop.snapshot)
        self._trim.if_due(self._loop.snapshot.at)
        if self._reloader.due():
            sd_notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
            self._reloader.reload()
            sd_notify("READY=1")

    def _apply(self, old: Settings, new: Settings) -> None:
        """Go on with ``new`` settings instead of the ``old`` ones, but for most of ``[agent]``. For the loop's thread.

        Collectors are made again only if one of their sections has changed, so that no history is lost otherwise.
        """
        web, peers = web_parts(new)
        changed = any(getattr(old, plugin.name) != getattr(new, plugin.name) for plugin in plugins())
        made = collectors.build(new, new.agent.state_dir) if changed else None
        judge, announcer = _judge(new, self._log), _announcer(new, self._log)
        executor, listeners = _executor(new, announcer), _listeners(new, self._log)
        if made is not None:
            self._loop.replace_collectors(made)
        self._loop.replace_judge(judge)
        for former in self._incident_manager.replace_policy(judge, executor, new.policy, listeners, announcer):
            if isinstance(former, Announcer | Annotator):
                former.close()
        self._server.web, self._server.hosts = web, own_hosts(new.agent.node, new.agent.names)
        self._app.job_nodes, self._app.fleet = (peers.jobs, peers.fleet) if peers else (None, None)
        self._facts.update(_policy_facts(new))
        self._orders.take(new)


def _policy_facts(settings: Settings) -> dict[str, object]:
    """The settings that pages and the API show, and that a reload may change."""
    cost = settings.cost
    return {"mode": settings.policy.mode, "gpu_hour": cost.gpu_hour, "currency": cost.currency}


def web_parts(settings: Settings) -> tuple[WebConfig, Peers | None]:
    """Certificate and passwords of the server, and what asks other agents. Raises ConfigError."""
    try:
        web = load(settings.agent.web_config) if settings.agent.web_config else WebConfig()
        return web, connect(settings)
    except (WebConfigError, PeerError) as error:
        raise ConfigError(str(error)) from error


def _drainer(settings: Settings) -> Drainer:
    """Drains this node through this machine's Slurm, which is looked up on use, and orders its repair if it may."""
    slurm = cache(lambda: choose().slurm)
    updates = DeferredUpdates(settings.agent.state_dir)
    drain = SlurmDrainer(slurm, settings.agent.node, settings.policy, updates)
    if settings.policy.repair == "observe":
        return drain
    from opsd.repair.case_file import Ordering  # most agents order nothing

    return Ordering(drain, settings.agent.state_dir, acting=settings.policy.repair == "act")


def _announcer(settings: Settings, log: Log) -> Announcer:
    notifier = Notifications(log, settings.notify.receiver)
    return Announcer(notifier, settings.agent.node, log, settings.policy.mode_of)


def _listeners(settings: Settings, log: Log) -> list[Listener]:
    """The listeners of every change of an incident: Grafana."""
    notify = settings.notify
    if not notify.grafana_url:
        return []
    return [Annotator(notify.grafana_url, notify.grafana_token_file, settings.agent.node, log)]


def _executor(settings: Settings, announcer: Announcer) -> Executor:
    nvml, node = settings.section(NvmlSettings), settings.agent.node
    return Executor(
        shm=settings.section(RanksSettings).root,
        notify=announcer.wait,
        set_power_limit=PowerControl(nvml.library).set_power_limit if nvml.enabled else None,
        drain_node=_drainer(settings) if settings.policy.drain else None,
        comment_job=lambda job, text: choose().slurm.summarize(job, text, f"idle {node}"),
    )


def _judge(settings: Settings, log: Log) -> Judge:
    return Judge(RUNBOOKS, log, hold_s=settings.policy.reopen_within_s, max_relapses=settings.policy.max_relapses)


def _loop(settings: Settings, journal: Journal, log: Log) -> tuple[Loop, IncidentManager]:
    """The loop with everything connected, before the first collection."""
    agent, policy = settings.agent, settings.policy
    announcer, judge = _announcer(settings, log), _judge(settings, log)
    incident_manager = IncidentManager(
        judge, _executor(settings, announcer), journal, log, policy=policy,
        started_at=time.time(), listeners=_listeners(settings, log), announce=announcer,
    )  # fmt: skip
    window = Window(agent.node, seconds=agent.window_s, interval_s=agent.interval_s, witnesses=witnesses())
    saved = SavedWindow(runtime_folder())
    try:
        if past := newest((incident_manager.kept_window, saved.read()), window.ticks, time.monotonic()):
            window.go_on(past)
    except KeptWindowError as error:
        log.warning("window begins empty", reason=str(error))
    incident_manager.kept_window = b""
    made = collectors.build(settings, agent.state_dir)
    loop = Loop(
        window, made, judge, incident_manager, journal, log,
        interval_s=agent.interval_s, deadline_s=agent.deadline_s, saved=saved,
    )  # fmt: skip
    return loop, incident_manager


class Orders:
    """Executes pending drain orders once Slurm answers again.

    Only an agent that is root or may drain accepts orders, as Slurm would refuse those of any other.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._stop = threading.Event()

    def take(self, settings: Settings) -> None:
        """From now on, by the rules of these settings."""
        self._stop.set()
        self._stop = threading.Event()
        if not settings.section(SlurmSettings).enabled:
            return
        updates = DeferredUpdates(settings.agent.state_dir)
        if os.geteuid() == 0 or settings.policy.drain:
            updates.enable()
        else:
            updates.disable()
        parts = (updates, cache(lambda: choose().slurm), settings.policy, self._say, self._stop)
        threading.Thread(target=keep_applying, args=parts, name="slurm-orders", daemon=True).start()

    def _say(self, sentence: str) -> None:
        self._log.warning("order to Slurm", outcome=sentence)


AT_ONCE = frozenset({"names", "web_config", "peer_ca_file", "peer_credentials_file"})
"""Keys of ``[agent]`` that a reload applies. The others take effect when the agent starts again."""


class Reloader:
    """Applies the configuration that ``read`` returns, once it is ``wanted``.

    ``apply`` gets the settings in force and the new ones. Both may raise ConfigError: then nothing has changed, and
    log, metrics and status say why.
    """

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings],
        apply: Callable[[Settings, Settings], None],
        log: Log,
        wanted: threading.Event,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._read, self._apply = settings, read, apply
        self._log, self._wanted, self._wall = log, wanted, wall
        self._attempts, self._loaded_at = 0, wall()
        self._problem = ""
        self._waiting: tuple[str, ...] = ()

    def due(self) -> bool:
        """Whether a reload is wanted; it is not from now on."""
        wanted = self._wanted.is_set()
        self._wanted.clear()
        return wanted

    def reload(self) -> None:
        """Read the configuration and apply it."""
        try:
            read = self._read()
            new = without_restart(self._settings, read)
            self._apply(self._settings, new)
        except ConfigError as error:
            self._problem = str(error)
            self._log.error("configuration refused, the old one stays", problem=self._problem)
        except Exception as error:
            self._problem = f"a bug in opsd: {type(error).__name__}"
            self._log.exception("configuration refused, the old one stays", problem=self._problem)
        else:
            self._settings, self._problem, self._loaded_at = new, "", self._wall()
            self._waiting = needs_restart(new, read)
            self._log.info("configuration reloaded", needs_restart=", ".join(self._waiting))
        self._attempts += 1

    def status(self) -> dict[str, object]:
        """For the API: the number of ``reloads`` tried, when the settings in force were loaded, and what is wrong."""
        return {
            "reloads": self._attempts,
            "loaded_at": self._loaded_at,
            "problem": self._problem,
            "needs_restart": list(self._waiting),
        }

    def samples(self) -> Iterator[Sample]:
        """The metrics of the configuration."""
        return reload_samples(self._problem, self._loaded_at)


def without_restart(running: Settings, read: Settings) -> Settings:
    """The settings that were ``read``, but for the keys that take effect only when the agent starts again."""
    at_once = {key: getattr(read.agent, key) for key in AT_ONCE}
    return read.model_copy(update={"agent": running.agent.model_copy(update=at_once)})


def needs_restart(running: Settings, read: Settings) -> tuple[str, ...]:
    """The keys in which the settings that were ``read`` differ from those that the agent runs with."""
    keys = type(running.agent).model_fields
    return tuple(f"agent.{key}" for key in keys if getattr(running.agent, key) != getattr(read.agent, key))


MAX_NAME: Final = 64
MAX_REASON: Final = 500
MAX_FOR_S: Final = 366 * 86_400.0


class Control:
    """Takes orders from a Unix socket in the state folder, in its own thread. The incident manager carries them out.

    Root and the agent's own user acknowledge and close incidents by it.
    It opens once the journal can be written: the journal's lock then keeps a second agent off the same folder.
    ``after_tick`` is for the thread of the loop.
    """

    def __init__(
        self, incident_manager: IncidentManager, journal: Journal, log: Log, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._incident_manager, self._journal, self._log = incident_manager, journal, log
        self._patience_s = patience_s
        self._order: Order | None = None
        self._carried_out = threading.Event()
        self._loop: SocketLoop | None = None
        self._server: ControlServer | None = None

    @property
    def path(self) -> Path:
        """The path of the socket."""
        return self._journal.path.with_name(SOCKET)

    def after_tick(self) -> None:
        """Open the socket once that is possible, and answer who waits for an order that is carried out."""
        if self._loop is None and not self._journal.problem:
            self._loop = SocketLoop()
            self._server = ControlServer(self.path, self._loop, self._handle, self._say)
            threading.Thread(target=self._loop.run, name="control", daemon=True).start()
        order = self._order
        if order is not None and (order.done or order.error):
            self._carried_out.set()

    def close(self) -> None:
        """Remove the socket."""
        if self._loop is not None and self._server is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self.path.unlink(missing_ok=True)

    def _say(self, problem: str) -> None:
        self._log.warning("incidents cannot be acknowledged", problem=problem)

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        order = parse(request)
        if isinstance(order, str):
            return {"ok": False, "error": order}
        self._carried_out.clear()
        self._order = order
        self._incident_manager.orders.put(order)
        if not self._carried_out.wait(self._patience_s):
            return {"ok": False, "error": "the agent's loop hangs; it does this as soon as it goes on"}
        if order.error:
            return {"ok": False, "error": order.error}
        written = self._journal.flush(WRITE_S) and not self._journal.problem
        lost = "" if written else f"; not in the journal yet: {self._journal.problem or 'the disk is slow'}"
        return {"ok": True, "said": order.done + lost}


def parse(request: dict[str, Any]) -> Order | str:
    """The order in ``request``, or what is wrong with it in one sentence."""
    verb, incident, by = (request.get(name) for name in ("cmd", "incident", "by"))
    if verb not in ("ack", "close"):
        return f"an agent knows the commands ack and close, not {verb!r}"
    if not isinstance(incident, str) or not incident:
        return "the incident has no id"
    if not isinstance(by, str) or not (name := printable(by).strip()) or len(name) > MAX_NAME:
        return f"a name has 1 to {MAX_NAME} characters"
    if verb == "ack":
        for_s = request.get("for_s")
        if for_s is None:
            return Order("ack", incident, name)
        if not isinstance(for_s, int | float) or not math.isfinite(for_s) or not 0 < for_s <= MAX_FOR_S:
            return "the time is not between a second and a year"
        return Order("ack", incident, name, for_s=float(for_s))
    said = request.get("reason")
    if not isinstance(said, str) or not (reason := printable(said).strip()) or len(reason) > MAX_REASON:
        return f"a reason has 1 to {MAX_REASON} characters"
    return Order("close", incident, name, reason=reason)
