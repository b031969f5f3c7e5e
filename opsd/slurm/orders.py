"""What Slurm is to be told once it answers again: orders kept as files, carried out by the node's agent, once each.

An order is one file in ``<state folder>/slurm-orders``, a folder that an agent makes which may carry orders out; where
it is missing nobody would, and none is kept. Carrying an order out twice does no harm: what is drained already stays as
it is, and an order that newer events have overtaken is dropped.
"""

from __future__ import annotations

import hashlib
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from opsd.files import write_text
from opsd.slurm import ownership, record
from opsd.slurm.ownership import Proof, Rules
from opsd.slurm.port import Slurm, SlurmError, SlurmUnavailable

FOLDER = "slurm-orders"
VALID_S = 86_400.0
RETRY_S = 15.0


@dataclass(frozen=True, slots=True)
class Order:
    """Drain ``names`` for the reason ``told``, or give them back; given at the epoch second ``at``."""

    verb: Literal["drain", "return"]
    names: tuple[str, ...]
    at: float
    told: str = ""
    force: bool = False
    checked: Mapping[str, Proof] = field(default_factory=dict)
    format: Literal[1] = 1


_ORDER = TypeAdapter(Order)


class Orders:
    """The orders in the folder of the agent's state."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER

    def invite(self) -> None:
        """Let others put orders here. For the agent that carries them out; nothing happens if its folder is closed."""
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def decline(self) -> None:
        """Let nobody put orders here any more, unless some are waiting already."""
        with suppress(OSError):
            self._folder.rmdir()

    @property
    def invited(self) -> bool:
        """Whether the agent to which the state folder belongs has invited orders."""
        try:
            found, state = self._folder.lstat(), self._folder.parent.stat()
        except OSError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == state.st_uid

    def put(self, order: Order) -> Path:
        """Keep ``order``, in the place of an earlier one for the same nodes. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = sorted(order.names)
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
        path = self._folder / f"{'-'.join(names)[:180].replace('/', '_')}-{digest}.json"
        write_text(path, _ORDER.dump_json(order, indent=1).decode() + "\n")
        return path

    def waiting(self) -> list[tuple[Path, Order | None]]:
        """Every order with its file, oldest name first; None for a file that is no order."""
        if not self._folder.is_dir():
            return []
        return [(path, _read(path)) for path in sorted(self._folder.glob("*.json"))]

    def carry_out(self, slurm: Slurm, rules: Rules, now: float) -> list[str]:
        """Carry out what waits and say what became of it; what Slurm did not answer to goes on waiting."""
        said: list[str] = []
        for path, order in self.waiting():
            try:
                outcome = _outcome(order, slurm, rules, now) if order else f"{path} is no order"
            except SlurmUnavailable:
                return said
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                outcome += f"; {path} cannot be removed: {error.strerror}"
            said.append(outcome)
        return said


def keep_carrying_out(
    orders: Orders,
    slurm: Callable[[], Slurm],
    rules: Rules,
    say: Callable[[str], None],
    stop: threading.Event,
    *,
    retry_s: float = RETRY_S,
) -> None:
    """Look for orders every ``retry_s`` seconds until ``stop`` is set."""
    while not stop.wait(retry_s):
        if orders.waiting():
            for sentence in orders.carry_out(slurm(), rules, time.time()):
                say(sentence)


def _outcome(order: Order, slurm: Slurm, rules: Rules, now: float) -> str:
    """Carry out ``order`` and say what became of it. Raises SlurmUnavailable."""
    try:
        return _carry_out(order, slurm, rules, now)
    except SlurmUnavailable:
        raise
    except SlurmError as error:
        return f"{order.verb} {', '.join(order.names)} was given up: {error}"


def _carry_out(order: Order, slurm: Slurm, rules: Rules, now: float) -> str:
    names = ", ".join(order.names)
    if now - order.at > VALID_S or _overtaken(order, slurm):
        return f"{order.verb} {names} was dropped: it is of {ownership.day(order.at)} and no longer up to date"
    if order.verb == "drain":
        done: Sequence[str] = ownership.drain(slurm, order.names, order.told, rules, force=order.force, now=now)
    else:
        done = ownership.give_back(slurm, order.names, order.checked, rules, force=order.force, now=now)
    verb = "drained" if order.verb == "drain" else "gave back"
    return f"{verb} {', '.join(done)}" if done else f"{order.verb} {names}: nothing was left to do"


def _overtaken(order: Order, slurm: Slurm) -> bool:
    """True if one of the nodes was given back, or drained anew, after the order had been given."""
    if order.verb == "return":
        return any((node.reason_at or 0.0) > order.at for node in slurm.nodes(order.names))
    stays = [stay for comment in slurm.comments(order.names).values() for stay in record.read(comment).stays]
    return any(stay.back is not None and stay.back > order.at for stay in stays)


def _read(path: Path) -> Order | None:
    try:
        return _ORDER.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
