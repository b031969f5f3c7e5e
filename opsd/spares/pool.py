"""The pool of spares in Slurm: nodes of the reservation, and nodes whose comment says that they are spares.

Whether this node may replace another one in a run; its launcher asks, which may be an ordinary user's.

The state of this node as a spare: one JSON file in the agent's state folder, replaced by rename.

The agent's collector (collectors/spare.py) reads ``ready``, ``expires_at``, ``checked_at`` and ``staged_bytes``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from opsd.collectors.spare import FILE
from opsd.config import Settings
from opsd.files import write_text
from opsd.settings.sections import SpareSettings
from opsd.slurm import node_comment
from opsd.slurm.ownership import day
from opsd.slurm.port import Node, Slurm, SlurmError, SlurmRejected


@dataclass(frozen=True, slots=True)
class SpareState:
    """``digest`` identifies the staged data; times are epoch seconds, 0 for never.

    ``lacks`` gives by topic (data, software, preflight) why the node is not ready. If it is empty, the node is ready
    until ``expires_at``.
    """

    source: str = ""
    folder: str = ""
    digest: str = ""
    staged_bytes: int = 0
    staged_at: float = 0.0
    verified_at: float = 0.0
    damaged: tuple[str, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    checked_at: float = 0.0
    expires_at: float = 0.0
    ready: bool = False
    lacks: Mapping[str, str] = field(default_factory=dict)
    format: Literal[1] = 1

    def holds_for(self, settings: SpareSettings) -> bool:
        """Whether the state is of the configured source and folder."""
        return (self.source, self.folder) == (settings.source, settings.folder)

    def why_not_ready(self, now: float) -> str:
        """Why the node must not be used as a spare at the epoch second ``now``, "" if it may be."""
        if self.lacks:
            return "; ".join(f"{topic}: {why}" for topic, why in self.lacks.items())
        if not self.ready:
            return "it was never verified; run `opsd spare verify`"
        return "" if now < self.expires_at else "its last verification is too old; run `opsd spare verify`"


_STATE = TypeAdapter(SpareState)


def read(state_dir: Path) -> SpareState | None:
    """The stored state, None if there is none or it cannot be used."""
    try:
        return _STATE.validate_json((state_dir / FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def write(state_dir: Path, state: SpareState) -> None:
    """Store ``state``. Raises OSError."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(state_dir / FILE, _STATE.dump_json(state, indent=1).decode() + "\n")


def forget(state_dir: Path) -> None:
    """Remove the state: this node is no spare any more. Raises OSError."""
    (state_dir / FILE).unlink(missing_ok=True)


FLAGS = "REPLACE_DOWN"
"""Slurm replaces a node that goes down (0.3 to 1.1 s, measured on 22.05 and 25.11)."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A node of the pool; ``why_not`` is why it must not be used now, "" if it is ready."""

    node: str
    why_not: str
    since: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether it may replace another node."""
        return not self.why_not


def pool(slurm: Slurm, reservation: str, max_age_s: float, now: float) -> list[Spare]:
    """The spares, by name. Raises SlurmError."""
    reserved = {name for found in slurm.reservations() if found.name == reservation for name in found.nodes}
    return judge(slurm.nodes(), slurm.comments(), reserved, max_age_s, now)


def judge(
    nodes: Sequence[Node], comments: Mapping[str, str], reserved: set[str], max_age_s: float, now: float
) -> list[Spare]:
    """The spares among ``nodes``, as of the epoch second ``now``. Pure."""
    spares = []
    for node in nodes:
        told = node_comment.read(comments.get(node.name, ""))
        if told.spare or node.name in reserved:
            spares.append(Spare(node.name, _why_not(node, told.spare, told.spare_at, max_age_s, now), told.spare_at))
    return spares


def mark(slurm: Slurm, node: str, spare: str, at: float) -> None:
    """Set the spare state in the node's comment: "ready", the topics it lacks, or "" for no spare.

    Raises SlurmError.
    """
    comments = slurm.comments([node])
    if node not in comments:
        raise SlurmRejected(f"Slurm has no node {node}; if this machine has another name there, set agent.node")
    before = node_comment.read(comments[node])
    after = replace(before, spare=spare, spare_at=at if spare else 0.0)
    if after != before:
        slurm.set_comment(node, node_comment.write(comments[node], after))


def reserve(slurm: Slurm, name: str, *, count: int, partition: str, users: str) -> None:
    """Create the pool's reservation of ``count`` nodes that Slurm chooses and replaces. Raises SlurmError."""
    slurm.reserve(
        name,
        {
            "StartTime": "now", "Duration": "infinite", "Users": users, "NodeCnt": str(count), "Flags": FLAGS,
            **({"PartitionName": partition} if partition else {}),
        },
    )  # fmt: skip


def _why_not(node: Node, told: str, at: float, max_age_s: float, now: float) -> str:
    if not node.usable:
        flags = "+".join([node.state, *sorted(node.flags)])
        return f"Slurm has it as {flags}{f': {node.reason}' if node.reason else ''}"
    if not told:
        return "it has not said that it is ready; run `opsd spare stage` and `opsd spare verify` on it"
    if told != "ready":
        return f"it lacks {told.replace(',', ', ')} since {day(at)}; `opsd spare verify` on it says what"
    if now - at > max_age_s:
        return f"it was ready at {day(at)}, which is too long ago; run `opsd spare verify` on it"
    return ""


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
    return (read(settings.agent.state_dir) or SpareState()).why_not_ready(clock())


def has_requirements(settings: SpareSettings) -> bool:
    """Whether these settings require anything of a spare."""
    return settings.enabled and bool(settings.source or settings.software)


def _by_comment(slurm: Callable[[], Slurm], settings: Settings, now: float) -> str:
    node, folder = settings.agent.node, settings.agent.state_dir
    try:
        port = slurm()
        (found,) = judge(port.nodes([node]), port.comments([node]), {node}, settings.spare.max_age_s, now)
    except ValueError:
        return f"whether it is ready cannot be known: {folder} cannot be read here, and Slurm has no node {node}"
    except SlurmError as error:
        raise EligibilityUnknownError(
            f"whether it is ready cannot be known: {folder} cannot be read here, and {error}"
        ) from error
    return found.why_not
