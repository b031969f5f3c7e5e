"""The boards: current, described, and about series that opsd really exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from collectors.base import Metric

pytest.importorskip("grafana_foundation_sdk")

from dashboards.build import outdated, rendered
from opsd.agent.metrics_cli import catalogue

BOARDS = [pytest.param(json.loads(text), id=path.stem) for path, text in rendered()]
COUNTING = ("counter", "untyped")


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions(board: dict[str, Any]) -> Iterator[str]:
    for panel in panels(board):
        yield from (target["expr"] for target in panel["targets"])


def used(expression: str, metrics: dict[str, Metric]) -> set[str]:
    words = set(re.findall(r"\b(?:opsd|DCGM_FI)_\w+", expression))
    assert words <= metrics.keys(), f"{expression} uses series that nothing exports: {words - metrics.keys()}"
    return words


@pytest.fixture(scope="module")
def metrics() -> dict[str, Metric]:
    return {metric.name: metric for _, metric in catalogue()}


def test_committed_boards_are_what_the_builders_make() -> None:
    """Nobody edits the JSON by hand, and nobody forgets to build it."""
    assert outdated() == []


@pytest.mark.parametrize("board", BOARDS)
def test_every_panel_explains_itself(board: dict[str, Any]) -> None:
    """A panel has a title, a description and a unit."""
    for panel in panels(board):
        assert panel["title"]
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


@pytest.mark.parametrize("board", BOARDS)
def test_every_series_exists(board: dict[str, Any], metrics: dict[str, Metric]) -> None:
    """An expression names only series that a collector or the agent exports."""
    assert all(used(expression, metrics) for expression in expressions(board))


@pytest.mark.parametrize("board", BOARDS)
def test_counters_are_shown_as_rates(board: dict[str, Any], metrics: dict[str, Metric]) -> None:
    """A counter's height means nothing; only its growth does."""
    for expression in expressions(board):
        for name in used(expression, metrics):
            if metrics[name].kind in COUNTING:
                assert re.search(rf"(rate|increase)\({name}\b", expression), expression
