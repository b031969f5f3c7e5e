"""The agent's log: fields in systemd's journal, lines for people on a terminal, JSON everywhere else on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from opsd.agent.system_log import SOCKET, JournalLogger, leads_to_journal


@contextlib.contextmanager
def _absent(name: str) -> Iterator[None]:
    """Hide a module from those who can do without it."""
    known = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if known is not None:
            sys.modules[name] = known


with _absent("rich"):  # for tracebacks in colour it would take 11 MiB, a fifth of the agent's memory
    import structlog

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


def configure(journal: str = SOCKET) -> FilteringBoundLogger:
    """The log of this process; ``journal`` is the socket of systemd's journal."""
    common: list[Any] = [structlog.processors.add_log_level]
    if leads_to_journal(sys.stderr, os.environ):
        _use([*common, structlog.processors.format_exc_info], lambda *_: JournalLogger(journal))
    elif sys.stderr.isatty():
        common.append(structlog.processors.TimeStamper(fmt="iso", utc=False))
        _use([*common, structlog.dev.ConsoleRenderer()], structlog.WriteLoggerFactory(sys.stderr))
    else:
        common += [structlog.processors.TimeStamper(fmt="iso", utc=True), structlog.processors.format_exc_info]
        _use([*common, structlog.processors.JSONRenderer(default=str)], structlog.WriteLoggerFactory(sys.stderr))
    log: FilteringBoundLogger = structlog.get_logger()
    return log


def _use(processors: list[Any], factory: Callable[..., Any]) -> None:
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
