"""Receivers of notifications: what each service gets, where their URLs may stand, and that none is disclosed."""

from __future__ import annotations

import json
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from opsd import exitcodes
from opsd.agent.incidents import Transition
from opsd.agent.notify import Announcer, Notifications
from opsd.notify.receiver import NotifyError, Receiver, body_for, read_receivers, type_of
from opsd.runbooks.base import Severity, State
from opsd.words import unformatted
from tests.fakes.agent import SILENT
from tests.fakes.clock import eventually
from tests.fakes.incidents import incident
from tests.fakes.webhook import Internet, Webhook


@pytest.mark.parametrize(
    ("url", "keys"),
    [
        ("https://hooks.slack.com/services/T/B/x", {"text", "mrkdwn"}),
        ("https://hooks.slack-gov.com/services/T/B/x", {"text", "mrkdwn"}),
        ("https://chat.googleapis.com/v1/spaces/x", {"text"}),
        ("https://discord.com/api/webhooks/1/x", {"content", "allowed_mentions"}),
        ("https://contoso.webhook.office.com/webhookb2/x", {"type", "attachments"}),
        ("https://prod-12.westus.logic.azure.com:443/workflows/x", {"type", "attachments"}),
        ("https://mattermost.example/hooks/x", {"text", "event"}),
        ("https://notdiscord.com/x", {"text", "event"}),
    ],
)
def test_each_service_gets_its_own_form(url: str, keys: set[str]) -> None:
    """Chats refuse or ignore other keys; a webhook of one's own gets the fields as well."""
    body = body_for(urlsplit(url).hostname or "")("tiny is stuck", {"event": "stuck"})
    assert set(body) == keys and "tiny is stuck" in str(body)


def test_no_service_formats_what_users_wrote() -> None:
    """Names such as __init__ keep their underscores, and nobody makes a reason vanish behind bars."""
    text = "rank 3 failed: __init__() takes *args || x ~~y~~ `z`"
    (attachment,) = body_for("a.webhook.office.com")(text, {})["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert attachment["content"]["body"] == [{"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text}]}]
    assert body_for("hooks.slack.com")(text, {})["mrkdwn"] is False
    shown = body_for("discord.com")(text, {})["content"]
    assert shown == r"rank 3 failed: \_\_init\_\_() takes \*args \|\| x \~\~y\~\~ \`z\`"


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ("<!channel> <@U1> <users/all> <at>x</at>", "‹!channel› ‹@ U1› ‹users/all› ‹at›x‹/at›"),
        ("@everyone a@here.org @bob bob@example.org", "@ everyone a@ here.org @ bob bob@example.org"),
        ("[login](https://evil.example) ![x](y)", "[login] (https://evil.example) ![x] (y)"),
        ("a\n# b\r\x1b[31m\u202e\u200bc", "a # b  [31m  c"),
        ("x" * 5000, "x" * 1999 + "…"),
        ("_" * 1999, "_" * 1999),
    ],
)
def test_reasons_of_users_alert_nobody_and_fit(webhook: Webhook, written: str, sent: str) -> None:
    """A reason is an exception of somebody's program: at most 2,000 characters of plain text on one line."""
    Receiver(webhook.url).send(written, {"reason": written})
    assert webhook.posts[-1] == {"text": sent, "reason": sent}


def test_a_long_text_fits_into_discord_escaped() -> None:
    """It answers 400 to more than 2,000 characters."""
    body = body_for("discord.com")("_" * 2000, {})
    assert len(unformatted(body["content"])) == 2000 and body["allowed_mentions"] == {"parse": []}


def test_teams_refuses_with_status_200(webhook: Webhook) -> None:
    """Its connectors say so in the answer."""
    webhook.answer = b"Webhook message delivery failed with error: Microsoft Teams endpoint returned HTTP error 413"
    with pytest.raises(NotifyError, match="refused"):
        Receiver(webhook.url).send("x", {})


def test_urls_in_a_file(tmp_path: Path) -> None:
    """One a line, with comments; a file of something else is refused without repeating it."""
    file = tmp_path / "notify"
    file.write_text("# ours\nhttps://hooks.slack.com/s3cret\n\n  mailto://u:p@h\n")
    assert [receiver.name for receiver in read_receivers(str(file))] == ["hooks.slack.com", "mailto://"]
    file.write_text("hooks.slack.com/s3cret\n")
    for where in (str(file), str(tmp_path / "none"), "hooks.slack.com"):
        with pytest.raises(NotifyError) as refused:
            read_receivers(where)
        assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("url", ["https://user:s3cret@h.example/s3cret", "mailto://u:s3cret@h", "https://[s3cret/x"])
def test_a_receiver_shows_no_secret(url: str) -> None:
    """Neither its name nor its representation has what is after the host, or a password."""
    assert "s3cret" not in Receiver(url).name + repr(Receiver(url))


class _Mail(socketserver.StreamRequestHandler):
    """The few words of SMTP that a client without TLS needs."""

    def handle(self) -> None:
        self.wfile.write(b"220 fake\r\n")
        while line := self.rfile.readline():
            verb = line.split()[0].upper() if line.split() else b""
            if verb == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                while (text := self.rfile.readline()) not in (b".\r\n", b""):
                    self.server.mail.append(text.decode())  # type: ignore[attr-defined]
            self.wfile.write(
                {b"EHLO": b"250-fake\r\n250 AUTH PLAIN\r\n", b"AUTH": b"235 ok\r\n"}.get(verb, b"250 ok\r\n")
            )


SERVICES = {
    "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/#general?verify=no": "hooks.slack.com",
    "workflows://prod-1.logic.azure.com:443/643e69f83c8944/s1gnature/?verify=no": "prod-1.logic.azure.com",
    "pagerduty://A1BRTD4JDTIiajkdnlazkcOXrIdevi7F@Aaaaaa?verify=no": "events.pagerduty.com",
}


@pytest.fixture
def internet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Internet]:
    """Hosts that all take every message, behind a proxy."""
    with Internet(tmp_path) as hosts:
        monkeypatch.setenv("HTTPS_PROXY", hosts.proxy)
        monkeypatch.delenv("NO_PROXY", raising=False)
        yield hosts


@pytest.mark.slow
@pytest.mark.parametrize(("url", "host"), SERVICES.items(), ids=SERVICES.values())
def test_the_agent_tells_what_apprise_knows(internet: Internet, url: str, host: str) -> None:
    """Slack, Teams and PagerDuty get an incident from the agent, in the form that apprise has for each."""
    pytest.importorskip("apprise")
    announce = Announcer(Notifications(SILENT, url), "n17", SILENT)
    announce(incident(severity=Severity.CRITICAL), Transition("i", "trouble", None, State.OPEN, 1.0, ""))
    assert eventually(lambda: bool(internet.messages), 60)
    ((told, message),) = internet.messages
    assert told == host and "trouble opened" in json.dumps(message)


@pytest.mark.slow
def test_pagerduty_is_called_and_closes_with_the_incident(internet: Internet) -> None:
    """With the incident's severity. What comes later is about the same one, and its end ends it there."""
    pytest.importorskip("apprise")
    url = next(url for url in SERVICES if url.startswith("pagerduty"))
    tell, fields = Notifications(SILENT, url), {"id": "trouble-1", "node": "n17", "kind": "trouble"}
    for severity, state in (("warning", "opened"), ("critical", "escalated"), ("critical", "resolved")):
        tell(f"[{severity}] n17: trouble {state}", {**fields, "severity": severity, "state": state})
    tell("[warning] n17: trouble opened", {**fields, "id": "trouble-2", "severity": "warning", "state": "opened"})
    messages = [message for _, message in internet.messages]
    assert [message["event_action"] for message in messages] == ["trigger", "trigger", "resolve", "trigger"]
    assert [message["payload"]["severity"] for message in messages[:2]] == ["warning", "critical"]
    first, second, third, other = (message["dedup_key"] for message in messages)
    assert first == second == third != other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "said"), [("nosuch://x", "nosuch://: apprise does not know such a URL"), ("hooks.slack.com/x", "URL")]
)
def test_the_configuration_is_refused_if_nobody_can_be_told(tmp_path: Path, url: str, said: str) -> None:
    """Before somebody waits for a message; one that can be told is no problem."""
    pytest.importorskip("apprise")
    secret, file = tmp_path / "webhook", tmp_path / "opsd.toml"
    file.write_text(f'[notify]\nwebhook_file = "{secret}"')
    for content, code in ((url, exitcodes.USAGE), (next(iter(SERVICES)), exitcodes.OK)):
        secret.write_text(content)
        secret.chmod(0o600)
        command = [sys.executable, "-m", "opsd", "config", "check", str(file)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (answer.returncode, said in answer.stderr) == (code, code != exitcodes.OK), answer.stderr


@pytest.mark.parametrize(
    ("fields", "type"),
    [
        ({"severity": "critical", "state": "opened"}, "failure"),
        ({"severity": "warning", "state": "escalated"}, "warning"),
        ({"severity": "critical", "state": "resolved"}, "success"),
        ({"event": "started"}, "info"),
        ({"event": "stuck"}, "failure"),
        ({"event": "finished", "exit_code": 0}, "success"),
        ({"event": "finished", "exit_code": 70}, "failure"),
        ({}, "info"),
    ],
)
def test_urgency(fields: dict[str, object], type: str) -> None:
    """Services that wake people go by it."""
    assert type_of(fields) == type


@pytest.mark.slow
def test_a_mail_is_delivered_by_apprise() -> None:
    """The first words are the subject. A server that is gone is an error without the password."""
    pytest.importorskip("apprise")
    with socketserver.TCPServer(("127.0.0.1", 0), _Mail) as server:
        server.mail = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"mailto://u:s3cret@127.0.0.1:{server.server_address[1]}?to=me@example.com&from=opsd@example.com"
        Receiver(url).send("tiny restarted: rank 3 failed", {})
        server.shutdown()
        mail = "".join(server.mail)  # type: ignore[attr-defined]
    assert "Subject: tiny restarted" in mail and "rank 3 failed" in mail
    with pytest.raises(NotifyError) as gone:
        Receiver(url).send("x", {})
    assert "s3cret" not in str(gone.value)
