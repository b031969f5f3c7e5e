#!/usr/bin/env python3
"""Write a CycloneDX bill of materials of an environment in which opsd is installed: part of `make release`.

    deploy/bom.py ENVIRONMENT OUT.cdx.json

cyclonedx-py (deploy/requirements/release.txt) lists the packages with licenses and dependencies. Added here: opsd as
what the list describes, and of each package the hashes that are pinned in deploy/requirements/agent.txt.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PINNED = Path(__file__).parent / "requirements" / "agent.txt"
PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main() -> None:
    """Exits with cyclonedx-py's code if that fails. Raises ValueError if opsd or a pinned package is missing."""
    environment, out = sys.argv[1:]
    tool = [str(Path(sys.executable).parent / "cyclonedx-py"), "environment", "--output-reproducible", environment]
    done = subprocess.run(tool, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    name = tomllib.loads(PROJECT.read_text())["project"]["name"]
    bom = complete(json.loads(done.stdout), name, pinned_hashes(PINNED.read_text()))
    Path(out).write_text(json.dumps(bom, indent=1, sort_keys=True) + "\n")


def pinned_hashes(requirements: str) -> dict[str, list[str]]:
    """SHA-256 of every file of each package in a requirements file, by the package's normalized name."""
    return {
        normalized(pin.partition("==")[0]): re.findall(r"--hash=sha256:([0-9a-f]{64})", pin)
        for pin in re.split(r"\n(?=[\w.-]+==)", "\n" + requirements)[1:]
    }


def complete(bom: dict[str, Any], subject: str, hashes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """``bom`` with the package ``subject`` as its subject and the ``hashes`` of its components."""
    components = {normalized(component["name"]): component for component in bom["components"]}
    if absent := {subject, *hashes} - components.keys():
        raise ValueError(f"not installed: {', '.join(sorted(absent))}")
    described = {**components.pop(subject), "type": "application"}
    listed = [with_hashes(component, hashes.get(name, ())) for name, component in components.items()]
    return {**bom, "metadata": {**bom["metadata"], "component": described}, "components": listed}


def with_hashes(component: dict[str, Any], hashes: Sequence[str]) -> dict[str, Any]:
    """A version has several files, so their hashes are those of its distribution and not of the component."""
    if not hashes:
        return component
    files = {
        "type": "distribution",
        "url": component["purl"],
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in hashes],
    }
    return {**component, "externalReferences": [*component.get("externalReferences", ()), files]}


def normalized(name: str) -> str:
    """A package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
