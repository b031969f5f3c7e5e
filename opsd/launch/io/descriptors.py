"""File descriptors are few: what the launcher needs for its own work is kept from those who merely connect."""

from __future__ import annotations

import resource

OWN_WORK = 512
"""What a launcher needs beside its connections: the pipes, logs and pidfds of its ranks."""
_KEPT = 64
_STRANGERS = 64


def ask_for(launchers: int) -> None:
    """Raise the soft limit to what a launcher needs that is connected with so many: two connections to each."""
    needed = 2 * launchers + OWN_WORK
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else min(needed, hard), hard)
        )


def for_strangers() -> int:
    """How many connections there may be on which nobody has proven who it is: a few, an eighth of a low limit."""
    return min(_STRANGERS, max(1, _limit() // 8))


def is_kept(descriptor: int) -> bool:
    """Whether a new descriptor is one of the last, kept for the launcher's own work. The lowest free one is given."""
    limit = _limit()
    return descriptor >= limit - min(_KEPT, limit // 4)


def _limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30
