"""What opsd needs has tested bounds, and what is installed on nodes is pinned with hashes (`make lock`)."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PINNED = ROOT / "deploy" / "requirements"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAME: str = PROJECT["project"]["name"]
NEEDED: dict[str, list[str]] = {"": PROJECT["project"]["dependencies"], **PROJECT["project"]["optional-dependencies"]}
GROUPS: dict[str, list[Any]] = PROJECT["dependency-groups"]
BUILD: list[str] = PROJECT["build-system"]["requires"]
PYTHONS = ["3.11", "3.12", "3.13"]


def pins(file: str) -> list[tuple[Requirement, int]]:
    """The packages in ``file``, each with the number of its hashes."""
    blocks = re.split(r"\n(?=\S)", re.sub(r"^\s*#.*\n", "", (PINNED / file).read_text(), flags=re.MULTILINE))
    return [(Requirement(block.split(" \\\n")[0]), block.count("--hash=sha256:")) for block in blocks if block.strip()]


def needed(*extras: str) -> list[Requirement]:
    return [Requirement(text) for extra in extras for text in NEEDED[extra]]


@pytest.mark.parametrize("text", sorted({*BUILD, *(text for texts in NEEDED.values() for text in texts)}))
def test_a_package_of_the_next_major_version_is_not_taken_untried(text: str) -> None:
    """Every range has a lower and an upper end, or is one version."""
    operators = {specifier.operator for specifier in Requirement(text).specifier}
    assert operators == {"=="} or operators >= {">=", "<"}


@pytest.mark.parametrize("file", sorted(path.name for path in PINNED.glob("*.txt")))
def test_every_pin_has_hashes(file: str) -> None:
    """And is one version."""
    for requirement, hashes in pins(file):
        assert hashes and {specifier.operator for specifier in requirement.specifier} == {"=="}, requirement


@pytest.mark.parametrize(
    ("file", "requirements"),
    [
        ("agent.txt", needed("", "web")),
        ("train.txt", needed("", "web", "train")),
        ("build.txt", [Requirement(text) for text in (*BUILD, *GROUPS["build"])]),
        ("release.txt", [Requirement(text) for text in (*BUILD, *GROUPS["release"]) if isinstance(text, str)]),
    ],
)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_are_current(file: str, requirements: list[Requirement], python: str) -> None:
    """Each Python finds one version of what pyproject.toml asks for, within its range; `make lock` renews them."""
    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    chosen = {pin.name: pin.specifier for pin, _ in pins(file) if pin.marker is None or pin.marker.evaluate(here)}
    for requirement in requirements:
        (pinned,) = chosen[requirement.name]
        assert requirement.specifier.contains(pinned.version), f"{requirement} is pinned to {pinned}"


def test_one_command_makes_all_pins_with_hashes() -> None:
    """`make lock`: a file that it leaves out would be kept by hand."""
    (recipe,) = re.findall(r"^lock:.*\n((?:\t.*\n?)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "--generate-hashes" in recipe
    assert {f"{name}.txt" for name in re.findall(r"^\tpin (\w+) ", recipe, re.MULTILINE)} == {
        path.name for path in PINNED.glob("*.txt")
    }


def test_agent_and_training_share_their_versions() -> None:
    """So that a node with torch has the same agent."""
    train = {str(pin) for pin, _ in pins("train.txt")}
    assert {str(pin) for pin, _ in pins("agent.txt")} <= train


def test_no_host_of_a_registry_is_written_down() -> None:
    """Sites have their own, and their credentials would stand here as well."""
    assert not [path for path in PINNED.iterdir() if re.search(r"https?://|--index|--find", path.read_text())]


def test_the_bill_of_materials_names_opsd_and_the_hashes_of_what_it_needs() -> None:
    """Opsd with its version is what it describes; each package has the hashes of its files."""
    module = runpy.run_path(str(ROOT / "deploy" / "bom.py"))
    hashes = module["pinned_hashes"]((PINNED / "agent.txt").read_text())
    assert hashes.keys() == {pin.name for pin, _ in pins("agent.txt")}
    listed = [{"name": name.replace("-", "_"), "purl": f"pkg:pypi/{name}@1"} for name in (NAME, "pip", *hashes)]
    bom = module["complete"]({"metadata": {}, "components": listed}, NAME, hashes)
    assert bom["metadata"]["component"]["name"] == NAME.replace("-", "_")
    assert {part["name"] for part in bom["components"]} == {part["name"] for part in listed} - {NAME.replace("-", "_")}
    (click,) = [part for part in bom["components"] if part["name"] == "click"]
    assert [one["content"] for one in click["externalReferences"][0]["hashes"]] == hashes["click"]
    with pytest.raises(ValueError, match="not installed: click"):
        module["complete"]({"metadata": {}, "components": [c for c in listed if c["name"] != "click"]}, NAME, hashes)


def test_the_bill_of_materials_of_an_environment_has_the_hashes(tmp_path: Path) -> None:
    """As the release writes it: of what cyclonedx-py, which is beside the interpreter, finds installed there."""
    listed = [{"name": name, "purl": f"pkg:pypi/{name}@1"} for name in (NAME, *(p.name for p, _ in pins("agent.txt")))]
    (tmp_path / "listed.json").write_text(json.dumps({"bomFormat": "CycloneDX", "metadata": {}, "components": listed}))
    tool, python, out = tmp_path / "cyclonedx-py", tmp_path / "python", tmp_path / "opsd.cdx.json"
    tool.write_text(f'#!/bin/sh\n[ "$1 $3" = "environment /venv" ] && exec cat {tmp_path}/listed.json\n')
    tool.chmod(0o755)
    python.symlink_to(sys.executable)
    subprocess.run([python, ROOT / "deploy" / "bom.py", "/venv", out], check=True)
    bom = json.loads(out.read_text())
    assert (bom["bomFormat"], bom["metadata"]["component"]["name"]) == ("CycloneDX", NAME)
    assert all(part["externalReferences"][0]["hashes"] for part in bom["components"])
    release = (ROOT / "deploy" / "release").read_text()
    assert '"$fresh/tools/bin/python" deploy/bom.py "$fresh/node" "dist/opsd-$version.cdx.json"' in release
