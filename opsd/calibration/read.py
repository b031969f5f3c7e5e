"""Figures that this cluster has measured, in place of a plan's defaults.

A figure that a file of this cluster gives, and what is refused of it: the impossible, and what is too old.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

from opsd.ledger.ledger import EVENTS, METRICS
from opsd.plan.forecast import Habits
from opsd.plan.hardware import Figure, Hardware, is_kind
from opsd.plan.layout import Layout
from opsd.plan.search import step_time
from opsd.plan.source import read
from opsd.preflight.base import Verdict
from opsd.preflight.command import HISTORY
from opsd.preflight.fleet import newest_by_node
from opsd.preflight.history import History, HistoryError
from opsd.preflight.report import Report, ReportError
from opsd.report.run import NoReport, RunReport, read_run
from opsd.simulate import history
from opsd.simulate.faults import DAY_S, FaultsError
from opsd.trainer import counts
from opsd.trainer.config import Config, ConfigError

STALE_DAYS: Final = 180
"""Drivers, firmware and cables change within half a year."""
_AHEAD_S: Final = 86_400.0


class NotUsable(ValueError):
    """A file of measurements that a plan cannot be made with; the message is one sentence with the fix."""


class TooLittle(NotUsable):
    """A file with nothing wrong in it, but nothing yet from which a figure follows."""


class Evidence(NamedTuple):
    """A value for the figure ``name`` of a plan, in its unit, measured at the epoch second ``at``."""

    name: str
    value: float
    source: str
    file: Path
    at: float


def checked(found: Iterable[Evidence], known: Mapping[str, Figure], now: float) -> Iterator[Evidence]:
    """``found``, if all of it can be. Raises NotUsable."""
    for each in found:
        low, high = _possible(each.name, known)
        figure = known[each.name]
        if not low <= each.value <= high:
            raise NotUsable(
                f"{each.file}: {each.name} of {each.value:.4g} {figure.unit} is impossible, between {low:.4g} and "
                f"{high:.4g} it could be; measure again, or leave the file out"
            )
        if each.at > now + _AHEAD_S:
            raise NotUsable(f"{each.file} is of {day(each.at)}, in the future: set the clock and measure again")
        if (age := (now - each.at) / 86_400) > STALE_DAYS:
            raise NotUsable(
                f"{each.file} is of {day(each.at)}, {age:.0f} days ago, and counts for {STALE_DAYS}: measure again"
            )
        yield each


def figures(found: Iterable[Evidence], known: Mapping[str, Figure]) -> dict[str, Figure]:
    """By name; of several values the newest."""
    return {
        each.name: Figure(each.value, known[each.name].unit, each.source, True, str(each.file), day(each.at))
        for each in sorted(found, key=lambda each: each.at)
    }


def day(at: float) -> str:
    """The local day of an epoch second, as 2026-11-23."""
    return time.strftime("%Y-%m-%d", time.localtime(at))


def _possible(name: str, known: Mapping[str, Figure]) -> tuple[float, float]:
    """The valid range of a figure.

    Links carry at most twice what is usual for such a GPU, and at least a fiftieth: less is no network of GPUs. Memory
    has what its data sheet says.
    """
    usual = known[name].value
    match name:
        case "gemm" | "attention":
            return 0.05, 1.0
        case "bandwidth":
            return 0.05 * usual, usual / 0.87
        case "loop":
            return 0.05, 1.5
        case "nvlink" | "network":
            return 0.02 * usual, 2 * usual
        case "node_latency" | "network_latency":
            return 1e-7, 0.1
        case "spread" | "data" | "evaluation" | "slow":
            return 0.0, 0.5
        case "failures" | "outages" | "maintenance":
            return 1e-9, 1.0
        case "repair":
            return 60.0, 365 * 86_400.0
        case "restart" | "stall":
            return 1e-3, 86_400.0
        case _:
            return 1e6, 1e12


# Figures from runs that have been: how often they failed, what a restart took, what evaluation and data have cost.


LEAST_EVENTS: Final = 5
"""Of failures, restarts or checkpoints: fewer are no rate."""
LEAST_S: Final = 3600.0
"""Of training: a shorter run is no measure of what a long one loses."""
_ASKED_FOR: Final = ("restart_requested", "node_retired")


def run_of(path: Path) -> RunReport:
    """The run in the folder ``path``. Raises NotUsable."""
    try:
        run = read_run(path)
    except NoReport as error:
        raise NotUsable(f"{error}; give the folder of a run") from error
    if not run.gpus or run.ledger.buckets["productive"] < LEAST_S:
        why = "shorter than an hour" if run.gpus else "a run without GPUs"
        raise NotUsable(f"{path} is {why}, from which nothing follows for long ones: give another run")
    return run


def run_figures(runs: Sequence[RunReport], path: Path) -> Iterator[Evidence]:
    """The figures of all ``runs`` together; what too few events would give is left out."""
    if not runs:
        return
    gpu_days = sum(run.gpus * run.held_s for run in runs) / 86_400
    productive = sum(run.ledger.buckets["productive"] for run in runs)
    at = max(run.ended for run in runs)
    name = f"{len(runs)} runs" if len(runs) > 1 else f"run {runs[0].run}"

    def of(figure: str, value: float, what: str) -> Evidence:
        return Evidence(figure, value, f"{what} of {name}, {gpu_days:,.0f} GPU-days", path, at)

    restarts = [restart for run in runs for restart in run.restarts]
    asked = sum(restart.kind in _ASKED_FOR for restart in restarts)
    for figure, number in (("failures", len(restarts) - asked), ("maintenance", asked)):
        if number >= LEAST_EVENTS:
            yield of(figure, number / gpu_days, f"{number} interruptions")
    took = [restart.down_s for restart in restarts if restart.down_s is not None]
    if len(took) >= LEAST_EVENTS:
        yield of("restart", median(took), f"median of {len(took)} restarts")
    saved = sum(len(run.checkpoints) for run in runs)
    stalled = sum(run.ledger.buckets["checkpoint_stall"] for run in runs)
    if saved >= LEAST_EVENTS and stalled:
        yield of("stall", stalled / saved, f"mean of {saved} checkpoints")
    yield of("data", sum(run.ledger.buckets["data_stall"] for run in runs) / productive, "stalls")
    yield of("evaluation", sum(run.evaluated_s for run in runs) / productive, "evaluations")
    yield of("slow", sum(map(_slow_s, runs)) / productive, "steps slower than the median")


def _slow_s(run: RunReport) -> float:
    """Seconds that all steps together took longer than if each had been the median step."""
    usual = median(step.seconds / step.count for step in run.steps)
    return max(0.0, run.ledger.buckets["productive"] - (run.ledger.steps - run.repeated) * usual)


# Figures from outages of nodes: Slurm's events, journals of agents, or a trace of faults.


def outage_figures(path: Path, at: float) -> Iterator[Evidence]:
    """How often nodes go, and how long they stay away; the history ended ``at``. Raises NotUsable."""
    try:
        trace = history.load(path, None)
    except history.EmptyHistoryError as error:
        raise TooLittle(str(error)) from error
    except FaultsError as error:
        raise NotUsable(str(error)) from error
    repairs = trace.repairs
    days = len(trace.nodes) * trace.span_s / DAY_S
    if len(repairs) < LEAST_EVENTS:
        few = "outage" if len(repairs) == 1 else "outages"
        raise TooLittle(f"{path} has {len(repairs)} {few} in {days:,.0f} node days, too few for a rate: gather more")
    told = f"{len(repairs)} outages in {days:,.0f} node days"
    yield Evidence("outages", len(repairs) / days, told, path, at)
    ended = [took for took, over in repairs if over]
    if len(ended) >= LEAST_EVENTS:
        yield Evidence("repair", fmean(ended), f"mean of {len(ended)} repairs that have ended", path, at)


# Figures from what ``make bench-gpu`` has written: one GPU, the trainer's own steps.


_PART = "dense_4k"
"""With attention over whole sequences, as a plan counts it."""


def bench_figures(path: Path, told: Mapping[str, Any], gpu: str, hardware: Hardware) -> Iterator[Evidence]:
    """What a step loses beside its kernels, waiting for data, and a checkpoint's stall. Raises NotUsable."""
    try:
        part = told["parts"][_PART]
        if why := part.get("skipped"):
            raise NotUsable(f"{path} has no speed: {_PART} was skipped, {why}; run make bench-gpu again")
        preset, model = str(part["preset"]), str(told["gpu"])
        settings: Mapping[str, object] = part["settings"]
        at = datetime.fromisoformat(told["date"]).timestamp()
        speed, data = float(part["tokens_per_s"]), float(part["data_share"])
        stall = None if part["checkpoint_stall_s"] is None else float(part["checkpoint_stall_s"])
        config = read(preset, [f"{name}={value}" for name, value in settings.items()], None, 1)
    except NotUsable:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise NotUsable(f"{path} is no result of make bench-gpu of this release; run it again") from error
    if not is_kind(gpu, model):
        raise NotUsable(f"{path} was measured on one {model}, and the plan is for {gpu}: give that --gpu")
    mfu = speed * counts.flops_per_token(config.model, config.data.sequence) / hardware.peak.value
    if not 0 < mfu < 1:
        raise NotUsable(f"{path}: {speed:,.0f} tokens/s would be {mfu:.0%} of the GPU's peak; run make bench-gpu again")
    name = f"make bench-gpu, {preset} on one GPU"
    yield Evidence("loop", _loop(config, speed, hardware), f"{name}, {speed:,.0f} tokens/s", path, at)
    yield Evidence("data", data / (1 - data) if data < 1 else 1.0, name, path, at)
    if stall is not None:
        yield Evidence("stall", stall, name, path, at)


def _loop(config: Config, tokens_per_s: float, hardware: Hardware) -> float:
    """The figure with which a plan predicts this speed on one GPU, where nothing is sent."""
    predicted = step_time(config, Layout.of(config), 1, hardware)
    busy = predicted.total - predicted.optimizer
    took = config.data.batch * config.data.sequence / tokens_per_s
    return hardware.loop.value * busy / max(took - predicted.optimizer, 1e-9)


# Figures from preflights: reports in JSON, and a node's history of them.


_NODES: Final = re.compile(r" on (\d+) nodes")
_SEARCHED: Final = 20
_PROCESSOR: Final = "processor"
"""The name that checks of GPUs use for the device of a machine without GPUs."""

Values = list[tuple[str, float]]
"""Subjects with their values."""


def of_report(path: Path, text: str) -> list[Report]:
    """The report in ``text``. Raises NotUsable."""
    try:
        return [Report.from_json(text)]
    except ReportError as error:
        raise NotUsable(f"{path}: {error}; give a report of opsd preflight --json") from error


def of_history(path: Path) -> list[Report]:
    """The newest of each node in which each check has passed. Raises NotUsable."""
    history = History(path)
    try:
        return [history.report(run.id) for node in history.nodes() for run in history.runs(node, _SEARCHED)]
    except HistoryError as error:
        raise NotUsable(str(error)) from error


def preflight_figures(reports: Sequence[Report], path: Path, gpu: str, hardware: Hardware) -> Iterator[Evidence]:
    """The figures of the newest measurement of each node. Raises NotUsable for another kind of GPU."""
    for report in reports:
        _refuse_other(report, path, gpu)
    peak, node, local = hardware.peak.value, hardware.node_gpus.value, hardware.node_latency.value

    def told(name: str, source: str, *series: tuple[str, str], use: Callable[[Values], float | None]) -> list[Evidence]:
        """``use`` of each node's newest values, the median of the nodes; of several series the lowest."""
        found = [_of_nodes(reports, check, measure, use) for check, measure in series]
        if not all(values for values, _ in found):
            return []
        values, at = min(found, key=lambda pair: median(pair[0]))
        nodes = f"{len(values)} nodes" if len(values) > 1 else "1 node"
        return [Evidence(name, median(values), f"preflight, {source}, {nodes}", path, at)]

    burn, latency = ("gpu_burn", "throughput"), ("collectives", "latency")
    yield from told("gemm", "gpu_burn, median of the GPUs", burn, use=lambda values: _median(values) / peak)
    yield from told("spread", "gpu_burn, the slowest GPU behind the median", burn, use=_behind)
    yield from told("bandwidth", "gpu_memory", ("gpu_memory", "bandwidth"), use=_median)
    yield from told(
        "nvlink", "collectives, the slower of all-gather and reduce-scatter", *_sharding("collectives"),
        use=lambda values: max(value for _, value in values),
    )  # fmt: skip
    for evidence in told("node_latency", "collectives, an all-reduce of 1 KiB", latency, use=_all_reduce):
        local = evidence.value
        yield evidence
    yield from told(
        "network", "network, for each GPU of a node", *_sharding("network_collectives"),
        use=lambda values: max((value / node for subject, value in values if _nodes(subject) > 1), default=None),
    )  # fmt: skip
    yield from told(
        "network_latency", "network, for each doubling of the nodes", ("network_collectives", "latency"),
        use=lambda values: _doubling(values, local),
    )  # fmt: skip
    yield from told("write", "storage_shared", ("storage_shared", "write"), use=_median)


def _of_nodes(
    reports: Sequence[Report], check: str, measure: str, use: Callable[[Values], float | None]
) -> tuple[list[float], float]:
    """``use`` of the newest values of each node, and when the newest were measured."""
    newest = newest_by_node([report for report in reports if _values(report, check, measure)]).values()
    found = [use(_values(report, check, measure)) for report in newest]
    return [value for value in found if value is not None], max((r.started for r in newest), default=0.0)


def _sharding(check: str) -> list[tuple[str, str]]:
    """What FSDP and tensor parallelism wait for."""
    return [(check, "all_gather_busbw"), (check, "reduce_scatter_busbw")]


def _refuse_other(report: Report, path: Path, gpu: str) -> None:
    facts = (result.facts.get("GPUs", "") for result in report.results if result.check == "gpu_inventory")
    model = next(filter(None, facts), "")
    if any(value.subject == _PROCESSOR for result in report.results for value in result.values):
        raise TooLittle(f"{path} was measured on {report.node} without GPUs: measure on a node that has some")
    if model and not is_kind(gpu, model):
        raise NotUsable(
            f"{path} was measured on {report.node} with {model}, and the plan is for {gpu}: give that --gpu"
        )


def _values(report: Report, check: str, measure: str) -> Values:
    """Those that did not fail: a broken GPU is no measure of the others."""
    return [
        (value.subject, value.value)
        for result in report.results if result.check == check
        for value in result.values if value.measure == measure and value.verdict is not Verdict.FAIL
    ]  # fmt: skip


def _median(values: Values) -> float:
    return median(value for _, value in values)


def _behind(values: Values) -> float | None:
    rates = [value for _, value in values]
    return 1 - min(rates) / median(rates) if len(rates) > 1 else None


def _all_reduce(values: Values) -> float | None:
    return next((value for subject, value in values if subject.startswith("all_reduce")), None)


def _doubling(values: Values, local: float) -> float | None:
    """What an all-reduce over nodes takes longer than in one, for each doubling."""
    found = [(_nodes(subject), value) for subject, value in values if subject.startswith("all_reduce")]
    return next(((value - local) / math.log2(nodes) for nodes, value in found if nodes > 1 and value > local), None)


def _nodes(subject: str) -> int:
    match = _NODES.search(subject)
    return int(match[1]) if match else 1


# Reads what a cluster has measured, wherever opsd writes it, and puts it in the place of a plan's defaults.


_JOURNAL: Final = "journal.db"
_LARGEST: Final = 256 << 20
"""Bytes of the metrics of a run that is read among others; one that is named is read whatever its size."""
_SQLITE: Final = b"SQLite format 3\x00"


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan's figures with those of this cluster among them, and in a sentence each what was left out."""

    hardware: Hardware
    habits: Habits
    left_out: tuple[str, ...] = ()


def usual_places(state_dir: Path, runs_root: Path) -> Iterator[Path]:
    """Files that opsd has written here: preflights and journal of this node, runs of this user. Those that exist."""
    yield from filter(Path.exists, (state_dir / HISTORY, state_dir / _JOURNAL))
    if any(runs_root.glob(f"*/{EVENTS}")):
        yield runs_root


def measured(
    paths: Sequence[Path], gpu: str, hardware: Hardware, habits: Habits, *, forgiving: bool, now: float | None = None
) -> Measured:
    """The figures of ``paths`` in place of others.

    Raises NotUsable, unless ``forgiving``. A file is left out then, and nothing is said of one with too little in it.
    """
    when = time.time() if now is None else now
    left_out: list[str] = []
    for path in sorted(paths, key=_kind):
        try:
            known = hardware.figures() | habits.figures()
            found = figures(checked(_evidence(path, gpu, hardware), known, when), known)
        except NotUsable as error:
            if not forgiving:
                raise
            if not isinstance(error, TooLittle):
                left_out.append(str(error))
            continue
        hardware, habits = hardware.given(found), habits.given(found)
    return Measured(hardware, habits, tuple(left_out))


def _kind(path: Path) -> int:
    """Preflights come first: what a step loses beside its kernels is fitted to a benchmark with them."""
    return 1 if path.suffix == ".json" and path.is_file() and "parts" in _json(path) else 0


def _evidence(path: Path, gpu: str, hardware: Hardware) -> Iterable[Evidence]:
    """What ``path`` says. Raises NotUsable."""
    if path.is_dir():
        return _of_folder(path)
    if path.exists() and not path.is_file():
        raise NotUsable(f"{path} is no file but a pipe or a device: write what it says into a file, and give that")
    try:
        with path.open("rb") as file:
            head = file.read(len(_SQLITE))
        if head == _SQLITE:
            return _of_database(path, gpu, hardware)
        if not head.lstrip().startswith(b"{"):
            return outage_figures(path, _age(path))
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotUsable(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}") from error
    if "parts" in (told := _json(path)):
        return bench_figures(path, told, gpu, hardware)
    return preflight_figures(of_report(path, text), path, gpu, hardware)


def _of_folder(path: Path) -> Iterable[Evidence]:
    if (path / EVENTS).exists():
        return run_figures([run_of(path)], path)
    if folders := sorted(path.glob(f"*/{EVENTS}")):
        return run_figures(list(_long(folder.parent for folder in folders)), path)
    if next(path.rglob(_JOURNAL), None):
        return outage_figures(path, max(map(_age, path.rglob(_JOURNAL))))
    raise NotUsable(f"{path} has neither runs nor journals: give what preflight, runs or agents have written")


def _of_database(path: Path, gpu: str, hardware: Hardware) -> Iterable[Evidence]:
    if path.name == _JOURNAL or "incidents" in _tables(path):
        return outage_figures(path, _age(path))
    return preflight_figures(of_history(path), path, gpu, hardware)


def _long(folders: Iterable[Path]) -> Iterator[RunReport]:
    """Those runs that say anything; the others of a user are trials. Reading the largest would take minutes."""
    for folder in folders:
        metrics = folder / METRICS
        if metrics.exists() and metrics.stat().st_size > _LARGEST:
            continue
        with suppress(NotUsable):
            yield run_of(folder)


def _tables(path: Path) -> set[str]:
    try:
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        finally:
            database.close()
    except sqlite3.Error as error:
        raise NotUsable(f"{path} is neither a history of preflights nor a journal: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _age(path: Path) -> float:
    """When the file was written last, in epoch seconds."""
    return path.stat().st_mtime
