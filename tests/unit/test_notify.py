"""Telling people: the webhook gets what it should, and its failure stays a sentence without the secret."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from opsd.agent.actions import ActionError
from opsd.agent.incidents import Transition
from opsd.agent.notify import Announcer, WebhookNotifier
from opsd.runbooks.base import State
from tests.fakes.agent import SILENT
from tests.fakes.clock import eventually
from tests.fakes.incidents import incident


class Webhook(HTTPServer):
    """Answers every POST with ``status`` and remembers it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.posts: list[dict[str, object]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/s3cret"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        self.server.posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        yield server
        server.shutdown()


def test_a_notification_is_posted(webhook: Webhook) -> None:
    """Text and fields as one JSON object."""
    WebhookNotifier(SILENT, webhook.url)("GPU 3 is hot", {"target": "n17"})
    assert webhook.posts == [{"text": "GPU 3 is hot", "target": "n17"}]


def test_what_users_write_is_no_markup(webhook: Webhook) -> None:
    """It alerts nobody, hides no link, and is no second message."""
    evil = "a <!channel> @here <https://e.example|b> [c](https://e.example)\x1b[2J\r\nn9: gpu_xid \u202e\x9b <script>"
    WebhookNotifier(SILENT, webhook.url)(evil, {"culprit": evil, "list": [evil]})
    (post,) = webhook.posts
    told = "a ‹!channel› @ here ‹https://e.example|b› [c] (https://e.example) [2J  n9: gpu_xid    ‹script›"
    assert post == {"text": told, "culprit": told, "list": [told]}
    WebhookNotifier(SILENT, webhook.url)("x" * 100_000, {})
    assert len(str(webhook.posts[1]["text"])) == 2000


def test_the_address_can_be_in_a_file(webhook: Webhook, tmp_path: Path) -> None:
    """It is read each time, so that a renewed one is taken up; one that cannot be read is told without it."""
    secret = tmp_path / "webhook"
    notify = WebhookNotifier(SILENT, secret)
    with pytest.raises(ActionError, match="webhook: the URL of the webhook cannot be read"):
        notify("early", {})
    secret.write_text(f"{webhook.url}\n", encoding="ascii")
    notify("GPU 3 is hot", {})
    assert [post["text"] for post in webhook.posts] == ["GPU 3 is hot"]


def test_a_webhook_that_refuses_or_is_gone_does_not_leak_its_address(webhook: Webhook) -> None:
    """The error says what happened; the address is as good as a password and is not in it."""
    notify = WebhookNotifier(SILENT, webhook.url)
    webhook.status = 403
    with pytest.raises(ActionError) as refused:
        notify("x", {})
    webhook.shutdown()
    webhook.server_close()
    with pytest.raises(ActionError) as gone:
        notify("x", {})
    assert str(refused.value) == "the webhook answered with status 403"
    assert "s3cret" not in str(gone.value) + str(gone.value.__cause__)


@pytest.mark.parametrize("status", [301, 308])
def test_a_webhook_that_has_moved_has_told_nobody(webhook: Webhook, status: int) -> None:
    """The answer names another address, and nobody has read the message."""
    webhook.status = status
    with pytest.raises(ActionError, match=f"answered with status {status}"):
        WebhookNotifier(SILENT, webhook.url)("x", {})


def test_an_environment_in_which_nothing_can_be_posted_is_a_sentence(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client raises what it likes over proxies that the environment names."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:port")
    with pytest.raises(ActionError, match="could not be reached: InvalidURL"):
        WebhookNotifier(SILENT, webhook.url)("x", {})


def test_people_hear_of_beginning_and_end_and_not_of_the_steps_between() -> None:
    """Opened, escalated and resolved are announced; verifying and a second attempt are not."""
    told: list[str] = []
    announce = Announcer(lambda text, fields: told.append(text), "n17", SILENT)
    states = [None, State.OPEN, State.ACTING, State.VERIFYING, State.OPEN, State.ESCALATED]
    for before, after in pairwise(states):
        assert after is not None
        announce(incident(), Transition("i", "trouble", before, after, 1.0, ""))
    assert eventually(lambda: len(told) == 2)
    assert [text.partition(": GPU")[0] for text in told] == [
        "[warning] n17: trouble opened",
        "[warning] n17: trouble escalated",
    ]


def test_people_who_were_called_hear_when_it_is_over() -> None:
    """Or that it was given up, which is no good news; what comes and goes is not told each time."""
    told: list[str] = []
    announce = Announcer(lambda text, fields: told.append(text), "n17", SILENT)
    over = Transition("i", "trouble", State.ESCALATED, State.ESCALATED, 1.0, "")
    announce(incident(resolved_at=1.0, relapses=3), over)
    announce(incident(resolved_at=1.0), over)
    announce(incident(resolved_at=1.0), Transition("i", "trouble", State.VERIFYING, State.ESCALATED, 1.0, ""))
    assert eventually(lambda: len(told) == 2)
    assert [text.partition(": GPU")[0] for text in told] == [
        "[warning] n17: trouble over",
        "[warning] n17: trouble escalated",
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
