"""Reloading the configuration of the agent."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from opsd.agent.daemon import Reloader
from opsd.agent.logs import Log
from opsd.config import ConfigError, Settings


class World:
    """A reloader, the configuration that it will read, and what it has applied and said."""

    def __init__(self) -> None:
        self.next: Settings | Exception = Settings()
        self.applied: list[tuple[Settings, Settings]] = []
        self.said: list[Mapping[str, object]] = []
        self.wanted = threading.Event()
        self.reloader = Reloader(
            Settings(), self.read, lambda *both: self.applied.append(both), Log(self.said.append), self.wanted,
            wall=lambda: 7.0,
        )  # fmt: skip

    def read(self) -> Settings:
        if isinstance(self.next, Exception):
            raise self.next
        return self.next

    def metrics(self) -> dict[str, float]:
        return {sample.metric.name: sample.value for sample in self.reloader.samples()}


def settings(**sections: object) -> Settings:
    return Settings.model_validate(sections)


def test_new_settings_are_applied() -> None:
    """The next reload starts from them."""
    world = World()
    first, second = settings(policy={"mode": "act"}), settings(policy={"mode": "recommend"})
    for world.next in (first, second):
        world.reloader.reload()
    assert world.applied == [(Settings(), first), (first, second)]
    assert world.reloader.status() == {"reloads": 2, "loaded_at": 7.0, "problem": "", "needs_restart": []}


@pytest.mark.parametrize("error", [ConfigError("unknown key agent.x"), ZeroDivisionError()])
def test_a_configuration_that_is_wrong_changes_nothing(error: Exception) -> None:
    """Log, metric and status say so, until one is good again."""
    world = World()
    world.next = error
    world.reloader.reload()
    assert world.applied == []
    assert world.said[-1]["level"] == "error"
    assert world.metrics()["opsd_config_last_reload_successful"] == 0
    assert world.reloader.status()["problem"] == str(error) or "ZeroDivisionError" in str(world.said[-1])
    world.next = Settings()
    world.reloader.reload()
    assert world.metrics()["opsd_config_last_reload_successful"] == 1
    assert world.reloader.status()["problem"] == ""


def test_what_needs_a_restart_is_named_and_left_alone() -> None:
    """The agent does not change its address or its state folder while it runs."""
    world = World()
    world.next = settings(agent={"listen": "127.0.0.1:1", "names": ["node-17.cluster"], "interval_s": 2.0})
    world.reloader.reload()
    ((_, applied),) = world.applied
    assert (applied.agent.listen, applied.agent.interval_s) == (Settings().agent.listen, 1.0)
    assert applied.agent.names == ("node-17.cluster",)
    assert world.reloader.status()["needs_restart"] == ["agent.listen", "agent.interval_s"]


def test_a_signal_is_one_reload() -> None:
    """However often it came before the next tick."""
    world = World()
    assert not world.reloader.due()
    world.wanted.set()
    world.wanted.set()
    assert world.reloader.due()
    assert not world.reloader.due()
