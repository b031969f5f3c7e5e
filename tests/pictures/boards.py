"""Draws the boards with the libraries that Grafana publishes on npm, from the answers of a real Prometheus.

The page (``boards/main.tsx``) asks nothing: its data are computed here, as Grafana's data source would ask for them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from PIL import Image

from opsd.dashboards.boards import NAMES, text_of
from opsd.stack.world import get
from tests.pictures.browser import PictureError, Scheme, take, title
from tests.pictures.pages import smaller

SOURCES: Final = Path(__file__).parent / "boards"
WIDTH: Final = 1440
SCALE, TALLEST = 0.7, 2000
"""A picture in the documentation is smaller than a screen, and shows the first rows of a long board."""
RATE_INTERVAL: Final = "1m"
"""What Grafana takes for $__rate_interval where the data source has the usual scrape interval of 15 s."""
INSTALL_S, BUILD_S = 600, 300
_LOADERS = {"svg": "dataurl", "woff2": "dataurl", "woff": "empty", "ttf": "empty", "png": "dataurl"}


def bundle(cache: Path) -> Path:
    """The folder below ``cache`` with the script and the style of the page, built if they are not there.

    Needs npm and its registry. Raises PictureError.
    """
    digest = hashlib.blake2s(digest_size=8)
    for name in ("package-lock.json", "main.tsx"):
        digest.update((SOURCES / name).read_bytes())
    folder = cache / digest.hexdigest()
    if (folder / "main.css").exists():
        return folder
    if (npm := shutil.which("npm")) is None:
        raise PictureError("npm is not installed (Debian package npm)")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", "main.tsx"):
        shutil.copy(SOURCES / name, folder)
    _run([npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--legacy-peer-deps"], folder, INSTALL_S)
    loaders = [f"--loader:.{ending}={loader}" for ending, loader in _LOADERS.items()]
    _run(
        [
            "node_modules/.bin/esbuild", "main.tsx", "--bundle", "--minify", "--outfile=main.js", "--jsx=automatic",
            "--define:process.env.NODE_ENV='production'", "--log-level=error", *loaders,
        ],
        folder, BUILD_S,
    )  # fmt: skip
    shutil.rmtree(folder / "node_modules")
    return folder


def _run(command: list[str], folder: Path, limit_s: float) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise PictureError(f"{command[0]} {command[1]} was not done within {limit_s:.0f} s") from None
    if done.returncode:
        raise PictureError(f"{' '.join(command[:2])} failed: {done.stderr[-2000:]}")


@dataclass(frozen=True, slots=True)
class Shot:
    """A board, the values of its variables, and the time that it shows: ``seconds`` until the epoch second ``end``."""

    name: str
    variables: Mapping[str, str]
    end: float
    seconds: float
    theme: Scheme = "dark"

    def board(self) -> dict[str, Any]:
        """The board's JSON, as it is shipped."""
        loaded: dict[str, Any] = json.loads(text_of(self.name))
        return loaded


def panels(board: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels with queries, those of collapsed rows included."""
    for panel in board["panels"]:
        yield from panel["panels"] if panel["type"] == "row" else [panel]


def page(shot: Shot, prometheus: str, built: Path, file: Path) -> Path:
    """Write the page of a board with its data, answered by ``prometheus``, to ``file``."""
    board = shot.board()
    step = max(1, math.ceil(shot.seconds / 360))
    end = shot.end - shot.end % step
    answers = {}
    for panel in panels(board):
        for target in panel["targets"]:
            asked = re.sub(r"\$(\w+)", lambda found: shot.variables[found[1]], target["expr"])
            values: dict[str, object] = {"query": asked}
            if target.get("instant"):
                kind, values["time"] = "query", end
            else:
                kind, values["start"], values["end"], values["step"] = "query_range", end - shot.seconds, end, step
            answer = get(f"{prometheus}/api/v1/{kind}?{urllib.parse.urlencode(values)}")
            answers[target["expr"]] = answer["data"]["result"]
    given = {
        "board": board, "theme": shot.theme, "from": end - shot.seconds, "to": end, "step": step, "width": WIDTH - 16,
        "answers": answers, "variables": {"datasource": "prometheus", **shot.variables},
    }  # fmt: skip
    script = json.dumps(given).replace("</", "<\\/")
    file.write_text(
        "<!doctype html><meta charset=utf-8><title></title>"
        f'<link rel=stylesheet href="{(built / "main.css").as_uri()}"><div id=root style="position:relative"></div>'
        f'<script>window.INPUT={script}</script><script src="{(built / "main.js").as_uri()}"></script>'
    )
    return file


def look(file: Path) -> dict[str, Any]:
    """What the ``page`` in ``file`` shows: its height in pixels, and what each panel has drawn. Raises PictureError."""
    said: dict[str, Any] = json.loads(title(file.as_uri(), (WIDTH, 3000)) or '{"error": "the page did not finish"}')
    if "error" in said:
        raise PictureError(f"{file.name}: {said['error']}")
    return said


def shots(end: float, seconds: float) -> list[Shot]:
    """All boards, with the values of their variables in the ``cluster``."""
    everything = dict.fromkeys(("cluster", "node", "gpu", "run", "check"), ".*")
    chosen = {"node": {"node": "node-17:9477"}, "job": {"job": "4242", "run": "train"}}
    common = {**everything, "job": "4242", "__rate_interval": RATE_INTERVAL}
    return [Shot(name, {**common, **chosen.get(name, {})}, end, seconds) for name in NAMES]


def pictures(prometheus: str, seconds: float, cache: Path, folder: Path, work: Path) -> list[Path]:
    """Draw the last ``seconds`` of all boards. Raises PictureError."""
    built = bundle(cache)
    taken = []
    for shot in shots(time.time(), seconds):
        file = page(shot, prometheus, built, work / f"board-{shot.name}.html")
        picture = folder / f"board-{shot.name}.png"
        take(file.as_uri(), picture, (WIDTH, min(look(file)["height"], TALLEST)), shot.theme)
        taken.append(smaller(picture, SCALE, Image.Quantize.MAXCOVERAGE))
    return taken
