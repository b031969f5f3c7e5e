"""Reads the files of a run folder: state, steps, restarts, checkpoints, evaluations and costs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from opsd import exitcodes
from opsd.launch.io.run_log import EventText
from opsd.ledger import beside
from opsd.ledger.beside import Ablation, DataRun, ablations_line, data_line
from opsd.ledger.ledger import (
    PLAN,
    Ledger,
    LedgerError,
    earlier_tokens,
    lost_nodes,
    make_ledger,
    open_run_file,
    read_lines,
    read_plan,
    read_records,
    repeated_steps,
    trained_tokens,
)
from opsd.plan.forecast import BadPlan, Forecast, Planned, Progress, forecast, forecast_dict

FILE: Final = "experts.jsonl"
STARVED: Final = 0.1
"""An expert with less than this share of the mean of its layer hardly learns."""
_END_BYTES: Final = 4 << 20
"""Of the file, which grows for months, its end is read. A line has some ten bytes for each layer and expert."""

_MOST: Final = 10**18


@dataclass(frozen=True, slots=True)
class LayerLoads:
    """The tokens that each expert of a layer has had."""

    layer: int
    loads: Sequence[int]

    @property
    def relative(self) -> list[float]:
        """The loads over their mean."""
        mean = sum(self.loads) / len(self.loads)
        return [load / mean if mean else 0.0 for load in self.loads]

    @property
    def fullest(self) -> int:
        """The number of the expert with most tokens."""
        return max(range(len(self.loads)), key=self.loads.__getitem__)

    @property
    def emptiest(self) -> int:
        """The number of the expert with fewest tokens."""
        return min(range(len(self.loads)), key=self.loads.__getitem__)

    @property
    def starved(self) -> int:
        """Number of experts below ``STARVED``."""
        return sum(load < STARVED for load in self.relative)


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """The loads of all layers in the ``steps`` up to ``step``."""

    step: int
    steps: int
    layers: Sequence[LayerLoads]

    @property
    def span(self) -> str:
        """These steps in words."""
        return f"step {self.step}" if self.steps == 1 else f"steps {self.step - self.steps + 1} to {self.step}"

    @property
    def sentence(self) -> str:
        """The fullest expert, and how many are starved."""
        worst = max(self.layers, key=lambda layer: max(layer.relative))
        experts = sum(len(layer.loads) for layer in self.layers)
        starved = sum(layer.starved for layer in self.layers)
        return (
            f"fullest is expert {worst.fullest} of layer {worst.layer}, {max(worst.relative):.1f} times the mean; "
            f"{starved:,} of {experts:,} have less than {STARVED:.0%} of it ({self.span})"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"step": self.step, "steps": self.steps, "loads": {one.layer: list(one.loads) for one in self.layers}}


def read_loads(folder: Path) -> ExpertLoads | None:
    """The newest loads of the run in ``folder``; None without any that can be read."""
    with suppress(OSError), open(folder / FILE, "rb", opener=open_run_file) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
        for line in reversed((file.read() or b"").splitlines()):  # None: a file of /proc that waits
            with suppress(ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
                return _parsed(json.loads(line))
    return None


def _parsed(line: dict[str, Any]) -> ExpertLoads:
    first = int(line["first_layer"])
    layers = [LayerLoads(first + number, [int(n) for n in loads]) for number, loads in enumerate(line["loads"])]
    if not layers or not all(layer.loads and 0 <= min(layer.loads) <= max(layer.loads) < _MOST for layer in layers):
        raise ValueError("no loads")
    return ExpertLoads(int(line["step"]), int(line["steps"]), layers)


Record = Mapping[str, Any]

EVALUATIONS = "evaluations.jsonl"
PAGE = "report.html"
"""The report in the run's folder."""
LOST = ("recomputed", "detection", "restart", "load")
"""The buckets of the ledger that failures have cost."""
IDLE = ("queued",)
"""The buckets in which the run held no GPU."""
_CAUSES = ("rank_exited", "hang_detected", "node_lost", "ranks_gone", "restart_requested", "node_retired")
_SLOW = ("straggler_found",)


class NoReport(Exception):
    """There is nothing to report; the message says why."""


@dataclass(frozen=True, slots=True)
class Step:
    """A line of the metrics, with one step or, of programs other than the trainer, those of ten seconds."""

    t: float
    step: int
    count: int
    seconds: float
    generation: int
    loss: float = math.nan
    tokens_per_s: float = math.nan


@dataclass(slots=True)
class Restart:
    """An interruption: what caused it, and how the run went on. ``t`` is the epoch second of the cause.

    ``step`` is the first one afterwards, None if its number is not known. ``down_s`` are the seconds from the cause to
    the end of that step, None if there was none. ``repeated`` is how many steps were done again.
    """

    t: float
    cause: str
    kind: str
    down_s: float | None = None
    step: int | None = None
    repeated: int = 0
    repeated_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """Seconds that it cost, as far as they are known."""
        return (self.down_s or 0.0) + self.repeated_s


@dataclass(frozen=True, slots=True)
class RunReport:
    """All that is reported about a run. Times are epoch seconds."""

    run: str
    folder: Path
    nodes: tuple[str, ...]
    world_size: int
    gpus: int
    began: float
    ended: float
    exit_code: int | None
    """None while it runs, and if its launcher died."""
    reason: str
    ledger: Ledger
    steps: Sequence[Step]
    last_step: int | None
    repeated: int
    tokens: int | None
    restarts: Sequence[Restart]
    checkpoints: Sequence[tuple[float, int]]
    evaluations: Sequence[Record]
    incidents: Sequence[tuple[float, str]]
    """Events that matter, in words."""
    slow: Sequence[str] = field(default_factory=tuple)
    lost_nodes: int = 0
    earlier_tokens: int = 0
    """Lost or replaced."""
    evaluated_s: float = 0.0
    """Seconds in which the training waited for evaluations."""
    planned: Planned | None = None
    plan_problem: str = ""
    """Why ``planned`` is None although the folder has a plan."""
    experts: ExpertLoads | None = None
    ablations: Sequence[Ablation] = ()
    """Studies that name this run as their main run."""
    data: Sequence[DataRun] = ()
    """Pipelines that made data for it."""

    @property
    def state(self) -> str:
        """How the run ended, in a few words."""
        return {
            None: "has not ended",
            exitcodes.OK: "finished",
            exitcodes.INTERRUPTED: "interrupted",
            exitcodes.REQUEUE: "stopped, can go on",
            exitcodes.NOT_FOUND: "could not be started",
            exitcodes.REPEATED: "failed: the same failure came back",
            exitcodes.FENCED: "passed over by another copy",
        }.get(self.exit_code, "failed")

    @property
    def held_s(self) -> float:
        """Seconds in which the run held its nodes."""
        return self.ledger.wall_s - sum(self.ledger.buckets[name] for name in IDLE)

    @property
    def gpu_hours(self) -> float:
        """Hours of all its GPUs together; of runs that changed their size, at the last one."""
        return self.gpus * self.held_s / 3600

    @property
    def lost_gpu_hours(self) -> float:
        """Those that failures have cost."""
        return self.gpus * sum(self.ledger.buckets[name] for name in LOST) / 3600

    @property
    def ablations_line(self) -> str:
        """What the studies beside the run cost; "" without any."""
        return ablations_line(self.ablations, self.planned.gpu_hours if self.planned else None)

    @property
    def data_line(self) -> str:
        """What the pipelines of data beside the run cost; "" without any."""
        return data_line(self.data, self.planned.gpu_hours if self.planned else None)

    @property
    def forecast(self) -> Forecast | None:
        """How the run will end; None without a plan, before the first step and after the last."""
        if self.planned is None or self.tokens is None:
            return None
        progress = Progress(self.ledger.buckets, self.tokens, self.lost_nodes, self.earlier_tokens, self.gpus)
        return forecast(self.planned, progress)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON; the steps are summed up."""
        return {
            "run": self.run,
            "folder": str(self.folder),
            "state": self.state,
            "exit_code": self.exit_code,
            "reason": self.reason,
            "nodes": list(self.nodes),
            "world_size": self.world_size,
            "began": self.began,
            "ended": self.ended,
            "last_step": self.last_step,
            "repeated_steps": self.repeated,
            "tokens": self.tokens,
            "gpus": self.gpus,
            "gpu_hours": self.gpu_hours,
            "lost_gpu_hours": self.lost_gpu_hours,
            "restarts": [{**asdict(restart), "cost_s": restart.cost_s} for restart in self.restarts],
            "checkpoints": [{"t": t, "step": step} for t, step in self.checkpoints],
            "evaluations": list(self.evaluations),
            "slow": list(self.slow),
            "experts": self.experts.as_dict() if self.experts else None,
            "ablations": [asdict(each) for each in self.ablations],
            "data": [asdict(each) for each in self.data],
            "ledger": self.ledger.as_dict(),
            "plan": self.planned.model_dump() if self.planned else None,
            "forecast": forecast_dict(found) if (found := self.forecast) else None,
        }


def read_run(folder: Path) -> RunReport:
    """The report of the run in ``folder``. Raises NoReport."""
    try:
        events, metrics, unread = read_records(folder)
        ledger = make_ledger(events, metrics, unread)
    except LedgerError as error:
        raise NoReport(str(error)) from error
    evaluations: list[dict[str, Any]] = []
    with suppress(OSError):
        evaluations = list(read_lines(folder / EVALUATIONS, ("t", "step", "results")))
    studies: list[Ablation] = []
    with suppress(OSError):
        studies = beside.read(Ablation, folder)
    pipelines: list[DataRun] = []
    with suppress(OSError):
        pipelines = beside.read(DataRun, folder)
    summed = summarize(folder, events, metrics, evaluations, ledger)
    run = replace(summed, experts=read_loads(folder), ablations=studies, data=pipelines)
    try:
        return replace(run, planned=Planned.parse(read_plan(folder)))
    except FileNotFoundError:
        return run
    except OSError as error:
        return replace(run, plan_problem=f"{PLAN} cannot be read: {error.strerror}")
    except BadPlan as error:
        return replace(run, plan_problem=str(error))


def summarize(
    folder: Path, events: Sequence[Record], metrics: Sequence[Record], evaluations: Sequence[Record], ledger: Ledger
) -> RunReport:
    """The report from the parsed files, each in the order of time. Pure."""
    steps = [_step(line) for line in metrics]
    starts = [event for event in events if event["event"] == "generation_started"]
    last = starts[-1]
    end = next((e for e in reversed(events) if e["event"] == "finished"), None)
    if end is not None and float(end["t"]) < float(last["t"]):
        end = None
    nodes = [str(name) for name in last.get("nodes") or ()] or [str(last.get("node", ""))]
    repeated = repeated_steps(metrics)
    return RunReport(
        run=str(last.get("run", folder.name)),
        folder=folder,
        nodes=tuple(nodes),
        world_size=int(last.get("world_size") or 0),
        gpus=int(last.get("gpus") or 0),
        began=float(starts[0]["t"]),
        ended=max(float(events[-1]["t"]), steps[-1].t if steps else 0.0),
        exit_code=None if end is None else int(end.get("exit_code", exitcodes.FAILED)),
        reason="" if end is None else str(end.get("reason", "")),
        ledger=ledger,
        steps=steps,
        last_step=max((int(line["step"]) for line in metrics if not line.get("relative")), default=None),
        repeated=repeated,
        tokens=trained_tokens(metrics),
        restarts=list(_restarts(events, steps)),
        checkpoints=_checkpoints(events),
        evaluations=evaluations,
        incidents=list(_incidents(events)),
        lost_nodes=lost_nodes(events),
        earlier_tokens=earlier_tokens(metrics),
        evaluated_s=sum(_number(line.get("evaluation_s")) for line in metrics),
        slow=[text for event in events if event["event"] in _SLOW and (text := EventText().sentence(event))],
    )


def _step(line: Record) -> Step:
    count = max(1, int(line.get("steps") or 1))
    return Step(
        float(line["t"]),
        int(line["step"]),
        count,
        _number(line.get("step_s")),
        int(line["generation"]),
        _number(line.get("loss"), math.nan),
        _number(line.get("tokens_per_s"), math.nan),
    )


def _number(value: object, missing: float = 0.0) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else missing


def _restarts(events: Sequence[Record], steps: Sequence[Step]) -> Iterator[Restart]:
    """The interruptions with a following generation, in order; of several causes at once the first."""
    usual = median(step.seconds / step.count for step in steps) if steps else 0.0
    text, cause, pending = EventText(), None, None
    for event in events:
        kind = event["event"]
        if kind in _CAUSES and cause is None and event.get("culprit", True) and event.get("ranks", True):
            cause = event
        elif kind == "generation_started":
            if pending is not None:
                yield pending
            pending = _restart(cause, text) if cause is not None else None
            cause = None
        elif kind == "resumed" and pending is not None and pending.down_s is None:
            pending.step = None if event.get("step") is None else int(event["step"])
            pending.down_s = _number(event.get("recovered_s"))
            pending.repeated = int(event.get("lost_steps") or 0)
            pending.repeated_s = pending.repeated * usual
        elif kind == "finished" and event.get("exit_code") != exitcodes.REQUEUE:
            cause = None
    if pending is not None:
        yield pending


def _restart(cause: Record, text: EventText) -> Restart:
    return Restart(float(cause["t"]), text.sentence(cause) or str(cause["event"]), str(cause["event"]))


def _checkpoints(events: Sequence[Record]) -> list[tuple[float, int]]:
    """Time and step of each durable checkpoint, one of each step."""
    found = {int(e["step"]): float(e["t"]) for e in events if e["event"] == "checkpoint_committed" and "step" in e}
    return [(t, step) for step, t in sorted(found.items())]


def _incidents(events: Sequence[Record]) -> Iterator[tuple[float, str]]:
    text = EventText()
    for event in events:
        if event["event"] not in ("finished", "checkpoint_loaded", "resumed") and (said := text.line(event)):
            yield float(event["t"]), said.partition(" ")[2].partition(" ")[2]


@dataclass(frozen=True, slots=True)
class Price:
    """Of an hour of one GPU; 0 if it is not known."""

    gpu_hour: float = 0.0
    currency: str = "USD"

    def of(self, hours: float) -> str:
        """``hours`` of a GPU in money, "" without a price."""
        return f"{hours * self.gpu_hour:,.2f} {self.currency}" if self.gpu_hour else ""


def cost_line(run: RunReport, price: Price) -> str:
    """``12.4 GPU-hours, 31.00 USD; failures cost 0.80 of them, 2.00 USD``; "" for a run without GPUs."""
    if not run.gpus:
        return ""
    parts = [f"{run.gpu_hours:,.2f} GPU-hours", price.of(run.gpu_hours)]
    lost = [f"failures cost {run.lost_gpu_hours:,.2f} of them", price.of(run.lost_gpu_hours)]
    told = ", ".join(filter(None, parts))
    return f"{told}; {', '.join(filter(None, lost))}" if run.restarts else told


def configured_price() -> Price:
    """The price in the configuration of this node; none without a file, or with one that cannot be used."""
    from opsd import config  # takes a quarter of a second

    if config.find_file() is None:
        return Price()
    try:
        cost = config.load().cost
    except config.ConfigError:
        return Price()
    return Price(cost.gpu_hour, cost.currency)
