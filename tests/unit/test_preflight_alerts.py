"""`opsd preflight --alerts`: the rules, the inbox, and a Prometheus that is down."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from opsd.preflight import inbox as module
from opsd.preflight.base import Context, CouldNotRunError, NotApplicableError
from opsd.preflight.checks import run_alerts
from opsd.preflight.checks.run_alerts import Alertmanager, Listed, Notified, Seen, alerts_of, findings
from opsd.preflight.checks.run_alerts import tests_of as fired_for
from opsd.preflight.inbox import Inbox
from opsd.settings.sections import PreflightSettings
from tests.fakes.clock import eventually
from tests.fakes.webhook import answering

# `opsd preflight --alerts`: what is made of the rules, and what is said of what came of them.


RULES = (
    {"alertname": "GpuThrottle", "severity": "critical"},
    {"alertname": "GoodputBurn", "severity": "warning", "window": "1h"},
    {"alertname": "GoodputBurn", "severity": "critical", "window": "6h"},
    {"alertname": "LossSpike"},
    {"alertname": "StorageFull", "severity": "{{ $labels.severity }}", "kind": "{{ $labels.kind }}"},
)

FIRED = fired_for(RULES, "n1", 1000.0, 1180.0)

LISTED = {name: Listed(alert.labels, ("slack",), (), True) for name, alert in FIRED.items()}

GOOD = Seen(FIRED, LISTED, Notified({"slack": 4.0}, {}), dict.fromkeys(FIRED, 1))


def test_each_rule_is_fired_with_its_own_severity_and_marked_as_a_test() -> None:
    """No two share an instance or a run, by which one would hold back another."""
    assert [*FIRED] == ["GpuThrottle", "GoodputBurn 1h", "GoodputBurn 6h", "LossSpike", "StorageFull"]
    assert [alert.labels["severity"] for alert in FIRED.values()] == ["critical", "warning", *3 * ["critical"]]
    assert {alert.labels["test"] for alert in FIRED.values()} == {"true"}
    assert all("nothing is wrong" in alert.annotations["summary"] for alert in FIRED.values())
    for label in ("instance", "run"):
        assert len({alert.labels[label] for alert in FIRED.values()}) == len(FIRED)
    assert FIRED["LossSpike"].to_json()["endsAt"] == "1970-01-01T00:19:40+00:00"


def test_when_everybody_was_told_there_is_nothing_to_say() -> None:
    """With an inbox of one's own and without."""
    assert [*findings(GOOD)] == []
    assert [*findings(replace(GOOD, arrived=None))] == []


@pytest.mark.parametrize(
    ("seen", "sentence"),
    [
        (replace(GOOD, listed={}), "does not list GpuThrottle, GoodputBurn 1h"),
        (replace(GOOD, listed={**LISTED, "LossSpike": Listed({}, (), (), True)}), "LossSpike would be told to nobody"),
        (
            replace(GOOD, listed={**LISTED, "LossSpike": Listed({}, ("slack",), ("silence-7",), True)}),
            "LossSpike is held back by silence-7",
        ),
        (replace(GOOD, notified=Notified({"slack": 4.0}, {"pagerduty": 2.0})), "2 messages to pagerduty failed"),
        (replace(GOOD, notified=Notified({}, {})), "has sent no message"),
        (replace(GOOD, arrived={name: 1 for name in FIRED if name != "LossSpike"}), "LossSpike did not arrive"),
        (replace(GOOD, arrived={**dict.fromkeys(FIRED, 1), "LossSpike": 2}), "LossSpike arrived more than once"),
    ],
)
def test_whoever_was_not_told_is_named(seen: Seen, sentence: str) -> None:
    """With what stood in the way."""
    [found] = findings(seen)
    assert sentence in found.summary


def test_messages_are_counted_from_before() -> None:
    """Alertmanager counts since its start, and real alerts were there before."""
    before = Notified({"slack": 10.0, "webhook": 3.0}, {"slack": 1.0})
    after = Notified({"slack": 14.0, "webhook": 3.0}, {"slack": 1.0})
    assert after.since(before) == Notified({"slack": 4.0}, {})


def _run(**fields: object) -> None:
    run_alerts.run(Context("n1", "standard", 1.0, **fields), lambda share, subject: None)  # type: ignore[arg-type]


def test_nobody_is_paged_who_did_not_ask_for_it() -> None:
    """Without --alerts it does not apply; without an Alertmanager it could not run."""
    nowhere = PreflightSettings(alertmanager="http://127.0.0.1:9", prometheus="http://127.0.0.1:9")
    with pytest.raises(NotApplicableError, match="--alerts"):
        _run(settings=nowhere)
    with pytest.raises(CouldNotRunError, match=r"preflight\.alertmanager"):
        _run(fire_alerts=True)
    with pytest.raises(CouldNotRunError, match="does not answer"):
        _run(fire_alerts=True, settings=nowhere)


# The inbox of `opsd preflight --alerts`, which anybody may reach while it is open.


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


# A Prometheus or Alertmanager that is down, refuses, or is something else: one sentence with its address.


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "answered with status 503"),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "answered with status 401"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "does not answer like"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"data":null}', "does not answer like"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer (RemoteProtocolError)"),
    ],
)
def test_what_answers_need_not_be_prometheus(answer: bytes, said: str) -> None:
    """A proxy that asks for a password, a page of a portal, an older API, another service."""
    with answering(answer) as url, pytest.raises(CouldNotRunError) as caught:
        alerts_of(url)
    assert url in str(caught.value) and said in str(caught.value)
    with answering(answer) as url, pytest.raises(CouldNotRunError) as caught:
        Alertmanager(url).listed("test", "true")
    assert url in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid", "prometheus:9090", "http://[::"])
def test_nobody_there_is_one_sentence(url: str) -> None:
    """Down, not resolved, or no address at all."""
    with pytest.raises(CouldNotRunError, match="is the address right"):
        alerts_of(url)
