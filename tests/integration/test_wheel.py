"""The package as users get it: the same from a checkout and from the sdist, and beside other people's modules."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from opsd import DISTRIBUTION, __version__, exitcodes
from opsd.commands.main import CHECKOUT_ONLY, COMMANDS
from tests.fakes.tree import ROOT

pytestmark = pytest.mark.slow

OTHERS = ("trainer.py", "dashboards.py", "runbooks.py", "collectors/__init__.py", "deploy/__init__.py")
"""Names that the folders of the repository have as well."""
NAMED = DISTRIBUTION.replace("-", "_")
DEVELOPMENT = ("bench", "scenarios", "stack", "commands/bench.py", "commands/stack.py")


def hatch(source: Path, target: Path, form: str) -> Path:
    """Build ``form``, sdist or wheel, of the tree ``source``."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", form, "-d", str(target)]
    subprocess.run(command, cwd=source, capture_output=True, check=True)
    return next(target.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[form]))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the checkout."""
    return hatch(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """An environment with the wheel, in which what it needs is that of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "needed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install(folder, wheel)
    return folder


def install(folder: Path, package: Path) -> None:
    command = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--no-deps", "--no-index"]
    subprocess.run([*command, package], capture_output=True, check=True)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A user's folder, whose modules must not be taken for those of opsd."""
    for name in OTHERS:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("raise RuntimeError('the wrong module')\n")
    return tmp_path


def run(installed: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment in ``folder``."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPSD_", "PYTHON"))}
    program, *args = command
    return subprocess.run(
        [installed / "bin" / program, *args], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {*archive.namelist()}


def test_the_wheel_of_the_sdist_is_the_same(wheel: Path, tmp_path: Path) -> None:
    """Distributions build from the sdist; the folders that opsd/ links to are in it."""
    with tarfile.open(hatch(ROOT, tmp_path / "sdist", "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    assert names(hatch(tmp_path / f"{NAMED}-{__version__}", tmp_path / "again", "wheel")) == names(wheel)


def test_links_of_the_readme_work_on_a_package_index(wheel: Path) -> None:
    """There is nothing beside it there: links and pictures are addresses of files of this release."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = HeaderParser().parsestr(archive.read(f"{NAMED}-{__version__}.dist-info/METADATA").decode())
    assert metadata["Description-Content-Type"] == "text/markdown"
    inline = [token for block in MarkdownIt().parse(metadata.get_payload()) for token in block.children or ()]
    links = {
        str(token.attrs.get("src") or token.attrs["href"]) for token in inline if token.type in ("image", "link_open")
    }
    pictures, pages = "https://raw.githubusercontent.com/opsd/opsd", "https://github.com/opsd/opsd/blob"
    assert {link for link in links if link.endswith((".png", ".svg"))} == {
        link for link in links if link.startswith(pictures)
    }
    for link in links:
        base = pictures if link.startswith(pictures) else pages
        assert (ROOT / link.removeprefix(f"{base}/v{__version__}/")).exists() and link.startswith(base), link


def test_it_brings_one_name_and_nothing_for_development(installed: Path) -> None:
    """At the top of site-packages there is opsd alone."""
    packages = next(installed.glob("lib/python*/site-packages"))
    assert {path.name for path in packages.iterdir()} == {"opsd", f"{NAMED}-{__version__}.dist-info", "needed.pth"}
    assert [name for name in DEVELOPMENT if (packages / "opsd" / name).exists()] == []
    for name in ("collectors", "runbooks", "trainer", "dashboards", "deploy"):
        assert (packages / "opsd" / name).is_dir()


def test_every_command_is_there_beside_a_user_s_modules(installed: Path, theirs: Path) -> None:
    """Each explains itself; those for development are refused in one sentence."""
    assert run(installed, theirs, "opsd", "--version").stdout.split()[-1] == __version__
    listed = run(installed, theirs, "opsd", "--help").stdout
    assert {name for name in COMMANDS if f"\n  {name} " in listed} == {*COMMANDS} - CHECKOUT_ONLY
    program = (
        "import contextlib, io, sys; from opsd.commands.main import cli\n"
        "for name in sys.argv[1:]:\n"
        "    said = io.StringIO()\n"
        "    with contextlib.redirect_stdout(said): cli.main([name, '--help'], standalone_mode=False)\n"
        "    assert 'Usage: ' in said.getvalue(), name\n"
    )
    done = run(installed, theirs, "python", "-c", program, *sorted({*COMMANDS} - CHECKOUT_ONLY))
    assert done.returncode == 0, done.stderr
    refused = run(installed, theirs, "opsd", "bench", "client")
    assert (refused.returncode, "in a checkout" in refused.stderr) == (exitcodes.USAGE, True)


def test_collectors_and_runbooks_are_opsd_s_own(installed: Path, theirs: Path) -> None:
    """They were at the top of site-packages once, where a user's module of that name came first."""
    for command in (("metrics", "--list"), ("runbook", "list"), ("config", "check"), ("agent", "--once")):
        done = run(installed, theirs, "opsd", *command)
        assert "wrong module" not in done.stderr
        assert done.stdout, done.stderr


def test_it_trains_beside_another_package_called_trainer(
    installed: Path, theirs: Path, shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """There is one on PyPI; installed later it would replace a folder of that name in site-packages."""
    downloaded = tmp_path_factory.mktemp("download")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--timeout=10", "--retries=0", "-d", downloaded]
    if subprocess.run([*command, "trainer==0.0.36"], capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached for the package trainer")
    install(installed, next(downloaded.iterdir()))
    folder = tmp_path_factory.mktemp("run")
    settings = {"data.shards": shards, "run.steps": 2, "run.folder": folder, "data.batch": 2, "data.prefetch": 1}
    options = [f"--set={key}={value}" for key, value in settings.items()]
    done = run(installed, theirs, "python", "-m", "opsd.trainer", "tiny", *options)
    assert done.returncode == 0, done.stderr
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
