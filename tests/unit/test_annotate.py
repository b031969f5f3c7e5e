"""Incidents as annotations in Grafana."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from opsd.agent.incidents import Transition
from opsd.agent.logs import Log
from opsd.agent.notify import Annotator
from opsd.config import ConfigError, load
from opsd.runbooks.base import State
from tests.fakes.clock import eventually
from tests.fakes.grafana import TOKEN, FakeGrafana
from tests.fakes.incidents import WALL, incident


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
