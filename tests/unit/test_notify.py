"""Telling people: what each service gets, and how failures are said."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from opsd import exitcodes
from opsd.agent.actions import ActionError
from opsd.agent.incidents import Transition, news
from opsd.agent.logs import Log
from opsd.agent.notify import MAX_WAITING, Annotator, Announcer, Notifications
from opsd.config import ConfigError, load
from opsd.notify.outgoing import send_json
from opsd.notify.receiver import NotifyError, Receiver, body_for, read_receivers, type_of
from opsd.runbooks.base import Severity, State
from opsd.words import unformatted
from tests.fakes.clock import eventually
from tests.fakes.collectors import SILENT
from tests.fakes.incidents import WALL, incident
from tests.fakes.webhook import TOKEN, FakeGrafana, Internet, Webhook

# Telling people: the webhook gets what it should, and its failure stays a sentence without the secret.


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


@pytest.mark.parametrize("heard", [False, True])
def test_each_receiver_hears_of_it_also_after_another_has_failed(webhook: Webhook, tmp_path: Path, heard: bool) -> None:
    """The log names the one that has not. If none has, that is an error, and all are tried again later."""
    file, logged = tmp_path / "webhook", list[Mapping[str, object]]()
    file.write_text(f"# ours\nhttp://127.0.0.1:1/s3cret\n{webhook.url if heard else ''}\n", encoding="utf-8")
    failed = "127.0.0.1: the webhook could not be reached: Connection refused"
    notify = Notifications(Log(logged.append), file)
    with contextlib.nullcontext() if heard else pytest.raises(ActionError, match=f"^{re.escape(failed)}$"):
        notify("GPU 3 is hot", {})
    assert [post["text"] for post in webhook.posts] == ["GPU 3 is hot"] * heard
    assert [entry["reason"] for entry in logged if "reason" in entry] == [failed] * heard


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


ACTED = ({"verb": "kill_process", "outcome": "ok", "at": 1.0},)
FAILED = ({"verb": "drain_node", "outcome": "failed", "at": 1.0},)
TOLD = ({"verb": "notify", "outcome": "ok", "at": 1.0},)


@pytest.mark.parametrize(
    ("before", "after", "changes", "said"),
    [
        (None, State.OPEN, {}, "opened"),
        (State.OPEN, State.ACTING, {"actions": ACTED}, ""),
        (State.ACTING, State.VERIFYING, {"actions": ACTED}, ""),
        (State.ACTING, State.VERIFYING, {"actions": FAILED}, "failed"),
        (State.ACTING, State.VERIFYING, {"actions": (*FAILED, {**ACTED[0], "at": 2.0})}, ""),
        (State.VERIFYING, State.OPEN, {"actions": ACTED}, ""),
        (State.VERIFYING, State.ESCALATED, {"actions": ACTED}, "escalated"),
        (State.VERIFYING, State.ESCALATED, {"actions": FAILED}, ""),
        (State.VERIFYING, State.ESCALATED, {"actions": TOLD}, ""),
        (State.RESOLVED, State.ESCALATED, {"relapses": 3}, "escalated"),
        (State.OPEN, State.OPEN, {}, "open; why"),
        (State.OPEN, State.RESOLVED, {"resolved_at": 1.0}, "resolved"),
        (State.ESCALATED, State.ESCALATED, {"resolved_at": 1.0}, "over"),
        (State.ESCALATED, State.ESCALATED, {"resolved_at": 1.0, "relapses": 3}, ""),
        (State.VERIFYING, State.ESCALATED, {"resolved_at": 1.0}, "escalated"),
        (State.VERIFYING, State.UNPROVEN, {"resolved_at": 1.0}, "unproven"),
        (State.OPEN, State.RESOLVED, {"resolved_at": 1.0, "untold": "opened"}, ""),
        (State.OPEN, State.RESOLVED, {"resolved_at": 1.0, "untold": "worse"}, "resolved"),
    ],
)
def test_people_hear_of_what_changes_something_for_them(
    before: State | None, after: State, changes: Mapping[str, object], said: str
) -> None:
    """Beginning and end, also of what was given up; and that opsd, which was to act, has not ended it."""
    found = incident(**{"actions": (), **changes})
    assert news(found, Transition("i", "trouble", before, after, 1.0, "why")) == said
    worse = Transition("i", "trouble", before, after, 1.0, "why", worse=True)
    assert before is None or "resolved_at" in changes or news(found, worse) == "worse"


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
        announce(incident(), "opened")
    assert eventually(lambda: len(told) == 2)


def test_runs_without_number_do_not_delay_what_is_said_of_the_node() -> None:
    """Each run waits for its own turn, also if it is called like a kind of incident; too much of one is dropped."""
    gate, told, said = threading.Event(), list[str](), list[Mapping[str, object]]()

    def slow(text: str, _fields: object) -> None:
        if "trouble opened" in text:
            gate.wait(60)
        told.append(text)

    announce = Announcer(slow, "n17", Log(said.append))
    for _ in range(2 * MAX_WAITING):
        announce(incident(run="gpu_xid"), "opened")
    announce(incident("x", kind="gpu_xid"), "opened")
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


# Receivers of notifications: what each service gets, where their URLs may stand, and that none is disclosed.


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
    announce(incident(severity=Severity.CRITICAL), "opened")
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


# Incidents as annotations in Grafana.


class Site:
    """An annotator and the Grafana that it writes to."""

    def __init__(self, folder: Path) -> None:
        self.grafana = FakeGrafana()
        self.token = folder / "token"
        self.token.write_text(TOKEN + "\n")
        self.said: list[Mapping[str, object]] = []
        self.annotate = Annotator(self.grafana.url + "/", self.token, "node-17", Log(self.said.append))

    def tell(self, after: State, before: State | None, at: float, **changes: object) -> None:
        shown = incident("i1", **{"resolved_at": at if after is State.RESOLVED else None, **changes})
        self.annotate(shown, Transition("i1", shown.kind, before, after, at, ""))

    def failed(self, reason: str) -> bool:
        return eventually(lambda: any(reason in str(entry.get("reason")) for entry in self.said))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    found.grafana.close()


def test_an_incident_is_a_region_and_its_action_a_moment(site: Site) -> None:
    """From when it opened to when it ended, with tags to filter by."""
    site.tell(State.OPEN, None, WALL)
    action = {"verb": "set_power_limit", "outcome": "running"}
    site.tell(State.ACTING, State.OPEN, WALL + 5, actions=(action,))
    site.tell(State.VERIFYING, State.ACTING, WALL + 6)
    site.tell(State.RESOLVED, State.VERIFYING, WALL + 60, verdict="it helped")
    assert eventually(lambda: any("timeEnd" in each for each in site.grafana.annotations))
    region, moment = site.grafana.annotations
    assert (region["time"], region["timeEnd"]) == (round(WALL * 1000), round((WALL + 60) * 1000))
    assert region["text"] == "trouble on node-17: GPU 0 is in trouble – it helped"
    assert region["tags"] == ["opsd", "trouble", "warning", "node:node-17", "job:4242"]
    assert moment["text"].endswith("set_power_limit")
    assert "timeEnd" not in moment


def test_the_region_of_an_escalated_incident_ends_with_it(site: Site) -> None:
    """Not when a person is called, but when it is over."""
    site.tell(State.OPEN, None, WALL)
    site.tell(State.ESCALATED, State.OPEN, WALL + 60)
    site.tell(State.ESCALATED, State.ESCALATED, WALL + 600, resolved_at=WALL + 600)
    assert eventually(lambda: any("timeEnd" in each for each in site.grafana.annotations))
    (region,) = site.grafana.annotations
    assert region["timeEnd"] - region["time"] == 600_000


def test_what_opened_before_a_restart_is_still_a_region(site: Site) -> None:
    """The annotation of its beginning is not remembered; a whole one is written when it ends."""
    site.tell(State.RESOLVED, State.OPEN, WALL + 60, opened_at=WALL)
    assert eventually(lambda: bool(site.grafana.annotations))
    (region,) = site.grafana.annotations
    assert region["timeEnd"] - region["time"] == 60_000


def test_symptoms_are_not_annotated(site: Site) -> None:
    """Their cause is, once."""
    site.tell(State.OPEN, None, WALL, cause="other")
    site.tell(State.OPEN, None, WALL)
    assert eventually(lambda: bool(site.grafana.annotations))
    assert len(site.grafana.annotations) == 1


def test_a_grafana_that_refuses_is_a_line_in_the_log_without_the_token(site: Site) -> None:
    """A token that is wrong, missing, or renewed; a Grafana that fails."""
    site.token.write_text("glsa_bad")
    site.tell(State.OPEN, None, WALL)
    assert site.failed("Grafana answered with status 401")
    site.token.unlink()
    site.tell(State.OPEN, None, WALL)
    assert site.failed("the token cannot be read")
    site.token.write_text(TOKEN)
    site.grafana.fail["POST /api/annotations"] = 500
    site.tell(State.OPEN, None, WALL)
    assert site.failed("Grafana answered with status 500")
    site.grafana.fail.clear()
    site.tell(State.OPEN, None, WALL)
    assert eventually(lambda: len(site.grafana.annotations) == 1)
    assert "glsa" not in str(site.said)


def test_an_environment_in_which_nothing_can_be_asked_does_not_end_the_annotations(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that is none is said as what it is, and the next incident is annotated again."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:port")
    site.tell(State.OPEN, None, WALL)
    assert site.failed("Grafana does not answer as it should: InvalidURL")
    monkeypatch.delenv("http_proxy")
    site.tell(State.OPEN, None, WALL)
    assert eventually(lambda: len(site.grafana.annotations) == 1)


def test_a_grafana_that_is_down_keeps_nobody_waiting(site: Site) -> None:
    """Hundreds of incidents are told of at once while it does not answer."""
    site.grafana.close()
    done = threading.Event()

    def flood() -> None:
        for _ in range(500):
            site.tell(State.OPEN, None, WALL)
        done.set()

    threading.Thread(target=flood, daemon=True).start()
    assert done.wait(20)


@pytest.mark.parametrize("url", ["grafana", "ftp://grafana", "https://user:password@grafana", "https://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    """With what it should be, and without what may be a password."""
    with pytest.raises(ConfigError, match="should be http:// or https:// and a host") as error:
        load(overrides=[f"notify.grafana_url={url}"])
    assert "password" not in str(error.value)
