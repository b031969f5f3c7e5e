"""The agent's log: lines for people on a terminal, JSON everywhere else; always on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any


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


def configure() -> FilteringBoundLogger:
    """The log of this process."""
    people = sys.stderr.isatty()
    renderers: list[Any] = (
        [structlog.dev.ConsoleRenderer()]
        if people
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not people),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    log: FilteringBoundLogger = structlog.get_logger()
    return log
