"""Whether this node may replace another one in a run; its launcher asks, which may be an ordinary user's."""

from __future__ import annotations

import time
from collections.abc import Callable

from opsd.collectors.spare import FILE
from opsd.config import Settings
from opsd.settings.spare import SpareSettings
from opsd.slurm.port import Slurm, SlurmError
from opsd.spares import pool, state
from opsd.spares.state import SpareState


class EligibilityUnknownError(OSError):
    """Whether the node is ready cannot be determined at the moment."""


def why_not(settings: Settings, slurm: Callable[[], Slurm], clock: Callable[[], float] = time.time) -> str:
    """Why ``agent.node`` must not replace another node, "" if it may, or if spares have no requirements here.

    The answer is in the agent's state folder, or, for a user who may not read that, in the node's comment in Slurm.
    Raises EligibilityUnknownError if neither can be read.
    """
    if not has_requirements(settings.spare):
        return ""
    try:
        (settings.agent.state_dir / FILE).stat()
    except PermissionError:
        return _by_comment(slurm, settings, clock())
    except OSError:
        pass
    return (state.read(settings.agent.state_dir) or SpareState()).why_not_ready(clock())


def has_requirements(settings: SpareSettings) -> bool:
    """Whether these settings require anything of a spare."""
    return settings.enabled and bool(settings.source or settings.software)


def _by_comment(slurm: Callable[[], Slurm], settings: Settings, now: float) -> str:
    node, folder = settings.agent.node, settings.agent.state_dir
    try:
        port = slurm()
        (found,) = pool.judge(port.nodes([node]), port.comments([node]), {node}, settings.spare.max_age_s, now)
    except ValueError:
        return f"whether it is ready cannot be known: {folder} cannot be read here, and Slurm has no node {node}"
    except SlurmError as error:
        raise EligibilityUnknownError(
            f"whether it is ready cannot be known: {folder} cannot be read here, and {error}"
        ) from error
    return found.why_not
