"""A user of the node against the HTTP server of its agent."""

from __future__ import annotations

import threading

import pytest

from opsd import exitcodes
from opsd.agent.web.server import MAX_CONNECTIONS
from tests.adversary.attacker import NOBODY, Attacker
from tests.adversary.attacks import ask_without_reading, hold_connections, make_ranks
from tests.adversary.node import Node
from tests.fakes.clock import eventually

pytestmark = pytest.mark.xdist_group("agent-process")


@pytest.mark.parametrize(
    ("request_text", "complete"),
    [
        ("GET /metrics HTTP/1.1\r\nX-Slow: ", False),
        ("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", True),
        ("GET /job/4242 HTTP/1.1\r\nHost: localhost\r\n\r\n", True),
        ("", False),
    ],
    ids=["slow header", "never reads", "pages of jobs", "silent"],
)
def test_no_user_keeps_others_from_the_agent(node: Node, attacker: Attacker, request_text: str, complete: bool) -> None:
    """200 connections at once: 29 of 30 scrapes found no thread. The kernel says whose they are.

    A complete request may be answered before the next connection comes; one that is not is refused in any case.
    """
    with node.agent():
        attacker.start(hold_connections, node.port, request_text, 200)
        assert [bool(node.get("/metrics")) for _ in range(30)] == [True] * 30
        assert complete or eventually(lambda: sum(node.series("opsd_http_refused_total").values()) > 0)


def test_a_user_shares_with_itself_only(node: Node, attacker: Attacker) -> None:
    """All that one user may have open leaves room for the others."""
    with node.agent():
        attacker.start(hold_connections, node.port, "GET /", 64)
        assert eventually(lambda: node.series("opsd_http_connections").get("", 0) >= 60)
        assert node.get("/readyz")
        assert node.series("opsd_http_refused_total")['reason="share"'] == 0
        assert attacker.uid == NOBODY


def test_users_together_leave_room_for_a_scrape(node: Node) -> None:
    """Each within the share of one: of all connections there are so many, and those with most lose theirs."""
    users = [Attacker(uid) for uid in range(64_001, 64_007)]
    try:
        with node.agent():
            for user in users:
                user.start(hold_connections, node.port, "GET /", 60)
            assert eventually(lambda: node.series("opsd_http_refused_total").get('reason="full"', 0) > 0)
            assert [bool(node.get("/metrics")) for _ in range(30)] == [True] * 30
            assert node.series("opsd_http_connections")[""] <= MAX_CONNECTIONS
    finally:
        for user in users:
            user.close()


def test_a_user_pays_for_long_answers(node: Node, attacker: Attacker) -> None:
    """The steps of 256 ranks are 5 MB: 64 connections took 0.8 of a core and kept scrapes waiting for 4 s."""
    attacker.start(make_ranks, str(node.shm), "big", 256)
    with node.agent():
        assert eventually(lambda: len(node.series("opsd_rank_up")) == 256)
        asking = attacker.start(ask_without_reading, node.port, "/api/v1/ranks", 64)
        assert asking.stdout is not None
        statuses = list[str]()
        threading.Thread(target=statuses.extend, args=(asking.stdout,), daemon=True).start()
        assert eventually(lambda: "429\n" in statuses, within_s=60)
        assert [bool(node.get("/metrics")) for _ in range(30)] == [True] * 30
        assert eventually(lambda: node.get("/api/v1/ranks") or "").count('"rank":') >= 256
        assert eventually(lambda: node.series("opsd_http_refused_total")['reason="share"'] > 0)


def test_what_a_user_sends_is_never_a_bug(node: Node, attacker: Attacker) -> None:
    """Versions in Accept that are none were a 500 each, with a traceback in the log."""

    def send(port: int) -> None:
        import socket

        accepts = ["application/openmetrics-text;version=x", "text/plain;version=1..0", ";q=,;", "text/plain;version=²"]
        for accept in accepts:
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                text = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n"
                connection.sendall(text.encode("latin-1"))
                print(connection.recv(100).split()[1].decode())

    with node.agent() as process:
        assert attacker.run(send, node.port).split() == ["200"] * 4
        process.terminate()
        assert "Traceback" not in process.communicate(timeout=60)[1]


def test_a_password_is_not_sent_to_a_user_who_listens_in_the_agents_place(node: Node, attacker: Attacker) -> None:
    """Where the agent is stopped its port is free; the command sent user and password in the clear to any taker."""

    def listen(port: int) -> None:
        import socket

        listener = socket.create_server(("127.0.0.1", port))
        print("listens", flush=True)
        while True:
            connection, _ = listener.accept()
            print(connection.recv(4096), flush=True)
            connection.close()

    heard = attacker.start(listen, node.port)
    asked = node.run("status", "--url", f"http://127.0.0.1:{node.port}", OPSD_AGENT_CREDENTIALS="operator:secret")
    heard.kill()
    assert heard.stdout is not None
    assert heard.stdout.read() in ("", "b''\n")
    assert asked.returncode == exitcodes.FAILED
    assert f"the password was not sent: what listens at 127.0.0.1:{node.port} belongs to user {NOBODY}" in asked.stderr
    with node.agent():
        asked = node.run("status", "--url", f"http://127.0.0.1:{node.port}", OPSD_AGENT_CREDENTIALS="operator:secret")
        assert asked.returncode == exitcodes.OK
