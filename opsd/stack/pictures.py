"""Screenshots of the agent's pages for the documentation, taken by a real browser."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from opsd.stack.node import JOB

BROWSERS: Final = ("chromium", "google-chrome")
DEADLINE_S: Final = 60.0
SHOTS: Final = (
    ("node.png", "/", (1100, 1000), "light"),
    ("job.png", f"/job/{JOB}", (1100, 1200), "dark"),
    ("node-phone.png", "/", (360, 740), "dark"),
)
"""File, address, width and height in pixels, preferred colour scheme."""
_SCHEMES: Final = {"dark": 0, "light": 1}


class PictureError(Exception):
    """A picture that cannot be taken; the message says what is missing."""


def take(agent: str, folder: Path) -> list[Path]:
    """Take ``SHOTS`` of the agent at the address ``agent`` into ``folder``. Raises PictureError."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise PictureError("no browser for pictures: install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    taken = []
    with tempfile.TemporaryDirectory(prefix="opsd-browser-") as profile:
        for name, path, size, scheme in SHOTS:
            _take(browser, profile, agent + path, folder / name, size, scheme)
            taken.append(folder / name)
    return taken


def _take(browser: str, profile: str, url: str, file: Path, size: tuple[int, int], scheme: str) -> None:
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}",
        f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}", f"--screenshot={file.absolute()}", url,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        raise PictureError(f"{browser} took no picture of {url} within {DEADLINE_S:.0f} s") from None
    if not file.exists():
        raise PictureError(f"{browser} took no picture of {url}: {done.stderr.strip().rpartition(chr(10))[2]}")
