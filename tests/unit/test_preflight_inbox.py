"""The inbox of `opsd preflight --alerts`, which anybody may reach while it is open."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from opsd.preflight import inbox as module
from opsd.preflight.inbox import Inbox
from tests.fakes.clock import eventually

ALERT = {"status": "firing", "labels": {"alertname": "GpuThrottle", "instance": "n1"}}


@contextmanager
def opened(client_s: float = 10.0) -> Iterator[Inbox]:
    """An inbox on a free port."""
    inbox = Inbox(client_s=client_s)
    try:
        yield inbox
    finally:
        inbox.close()


@pytest.fixture(scope="module")
def inbox() -> Iterator[Inbox]:
    with opened() as inbox:
        yield inbox


def address(inbox: Inbox) -> tuple[str, int]:
    return "127.0.0.1", int(inbox.url.rpartition(":")[2])


def post(inbox: Inbox, body: str, length: str = "") -> int:
    """The status of the answer."""
    connection = http.client.HTTPConnection(*address(inbox), timeout=20)
    connection.request("POST", "/webhook", body, {"Content-Length": length or str(len(body))})
    return connection.getresponse().status


def test_a_message_arrives() -> None:
    """With its alerts, of which those that fire are counted."""
    with opened() as inbox:
        assert post(inbox, json.dumps({"alerts": [ALERT, {**ALERT, "status": "resolved"}]})) == 200
        assert (inbox.firing(), len(inbox.alerts("GpuThrottle"))) == ([ALERT], 2)


@pytest.mark.parametrize(
    "alerts", [5, None, {}, [7], [{}], [{"labels": 5}], [{"labels": {"alertname": []}}], [{"labels": {"a": "b"}}]]
)
def test_a_message_of_another_form_has_no_alerts(inbox: Inbox, alerts: object) -> None:
    """It raised KeyError in the check, which could not run then."""
    assert post(inbox, json.dumps({"alerts": alerts})) == 200
    assert (inbox.firing(), inbox.alerts("GpuThrottle")) == ([], [])


@pytest.mark.parametrize(
    "length", ["80000000000", "9" * 5000, "-1", "1e3", str(module.MAX_BODY + 1)], ids=lambda text: text[:12]
)
def test_nobody_may_send_without_end(inbox: Inbox, length: str) -> None:
    """What is announced is not read: it was kept in memory, however much it was."""
    assert post(inbox, "", length) == 413


@pytest.mark.parametrize("body", ["", "{", "[" * 100_000], ids=["empty", "half", "nested"])
def test_what_is_no_json_is_refused(inbox: Inbox, body: str) -> None:
    """Without a traceback, and the next message arrives."""
    assert (post(inbox, body), post(inbox, "{}")) == (400, 200)


def test_messages_have_room_together() -> None:
    """A client that goes on is refused."""
    with opened() as inbox:
        body = json.dumps(" " * (module.MAX_BODY - 2))
        answers = [post(inbox, body) for _ in range(module.MAX_KEPT // module.MAX_BODY + 1)]
        assert answers == [200] * (len(answers) - 1) + [507]


def test_silent_clients_are_few_and_have_some_seconds() -> None:
    """Each had a thread for as long as it liked."""
    with ExitStack() as ending:
        inbox = ending.enter_context(opened(client_s=0.5))
        count = module.MAX_CLIENTS + 40
        silent = [ending.enter_context(socket.create_connection(address(inbox), 20)) for _ in range(count)]
        assert [client.recv(1) for client in silent] == [b""] * count
        assert eventually(lambda: answers(inbox))


def answers(inbox: Inbox) -> bool:
    """Whether a message is taken."""
    try:
        return post(inbox, "{}") == 200
    except OSError:  # the last of the others is not gone yet
        return False
