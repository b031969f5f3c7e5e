"""Every alert fired once as a test, through the site's own Alertmanager: do the notifications arrive?

It pages people, so it has to be requested (`--alerts`). Each alert keeps its severity, so that it takes the real route;
the label test="true" and its text mark it as a test. No two share an instance or a run, so that none inhibits another.
They are resolved at the end, and expire by themselves if this process is killed.

Requests to the site's Prometheus and Alertmanager: list alerts, post alerts, count notifications.

Uses version 2 of Alertmanager's API (its api/v2/openapi.yaml) and version 1 of Prometheus'.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from opsd.preflight.base import (
    Check,
    Context,
    CouldNotRunError,
    Finding,
    Measure,
    Measurement,
    NotApplicableError,
    Outcome,
    Progress,
    Verdict,
)
from opsd.preflight.inbox import Inbox
from opsd.runbooks import RUNBOOKS

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


MARK: Final = "preflight"
"""Label with the same value in all alerts of one check."""
_WIDEST: Final = "critical"
"""Severity used for alerts that take their severity from their series: the one with the widest routing."""
_POLL_S: Final = 0.5
_QUIET_S: Final = 5.0
"""This long after the last notification no more is expected."""
_OUTLIVES_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of the ``fired`` alerts: in Alertmanager, its notifications, and the names of those that ``arrived``.

    ``arrived`` is None without an inbox.
    """

    fired: Mapping[str, Alert]
    listed: Mapping[str, Listed]
    notified: Notified
    arrived: Mapping[str, int] | None = None


def run(context: Context, progress: Progress) -> Outcome:
    """Fire, wait until all have arrived, resolve."""
    if not context.fire_alerts:
        raise NotApplicableError("it pages people; --alerts fires each alert once")
    if not context.settings.alertmanager or not context.settings.prometheus:
        raise CouldNotRunError("set preflight.alertmanager and preflight.prometheus, the addresses of the site's own")
    rules = alerts_of(context.settings.prometheus)
    if not rules:
        raise CouldNotRunError(f"{context.settings.prometheus} has none of opsd's alerts; load deploy/prometheus/rules")
    manager, began = Alertmanager(context.settings.alertmanager), time.time()
    fired = tests_of(rules, context.node, began, began + context.seconds + _OUTLIVES_S)
    before = manager.notified()
    with ExitStack() as ending:
        inbox = _inbox(context.settings.alert_inbox, ending)
        ending.callback(lambda: manager.post([replace(alert, until=time.time()) for alert in fired.values()]))
        manager.post([*fired.values()])
        seen, slowest = _wait(lambda: _look(manager, fired, before, inbox), began + context.seconds, progress)
    facts = {name: ", ".join(alert.receivers) for name, alert in sorted(seen.listed.items())}
    measured = [Measurement("alerts", len(fired))]
    measured += [Measurement("delay", slowest - began)] if slowest else []
    return Outcome(tuple(measured), (*_unknown(rules), *findings(seen)), facts)


def tests_of(rules: Sequence[Mapping[str, str]], node: str, since: float, until: float) -> dict[str, Alert]:
    """A test alert for each rule, by its name in reports."""
    tests = {}
    for templated in rules:
        rule = {label: value for label, value in templated.items() if "{{" not in value}  # else known once it fires
        extra = [value for label, value in rule.items() if label not in ("alertname", "severity")]
        name = " ".join([rule["alertname"], *extra])
        place = f"test-{'-'.join([rule['alertname'], *extra])}.{node}"
        labels = {
            "severity": _WIDEST,
            **rule,
            "instance": place,
            "run": place,
            "test": "true",
            MARK: f"{node}-{since:.0f}",
        }
        words = f"TEST of the alert {name} by `opsd preflight` on {node}: nothing is wrong"
        annotations = {"summary": words, "description": "It ends by itself within minutes.", "node": node}
        tests[name] = Alert(labels, annotations, since, until)
    return tests


def _inbox(address: str, ending: ExitStack) -> Inbox | None:
    if not address:
        return None
    host, _, port = address.rpartition(":")
    try:
        inbox = Inbox((host.strip("[]"), int(port)))
    except OSError as error:
        raise CouldNotRunError(f"preflight.alert_inbox {address} cannot be listened on: {error.strerror}") from error
    ending.callback(inbox.close)
    return inbox


def _look(manager: Alertmanager, fired: Mapping[str, Alert], before: Notified, inbox: Inbox | None) -> Seen:
    mark = next(iter(fired.values())).labels[MARK]
    by_place = {alert.labels["instance"]: name for name, alert in fired.items()}
    listed = {by_place[found.labels["instance"]]: found for found in manager.listed(MARK, mark) if found.processed}
    arrived = None
    if inbox is not None:
        mine = [alert["labels"].get("instance") for alert in inbox.firing() if alert["labels"].get(MARK) == mark]
        arrived = Counter(by_place[place] for place in mine if place in by_place)
    return Seen(fired, listed, manager.notified().since(before), arrived)


def _wait(look: Callable[[], Seen], deadline: float, progress: Progress) -> tuple[Seen, float | None]:
    """The state once all have arrived and no more follow, and when the last one arrived; None if they never did.

    Raises CouldNotRunError if Alertmanager stops answering.
    """
    began, last, changed = time.time(), look(), time.time()
    while (now := time.time()) < deadline:
        seen = look()
        changed = now if seen != last else changed
        last = seen
        progress(_share(seen), "")
        if _complete(seen) and now - changed >= _QUIET_S:
            break
        time.sleep(_POLL_S)
    return last, max(changed, began) if _complete(last) else None


def _share(seen: Seen) -> float:
    there = seen.listed if seen.arrived is None else seen.arrived
    return min(1.0, len(there) / len(seen.fired))


def _complete(seen: Seen) -> bool:
    return _share(seen) == 1.0 and bool(seen.notified.sent)


def findings(seen: Seen) -> Iterator[Finding]:
    """Notifications that did not arrive, and why."""
    lost = [name for name in seen.fired if name not in seen.listed]
    held = {name: found for name, found in seen.listed.items() if found.held_by}
    nobody = [name for name, found in seen.listed.items() if not found.receivers]
    if lost:
        yield _fail(f"Alertmanager does not list {_names(lost)}, which it was sent", "read Alertmanager's log")
    if nobody:
        yield _fail(f"{_names(nobody)} would be told to nobody", "correct Alertmanager's routes")
    for name, found in held.items():
        yield _fail(f"{name} is held back by {', '.join(found.held_by)}", "end the silence, or correct inhibit_rules")
    for integration, count in seen.notified.failed.items():
        yield _fail(
            f"{count:.0f} messages to {integration} failed", "look at its address, its key and Alertmanager's log"
        )
    if not seen.notified.sent and not lost:
        yield _fail("Alertmanager has sent no message", "look for a longer group_wait, a mute time, or no receiver")
    if seen.arrived is not None:
        missing = [name for name in seen.fired if name not in seen.arrived and name not in held]
        twice = [name for name, count in seen.arrived.items() if count > 1]
        if missing:
            yield _fail(f"{_names(missing)} did not arrive at the inbox", "let a webhook of all alerts post there")
        if twice:
            yield Finding(Verdict.WARN, f"{_names(twice)} arrived more than once", "two routes lead to the inbox")


def _unknown(rules: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """Incidents without an alert: an old rule file, or one that is not loaded."""
    there = {rule["alertname"] for rule in rules}
    lacking = [name for book in RUNBOOKS if (name := "".join(map(str.title, book.kind.split("_")))) not in there]
    if lacking:
        yield _fail(f"Prometheus does not have {_names(lacking)}", "load all files of deploy/prometheus/rules")


def _fail(summary: str, advice: str) -> Finding:
    return Finding(Verdict.FAIL, summary, advice)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


CHECK = Check(
    name="run_alerts",
    title="Every alert, fired once",
    run=run,
    seconds={"quick": 120, "standard": 120},
    measures=(
        Measure("alerts", "", "alerts that were fired"),
        Measure("delay", "seconds", "until the last message had been sent", "lower", noise=1.0, required=False),
    ),
    needs=frozenset({"network"}),
    advice="amtool config routes test shows who is told of what",
)
