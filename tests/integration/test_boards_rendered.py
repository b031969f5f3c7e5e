"""Every board, drawn by Grafana's own libraries with the data of a cluster: what is on it can be read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

from opsd.simulated.gpus import NoCompilerError
from opsd.stack.world import StackError
from tests.fakes.clock import eventually
from tests.pictures.__main__ import CACHE
from tests.pictures.boards import NAMES, bundle, look, page, panels, shots
from tests.pictures.browser import BROWSER, PictureError
from tests.pictures.cluster import SILENT, cluster, story

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="chromium (Debian package chromium) is not installed"),
    pytest.mark.long,
    pytest.mark.timeout(1500),
]
SECONDS = 90.0
Board = dict[str, Any]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Board]]:
    """What each board shows of a cluster that has run for a while, by the name of the board and the panel's title."""
    folder = tmp_path_factory.mktemp("cluster")
    try:
        built = bundle(CACHE)
        with cluster(folder) as (stack, nodes):
            story(nodes, SECONDS)
            assert eventually(lambda: bool(stack.query('opsd_incidents{kind="gpu_throttle"} > 0')), 60)
            asked = shots(time.time(), SECONDS)
            files = [page(shot, stack.prometheus, built, folder / f"{shot.name}.html") for shot in asked]
    except (PictureError, NoCompilerError, StackError) as error:
        pytest.skip(str(error))
    yield {shot.name: {"json": shot.board(), **look(file)} for shot, file in zip(asked, files, strict=True)}


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_shows_data_or_says_why_not(drawn: dict[str, Board], name: str) -> None:
    """No panel fails, and one without values has words of its own for that."""
    shown, known = drawn[name]["panels"], {panel["title"]: panel for panel in panels(drawn[name]["json"])}
    assert shown.keys() == known.keys()
    assert {title: panel["error"] for title, panel in shown.items() if "error" in panel} == {}
    silent = [
        title for title, panel in shown.items()
        if panel["empty"] and known[title]["fieldConfig"]["defaults"].get("noValue", "no data") == "no data"
    ]  # fmt: skip
    assert silent == []


@pytest.mark.parametrize("name", NAMES)
def test_no_panel_covers_another(drawn: dict[str, Board], name: str) -> None:
    """Rows that are opened included; nor is one beyond the edge."""
    boxes = {title: panel["box"] for title, panel in drawn[name]["panels"].items()}
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        apart = a[0] + a[2] <= b[0] + 1 or b[0] + b[2] <= a[0] + 1 or a[1] + a[3] <= b[1] + 1 or b[1] + b[3] <= a[1] + 1
        assert apart, (one, other)
    assert all(x >= 0 and x + width <= 1440 for x, _, width, _ in boxes.values())


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_names_can_be_read(drawn: dict[str, Board], name: str) -> None:
    """Nothing is NaN or undefined, legends are short, and no variable is left in a text or a link."""
    for title, panel in drawn[name]["panels"].items():
        words = [*panel["names"], *map(str, panel.get("texts", ())), *panel.get("links", ())]
        assert not [word for word in words if "NaN" in word or "undefined" in word or "$" in word], title
        assert panel["type"] == "heatmap" or all(len(word) < 60 for word in panel["names"]), title


def test_the_cluster_is_as_it_was(drawn: dict[str, Board]) -> None:
    """Units, words for values, and links come out as they were meant."""
    shown = drawn["cluster"]["panels"]
    assert shown["GPUs"]["texts"] == ["32"] and shown["Silent nodes"]["texts"] == ["1"]
    rows = {row["instance"]: row for row in shown["Nodes"]["texts"]}
    assert {name.partition(":")[0]: row["agent"] for name, row in rows.items()} == {
        **{f"node-{n}": "answers" for n in range(17, 21)}, SILENT: "no answer",
    }  # fmt: skip
    assert "/d/opsd-node?var-datasource=prometheus&var-cluster=demo&var-node=node-17:9477" in shown["Nodes"]["links"]
    assert any(row["kind"] == "gpu_throttle" for row in shown["Incidents"]["texts"])
    assert drawn["node"]["panels"]["Hottest GPU"]["texts"][0].endswith("°C")
    assert drawn["job"]["panels"]["Tokens/s"]["texts"][0].endswith("k tokens/s")


def test_the_pictures_in_the_documentation_are_of_these_boards() -> None:
    """One of each."""
    folder = Path(__file__).parents[2] / "docs/pictures"
    assert {file.name for file in folder.glob("board-*.png")} == {f"board-{name}.png" for name in NAMES}
