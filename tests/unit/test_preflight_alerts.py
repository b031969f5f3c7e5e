"""`opsd preflight --alerts`: what is made of the rules, and what is said of what came of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from opsd.preflight.base import Context, CouldNotRunError, NotApplicableError
from opsd.preflight.checks import run_alerts
from opsd.preflight.checks.run_alerts import Listed, Notified, Seen, findings
from opsd.preflight.checks.run_alerts import tests_of as fired_for
from opsd.settings.sections import PreflightSettings

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
