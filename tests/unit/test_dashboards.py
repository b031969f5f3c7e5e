"""The boards: current, described, about series that exist; and how they get into a Grafana."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from opsd.collectors.base import Metric
from opsd.commands.metrics import catalogue
from opsd.dashboards.alerts import rules
from opsd.dashboards.boards import NAMES, OF_GRAFANA, in_order, text_of
from opsd.preflight.view import openmetrics
from tests.fakes.preflight import GEMM, report

pytest.importorskip("grafana_client")
from opsd.commands.main import cli
from opsd.ports import free_port
from tests.fakes.webhook import TOKEN, FakeGrafana

# The boards: current, described, and about series that opsd really exports.


BOARDS = [pytest.param(json.loads(text_of(name)), id=name) for name in NAMES]

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


SOFT_TOP = ("percentunit", "cps", "s", "Bps", "binBps")
"""Units in which Grafana draws values that are all 0 from 0 to 100 unless the axis is given an end."""


@pytest.mark.parametrize("board", BOARDS)
def test_panels_are_alike(board: dict[str, Any]) -> None:
    """They ask the chosen data source, do not overlap, and their legends and axes are as in other boards."""
    places = set()
    for panel in panels(board):
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        if panel in board["panels"]:  # those of a closed row have no place yet
            assert not cells & places and at["x"] + at["w"] <= 24, panel["title"]
            places |= cells
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        defaults, options = panel["fieldConfig"]["defaults"], panel["options"]
        if panel["type"] == "stat":
            assert options["reduceOptions"]["calcs"] == ["lastNotNull"] and defaults["noValue"], panel["title"]
        if panel["type"] == "timeseries":
            side = ("list", "bottom") if at["w"] < 12 else ("table", "right")
            assert (options["legend"]["displayMode"], options["legend"]["placement"]) == side, panel["title"]
            custom = defaults["custom"]
            needs_end = defaults["unit"] in SOFT_TOP and "axisSoftMin" in custom
            assert not needs_end or "axisSoftMax" in custom, panel["title"]


@pytest.mark.parametrize("board", BOARDS)
def test_a_board_shows_incidents_and_what_agents_wrote(board: dict[str, Any]) -> None:
    """As marks in its graphs."""
    wrote, opened = board["annotations"]["list"]
    assert (wrote["name"], wrote["target"]["tags"]) == ("what agents wrote", ["opsd"])
    assert (opened["name"], opened["expr"].partition("{")[0]) == ("incidents", "increase(opsd_incidents_opened_total")
    assert (board["refresh"], board["timezone"], board["tags"]) == ("10s", "browser", ["opsd"])


@pytest.mark.parametrize("name", NAMES)
def test_what_grafana_exports_is_brought_into_order(name: str) -> None:
    """Its numbers of boards and versions go, nobody can edit the shared one, and keys are sorted."""
    board = json.loads(text_of(name)) | dict.fromkeys(OF_GRAFANA, 7) | {"editable": True}
    assert in_order(json.dumps(dict(reversed(board.items())))) == text_of(name)


def test_boards_are_written_and_checked(tmp_path: Path) -> None:
    """For Grafana's provisioning; what somebody has changed there is named."""
    folder = tmp_path / "boards"
    arguments = ["--out", str(folder)]
    built = CliRunner().invoke(cli, ["dashboards", "build", *arguments])
    assert built.output.splitlines() == [f"wrote {folder / name}.json" for name in NAMES]
    assert CliRunner().invoke(cli, ["dashboards", "check", *arguments]).exit_code == 0
    (folder / "job.json").write_text("{}")
    changed = CliRunner().invoke(cli, ["dashboards", "check", *arguments])
    assert (changed.exit_code, changed.output.count("is not current")) == (1, 1)
    again = CliRunner().invoke(cli, ["dashboards", "build", *arguments])
    assert again.output == f"wrote {folder / 'job.json'}\n"
    assert CliRunner().invoke(cli, ["dashboards", "build", "--out", "/dev/null/boards"]).exit_code == 1


def test_boards_can_be_told_apart() -> None:
    """A uid of their own that never changes, and a link to the others."""
    boards = [json.loads(text_of(name)) for name in NAMES]
    assert [board["uid"] for board in boards] == [
        "opsd-cluster", "opsd-job", "opsd-node", "opsd-goodput", "opsd-incidents", "opsd-training",
        "opsd-preflight",
    ]  # fmt: skip
    assert all(board["links"][0]["tags"] == ["opsd"] for board in boards)


def test_links_of_tables_lead_somewhere() -> None:
    """Each is in a column that its table has, and names boards that exist and labels that the rows have."""
    boards = [json.loads(text_of(name)) for name in NAMES]
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


# Bringing the boards into a Grafana, over HTTP, with everything that can go wrong.


UIDS = [f"opsd-{name}" for name in ("cluster", "job", "node", "goodput", "incidents", "training", "preflight")]


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    fake = FakeGrafana()
    yield fake
    fake.close()


def push(url: str, *options: str, token: str = TOKEN) -> Result:
    return CliRunner().invoke(cli, ["dashboards", "push", "--url", url, *options], env={"GRAFANA_TOKEN": token})


def test_pushing_twice_changes_nothing_the_second_time(grafana: FakeGrafana) -> None:
    """Neither a second folder nor a second version of a board."""
    first = push(grafana.url)
    assert first.exit_code == 0, first.output
    assert first.output.splitlines() == [f"{uid}: new" for uid in UIDS]
    assert grafana.writes == ["folder opsd", *UIDS]
    assert {board["meta"]["folderUid"] for board in grafana.boards.values()} == {"opsd"}
    second = push(grafana.url)
    assert second.output.splitlines() == [f"{uid}: same" for uid in UIDS]
    assert len(grafana.writes) == 1 + len(UIDS)


def test_a_board_that_was_edited_or_moved_is_put_right(grafana: FakeGrafana) -> None:
    """And no other is touched."""
    push(grafana.url)
    grafana.boards["opsd-node"]["dashboard"]["title"] = "mine"
    grafana.boards["opsd-job"]["meta"]["folderUid"] = "elsewhere"
    grafana.writes.clear()
    assert "opsd-node: changed" in push(grafana.url).output
    assert grafana.writes == ["opsd-job", "opsd-node"]
    assert grafana.boards["opsd-node"]["dashboard"]["title"] == "opsd / node"


def test_a_dry_run_shows_the_difference_and_writes_nothing(grafana: FakeGrafana) -> None:
    """In an empty Grafana and in one with boards."""
    assert "opsd-node: new" in push(grafana.url, "--dry-run").output
    assert grafana.writes == []
    push(grafana.url)
    grafana.boards["opsd-node"]["dashboard"]["title"] = "mine"
    grafana.writes.clear()
    shown = push(grafana.url, "--dry-run").output
    assert '- "title": "mine",' in shown
    assert '+ "title": "opsd / node",' in shown
    assert grafana.writes == []


def test_the_token_may_come_from_a_file(grafana: FakeGrafana, tmp_path: Path) -> None:
    """With the newline that editors leave at its end."""
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    assert push(grafana.url, "--token-file", str(file), token="").exit_code == 0


@pytest.mark.parametrize(
    ("request_line", "status", "said"),
    [
        ("GET /api/folders/opsd", 401, "does not know this token (401)"),
        ("POST /api/folders", 403, "needs the role Editor"),
        ("POST /api/dashboards/db", 412, "of the same name that is not ours"),
        ("POST /api/dashboards/db", 400, "refused"),
        ("GET /api/dashboards/uid/opsd-node", 500, "failed: Server Error 500"),
        ("GET /api/frontend/settings", 404, "is the address right?"),
    ],
)
def test_what_grafana_refuses_is_one_sentence(grafana: FakeGrafana, request_line: str, status: int, said: str) -> None:
    """With the exit code 1, and never the token."""
    grafana.fail[request_line] = status
    done = push(grafana.url)
    assert done.exit_code == 1
    assert said in done.output
    assert done.output.splitlines()[-1].startswith(f"opsd: {grafana.url} ")
    assert TOKEN not in done.output


def test_a_wrong_token_is_said(grafana: FakeGrafana) -> None:
    """Which is what 401 means."""
    done = push(grafana.url, token="glsa_bad")
    assert (done.exit_code, "does not know this token" in done.output) == (1, True)


def test_an_older_grafana_is_refused_before_anything_is_written() -> None:
    """It would take the boards and show them wrongly."""
    old = FakeGrafana("9.5.2")
    done = push(old.url)
    assert (done.exit_code, old.writes) == (1, [])
    assert "is Grafana 9.5.2; the boards need Grafana 11 or newer" in done.output
    old.close()


def test_a_grafana_that_is_down_is_one_sentence() -> None:
    """Nobody listens at the address."""
    url = f"http://127.0.0.1:{free_port()}"
    done = push(url)
    assert done.exit_code == 1
    assert done.output.startswith(f"opsd: {url} does not answer like a Grafana")


@pytest.mark.parametrize("token", ["", "  \n", "glsa\nx", "glsaé"])
def test_without_a_token_nothing_is_asked(grafana: FakeGrafana, token: str) -> None:
    """Exit code 2, as for every wrong command line."""
    done = push(grafana.url, token=token)
    assert done.exit_code != 0
    assert "holds no token" in str(done.exception) + done.output
