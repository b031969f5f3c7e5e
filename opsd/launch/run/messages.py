"""Reports of launchers to the leader, and its orders. They travel in ``tell`` and ``order``.

Times are sent as ages in seconds, so that clocks need not agree.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from opsd.launch.claims import messages as group
from opsd.launch.hangs.hang import RankStatus
from opsd.launch.io.protocol import Codec
from opsd.launch.ranks.failure import Failure

TO_LEADER, FROM_LEADER = "to the leader", "from the leader"


class StopReason(Enum):
    """Why an orderly stop is made."""

    SIGNAL = "signal"
    REQUEST = "request"
    SWAP = "swap"
    GROW = "grow"


@dataclass(frozen=True, slots=True)
class Stop:
    """An orderly stop. ``what`` is the signal, the node to be swapped, or those that have come."""

    why: StopReason
    what: str = ""

    @property
    def final(self) -> bool:
        """Whether the run goes on only if it is started again."""
        return self.why in (StopReason.SIGNAL, StopReason.REQUEST)

    def __str__(self) -> str:
        return {
            StopReason.SIGNAL: self.what,
            StopReason.REQUEST: "control",
            StopReason.SWAP: f"the swap of {self.what}",
            StopReason.GROW: f"the arrival of {self.what}",
        }[self.why]


@dataclass(frozen=True, slots=True)
class FailedRank:
    """A rank's failure, whose ``t`` is an age, with its log and the end of the log."""

    failure: Failure
    log: str = ""
    tail: str = ""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long some steps took on the ranks of a node; see ``step_times``.

    ``gpus`` has the GPU of each rank, -1 if it is unknown. ``seconds`` has for each rank and step the encoded times.
    ``places`` has dp, pp, tp and cp of each rank, one after the other, or nothing if they are unknown.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    gpus: tuple[int, ...]
    seconds: str
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """The highest completed and committed step known on a node, and how long its latest steps took."""

    direction: ClassVar = TO_LEADER
    generation: int
    furthest: int | None
    committed: int | None
    times: StepTimes | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a node that concerns the run; ``record`` as in ``events.jsonl``."""

    direction: ClassVar = TO_LEADER
    record: dict[str, Any]
    age_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Ranks of a node have failed."""

    direction: ClassVar = TO_LEADER
    generation: int
    failures: tuple[FailedRank, ...]


@dataclass(frozen=True, slots=True)
class Hung:
    """The ranks of a node hang."""

    direction: ClassVar = TO_LEADER
    generation: int


@dataclass(frozen=True, slots=True)
class RankStatuses:
    """The status of a node's ranks, ``changed`` as an age, and the file with their stacks."""

    wire: ClassVar = "standings"
    direction: ClassVar = TO_LEADER
    generation: int
    ranks: tuple[RankStatus, ...]
    stacks: str | None


@dataclass(frozen=True, slots=True)
class Ended:
    """All ranks of a node have ended, by themselves or as they were told; ``cut_off``: the signal has ended some."""

    direction: ClassVar = TO_LEADER
    generation: int
    told: Stop | None = None
    cut_off: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """The ranks of a node have not run for ``gone_s`` seconds, and have not ended in good order."""

    direction: ClassVar = TO_LEADER
    generation: int
    gone_s: float


@dataclass(frozen=True, slots=True)
class Late:
    """Ranks that were told to stop have exceeded the timeout."""

    direction: ClassVar = TO_LEADER
    generation: int
    reason: str
    told: Stop | None = None


@dataclass(frozen=True, slots=True)
class StopWanted:
    """A user wants the run to checkpoint and end."""

    direction: ClassVar = TO_LEADER
    stop: Stop


@dataclass(frozen=True, slots=True)
class RestartWanted:
    """A user wants all ranks restarted from the last checkpoint."""

    direction: ClassVar = TO_LEADER
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class SwapWanted:
    """``node`` is to be replaced by a spare at a step boundary."""

    direction: ClassVar = TO_LEADER
    generation: int
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class SpareWanted:
    """A swap of ``node`` was requested and there is no spare; one may be provided."""

    direction: ClassVar = TO_LEADER
    generation: int
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """A borrowed node has to leave, once another has taken its place."""

    direction: ClassVar = TO_LEADER
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """Why a node must not replace another, "" if it may; a ``lemon`` does so last."""

    direction: ClassVar = TO_LEADER
    why: str
    lemon: bool = False


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The node had been drained, and was given back to service at ``at``, epoch seconds."""

    direction: ClassVar = TO_LEADER
    at: float


@dataclass(frozen=True, slots=True)
class StopOrdered:
    """All ranks are to checkpoint at the next step boundary and end."""

    direction: ClassVar = FROM_LEADER
    generation: int
    stop: Stop


@dataclass(frozen=True, slots=True)
class RankStatusesWanted:
    """A node has reported a hang: all nodes are to report the status of their ranks."""

    wire: ClassVar = "standings_wanted"
    direction: ClassVar = FROM_LEADER
    generation: int


@dataclass(frozen=True, slots=True)
class DumpsWanted:
    """The ranks of all nodes hang: their flight recorders are to be written into the run's folder."""

    direction: ClassVar = FROM_LEADER
    generation: int


@dataclass(frozen=True, slots=True)
class HangFound:
    """The run is restarted for a hang; ``fields`` are those of its event, ``score`` is the weight of the evidence."""

    direction: ClassVar = FROM_LEADER
    fields: dict[str, Any]
    score: int


@dataclass(frozen=True, slots=True)
class StragglerNews:
    """A straggler was found or is gone: ``event`` with its ``fields`` is for the node of its ranks."""

    direction: ClassVar = FROM_LEADER
    event: str
    fields: dict[str, Any]


ToLeader = (
    Progress | Event | Failed | Hung | RankStatuses | Ended | Waiting | Late | StopWanted | RestartWanted | SwapWanted
    | SpareWanted | Leaving | Readiness | GivenBack
)  # fmt: skip
FromLeader = StopOrdered | RankStatusesWanted | DumpsWanted | HangFound | StragglerNews
KINDS: tuple[type, ...] = (*typing.get_args(ToLeader), *typing.get_args(FromLeader))
CODEC = Codec(KINDS)
MESSAGES = (*group.MESSAGES, *KINDS)
"""All messages between launchers."""
