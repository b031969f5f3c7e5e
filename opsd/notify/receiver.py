"""Where messages for people go: a webhook, a chat, or a service that apprise knows.

The URL of a receiver is as good as a password. It is in no error, no log and no command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import opsd
from opsd import pip_install
from opsd.files import read_settings

TIMEOUT_S = 10.0
APPRISE_S = 60.0
"""The same for apprise, which starts an interpreter and may speak to a mail server."""
NO_APPRISE, UNKNOWN = 3, 4
"""Exit codes of ``python -m opsd.notify`` without apprise, and for a URL that apprise does not know."""
AT_ONCE = 2
"""Processes of apprise: each takes 47 MiB, and the service of the agent has 256."""
_APPRISE = threading.BoundedSemaphore(AT_ONCE)
_TYPES = {"critical": "failure", "warning": "warning", "info": "info"}
"""Severities as apprise calls them. It calls good news ``success``."""
_DISCORD_MARKUP = str.maketrans({mark: f"\\{mark}" for mark in r"\*_~`|"})
_NOT_DELIVERED = b"Webhook message delivery failed"
"""How a connector of Teams begins its answer, of status 200, to what Teams has refused."""
Body = Callable[[str, Mapping[str, object]], Mapping[str, Any]]


class NotifyError(Exception):
    """A message was not taken; the reason is one sentence, without the URL. ``heard``: another receiver has it."""

    def __init__(self, reason: str, *, heard: bool = False) -> None:
        super().__init__(reason)
        self.heard = heard


@dataclass(frozen=True, slots=True)
class Receiver:
    """The owner of a URL: http and https are webhooks, other schemes are apprise's."""

    url: str = field(repr=False)

    @property
    def name(self) -> str:
        """What may be said of it: the scheme, and of a webhook the host."""
        try:
            parts = urlsplit(self.url)
            return (parts.hostname or "the webhook") if self.is_webhook else f"{parts.scheme}://"
        except ValueError:
            return "the webhook"

    @property
    def is_webhook(self) -> bool:
        """Whether it is posted to without apprise."""
        return self.url.partition("://")[0].lower() in ("http", "https")

    def send(self, text: str, fields: Mapping[str, object], children: set[int] | None = None) -> None:
        """Deliver one message; may take TIMEOUT_S, with apprise APPRISE_S. Raises NotifyError.

        ``children`` has the process of apprise while it runs, for a caller that ends unknown children.
        """
        if self.is_webhook:
            _post(self.url, text, fields)
            return
        told = {"url": self.url, "text": text, "title": title_of(text, fields), "type": type_of(fields)}
        _hand_to_apprise(told, children if children is not None else set())

    def check(self) -> None:
        """See whether messages can be sent there, without sending one. Raises NotifyError."""
        if not self.is_webhook:
            _hand_to_apprise({"url": self.url}, set())


def title_of(text: str, fields: Mapping[str, object]) -> str:
    """The subject of a mail, and the key by which a service knows that a later message is about the same.

    That of an incident is the same from its beginning to its end. Otherwise it is the beginning of ``text``.
    """
    if fields.get("id"):
        return f"{fields.get('node', '')} {fields.get('kind', '')}: {fields['id']}".strip()
    return text.partition(": ")[0]


def type_of(fields: Mapping[str, object]) -> str:
    """The type of a message as apprise calls it, from the fields of an incident or of a launcher's event."""
    if fields.get("state") in ("resolved", "unproven", "over") or fields.get("event") == "restarted":
        return "success"
    if fields.get("event") == "finished":
        return "success" if fields.get("exit_code") == 0 else "failure"
    if fields.get("event") == "stuck":
        return "failure"
    return _TYPES.get(str(fields.get("severity", "")), "info")


def send_to_all(where: str, text: str, fields: Mapping[str, object]) -> None:
    """Deliver one message to all receivers that ``where`` names. Raises NotifyError once all have been tried."""
    failed, receivers = [], read_receivers(where)
    for receiver in receivers:
        try:
            receiver.send(text, fields)
        except NotifyError as error:
            failed.append(f"{receiver.name}: {error}")
    if failed:
        raise NotifyError("; ".join(failed), heard=len(failed) < len(receivers))


def read_receivers(where: str) -> list[Receiver]:
    """The receivers that ``where`` names: a URL, or a file with one on each line. Raises NotifyError."""
    if "://" in where:
        return [Receiver(where.strip())]
    try:
        lines = read_settings(Path(where)).decode("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise NotifyError(f"{where}: neither a URL nor a file with URLs that can be read") from error
    urls = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not urls or not all("://" in url for url in urls):
        raise NotifyError(f"{where}: the file must have a URL on each line, and no other text but comments")
    return [Receiver(url) for url in urls]


def body_for(host: str) -> Body:
    """What makes the JSON for the service on ``host``; the text and the fields themselves for one that is not known."""
    for services, body in _SERVICES.items():
        if any(host == service or host.endswith(f".{service}") for service in services):
            return body
    return lambda text, fields: {"text": text, **fields}


def _slack(text: str, _fields: Mapping[str, object]) -> Mapping[str, Any]:
    return {"text": text, "mrkdwn": False}


def _google(text: str, _fields: Mapping[str, object]) -> Mapping[str, Any]:
    return {"text": text}  # it knows no way to turn * and _ off, and refuses keys that it does not know


def _discord(text: str, _fields: Mapping[str, object]) -> Mapping[str, Any]:
    return {"content": text.translate(_DISCORD_MARKUP), "allowed_mentions": {"parse": []}}


def _teams(text: str, _fields: Mapping[str, object]) -> Mapping[str, Any]:
    content = {
        "type": "AdaptiveCard",
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "version": "1.4",
        # A TextBlock would read Markdown in it.
        "body": [{"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": text}]}],
    }
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": content}
    return {"type": "message", "attachments": [attachment]}


_SERVICES: Mapping[tuple[str, ...], Body] = {
    ("hooks.slack.com", "hooks.slack-gov.com"): _slack,
    ("chat.googleapis.com",): _google,
    ("discord.com", "discordapp.com"): _discord,
    ("webhook.office.com", "logic.azure.com", "powerplatform.com"): _teams,  # by connectors and by workflows
}
"""All of them take the 2,000 characters that ``send_json`` lets through: Discord takes 2,000, Slack 40,000, Google Chat
32,000 bytes, Teams 28 KB."""


def _post(url: str, text: str, fields: Mapping[str, object]) -> None:
    try:
        from opsd.notify.outgoing import send_json  # megabytes that only those with a webhook need

        body = body_for(urlsplit(url).hostname or "")(text, fields)
        status, answer = send_json("POST", url, body, TIMEOUT_S)
    except Exception as error:  # also of proxies and certificates, which the environment names
        raise NotifyError(f"the webhook could not be reached: {_without_url(error)}") from error
    if not 200 <= status < 300:  # redirects are failures, too
        raise NotifyError(f"the webhook answered with status {status}")
    if answer.startswith(_NOT_DELIVERED):
        raise NotifyError("the webhook took the message, and Teams refused it")


def _without_url(error: Exception) -> str:
    """What the operating system or TLS says; of any other ``error``, whose text may have the URL, its name."""
    inner = getattr(error, "reason", None)
    cause = inner if isinstance(inner, OSError) else error
    return (cause.strerror if isinstance(cause, OSError) else None) or type(cause).__name__


def _hand_to_apprise(told: Mapping[str, str], children: set[int]) -> None:
    """In a process of its own: apprise needs tens of megabytes, and has no deadline."""
    with _APPRISE:
        code = _exit_code_of_apprise(told, children)
    if code == NO_APPRISE:
        raise NotifyError(f"it needs apprise: {pip_install('notify')}")
    if code == UNKNOWN:
        raise NotifyError("apprise does not know such a URL")
    if code:
        raise NotifyError("apprise could not deliver the message")


def _exit_code_of_apprise(told: Mapping[str, str], children: set[int]) -> int:
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "opsd.notify"],
            cwd=Path(opsd.__file__).parents[1],  # where -m finds this opsd, not one of the user's
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise NotifyError(f"no process can be started: {error.strerror}") from error
    children.add(process.pid)
    try:
        process.communicate(json.dumps(told).encode(), APPRISE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise NotifyError(f"the message was not delivered within {APPRISE_S:g} s") from None
    finally:
        children.discard(process.pid)
    return process.returncode
