"""Telling people: the webhook gets what it should, and its failure stays a sentence without the secret."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Mapping
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path

import pytest

from opsd.agent.actions import ActionError
from opsd.agent.incidents import Transition
from opsd.agent.logs import Log
from opsd.agent.notify import MAX_WAITING, Announcer, Notifications
from opsd.notify.outgoing import send_json
from opsd.runbooks.base import Severity, State
from tests.fakes.agent import SILENT
from tests.fakes.clock import eventually
from tests.fakes.incidents import incident
from tests.fakes.webhook import Webhook


def test_a_notification_is_posted(webhook: Webhook) -> None:
    """Text and fields as one JSON object."""
    Notifications(SILENT, webhook.url)("GPU 3 is hot", {"target": "n17"})
    assert webhook.posts == [{"text": "GPU 3 is hot", "target": "n17"}]


def test_what_users_write_is_no_markup(webhook: Webhook) -> None:
    """It alerts nobody, hides no link, and is no second message."""
    evil = "a <!channel> @here <https://e.example|b> [c](https://e.example)\x1b[2J\r\nn9: gpu_xid \u202e\x9b <script>"
    Notifications(SILENT, webhook.url)(evil, {"culprit": evil, "list": [evil]})
    (post,) = webhook.posts
    told = "a ‹!channel› @ here ‹https://e.example|b› [c] (https://e.example) [2J  n9: gpu_xid    ‹script›"
    assert post == {"text": told, "culprit": told, "list": [told]}
    Notifications(SILENT, webhook.url)("x" * 100_000, {})
    assert len(str(webhook.posts[1]["text"])) == 2000


def test_the_address_can_be_in_a_file(webhook: Webhook, tmp_path: Path) -> None:
    """It is read each time, so that a renewed one is taken up; one that cannot be read is told without it."""
    secret = tmp_path / "webhook"
    notify = Notifications(SILENT, secret)
    with pytest.raises(ActionError, match="webhook: neither a URL nor a file with URLs that can be read"):
        notify("early", {})
    secret.write_text(f"{webhook.url}\n", encoding="ascii")
    notify("GPU 3 is hot", {})
    assert [post["text"] for post in webhook.posts] == ["GPU 3 is hot"]


def test_each_receiver_hears_of_it_also_after_another_has_failed(webhook: Webhook, tmp_path: Path) -> None:
    """The error names the one that has not."""
    file = tmp_path / "webhook"
    file.write_text(f"# ours\nhttp://127.0.0.1:1/s3cret\n{webhook.url}\n", encoding="utf-8")
    with pytest.raises(ActionError, match=r"^127\.0\.0\.1: the webhook could not be reached: Connection refused$"):
        Notifications(SILENT, file)("GPU 3 is hot", {})
    assert [post["text"] for post in webhook.posts] == ["GPU 3 is hot"]


def test_a_webhook_that_refuses_or_is_gone_does_not_leak_its_address(webhook: Webhook) -> None:
    """The error says what happened; the address is as good as a password and is not in it."""
    notify = Notifications(SILENT, webhook.url)
    webhook.status = 403
    with pytest.raises(ActionError) as refused:
        notify("x", {})
    webhook.shutdown()
    webhook.server_close()
    with pytest.raises(ActionError) as gone:
        notify("x", {})
    assert str(refused.value) == "127.0.0.1: the webhook answered with status 403"
    assert "s3cret" not in str(gone.value) + str(gone.value.__cause__)


@pytest.mark.parametrize("status", [301, 308])
def test_a_webhook_that_has_moved_has_told_nobody(webhook: Webhook, status: int) -> None:
    """The answer names another address, and nobody has read the message."""
    webhook.status = status
    with pytest.raises(ActionError, match=f"answered with status {status}"):
        Notifications(SILENT, webhook.url)("x", {})


def test_an_environment_in_which_nothing_can_be_posted_is_a_sentence(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client raises what it likes over proxies that the environment names."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:port")
    with pytest.raises(ActionError, match="could not be reached: InvalidURL"):
        Notifications(SILENT, webhook.url)("x", {})


def test_people_hear_of_beginning_and_end_and_not_of_the_steps_between() -> None:
    """Opened, escalated, worse and resolved are announced; verifying and a second attempt are not."""
    told: list[str] = []
    announce = Announcer(lambda text, fields: told.append(text), "n17", SILENT)
    states = [None, State.OPEN, State.ACTING, State.VERIFYING, State.OPEN, State.ESCALATED]
    for before, after in pairwise(states):
        assert after is not None
        announce(incident(), Transition("i", "trouble", before, after, 1.0, ""))
    announce(incident(severity=Severity.CRITICAL), Transition("i", "t", State.OPEN, State.OPEN, 1.0, "", worse=True))
    assert eventually(lambda: len(told) == 3)
    assert [text.partition(": GPU")[0] for text in told] == [
        "[warning] n17: trouble opened",
        "[warning] n17: trouble escalated",
        "[critical] n17: trouble worse",
    ]


def test_people_who_were_called_hear_when_it_is_over() -> None:
    """Or that it was given up, which is no good news; what comes and goes is not told each time."""
    told: list[str] = []
    announce = Announcer(lambda text, fields: told.append(text), "n17", SILENT)
    over = Transition("i", "trouble", State.ESCALATED, State.ESCALATED, 1.0, "")
    announce(incident(resolved_at=1.0, relapses=3), over)
    announce(incident(resolved_at=1.0), over)
    announce(incident(resolved_at=1.0), Transition("i", "trouble", State.VERIFYING, State.ESCALATED, 1.0, ""))
    announce(incident(resolved_at=1.0), Transition("i", "trouble", State.VERIFYING, State.UNPROVEN, 1.0, ""))
    assert eventually(lambda: len(told) == 3)
    assert [text.partition(": GPU")[0] for text in told] == [
        "[warning] n17: trouble over",
        "[warning] n17: trouble escalated",
        "[warning] n17: trouble unproven",
    ]


@pytest.mark.parametrize("error", [ActionError("the webhook could not be reached: ConnectTimeout"), KeyError("x")])
def test_a_notifier_that_fails_does_not_end_the_announcements(error: Exception) -> None:
    """The next incident is announced again, also after a bug."""
    told: list[str] = []

    def flaky(text: str, fields: object) -> None:
        told.append(text)
        if len(told) == 1:
            raise error

    announce = Announcer(flaky, "n17", SILENT)
    for _ in range(2):
        announce(incident(), Transition("i", "trouble", None, State.OPEN, 1.0, ""))
    assert eventually(lambda: len(told) == 2)


def test_runs_without_number_do_not_delay_what_is_said_of_the_node() -> None:
    """Each run waits for its own turn, also if it is called like a kind of incident; too much of one is dropped."""
    gate, told, said = threading.Event(), list[str](), list[Mapping[str, object]]()

    def slow(text: str, _fields: object) -> None:
        if "trouble opened" in text:
            gate.wait(60)
        told.append(text)

    announce = Announcer(slow, "n17", Log(said.append))
    opened = Transition("i", "trouble", None, State.OPEN, 1.0, "")
    for _ in range(2 * MAX_WAITING):
        announce(incident(run="gpu_xid"), opened)
    announce(incident("x", kind="gpu_xid"), opened)
    assert sum(line["event"] == "announcement dropped" for line in said) >= MAX_WAITING - 1
    assert eventually(lambda: [text.partition(": GPU")[0] for text in told] == ["[warning] n17: gpu_xid opened"])
    gate.set()


def test_a_webhook_that_trickles_is_given_up() -> None:
    """Each byte of its answer comes in time, the answer never."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=trickle, args=(listener,), daemon=True).start()
        began = time.monotonic()
        with pytest.raises((OSError, HTTPException)):
            send_json("POST", f"http://127.0.0.1:{listener.getsockname()[1]}/", {}, 0.5)
        assert time.monotonic() - began < 20


def test_the_limit_of_an_answer_ends_after_it(webhook: Webhook) -> None:
    """What has been answered is left alone once its time is over, and the next answer has a limit too."""
    assert send_json("POST", webhook.url, {}, 0.5)[0] == 200
    assert eventually(lambda: not any(thread.name == "deadlines" for thread in threading.enumerate()))
    test_a_webhook_that_trickles_is_given_up()


def trickle(listener: socket.socket) -> None:
    """Answer one request, a byte every tenth of a second for a minute."""
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        for byte in itertools.islice(itertools.cycle(b"HTTP/1.1 "), 600):
            connection.sendall(bytes([byte]))
            time.sleep(0.1)
