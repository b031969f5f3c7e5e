"""The progress of a run: its stages, documents at each step, and the cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from opsd.data.checks import merged
from opsd.data.pipeline import PipelineError
from opsd.data.records import BEAT_S, FAILED, RUN, Attempt, Flow, StageFolder, read_json
from opsd.words import count, duration, plural, size

BAR: Final = 30
"""Width of the funnel in characters."""


def status(root: Path) -> dict[str, Any]:
    """The run in ``root`` for JSON. Raises PipelineError."""
    about = read_json(root / RUN)
    if about is None:
        raise PipelineError(f"{root} is not the folder of a pipeline; `opsd data run` makes it")
    numbers = sorted(int(path.name[6:]) for path in root.glob("stage-*") if path.name[6:].isdigit())
    stages = [_stage(StageFolder(root, number)) for number in numbers]
    cost = {name: sum(stage["cost"][name] for stage in stages) for name in ("core_hours", "lost_core_hours")}
    return {"pipeline": about["pipeline"], "stages": stages, "cost": cost}


def _stage(folder: StageFolder) -> dict[str, Any]:
    plan, records, attempts = folder.plan or {"tasks": 0, "steps": []}, folder.records(), folder.attempts()
    finished, useful = {record.rank for record in records}, {record.attempt for record in records}
    recent = time.time() - 6 * BEAT_S
    running = [a for a in attempts if not (a.outcome or a.why) and a.rank not in finished and a.seen > recent]
    spent = {a.token: a.seconds * a.cpus / 3600 for a in attempts}
    files = [file for record in records for file in record.files]
    return {
        "number": folder.number,
        "steps": [name for name, _ in plan["steps"]],
        "state": _state(folder, len(finished) == plan["tasks"], bool(running)),
        "tasks": plan["tasks"], "done": len(finished), "running": len({a.rank for a in running}),
        "failed": sum(a.outcome == FAILED for a in attempts),
        "lost": sum(not a.outcome and a.token not in useful and a not in running for a in attempts),
        "eta_s": _eta(attempts, useful, plan["tasks"] - len(finished), len(running)),
        "cost": {"core_hours": sum(spent.values()), "lost_core_hours": sum(spent[t] for t in spent.keys() - useful)},
        "flows": [_flow(flow) for flow in merged(records)],
        "written": {"files": len(files), "bytes": sum(file.size for file in files)},
    }  # fmt: skip


def _state(folder: StageFolder, all_finished: bool, running: bool) -> str:
    if folder.done is not None and all_finished:
        return "done"
    return "running" if running else "stopped"


def _eta(attempts: Sequence[Attempt], useful: set[str], left: int, running: int) -> float | None:
    """Seconds until the stage is done, if tasks take as long as those before and as many run at once."""
    took = [attempt.seconds for attempt in attempts if attempt.token in useful]
    return left * sum(took) / len(took) / running if took and running else None


def _flow(flow: Flow) -> dict[str, Any]:
    return {
        "step": flow.step,
        "documents": {"in": flow.documents_in, "made": flow.documents_made, "out": flow.documents_out,
                      "dropped": flow.documents_dropped},
        "bytes": {"in": flow.bytes_in, "made": flow.bytes_made, "edited": flow.edited, "out": flow.bytes_out,
                  "dropped": flow.bytes_dropped},
        "reasons": dict(sorted(flow.reasons.items())), "consumed": flow.consumed,
    }  # fmt: skip


def funnel(stage: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each step of a stage: documents and bytes in and out, why documents were dropped, and a bar."""
    flows = stage["flows"]
    most = max((flow["documents"]["in"] + flow["documents"]["made"] for flow in flows), default=0)
    for flow in flows:
        documents, amount = flow["documents"], flow["bytes"]
        came = documents["in"] + documents["made"]
        left = came if flow["consumed"] else documents["out"]
        why = ", ".join(f"{number:,} {reason}" for reason, number in flow["reasons"].items())
        yield (
            flow["step"], f"{came:,}", "in files" if flow["consumed"] else f"{documents['out']:,}",
            f"{documents['dropped']:,}", size(amount["in"] + amount["made"]),
            "in files" if flow["consumed"] else size(amount["out"]),
            "█" * round(BAR * left / most) if most else "", why,
        )  # fmt: skip


def headline(stage: Mapping[str, Any]) -> str:
    """A stage in one line."""
    parts = [f"stage {stage['number']}: {stage['state']}, {stage['done']:,} of {stage['tasks']:,} tasks"]
    parts += [f"{stage['running']:,} running"] if stage["running"] else []
    parts += [f"{plural(stage[name], 'attempt')} {name}" for name in ("failed", "lost") if stage[name]]
    if stage["eta_s"] is not None:
        parts.append(f"about {duration(stage['eta_s'])} left")
    written = stage["written"]
    return f"{', '.join(parts)}; {count(written['files'])} files, {size(written['bytes'])}"
