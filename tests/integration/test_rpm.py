"""deploy/rpm: a package that rpm installs on a node, again with the settings kept, and removes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.test_deb import PYTHON, build, inside, machine
from tests.integration.test_install import MAINTAINER

__all__ = ["machine"]

BUILD = Path(__file__).parents[2] / "deploy" / "rpm"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("rpmbuild") is None, reason="rpmbuild is not installed"),
]


def ask(package: Path, *options: str) -> list[str]:
    done = subprocess.run(["rpm", "-qp", *options, package], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()


def test_rpm_installs_it_again_and_removes_it(machine: Path, tmp_path: Path) -> None:
    """The package says what it has and needs; the program runs, an edited setting stays, removal leaves no program."""
    package = build(BUILD, tmp_path, "0.0.1", "opsd-0.0.1-1.*.rpm")
    assert ask(package, "--queryformat", "%{PACKAGER}") == [MAINTAINER]
    files = ask(package, "--list")
    for path in ("/usr/bin/opsd", "/usr/lib/systemd/system/opsd.service", "/usr/share/man/man1/opsd-launch.1.gz"):
        assert path in files
    assert not [path for path in files if str(tmp_path) in path or "__pycache__" in path]
    assert ask(package, "--configfiles") == ["/etc/opsd/opsd.toml"]
    assert str(Path(PYTHON).resolve()) in ask(package, "--requires")
    owners = {line.split()[2] for line in ask(package, "--list", "--verbose")}
    assert owners == {"root"}

    settings = machine / "etc/opsd/opsd.toml"
    shutil.copy(package, machine / "opsd.rpm")
    inside(machine, "rpm", "--install", "--nodeps", "/opsd.rpm")
    say = ("/opt/opsd/bin/python", "-c", "import opsd; print(opsd.__version__)")
    assert inside(machine, *say).strip() == "0.0.1"
    settings.write_text("mine")
    inside(machine, "rpm", "--upgrade", "--nodeps", "--replacepkgs", "/opsd.rpm")
    assert settings.read_text() == "mine"
    inside(machine, "rpm", "--erase", "opsd")
    assert not (machine / "opt/opsd").exists()
    assert (settings.with_suffix(".toml.rpmsave")).read_text() == "mine"
