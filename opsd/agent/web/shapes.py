"""The shapes of the API's answers: records of the agent, with the fields that an answer leaves out or adds.

``openapi.json`` is made from them (`make generate`), and tests hold the answers against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from opsd.agent.brief import Brief
from opsd.agent.gather import Health
from opsd.agent.similar_incidents import KindStatistics
from opsd.agent.web.api import BRIEF, GAUGES, PUBLIC, STEP
from opsd.agent.web.jobs import JobOnGpus, RepairNow
from opsd.collectors.base import GpuFact, RankFact, RepairFact, RepairStep, RunFact
from opsd.runbooks.base import Incident


class Record(NamedTuple):
    """An object: the fields of the dataclass ``of`` (``only`` these, if given) and ``more``, by name.

    A value of ``more`` is a type, another Record, or a list with one Record.
    """

    name: str
    about: str
    more: Mapping[str, Any] = {}
    of: type | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


ACTION: Final = Record(
    "ActionTaken",
    "An action of the agent, or one that it recommends. `ended_at` is there once it has ended, `resumed` if it was "
    "carried out again after a restart of the agent.",
    {
        "verb": str, "target": str, "args": dict[str, Any], "reason": str, "at": float, "outcome": str, "detail": str,
        "ended_at?": float, "resumed?": bool,
    },
)  # fmt: skip
_INCIDENT: Final = {"actions": [ACTION], "joint_gpu_seconds": float}
SYMPTOM: Final = Record(
    "Symptom", "A symptom, complete.", {**_INCIDENT, "symptoms": list[dict[str, Any]]}, Incident, PUBLIC
)
BRIEF_SYMPTOM: Final = Record("BriefSymptom", "A symptom in brief.", {}, Incident, BRIEF)
_TOLD: Final = {**_INCIDENT, "brief": Brief}
LISTED: Final = Record(
    "ListedIncident",
    "An incident that is no symptom. `joint_gpu_seconds` is its cost together with that of its symptoms; losses that "
    "overlap count once. `symptoms` are complete if `?symptoms=1` asks for it.",
    {**_TOLD, "symptoms": [BRIEF_SYMPTOM, SYMPTOM]}, Incident, PUBLIC,
)  # fmt: skip
SIMILAR: Final = Record(
    "SimilarIncident",
    "A past incident: `similarity` is 0 to 1, `done` are executed verbs, `helped` is null if none was executed.",
    {"similarity": float, "done": list[str], "helped": bool | None}, Incident, (*BRIEF, "verdict"),
)  # fmt: skip
INCIDENT: Final = Record(
    "IncidentDetails", "An incident with its symptoms and the past incidents most like it.",
    {**_TOLD, "symptoms": [SYMPTOM], "similar": [SIMILAR]}, Incident, PUBLIC,
)  # fmt: skip
INCIDENTS: Final = Record("Incidents", "Newest first.", {"incidents": [LISTED]})
REPAIR: Final = Record(
    "Repair", "A repair of this node with its steps in order.",
    {"state": str, "steps": [Record("RepairStep", "`ok` is null until the step has ended.", {}, RepairStep, STEP)]},
    RepairFact, without=("attempts", "resumed_at"),
)  # fmt: skip
REPAIRS: Final = Record("Repairs", "Newest first.", {"repairs": [REPAIR]})
STATISTICS: Final = Record("Statistics", "Incidents by kind.", {"kinds": list[KindStatistics]})
RANKS: Final = Record(
    "Ranks",
    "`at` is the monotonic second of the answer, `wall` the same in epoch seconds. Times of ranks are monotonic.",
    {"at": float, "wall": float, "ranks": list[RankFact]},
)
COLLECTOR: Final = Record(
    "Collector",
    "`last_success_age_s` is null if it never succeeded.",
    {
        "name": str, "state": Health, "reason": str, "duration_s": float, "errors": int,
        "last_success_age_s": float | None, "series": int,
    },
)  # fmt: skip
RANK: Final = Record(
    "RankInBrief",
    "`process` is the kernel's state letter, null once the process is gone; `step` is the last completed one.",
    {
        "run": str, "rank": int, "generation": int, "gpu": int | None, "pid": int, "live": bool, "process": str | None,
        "phase": str, "phase_s": float, "step": int | None, "step_s": float | None, "committed_step": int | None,
        "planned_step": int | None,
    },
)  # fmt: skip
CONFIG: Final = Record(
    "ConfigState",
    "`reloads` were tried, `problem` is that of the last one, `needs_restart` are keys that a reload does not apply.",
    {"reloads": int, "loaded_at": float, "problem": str, "needs_restart": list[str]},
)
GPU: Final = Record("Gpu", "Null is what a GPU does not have.", dict.fromkeys(GAUGES.values(), float | None), GpuFact)
STATUS: Final = Record(
    "Status",
    "Agent and node. `incidents` counts current ones by state; `lemon` is a node that keeps failing.",
    {
        "node": str, "started_at": float, "mode": str, "gpu_hour": float, "currency": str, "config": CONFIG,
        "version": str, "tick": int, "tick_age_s": float, "series": int, "collectors": [COLLECTOR],
        "journal": Record("JournalState", "`problem` is empty while it can be written.", {"up": bool, "problem": str}),
        "repair": RepairNow | None, "lemon": bool, "faults": float | None, "incidents": dict[str, int],
        "gpus": [GPU],
        "ranks": [RANK], "runs": list[RunFact], "jobs": list[JobOnGpus],
    },
)  # fmt: skip
PROBLEM: Final = Record("Problem", "A refusal, in one sentence.", {"error": str})
