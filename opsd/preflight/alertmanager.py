"""Requests to the site's Prometheus and Alertmanager: list alerts, post alerts, count notifications.

Uses version 2 of Alertmanager's API (its api/v2/openapi.yaml) and version 1 of Prometheus'.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from opsd.preflight.base import CouldNotRunError

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S: Final = 10.0
_GROUPS: Final = "opsd-"
_SENT: Final = re.compile(r'^alertmanager_notifications_total\{.*?integration="(\w+)".*\} (\S+)$', re.MULTILINE)
_FAILED: Final = re.compile(
    r'^alertmanager_notifications_failed_total\{.*?integration="(\w+)".*\} (\S+)$', re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert with its ``labels`` and annotations; it resolves by itself at the epoch second ``until``."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    since: float
    until: float

    def to_json(self) -> dict[str, object]:
        """The alert in Alertmanager's format."""
        times = {"startsAt": _written(self.since), "endsAt": _written(self.until)}
        return {"labels": dict(self.labels), "annotations": dict(self.annotations), **times}


@dataclass(frozen=True, slots=True)
class Listed:
    """An alert in Alertmanager; ``held_by`` are the silences and alerts that suppress its notifications."""

    labels: Mapping[str, str]
    receivers: tuple[str, ...]
    held_by: tuple[str, ...]
    processed: bool


@dataclass(frozen=True, slots=True)
class Notified:
    """Notifications sent and failed since Alertmanager started, by integration (webhook, slack, pagerduty, …)."""

    sent: Mapping[str, float]
    failed: Mapping[str, float]

    def since(self, before: Notified) -> Notified:
        """The difference to ``before``; integrations without new notifications are left out."""
        sent = {name: count - before.sent.get(name, 0.0) for name, count in self.sent.items()}
        failed = {name: count - before.failed.get(name, 0.0) for name, count in self.failed.items()}
        return Notified(_positive(sent), _positive(failed))


class Alertmanager:
    """The Alertmanager at ``url``. Every call raises CouldNotRunError if it gets no valid answer."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def post(self, alerts: Sequence[Alert]) -> None:
        """Post ``alerts`` as Prometheus does: an existing one is updated, one that is over is resolved."""
        _ask("POST", f"{self._url}/api/v2/alerts", json=[alert.to_json() for alert in alerts])

    def listed(self, label: str, value: str) -> list[Listed]:
        """The alerts whose ``label`` is ``value``, suppressed or not."""
        answer = _ask("GET", f"{self._url}/api/v2/alerts", params={"filter": f'{label}="{value}"'})
        with _understood(self._url, "Alertmanager"):
            return [
                Listed(
                    alert["labels"],
                    tuple(receiver["name"] for receiver in alert["receivers"]),
                    (*alert["status"]["silencedBy"], *alert["status"]["inhibitedBy"]),
                    alert["status"]["state"] != "unprocessed",
                )
                for alert in answer.json()
            ]

    def notified(self) -> Notified:
        """Notifications sent so far."""
        text = _ask("GET", f"{self._url}/metrics").text
        return Notified(_summed(_SENT.findall(text)), _summed(_FAILED.findall(text)))


def alerts_of(prometheus: str) -> list[dict[str, str]]:
    """The labels, "alertname" included, of every alert in opsd's rule groups in Prometheus.

    Raises CouldNotRunError.
    """
    answer = _ask("GET", f"{prometheus.rstrip('/')}/api/v1/rules", params={"type": "alert"})
    with _understood(prometheus, "Prometheus"):
        groups = [group for group in answer.json()["data"]["groups"] if group["name"].startswith(_GROUPS)]
        return [{"alertname": rule["name"], **rule.get("labels", {})} for group in groups for rule in group["rules"]]


@contextmanager
def _understood(url: str, program: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise CouldNotRunError(f"{url} does not answer like {program}; is the address right?") from error


def _ask(method: str, url: str, **options: Any) -> httpx.Response:
    import httpx  # a tenth of a second that other preflights do not pay

    try:
        answer = httpx.request(method, url, timeout=_TIMEOUT_S, **options)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CouldNotRunError(f"{url} does not answer ({type(error).__name__}); is the address right?") from error
    if answer.is_error:
        raise CouldNotRunError(f"{url} answered with status {answer.status_code}; is the address right?")
    return answer


def _written(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def _summed(rows: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Newer releases have one series per receiver or reason."""
    sums: dict[str, float] = {}
    for name, count in rows:
        sums[name] = sums.get(name, 0.0) + float(count)
    return sums


def _positive(counts: Mapping[str, float]) -> dict[str, float]:
    return {name: count for name, count in counts.items() if count > 0}
