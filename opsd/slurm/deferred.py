"""Drains and returns that wait until Slurm answers again: one file each, applied once by the node's agent.

The files are in ``<state folder>/slurm-orders``. An agent that may apply them creates that folder; without it, no
update is kept. Applying an update twice is harmless: a drained node stays drained, and an update that newer events have
superseded is dropped.

Draining this node in Slurm: off unless configured, by the rules of the cluster, never without Slurm's answer.
"""

from __future__ import annotations

import hashlib
import math
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from opsd.durable import make_folder
from opsd.files import write_text
from opsd.settings.policy import PolicySettings
from opsd.slurm import node_comment, ownership
from opsd.slurm.drain import OWN_PREFIX
from opsd.slurm.ownership import PreflightResult
from opsd.slurm.port import Slurm, SlurmError, SlurmRejected, SlurmUnavailable

FOLDER = "slurm-orders"
VALID_S = 86_400.0
RETRY_S = 15.0


@dataclass(frozen=True, slots=True)
class DeferredUpdate:
    """Drain ``names`` with the reason ``told``, or return them; requested at the epoch second ``at``."""

    verb: Literal["drain", "return"]
    names: tuple[str, ...]
    at: float
    told: str = ""
    force: bool = False
    checked: Mapping[str, PreflightResult] = field(default_factory=dict)
    format: Literal[1] = 1


_UPDATE = TypeAdapter(DeferredUpdate)


class DeferredUpdates:
    """The updates in the agent's state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER

    def enable(self) -> None:
        """Accept updates. Called by the agent that applies them; does nothing if the folder cannot be created."""
        with suppress(OSError):
            make_folder(self._folder, mode=0o700)

    def disable(self) -> None:
        """Accept no more updates, unless some are still pending."""
        with suppress(OSError):
            self._folder.rmdir()

    @property
    def enabled(self) -> bool:
        """Whether the agent that owns the state folder accepts updates."""
        try:
            found, state = self._folder.lstat(), self._folder.parent.stat()
        except OSError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == state.st_uid

    def put(self, update: DeferredUpdate) -> Path:
        """Keep ``update``; replaces an earlier one for the same nodes. Raises OSError."""
        make_folder(self._folder, mode=0o700)
        names = sorted(update.names)
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
        path = self._folder / f"{'-'.join(names)[:180].replace('/', '_')}-{digest}.json"
        write_text(path, _UPDATE.dump_json(update, indent=1).decode() + "\n")
        return path

    def pending(self) -> list[tuple[Path, DeferredUpdate | None]]:
        """All updates with their files, in order of name; None for a file that is not an update."""
        if not self._folder.is_dir():
            return []
        return [(path, _read(path)) for path in sorted(self._folder.glob("*.json"))]

    def apply(self, slurm: Slurm, policy: PolicySettings, now: float) -> list[str]:
        """Apply pending updates and describe the results. Updates that Slurm does not answer stay pending."""
        said: list[str] = []
        for path, update in self.pending():
            try:
                outcome = _outcome(update, slurm, policy, now) if update else f"{path} is no order"
            except SlurmUnavailable:
                return said
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                outcome += f"; {path} cannot be removed: {error.strerror}"
            said.append(outcome)
        return said


def keep_applying(
    updates: DeferredUpdates,
    slurm: Callable[[], Slurm],
    policy: PolicySettings,
    say: Callable[[str], None],
    stop: threading.Event,
    *,
    retry_s: float = RETRY_S,
) -> None:
    """Apply pending updates every ``retry_s`` seconds until ``stop`` is set; a folder that fails is tried again."""
    trouble = ""
    while not stop.wait(retry_s):
        before, trouble = trouble, ""
        try:
            if updates.pending():
                for sentence in updates.apply(slurm(), policy, time.time()):
                    say(sentence)
        except OSError as error:
            trouble = f"orders that Slurm has not taken cannot be read: {error}"
            if trouble != before:
                say(trouble)


def _outcome(update: DeferredUpdate, slurm: Slurm, policy: PolicySettings, now: float) -> str:
    """Apply ``update`` and describe the result. Raises SlurmUnavailable."""
    try:
        return _apply(update, slurm, policy, now)
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        return f"{update.verb} {', '.join(update.names)} was given up: {error}"


def _apply(update: DeferredUpdate, slurm: Slurm, policy: PolicySettings, now: float) -> str:
    names = ", ".join(update.names)
    if now - update.at > VALID_S or _is_superseded(update, slurm):
        return f"{update.verb} {names} was dropped: it is of {ownership.day(update.at)} and no longer up to date"
    if update.verb == "drain":
        done: Sequence[str] = ownership.drain(slurm, update.names, update.told, policy, force=update.force, now=now)
    else:
        done = ownership.give_back(slurm, update.names, update.checked, policy, force=update.force, now=now)
    verb = "drained" if update.verb == "drain" else "gave back"
    return f"{verb} {', '.join(done)}" if done else f"{update.verb} {names}: nothing was left to do"


def _is_superseded(update: DeferredUpdate, slurm: Slurm) -> bool:
    """Whether the update was carried out, or one of the nodes returned or drained again, since it was requested."""
    if update.verb == "return":
        return any((node.reason_at or 0.0) > update.at for node in slurm.nodes(update.names))
    histories = [node_comment.read(comment).stays for comment in slurm.comments(update.names).values()]
    returned = any(stay.back is not None and stay.back > update.at for stays in histories for stay in stays)
    drained = [any(stay.out >= math.floor(update.at) for stay in stays) for stays in histories]
    return returned or (bool(drained) and all(drained))


def _read(path: Path) -> DeferredUpdate | None:
    try:
        return _UPDATE.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


class SlurmDrainer:
    """Drains ``node`` within ``policy``. ``slurm`` is called at each use.

    What Slurm did not answer to waits in ``updates``, if there are any, and is done once it answers.
    """

    def __init__(
        self, slurm: Callable[[], Slurm], node: str, policy: PolicySettings, updates: DeferredUpdates | None = None
    ) -> None:
        self._connect, self._node, self._policy, self._updates = slurm, node, policy, updates

    def __call__(self, node: str, reason: str) -> str:
        """Drain ``node`` and say what was done; ``reason`` gets opsd's prefix if it lacks it. Raises SlurmError.

        Agents of several nodes may see the same free place and take it at the same time. Each looks again afterwards,
        and those who came last give their node back.
        """
        if node != self._node:
            raise SlurmRejected(f"this agent drains {self._node} only, not {node}")
        told = reason if reason.startswith(OWN_PREFIX) else f"{OWN_PREFIX} {reason}"
        try:
            fresh = ownership.drain(self._connect(), [node], told, self._policy)
        except SlurmUnavailable as error:
            raise SlurmUnavailable(f"Slurm: {error}{self._later(node, told)}") from error
        except (SlurmError, ValueError) as error:
            raise SlurmRejected(f"Slurm: {error}") from error
        return f"drained {node}" if fresh else f"{node} was drained by opsd already"

    def _later(self, node: str, told: str) -> str:
        if self._updates is not None:
            with suppress(OSError):
                self._updates.put(DeferredUpdate("drain", (node,), time.time(), told))
                return f"; {node} is drained once Slurm answers"
        return ""
