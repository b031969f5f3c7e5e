#!/usr/bin/env python3
"""Refuse a release while the package index has files under opsd's name that this repository did not release.

    deploy/published.py VERSION [FILE...]

Every file on the index must be in the message of its version's tag (``SHA256  NAME``, as in SHA256SUMS), or be one of
the FILEs that were just built for VERSION. Without FILEs those of VERSION are not judged. The index is asked through
the Simple API (PEP 691). Exit codes: 0 nothing foreign, 1 foreign files, 2 the index could not be asked.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 30
SDIST_OR_WHEEL = re.compile(r"[^-]+-(?P<version>[^-]+?)(\.tar\.gz|\.zip|-.*\.whl)")


def main() -> int:
    """Ask the index that ``OPSD_INDEX`` names, or uv's default one."""
    version, *built = sys.argv[1:]
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    if os.environ.get("OFFLINE") == "1":
        print(f"release: OFFLINE=1: the index was not asked whether {name} is ours: ask it before the upload")
        return 0
    try:
        listed = files(os.environ.get("OPSD_INDEX") or default_index(), name)
    except (httpx.HTTPError, httpx.InvalidURL, KeyError, TypeError, ValueError) as error:
        said = str(error) or type(error).__name__
        print(f"release: the index does not say whether {name} is ours: {said}; OFFLINE=1 skips it", file=sys.stderr)
        return 2
    ours = {Path(file).name: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in built}
    judged = {file: digest for file, digest in listed.items() if built or version_of(file) != version}
    if foreign := sorted(file for file in judged if judged[file] != (ours | released(version_of(file))).get(file)):
        print(
            f"release: the index has {name} with files that are not ours: {', '.join(foreign)}. "
            "If the version is taken, change it in opsd/__init__.py; if the name is, change it in pyproject.toml.",
            file=sys.stderr,
        )
        return 1
    return 0


def default_index() -> str:
    """The index from which uv installs here."""
    asked = ["uv", "pip", "compile", "--quiet", "--no-header", "--emit-index-url", "-"]
    command = [str(Path(sys.executable).parent / asked[0]), *asked[1:]]
    said = subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout
    return said.split("--index-url", 1)[1].split()[0]


def files(index: str, name: str) -> Mapping[str, str]:
    """The files that ``index`` has of ``name``, each with its SHA-256. Raises httpx.HTTPError, KeyError, ValueError."""
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    answer = httpx.get(f"{index.rstrip('/')}/{name}/", headers=accept, follow_redirects=True, timeout=TIMEOUT_S)
    if answer.status_code == httpx.codes.NOT_FOUND:
        return {}
    page: dict[str, Any] = answer.raise_for_status().json()
    return {file["filename"]: file["hashes"]["sha256"] for file in page["files"]}


def version_of(file: str) -> str:
    """The version in the name of an sdist or wheel; "" of another file."""
    found = SDIST_OR_WHEEL.fullmatch(file)
    return found["version"] if found else ""


def released(version: str) -> dict[str, str]:
    """The files in the message of the tag of ``version``, each with its SHA-256."""
    command = ["git", "tag", "--list", f"v{version}", "--format=%(contents)"]
    message = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {file: digest for digest, file in re.findall(r"^([0-9a-f]{64})  (\S+)$", message, re.MULTILINE)}


if __name__ == "__main__":
    sys.exit(main())
