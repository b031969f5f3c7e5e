"""The boards: current, described, and about series that opsd really exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from opsd.collectors.base import Metric

pytest.importorskip("grafana_foundation_sdk")

from opsd.commands.metrics import catalogue
from opsd.dashboards.alerts import rules
from opsd.dashboards.build import rendered
from opsd.preflight.view import openmetrics
from tests.fakes.preflight_reports import GEMM, report

BOARDS = [pytest.param(json.loads(text), id=path.stem) for path, text in rendered()]
COUNTING = ("counter", "untyped")
RECORDED = {rule.name for rule in rules() if not rule.alert}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def expressions(board: dict[str, Any]) -> Iterator[str]:
    for panel in panels(board):
        yield from (target["expr"] for target in panel["targets"])


def used(expression: str, metrics: dict[str, Metric]) -> set[str]:
    words = set(re.findall(r"(?<![\w:])(?:opsd|DCGM_FI)_\w+", expression))
    levels = set(re.findall(r"\b(?:instance|run|cluster)\w*:[\w:]+", expression))
    assert levels <= RECORDED, f"{expression} uses series that no rule records: {levels - RECORDED}"
    assert words <= metrics.keys(), f"{expression} uses series that nothing exports: {words - metrics.keys()}"
    return words


@pytest.fixture(scope="module")
def metrics() -> dict[str, Metric]:
    """What the agent exports, and what ``opsd preflight --textfile`` writes for node_exporter."""
    written = openmetrics(report(GEMM))
    preflight = {name: Metric(name, "") for name in re.findall(r"^# TYPE (\w+) gauge$", written, re.MULTILINE)}
    return {**preflight, **{metric.name: metric for _, metric in catalogue()}}


@pytest.mark.parametrize("board", BOARDS)
def test_every_panel_explains_itself(board: dict[str, Any]) -> None:
    """A panel has a title, a description and a unit."""
    for panel in panels(board):
        assert panel["title"]
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


@pytest.mark.parametrize("board", BOARDS)
def test_every_series_exists(board: dict[str, Any], metrics: dict[str, Metric]) -> None:
    """An expression names only series that a collector or the agent exports, or a rule records."""
    for expression in expressions(board):
        assert used(expression, metrics) or re.search(r"\bup\{|:opsd_", expression)


@pytest.mark.parametrize("board", BOARDS)
def test_counters_are_shown_as_rates(board: dict[str, Any], metrics: dict[str, Metric]) -> None:
    """A counter's height means nothing; only its growth does."""
    for expression in expressions(board):
        for name in used(expression, metrics):
            if metrics[name].kind in COUNTING:
                assert re.search(rf"(rate|increase)\({name}\b", expression), expression


@pytest.mark.parametrize("board", BOARDS)
def test_a_board_can_be_narrowed_down(board: dict[str, Any]) -> None:
    """By data source and cluster at least; a variable that a query asks for exists."""
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert {"datasource", "cluster"} <= variables
    for expression in expressions(board):
        assert set(re.findall(r"\$(\w+)", expression)) - {"__rate_interval"} <= variables


def test_boards_can_be_told_apart() -> None:
    """A uid of their own that never changes, and a link to the others."""
    boards = [json.loads(text) for _, text in rendered()]
    assert [board["uid"] for board in boards] == [
        "opsd-cluster", "opsd-job", "opsd-node", "opsd-goodput", "opsd-incidents", "opsd-training",
        "opsd-preflight",
    ]  # fmt: skip
    assert all(board["links"][0]["tags"] == ["opsd"] for board in boards)


def test_links_of_tables_lead_somewhere() -> None:
    """Each is in a column that its table has, and names boards that exist and labels that the rows have."""
    boards = [json.loads(text) for _, text in rendered()]
    tables = [panel for board in boards for panel in panels(board) if panel["type"] == "table"]
    urls = []
    for panel in tables:
        (labels,) = {re.findall(r"\bby \(([^)]*)\)", target["expr"])[0] for target in panel["targets"]}
        for override in panel["fieldConfig"]["overrides"]:
            found = [link["url"] for each in override["properties"] if each["id"] == "links" for link in each["value"]]
            named = {field for url in found for field in re.findall(r"__data\.fields\.(\w+)", url)}
            assert named <= {*labels.split(", ")} and (not found or override["matcher"]["options"] in labels)
            urls += found
    assert {uid for url in urls for uid in re.findall(r"^/d/([\w-]+)", url)} == {"opsd-node", "opsd-job"}
    assert {"opsd-node", "opsd-job"} <= {board["uid"] for board in boards} and len(tables) == 8
