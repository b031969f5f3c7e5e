"""The agent's HTTP server: GET and HEAD only, loopback by default.

One thread serves all connections and waits for none of them; others answer complete and authenticated requests. Each
peer (a user of this machine, or an address) has a share of the connections and of the threads, and each connection a
few seconds. So a client that is slow, silent or greedy costs itself an answer and nobody else.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs, urlsplit

import h11

from opsd.agent.logs import Log
from opsd.agent.metrics import http_samples
from opsd.agent.web.access import WebConfig
from opsd.agent.web.admission import Budget, Budgets, Hosts, oldest, peer_of, too_much
from opsd.agent.web.app import Answer, App, Request, problem, readable
from opsd.agent.web.connection import Connection, Stage, UncertifiedError
from opsd.collectors.base import Sample
from opsd.threads import FairQueue

MAX_CONNECTIONS: Final = 256
MAX_PER_PEER: Final = 64
HEADER_S: Final = 2.0
"""A request's header, and the TLS handshake before it, must be complete after this many seconds."""
CONNECTION_S: Final = 5.0
"""A connection is closed after this many seconds in any case."""
PASSWORDS: Final = 10, 1.0
HANDSHAKES: Final = 20, 10.0
"""How many a peer may try at once, and then in a second: a handshake takes this thread milliseconds."""
MAX_UNSENT: Final = 16 << 20
"""Bytes of different answers that clients have not taken yet."""
POLL_S: Final = 0.2
"""Interval of checks of connections while there are any, in seconds."""
PAUSE_S: Final = 0.5
"""Seconds without accepting connections after the process had no descriptors left."""
REFUSALS: Final = ("slow", "share", "full", "password", "certificate", "host", "malformed")
"""Why connections are closed and requests refused: the client was too slow, its peer has more than its share (of the
connections, TLS handshakes, processor time or memory), there are too many in total, a wrong password or too many
attempts, no certificate or one that is not accepted, another host's name, no HTTP."""
_AT_ONCE = 32
"""Connections accepted before those that are open get their turn."""


class Server:
    """Listens on ``listen`` ("127.0.0.1:9477", "[::1]:9477") at once, and answers from ``start`` to ``close``.

    ``web`` has certificate and passwords and may be replaced at any time; without it every client is answered,
    unencrypted. ``hosts`` are the names that are answered without TLS. ``refused`` counts by reason. ``budgets`` are
    what peers may cost.

    Raises OSError if the address cannot be listened on.
    """

    app: App

    def __init__(
        self,
        listen: str,
        log: Log,
        web: WebConfig | None = None,
        hosts: Hosts | None = None,
        *,
        budgets: Budgets | None = None,
    ) -> None:
        self.log = log
        self.web = web or WebConfig()
        self.hosts = hosts or Hosts()
        self.refused: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, int(port)), family=family, backlog=MAX_CONNECTIONS)
        self._listener.setblocking(False)
        host, self.server_port, *_ = self._listener.getsockname()
        self.address = f"[{host}]:{self.server_port}" if ":" in host else f"{host}:{self.server_port}"
        """Host and port in use, for instance after listening on port 0."""
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._open: dict[Connection, None] = {}
        self._of_peer: Counter[str] = Counter()
        self._attempts, self._handshakes = Budget(*PASSWORDS), Budget(*HANDSHAKES)
        self._answers: deque[tuple[Connection, Answer]] = deque()
        self._quick, self._slow = FairQueue("http", 4, share=3), FairQueue("http-pages", 2, share=1)
        self._dear = FairQueue("http-dear", 1, share=1)
        self._budgets = budgets or Budgets()
        self._passwords = FairQueue("http-passwords", 1, share=1)
        self._accept_at = 0.0
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def start(self, app: App) -> None:
        """Answer requests with ``app``, including those that are already waiting."""
        self.app = app
        self._thread.start()

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._open)

    def samples(self) -> Iterator[Sample]:
        """The server's metrics."""
        return http_samples(self.connections, dict(self.refused))

    def close(self) -> None:
        """Stop serving and close all connections."""
        self._closing = True
        self._rouse()
        if self._thread.is_alive():
            self._thread.join(1.0)
        for queue in (self._quick, self._slow, self._dear, self._passwords):
            queue.close()
        for each in (self._listener, self._wake, self._woken):
            each.close()

    # -- the thread of the connections ---------------------------------------------------------------------------

    def _serve(self) -> None:
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._woken, selectors.EVENT_READ)
            self._selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing:
                try:
                    self._turn()
                except Exception:
                    self.log.exception("a bug in the HTTP server")
                    time.sleep(POLL_S)
            for connection in [*self._open]:
                self._close(connection)

    def _turn(self) -> None:
        """Do what is possible now; waits for something to do."""
        for key, _ in self._selector.select(POLL_S if self._open or self._accept_at else None):
            if key.data is not None:
                self._proceed(key.data)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
        while self._answers:
            connection, answer = self._answers.popleft()
            self.refused["password"] += answer[0] is HTTPStatus.UNAUTHORIZED
            self.refused["share"] += answer[0] is HTTPStatus.TOO_MANY_REQUESTS
            if connection.open:
                for late in too_much(self._open, answer[1], MAX_UNSENT):
                    self._refuse(late, "share")
                self._proceed(connection, answer)
        self._close_late(time.monotonic())

    def _connection(self, raw: socket.socket, peer: str) -> Connection:
        if self.web.context is None:
            return Connection(raw, peer, time.monotonic())
        from opsd.agent.web.tls import TlsConnection

        return TlsConnection(raw, peer, self.web.context, time.monotonic())

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                raw, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause()
                    return
                continue
            try:
                peer = peer_of(raw)
                tls = self.web.context is not None
                if not self._budgets.may_connect(peer) or (tls and not self._handshakes.allow(peer)):
                    self.refused["share"] += 1
                    raw.close()
                    continue
                self._make_room(peer)
                connection = self._connection(raw, peer)
            except OSError:  # it has gone already
                raw.close()
                continue
            self._open[connection] = None
            self._of_peer[peer] += 1
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
            self._proceed(connection)

    def _pause(self) -> None:
        """Accept nothing for a while: a connection that cannot be accepted would keep this thread busy."""
        self._accept_at = time.monotonic() + PAUSE_S
        self._selector.unregister(self._listener)
        if self._open:
            self._refuse(oldest(self._open), "full")

    def _make_room(self, peer: str) -> None:
        """Close a connection of ``peer`` if it has its share, or one of the peer with most if there are too many."""
        if self._of_peer[peer] >= MAX_PER_PEER:
            self._refuse(oldest(c for c in self._open if c.peer == peer), "share")
        elif len(self._open) >= MAX_CONNECTIONS:
            ((busiest, _),) = self._of_peer.most_common(1)
            self._refuse(oldest(c for c in self._open if c.peer == busiest), "full")

    def _proceed(self, connection: Connection, answer: Answer | None = None) -> None:
        """Read or write what is possible now; ``answer`` is there once there is one."""
        try:
            if answer is not None:
                connection.answer(*answer)
            if connection.stage is Stage.READING and (request := connection.receive()) is not None:
                self._admit(connection, request)
            if connection.stage is Stage.WRITING and connection.send():
                self._close(connection)
                return
        except h11.RemoteProtocolError as error:
            self.refused["malformed"] += 1
            self._give_up(connection, HTTPStatus(error.error_status_hint), "not HTTP that can be understood")
            return
        except UncertifiedError:
            self._refuse(connection, "certificate")
            return
        except connection.malformed:
            self._refuse(connection, "malformed")
            return
        except OSError:  # the client has gone
            self._close(connection)
            return
        except Exception:
            self.log.exception("a bug in the HTTP server", peer=connection.peer)
            self._close(connection)
            return
        self._await(connection)

    def _await(self, connection: Connection) -> None:
        """Tell the selector what the connection waits for."""
        registered = self._selector.get_map().get(connection.socket)
        if not connection.events:
            self._selector.unregister(connection.socket)
        elif registered is None:
            self._selector.register(connection.socket, connection.events, connection)
        elif registered.events != connection.events:
            self._selector.modify(connection.socket, connection.events, connection)

    def _give_up(self, connection: Connection, status: HTTPStatus, text: str) -> None:
        """Say what is wrong, if the client takes it at once, and close."""
        with suppress(OSError, h11.LocalProtocolError):
            connection.answer(*problem(status, text))
            connection.send()
        self._close(connection)

    def _close_late(self, now: float) -> None:
        for connection in [*self._open]:
            age_s = now - connection.opened_at
            if age_s < HEADER_S:
                break  # the others are younger
            if connection.stage is Stage.READING or (age_s >= CONNECTION_S and connection.stage is Stage.WRITING):
                self._refuse(connection, "slow")
            elif age_s >= CONNECTION_S:
                self._close(connection)
        if self._accept_at and now >= self._accept_at:
            self._accept_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _refuse(self, connection: Connection, reason: str) -> None:
        self.refused[reason] += 1
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        if connection not in self._open:
            return
        del self._open[connection]
        self._of_peer[connection.peer] -= 1
        if not self._of_peer[connection.peer]:
            del self._of_peer[connection.peer]
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()

    # -- requests ------------------------------------------------------------------------------------------------

    def _admit(self, connection: Connection, asked: h11.Request) -> None:
        """Refuse the request, or have it answered in another thread: first the password, then the rest."""
        headers = _headers(asked)
        if asked.method not in (b"GET", b"HEAD"):
            connection.answer(*problem(HTTPStatus.NOT_IMPLEMENTED, "only GET and HEAD: the agent can only be read"))
            return
        try:
            request = _request(asked, headers)
        except ValueError:
            connection.answer(*problem(HTTPStatus.BAD_REQUEST, "not an address that can be understood"))
            return
        if self.web.context is None and not self.hosts.admit(headers.get("host", "")):
            self.refused["host"] += 1
            said = f"this agent has another name than {headers['host']!r}; agent.names has those that it answers to"
            connection.answer(*readable(request, problem(HTTPStatus.MISDIRECTED_REQUEST, said)))
            return
        password = headers.get("authorization", "")
        if self.web.recalls(password):
            self._start(connection, request)
        elif not password:
            connection.answer(*_unauthorized())
        elif not self._attempts.allow(connection.peer):
            self.refused["password"] += 1
            connection.answer(*problem(HTTPStatus.TOO_MANY_REQUESTS, "too many passwords; try again in some seconds"))
        else:
            check = partial(self._check_password, connection, request, password)
            self._passwords.submit(connection.peer, check, lambda: connection.open)

    # -- the other threads ---------------------------------------------------------------------------------------

    def _check_password(self, connection: Connection, request: Request, password: str) -> None:
        if self.web.admits(password):
            self._start(connection, request)
        else:
            self._finish(connection, _unauthorized())

    def _start(self, connection: Connection, request: Request) -> None:
        if self.app.is_cheap(request):
            queue, work = self._quick, self._answer
        else:
            queue, work = self._slow if self.app.is_slow(request.path) else self._dear, self._answer_dearly
        queue.submit(connection.peer, partial(work, connection, request), lambda: connection.open)

    def _answer_dearly(self, connection: Connection, request: Request) -> None:
        """Answer at the expense of the peer. Afterwards the thread rests, so that it takes half of a core at most."""
        if not self._budgets.may_ask(connection.peer):
            said = "the last answers have taken too much processor time; try again in some seconds"
            self._finish(connection, readable(request, problem(HTTPStatus.TOO_MANY_REQUESTS, said)))
            return
        began = time.thread_time()
        self._answer(connection, request)
        used_s = time.thread_time() - began
        self._budgets.charge(connection.peer, used_s)
        time.sleep(used_s)

    def _answer(self, connection: Connection, request: Request) -> None:
        try:
            answer = self.app(request)
        except Exception:
            self.log.exception("request failed", path=request.path)
            said = "a bug in opsd; the agent's log has more"
            answer = readable(request, problem(HTTPStatus.INTERNAL_SERVER_ERROR, said))
        self._finish(connection, answer)

    def _finish(self, connection: Connection, answer: Answer) -> None:
        self._answers.append((connection, answer))
        self._rouse()

    def _rouse(self) -> None:
        with suppress(OSError):  # full: it is awake, closed: it needs no waking
            self._wake.send(b"\0")


def _headers(request: h11.Request) -> dict[str, str]:
    """The headers by their names in lower case; of several with one name the first."""
    found: dict[str, str] = {}
    for name, value in request.headers:
        found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return found


def _request(asked: h11.Request, headers: dict[str, str]) -> Request:
    """The parsed request. Raises ValueError for an invalid address, or one with too many parameters."""
    url = urlsplit(asked.target.decode("latin-1"))
    query = parse_qs(url.query, max_num_fields=20)
    return Request(url.path, query, headers.get("accept", ""), headers.get("accept-encoding", ""))


def _unauthorized() -> Answer:
    status, body, headers = problem(HTTPStatus.UNAUTHORIZED, "this agent asks for a user and a password")
    return status, body, {**headers, "WWW-Authenticate": 'Basic realm="opsd", charset="UTF-8"'}
