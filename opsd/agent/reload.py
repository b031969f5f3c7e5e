"""Reloading the configuration: all of it or nothing, in the loop's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from opsd.agent.logs import Log
from opsd.agent.metrics import reload_samples
from opsd.collectors.base import Sample
from opsd.config import ConfigError, Settings

AT_ONCE = frozenset({"names", "web_config", "peer_ca_file", "peer_credentials_file"})
"""Keys of ``[agent]`` that a reload applies. The others take effect when the agent starts again."""


class Reloader:
    """Applies the configuration that ``read`` returns, once it is ``wanted``.

    ``apply`` gets the settings in force and the new ones. Both may raise ConfigError: then nothing has changed, and
    log, metrics and status say why.
    """

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings],
        apply: Callable[[Settings, Settings], None],
        log: Log,
        wanted: threading.Event,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._read, self._apply = settings, read, apply
        self._log, self._wanted, self._wall = log, wanted, wall
        self._attempts, self._loaded_at = 0, wall()
        self._problem = ""
        self._waiting: tuple[str, ...] = ()

    def due(self) -> bool:
        """Whether a reload is wanted; it is not from now on."""
        wanted = self._wanted.is_set()
        self._wanted.clear()
        return wanted

    def reload(self) -> None:
        """Read the configuration and apply it."""
        try:
            read = self._read()
            new = without_restart(self._settings, read)
            self._apply(self._settings, new)
        except ConfigError as error:
            self._problem = str(error)
            self._log.error("configuration refused, the old one stays", problem=self._problem)
        except Exception as error:
            self._problem = f"a bug in opsd: {type(error).__name__}"
            self._log.exception("configuration refused, the old one stays", problem=self._problem)
        else:
            self._settings, self._problem, self._loaded_at = new, "", self._wall()
            self._waiting = needs_restart(new, read)
            self._log.info("configuration reloaded", needs_restart=", ".join(self._waiting))
        self._attempts += 1

    def status(self) -> dict[str, object]:
        """For the API: the number of ``reloads`` tried, when the settings in force were loaded, and what is wrong."""
        return {
            "reloads": self._attempts,
            "loaded_at": self._loaded_at,
            "problem": self._problem,
            "needs_restart": list(self._waiting),
        }

    def samples(self) -> Iterator[Sample]:
        """The metrics of the configuration."""
        return reload_samples(self._problem, self._loaded_at)


def without_restart(running: Settings, read: Settings) -> Settings:
    """The settings that were ``read``, but for the keys that take effect only when the agent starts again."""
    at_once = {key: getattr(read.agent, key) for key in AT_ONCE}
    return read.model_copy(update={"agent": running.agent.model_copy(update=at_once)})


def needs_restart(running: Settings, read: Settings) -> tuple[str, ...]:
    """The keys in which the settings that were ``read`` differ from those that the agent runs with."""
    keys = type(running.agent).model_fields
    return tuple(f"agent.{key}" for key in keys if getattr(running.agent, key) != getattr(read.agent, key))
