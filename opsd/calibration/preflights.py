"""Figures from preflights: reports in JSON, and a node's history of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from opsd.calibration.evidence import Evidence, NotUsable, TooLittle
from opsd.plan.hardware import Hardware, is_kind
from opsd.preflight.base import Verdict
from opsd.preflight.fleet import newest_by_node
from opsd.preflight.history import History, HistoryError
from opsd.preflight.report import Report, ReportError

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


def figures_of(reports: Sequence[Report], path: Path, gpu: str, hardware: Hardware) -> Iterator[Evidence]:
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
