"""Chromium without a window: screenshots, and what a page says of itself in its title."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final, Literal

BROWSERS: Final = ("chromium", "google-chrome")
BROWSER: Final = next((found for name in BROWSERS if (found := shutil.which(name))), None)
DEADLINE_S: Final = 180.0
_SCHEMES: Final = {"dark": 0, "light": 1}

Scheme = Literal["light", "dark"]


class PictureError(Exception):
    """A picture that cannot be taken; the message says what is missing."""


def browse(url: str, size: tuple[int, int], *options: str, scheme: Scheme = "light", wait_s: float = 20.0) -> str:
    """What the browser prints for a page in a window of ``size`` pixels, after ``wait_s`` of the page's own time.

    Raises PictureError.
    """
    if BROWSER is None:
        raise PictureError("no browser for pictures: install chromium")
    with tempfile.TemporaryDirectory(prefix="opsd-browser-") as profile:
        command = [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", "--allow-file-access-from-files",
            f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}", f"--virtual-time-budget={wait_s * 1e3:.0f}",
            *options, url,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            raise PictureError(f"{BROWSER} was not done with {url} within {DEADLINE_S:.0f} s") from None
    if done.returncode:
        raise PictureError(f"{BROWSER} failed for {url}: {done.stderr.strip().rpartition(chr(10))[2]}")
    return done.stdout


def take(url: str, file: Path, size: tuple[int, int], scheme: Scheme) -> None:
    """Take a screenshot. Raises PictureError."""
    browse(url, size, f"--screenshot={file.absolute()}", scheme=scheme)
    if not file.exists():
        raise PictureError(f"{BROWSER} took no picture of {url}")


def title(url: str, size: tuple[int, int]) -> str:
    """The title of the page once its scripts are done. Raises PictureError."""
    found = re.search(r"<title>(.*?)</title>", browse(url, size, "--dump-dom"), re.DOTALL)
    if found is None:
        raise PictureError(f"{url} has no title")
    return html.unescape(found[1])
