"""Bringing the boards into a Grafana, over HTTP, with everything that can go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("grafana_foundation_sdk")
pytest.importorskip("grafana_client")

from opsd.commands.main import cli
from opsd.ports import free_port
from tests.fakes.grafana import TOKEN, FakeGrafana

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
