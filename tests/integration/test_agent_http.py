"""The agent over real HTTP: collectors that fail, clients that mean harm, and those that take all they can get."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from opsd import exitcodes
from opsd.agent.loop import Snapshot
from opsd.agent.web import server as module
from opsd.agent.web.admission import Budget, Budgets
from opsd.agent.web.app import Answer, App, Request
from opsd.agent.web.server import CONNECTION_S, HEADER_S, MAX_PER_PEER, Server
from opsd.collectors.base import Metric, NoData, Reading, RepairFact, RepairStep, Sample
from opsd.commands.main import cli
from opsd.runbooks.base import Cost, State
from tests.fakes.clock import FakeClock, eventually
from tests.fakes.collectors import SILENT, VALUE, Agent, FakeCollector, HangingCollector, runbook
from tests.fakes.incidents import finding, incident

# The agent over real HTTP, with collectors that raise, hang and find nothing.


HOSTILE = "list[/0] [red]x\x1b[2J"

FACTS = {"node": "node", "mode": "act", "started_at": 1.0}


class RealTime(FakeClock):
    """The machine's own clocks."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


class Site:
    """A ticking agent and its server."""

    def __init__(self, agent: Agent, latest=None) -> None:
        self.agent = agent
        app = App(latest or (lambda: agent.loop.snapshot), FACTS, stale_s=5.0)
        self.server = Server("127.0.0.1:0", SILENT)
        self.server.start(app)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=agent.loop.run, args=(self.stop,), daemon=True)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        host, _, port = self.server.address.rpartition(":")
        connection = HTTPConnection(host, int(port), timeout=20)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        try:
            return answer.status, answer.read()
        finally:
            connection.close()

    def json(self, path: str):
        return json.loads(self.get(path)[1])

    def series(self) -> dict[str, float]:
        """Every series by its name and label values, in the order of the labels' names."""
        text = self.get("/metrics")[1].decode()
        return {
            f"{s.name}{{{','.join(s.labels.values())}}}": s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    hanging = HangingCollector("driver")
    lost = FakeCollector("gpus", lambda: Reading((Sample(VALUE, 0.0, ("lost",)),)))

    def broken() -> Reading:
        raise OSError("sensor unplugged")

    collectors = [
        FakeCollector("source"), FakeCollector("broken", broken), hanging, lost,
        FakeCollector("absent", lambda: NoData("no such device")),
    ]  # fmt: skip
    books = [runbook(detect=lambda view: [finding(summary=HOSTILE, cost=Cost(text="é", gpu_seconds=float("nan")))])]
    agent = Agent(tmp_path, collectors, books, mode="observe", clock=RealTime(), interval_s=0.05, deadline_s=0.2)
    found = Site(agent)
    found.thread.start()
    yield found
    hanging.release.set()
    found.stop.set()
    found.thread.join(20)
    found.server.close()


def test_every_collector_shows_as_what_it_is(site: Site) -> None:
    """One that raises, one that hangs and one without hardware cost the others nothing and are never healthy."""
    states = ("ok", "no_data", "error", "hung")

    def state(collector: str) -> str:
        series = site.series()
        return next((s for s in states if series.get(f"opsd_collector_state{{{collector},{s}}}") == 1), "")

    assert eventually(lambda: state("driver") == "hung")
    assert [state(name) for name in ("source", "broken", "absent", "gpus")] == ["ok", "error", "no_data", "ok"]
    series = site.series()
    assert [series[f"opsd_collector_up{{{n}}}"] for n in ("source", "broken", "driver", "absent")] == [1, 0, 0, 0]
    assert series["opsd_collector_errors_total{broken}"] >= 1
    assert "opsd_fake_value{source}" in series
    assert "opsd_fake_value{driver}" not in series
    said = {c["name"]: c["reason"] for c in site.json("/api/v1/status")["collectors"]}
    assert said["broken"] == "OSError: sensor unplugged"
    assert said["absent"] == "no such device"


def test_the_loop_ticks_on_beside_a_hanging_collector(site: Site) -> None:
    """No tick takes longer for it once it is known to hang."""
    assert eventually(lambda: site.series().get("opsd_agent_ticks_total{}", 0) > 20)
    assert site.series()["opsd_agent_tick_seconds{}"] < 0.1


def test_counters_exist_at_zero_from_the_first_scrape(site: Site) -> None:
    """A counter that first appears at one raises no alert."""
    assert eventually(lambda: site.get("/readyz")[0] == 200)
    series = site.series()
    assert series["opsd_runbook_errors_total{trouble}"] == 0
    assert series["opsd_actions_total{ok,kill_process}"] == 0
    assert series["opsd_incidents{,trouble,,critical,escalated}"] == 0


def test_incidents_are_served_as_promised(site: Site) -> None:
    """The fields of the API, newest first, by state, with a limit; numbers that JSON does not have become null."""
    assert eventually(lambda: bool(site.json("/api/v1/incidents")["incidents"]))
    (incident,) = site.json("/api/v1/incidents?state=open&limit=5")["incidents"]
    promised = "id kind severity state summary culprit confidence evidence cost opened_at last_seen_at resolved_at"
    assert set(promised.split()) | {"attempts", "verdict", "actions", "job"} <= set(incident)
    assert incident["culprit"] == {"component": "gpu", "node": "node", "gpu": 0, "rank": None, "detail": ""}
    assert set(incident["evidence"][0]) == {"text", "source", "at", "last"}
    assert (incident["cost"]["text"], incident["cost"]["gpu_seconds"]) == ("é", None)
    assert site.json(f"/api/v1/incidents/{incident['id']}")["id"] == incident["id"]
    assert site.json("/api/v1/incidents?state=current")["incidents"]
    assert site.json("/api/v1/incidents?state=resolved") == {"incidents": []}
    assert site.json("/api/v1/incidents?limit=0") == {"incidents": []}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/nothing", 404), ("/api/v1/incidents/none", 404), ("/api/v1/incidents/../../etc/passwd", 404),
        ("/api/v1/incidents?limit=99999999999", 200),
        ("/api/v1/incidents?limit=-1", 400), ("/api/v1/incidents?limit=x", 400), ("/", 200), ("/healthz", 200),
    ],
)  # fmt: skip
def test_paths(site: Site, path: str, status: int) -> None:
    """What does not exist is 404, what makes no sense 400, and both say so in JSON."""
    assert site.get(path)[0] == status


def test_only_reading_is_possible(site: Site) -> None:
    """HEAD has the headers alone; everything that could change something is refused."""
    assert site.get("/metrics", "HEAD") == (200, b"")
    assert {site.get("/metrics", method)[0] for method in ("POST", "PUT", "DELETE")} == {501}


def test_before_the_first_collection_the_agent_is_not_ready_and_a_stuck_loop_is_not_healthy(tmp_path: Path) -> None:
    """Readiness and health come from the loop's own progress."""
    snapshots = [Snapshot(-1, time.monotonic(), 0.0)]
    site = Site(Agent(tmp_path, [], []), latest=lambda: snapshots[-1])
    assert (site.get("/readyz")[0], site.get("/healthz")[0]) == (503, 200)
    snapshots.append(Snapshot(7, time.monotonic(), 0.0))
    assert (site.get("/readyz")[0], site.get("/healthz")[0]) == (200, 200)
    snapshots.append(Snapshot(8, time.monotonic() - 60, 0.0))
    assert (site.get("/readyz")[0], site.get("/healthz")[0]) == (503, 503)
    site.server.close()


def test_a_bug_is_an_answer(tmp_path: Path) -> None:
    """An exception while answering is a 500 and not a dropped connection."""

    def broken() -> Snapshot:
        raise ZeroDivisionError

    site = Site(Agent(tmp_path, [], []), latest=broken)
    assert site.get("/api/v1/status")[0] == 500
    site.server.close()


@pytest.mark.slow
def test_connections_that_stand_still_are_cut_off(site: Site) -> None:
    """Clients that send nothing, or never read, hold neither threads nor the agent for long."""
    host, _, port = site.server.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(module.MAX_CONNECTIONS)]
    assert eventually(lambda: _answers(site))
    for connection in silent:
        connection.settimeout(20)
        assert connection.recv(1) == b""
        connection.close()


def _answers(site: Site) -> bool:
    try:
        return site.get("/healthz")[0] == 200
    except OSError:
        return False


def test_the_command_line_prints_what_users_wrote_without_obeying_it(site: Site) -> None:
    """Markup and control characters in a summary neither colour the terminal nor break the listing."""
    assert eventually(lambda: bool(site.json("/api/v1/incidents")["incidents"]))
    id = site.json("/api/v1/incidents")["incidents"][0]["id"]
    url = f"--url=http://{site.server.address}"
    listed = CliRunner().invoke(cli, ["incidents", url], env={"COLUMNS": "300"})
    shown = CliRunner().invoke(cli, ["incidents", "show", id, url], env={"COLUMNS": "300"})
    for result in (listed, shown):
        assert result.exit_code == 0
        assert HOSTILE.replace("\x1b", " ") in result.output
    assert "absent" in CliRunner().invoke(cli, ["status", url], env={"COLUMNS": "300"}).output


def test_the_commands_show_symptoms_similar_incidents_and_sums(tmp_path: Path) -> None:
    """A root with its symptom, a past incident like it, and the sums by kind reach the terminal."""
    root = incident("root", opened_at=2.0)
    symptom = incident("symptom", kind="straggler", summary="rank 2 is slow", cause="root", opened_at=3.0)
    past = incident("past", opened_at=1.0, resolved_at=2.0, state=State.RESOLVED, attempts=1)
    snapshot = Snapshot(1, 0.0, 0.0, incidents=(root, symptom), ended=(past,))
    site = Site(Agent(tmp_path, [], []), latest=lambda: snapshot)
    url = f"--url=http://{site.server.address}"

    def opsd(*arguments: str) -> str:
        return CliRunner().invoke(cli, [*arguments, url], env={"COLUMNS": "300"}).output

    assert "symptom: rank 2 is slow" in opsd("incidents")
    shown = opsd("incidents", "show", "root")
    assert "rank 2 is slow  (symptom)" in shown
    assert "100% alike: GPU 0 is in trouble; done: kill_process, it helped  (past)" in shown
    assert "cause      root" in opsd("incidents", "show", "symptom")
    assert "trouble 2 0.0 s 1.0 s 0% 100% 0%" in " ".join(opsd("incidents", "stats").split())
    site.server.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("incidents", "list", "--state=closed"), "'closed' is not one of 'current', 'open'"),
        (("status", "--url=node-17:9477"), "--url node-17:9477 is no address such as http://node-17:9477"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(arguments: tuple[str, ...], says: str) -> None:
    """An answer of no incidents, or the advice to start an agent, would be believed."""
    asked = CliRunner().invoke(cli, arguments)
    assert asked.exit_code == exitcodes.USAGE
    assert says in asked.output


def test_the_history_of_a_node_has_its_repairs_among_the_incidents(tmp_path: Path) -> None:
    """Newest first, each a line in a pipe, with the steps in the order in which they were done."""
    steps = (RepairStep("reset_gpus", 20.0, ok=True), RepairStep("retest", 30.0, ok=False, detail="gpu_health failed"))
    done = RepairFact("repair-1", "n1", "gpu_xid", "opsd:gpu_xid-1 Xid 95", 15.0, steps, "rma", 40.0, "nothing helped")
    past = [
        incident(id, opened_at=at, resolved_at=at, state=State.RESOLVED) for id, at in (("new", 50.0), ("old", 10.0))
    ]
    site = Site(Agent(tmp_path, [], []), latest=lambda: Snapshot(1, 0.0, 0.0, ended=tuple(past), repairs=(done,)))
    url = f"--url=http://{site.server.address}"

    def opsd(*arguments: str) -> str:
        return CliRunner().invoke(cli, ["incidents", *arguments, url], env={"COLUMNS": "300"}).output

    new, repair, old = opsd().splitlines()
    assert (new.endswith("new"), old.endswith("old")) == (True, True)
    assert "repair    opsd:gpu_xid-1 Xid 95  reset_gpus done  retest failed  rma: nothing helped, repair-1" in repair
    assert len(opsd("--limit=2").splitlines()) == 2
    assert opsd("--state=current") == "no incidents\n"
    assert "retest  failed: gpu_health failed" in opsd("show", "repair-1")
    assert [record["id"] for record in json.loads(opsd("--json"))["repairs"]] == ["repair-1"]
    site.server.close()


class Earlier(App):
    """The agent of a release that knew no repairs."""

    def __call__(self, request: Request) -> Answer:
        return super().__call__(replace(request, path=request.path.replace("repairs", "none")))


def test_an_agent_of_an_earlier_release_has_incidents_without_repairs() -> None:
    """Agents are upgraded one by one, and the command line before them."""
    server = Server("127.0.0.1:0", SILENT)
    server.start(Earlier(lambda: Snapshot(1, 0.0, 0.0, incidents=(incident("a"),)), FACTS, stale_s=5.0))
    url = f"--url=http://{server.address}"
    listed, as_json, shown = (
        CliRunner().invoke(cli, ["incidents", *arguments, url], env={"COLUMNS": "300"})
        for arguments in ((), ("--json",), ("show", "repair-1"))
    )
    server.close()
    assert (listed.exit_code, listed.output.splitlines()[0].split()[-1]) == (exitcodes.OK, "a")
    assert (len(json.loads(as_json.output)["incidents"]), json.loads(as_json.output)["repairs"]) == (1, [])
    assert (shown.exit_code, "knows no incident or repair 'repair-1'" in shown.output) == (exitcodes.FAILED, True)


@pytest.mark.parametrize(
    "id", ["none", "repair-1", "../status", "..", ".", "", "a?b", "a/b", "a#b", "ä b", "\udcff", "%2e"]
)
def test_what_is_no_incident_is_none_and_the_answer_says_what_to_do(site: Site, id: str) -> None:
    """Also what a URL takes for another page."""
    shown = CliRunner().invoke(cli, ["incidents", "show", f"--url=http://{site.server.address}", "--", id])
    assert (shown.exit_code, shown.exception.__class__) == (exitcodes.FAILED, SystemExit)
    assert "`opsd incidents --limit 1000` lists all that it knows" in shown.output


@pytest.mark.parametrize("answer", [(404, {"message": "Not found"}), (401, {}), (200, ["up"]), (500, "broken")])
def test_what_is_no_agent_is_told(answer: tuple[int, object]) -> None:
    """Grafana and others answer at the ports of people who confuse them, and in JSON."""
    status, body = answer

    class Else(App):
        def __call__(self, request: Request) -> Answer:
            return HTTPStatus(status), json.dumps(body).encode(), {}

    server = Server("127.0.0.1:0", SILENT)
    server.start(Else(lambda: Snapshot(1, 0.0, 0.0), FACTS, stale_s=5.0))
    asked = CliRunner().invoke(cli, ["incidents", f"--url=http://{server.address}"])
    server.close()
    assert (asked.exit_code, asked.exception.__class__) == (exitcodes.FAILED, SystemExit)
    assert asked.output.startswith(f"opsd: no agent answers at http://{server.address} (something else says {status} ")


# The agent's HTTP server under clients that take all they can get.


SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


class StuckApp(App):
    """Its pages of jobs take as long as ``may_end`` is not set, as where a user's file system does not answer."""

    def __init__(self) -> None:
        snapshot = Snapshot(1, time.monotonic() + 1e6, time.time())
        super().__init__(lambda: snapshot, {"node": "n"}, stale_s=5.0)
        self.may_end = threading.Event()

    def __call__(self, request: Request):
        if request.path.startswith("/job/"):
            self.may_end.wait(60)
        return super().__call__(request)


@pytest.fixture
def app() -> Iterator[StuckApp]:
    app = StuckApp()
    yield app
    app.may_end.set()


@pytest.fixture
def server(app: StuckApp) -> Iterator[Server]:
    server = Server("127.0.0.1:0", SILENT)
    server.start(app)
    yield server
    server.close()


@pytest.fixture
def address(server: Server) -> tuple[str, int]:
    return "127.0.0.1", server.server_port


def test_many_slow_connections_fail_no_scrape(server: Server, address: tuple[str, int]) -> None:
    """Two hundred that send a byte now and then: 29 of 30 scrapes found no thread."""
    stop = threading.Event()

    def dawdle() -> None:
        while not stop.is_set():
            try:
                with socket.create_connection(address, timeout=20) as connection:
                    connection.sendall(b"GET /metrics HTTP/1.1\r\n")
                    while not stop.wait(0.3):
                        connection.sendall(b"X")
            except OSError:
                stop.wait(0.05)

    for _ in range(200):
        threading.Thread(target=dawdle, daemon=True).start()
    try:
        assert eventually(lambda: server.connections >= MAX_PER_PEER)
        answers = [status(address, SCRAPE) for _ in range(30) if not stop.wait(0.05)]
    finally:
        stop.set()
    assert answers == [200] * 30
    assert server.refused["share"] > 0
    assert server.connections <= MAX_PER_PEER


def test_a_header_has_two_seconds_altogether(server: Server, address: tuple[str, int]) -> None:
    """Not for each byte, and less than the whole connection has."""
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 20:
                connection.sendall(b"x")
                time.sleep(0.1)
        assert HEADER_S - 0.5 < time.monotonic() - began < 20
    assert server.refused["slow"] == 1


def test_answers_that_do_not_come_hold_up_no_scrape(address: tuple[str, int]) -> None:
    """As many as may be open wait for pages that are made from files of users."""
    waiting = []
    for _ in range(MAX_PER_PEER - 1):
        waiting.append(socket.create_connection(address, timeout=20))
        waiting[-1].sendall(b"GET /job/4242 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert status(address, SCRAPE) == 200
    assert status(address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
    waiting[-1].settimeout(2 * CONNECTION_S)
    assert waiting[-1].recv(1) == b""  # it is over after some seconds
    for connection in waiting:
        connection.close()


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"HTTP/1.1\r\nHost: evil.example.com", 421), (b"HTTP/1.1\r\nHost: 127.0.0.1:9477", 200),
        (b"HTTP/1.0\r\nX: y", 200), (b"HTTP/1.1\r\nX: y", 400), (b"HTTP/1.1\r\nHost: localhost\r\nHost: evil", 400),
    ],
)  # fmt: skip
def test_only_own_names_are_answered(server: Server, address: tuple[str, int], head: bytes, expected: int) -> None:
    """A web page in somebody's browser that lets its name point to this node reads nothing."""
    assert status(address, b"GET /metrics " + head + b"\r\n\r\n") == expected
    assert server.refused["host"] == (expected == 421)


class LongApp(App):
    """Each answer but a scrape has 5 MB; with ``own`` each has its own."""

    def __init__(self, *, own: bool) -> None:
        snapshot = Snapshot(1, time.monotonic() + 1e6, time.time())
        super().__init__(lambda: snapshot, {"node": "n"}, stale_s=5.0)
        self._own, self._body = own, b"x" * 5_000_000

    def __call__(self, request: Request):
        if request.path == "/metrics":
            return super().__call__(request)
        return HTTPStatus.OK, self._body + b"y" if self._own else self._body, {}


@pytest.mark.parametrize("own", [True, False])
def test_answers_that_nobody_reads_have_a_limit(own: bool) -> None:
    """30 of 5 MB each were 150 MB; the same answer is there once, however many have not read it."""
    server = Server("127.0.0.1:0", SILENT)
    server.start(LongApp(own=own))
    waiting = []
    try:
        for _ in range(30):
            waiting.append(socket.socket())
            waiting[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            waiting[-1].connect(("127.0.0.1", server.server_port))
            waiting[-1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        readable = [select.select([each], [], [], 20)[0] for each in waiting]
        assert all(readable)
        assert eventually(lambda: server.refused["share"] > 0) if own else server.refused["share"] == 0
        assert status(("127.0.0.1", server.server_port), SCRAPE) == 200
    finally:
        for connection in waiting:
            connection.close()
        server.close()


@pytest.fixture
def poor(app: StuckApp) -> Iterator[Server]:
    """A server whose peers may connect three times, and have one answer."""
    budgets = Budgets(unlimited=(), connections=Budget(3, 1e-6), answers=Budget(1e-9, 1e-6))
    server = Server("127.0.0.1:0", SILENT, budgets=budgets)
    server.start(app)
    yield server
    server.close()


def test_a_peer_pays_for_what_is_made_for_it_alone(poor: Server) -> None:
    """Whoever has used up its processor time is refused such answers for a while, and no scrape."""
    odd = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text;version=7.0.0\r\n\r\n"
    asked = (b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n", odd, SCRAPE)
    assert [status(("127.0.0.1", poor.server_port), text) for text in asked] == [200, 429, 200]
    assert poor.refused["share"] == 1


def test_a_peer_that_connects_without_end_is_not_served(poor: Server) -> None:
    """Each connection takes the thread that serves all."""
    assert [status(("127.0.0.1", poor.server_port), SCRAPE) for _ in range(5)] == [200, 200, 200, 0, 0]
    assert poor.refused["share"] == 2


# The agent's HTTP server against clients that mean harm, or do not know better.


HARD_VALUE = Metric("opsd_fake_value", "A value.", labels=("source",))

PATHS = ("/", "/metrics", "/healthz", "/api/v1/incidents", "/api/v1/ranks", "/job/4242", "/runbooks/gpu_throttle")


@pytest.fixture(scope="module")
def hardened() -> Iterator[tuple[str, int]]:
    """A server whose metrics are some megabytes."""
    samples = tuple(Sample(HARD_VALUE, 1.0, (f"{'x' * 100}{number}",)) for number in range(30_000))
    snapshot = Snapshot(1, time.monotonic() + 1e6, time.time(), samples=(samples,))
    server = Server("127.0.0.1:0", SILENT)
    server.start(App(lambda: snapshot, {"node": "n"}, stale_s=5.0))
    host, _, port = server.address.rpartition(":")
    yield host, int(port)
    server.close()


def exchange(address: tuple[str, int], request: bytes) -> bytes:
    """Send ``request`` and nothing more; the beginning of the answer."""
    with socket.create_connection(address, timeout=20) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(4096)
        except OSError:
            return b""


def status(address: tuple[str, int], request: bytes) -> int:
    """The status of the answer, 0 if there was none."""
    words = exchange(address, request).split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else 0


lines = st.binary(max_size=200).filter(lambda text: b"\n" not in text and b"\r" not in text)


@settings(max_examples=150)
@given(
    path=lines.map(lambda text: b"/" + text),
    headers=st.lists(st.tuples(lines, lines), max_size=8),
    method=st.sampled_from([b"GET", b"HEAD"]),
)
@example(path=b"/?limit=\xff%ff&refresh=%00", headers=[], method=b"GET")
@example(path=b"//[", headers=[], method=b"GET")
@example(path=b"http://[::1/metrics", headers=[(b"Host", b"[")], method=b"GET")
@example(path=b"/metrics", headers=[(b"Accept", b";q=\xff," * 30), (b"Accept-Encoding", b"gzip;q=x")], method=b"GET")
@example(path=b"/metrics", headers=[(b"Accept", b"application/openmetrics-text;version=x")], method=b"GET")
@example(path=b"/metrics", headers=[(b"Accept", b"text/plain;version=1..0")], method=b"GET")
@example(path=b"/metrics", headers=[(b"Accept", b"application/openmetrics-text;version=1\xb2")], method=b"GET")
@example(path=b"/api/v1/incidents?" + b"a&" * 50, headers=[], method=b"GET")
@example(path=b"/api/v1/incidents?limit=" + "²".encode(), headers=[], method=b"GET")
def test_no_request_is_a_bug(hardened: tuple[str, int], path: bytes, headers, method: bytes) -> None:
    """Whatever comes in, the answer is never an error of the server, and the next one is answered."""
    text = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    assert 0 < status(hardened, method + b" " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + text + b"\r\n") < 500
    assert status(hardened, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200


@settings(max_examples=100)
@given(request=st.binary(max_size=400))
def test_bytes_that_are_no_request_do_no_harm(hardened: tuple[str, int], request: bytes) -> None:
    """Not even HTTP."""
    exchange(hardened, request + b"\r\n\r\n")
    assert status(hardened, b"GET /healthz HTTP/1.0\r\n\r\n") == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/runbooks/../server.py", "/runbooks/%00",
        "/job/%00", "/job/../api",
        "/runbooks/..%2f..%2fetc%2fpasswd", "file:///etc/passwd", "/api/v1/incidents/%2e%2e%2fconfig",
    ],
)  # fmt: skip
def test_no_path_leads_to_a_file(hardened: tuple[str, int], path: str) -> None:
    """The server has no files to give: what it does not know is 404."""
    assert status(hardened, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "get"])
@pytest.mark.parametrize("path", PATHS)
def test_nothing_can_be_changed(hardened: tuple[str, int], method: str, path: str) -> None:
    """There are no control endpoints, and no method but those that read."""
    assert status(hardened, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) == 501


def test_headers_beyond_all_measure_are_refused(hardened: tuple[str, int]) -> None:
    """A line of a megabyte, and ten thousand headers."""
    assert status(hardened, b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n") in (
        0,
        431,
    )
    assert status(hardened, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000 + b"\r\n") in (0, 431)
    assert status(hardened, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200


def test_fifty_at_once_are_all_answered(hardened: tuple[str, int]) -> None:
    """Several Prometheis, a dashboard on a wall and everybody who looks after an alert."""
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: status(hardened, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), range(50)))
    assert answers == [200] * 50


@pytest.mark.slow
def test_scrapers_that_never_read_are_cut_off(hardened: tuple[str, int]) -> None:
    """Some that ask for megabytes and take none hold up neither the others nor the agent."""
    deaf = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(hardened)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deaf.append(connection)
    began = time.monotonic()
    assert status(hardened, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
    assert time.monotonic() - began < CONNECTION_S
    time.sleep(CONNECTION_S + 1)
    for connection in deaf:
        connection.settimeout(20)
        got = 0
        while chunk := connection.recv(1 << 20):
            got += len(chunk)
        assert got < 3_000_000
        connection.close()
