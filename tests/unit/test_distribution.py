"""opsd as a distribution: its name, what it needs, what it brings along, and beside other packages."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

import opsd
from opsd import DISTRIBUTION, exitcodes, pip_install
from opsd.commands.main import cli
from opsd.own_packages import is_module_of_opsd, prefer_own_packages
from tests.fakes.tree import ROOT

# opsd is installed under a name that is its own: in every hint and page, and on the package index.


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

EXTRAS = {*PROJECT["optional-dependencies"]}

OTHERS = {"pyarrow", "transformers", "wandb", "{name}", "torchtitan==0.3.*", "dist/*.whl", "{DISTRIBUTION}[{extra}]"}
"""What pages and messages install beside opsd, and the hint from which all others are made."""

INSTALL = re.compile(r"pip3? install (?:(?:-[\w-]+|constraints\.txt) )*'?(?P<what>[a-z.{][^'\"`\s:)]*)")

HASH = hashlib.sha256(b"built").hexdigest()


def tracked() -> Iterator[tuple[str, str]]:
    """The sources and pages with their text."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        path = ROOT / name
        if name and path.is_file() and not path.is_symlink() and name != str(Path(__file__).relative_to(ROOT)):
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_the_name_is_that_of_the_project() -> None:
    """It stands in pyproject.toml, and in the package for hints."""
    assert (PROJECT["name"], pip_install("train")) == (DISTRIBUTION, f"pip install '{DISTRIBUTION}[train]'")


def test_every_pip_install_names_our_distribution_or_a_checkout() -> None:
    """A hint that names opsd itself would install another project's code."""
    found = {(file, match["what"].rstrip(",")) for file, text in tracked() for match in INSTALL.finditer(text)}
    assert {what for _, what in found} & {"."}
    for file, what in found - {(file, what) for file, what in found if what in OTHERS}:
        name, _, extras = what.removesuffix("]").partition("[")
        assert name in (".", DISTRIBUTION) and {*filter(None, extras.split(","))} <= EXTRAS, (file, what)
    names = {(file, name) for file, text in tracked() for name in re.findall(r"(?<![\w.-])opsd\[\w+\]", text)}
    assert names == set()
    extras = {extra for _, text in tracked() for extra in re.findall(r"pip_install\(['\"](\w+)['\"]\)", text)}
    assert extras and extras <= EXTRAS


class Index(BaseHTTPRequestHandler):
    """A package index with the files in ``listed``, or with the status ``status``."""

    listed: Mapping[str, str]
    status = 200

    def do_GET(self) -> None:
        names = ", ".join(
            f'{{"filename": "{name}", "hashes": {{"sha256": "{sha}"}}}}' for name, sha in self.listed.items()
        )
        self.send_response(self.status if self.path == f"/simple/{DISTRIBUTION}/" else 500)
        self.end_headers()
        self.wfile.write(f'{{"files": [{names}]}}'.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository that has released 0.0.9 with the file whose hash is that of b"old", and has just built 0.1.0."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy/published.py", tmp_path / "deploy")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / WHEEL).write_bytes(b"built")
    sums = f"{hashlib.sha256(b'old').hexdigest()}  {OLD}\n"
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@t.example")
    for command in (
        ("init", "-q"),
        ("commit", "-q", "--allow-empty", "-m", "first"),
        ("tag", "-a", "-m", sums, "v0.0.9"),
    ):
        subprocess.run([*git, *command], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


WHEEL, OLD = (f"opsd_cluster-{version}-py3-none-any.whl" for version in ("0.1.0", "0.0.9"))


@pytest.mark.parametrize(
    ("listed", "status", "built", "code", "said"),
    [
        ({}, 404, True, 0, ""),
        ({OLD: hashlib.sha256(b"old").hexdigest()}, 200, True, 0, ""),
        ({OLD: HASH}, 200, True, 1, OLD),
        ({WHEEL: HASH}, 200, True, 0, ""),
        ({WHEEL: "0" * 64}, 200, True, 1, WHEEL),
        ({WHEEL: "0" * 64}, 200, False, 0, ""),
        ({"opsd_cluster-0.0.1.tar.gz": HASH}, 200, False, 1, "opsd_cluster-0.0.1.tar.gz"),
        ({"opsd-cluster-1.egg": HASH}, 200, True, 1, "opsd-cluster-1.egg"),
        ({}, 503, True, 2, "OFFLINE=1"),
    ],
    ids=["free", "released", "other files", "uploaded", "taken", "not built", "never ours", "odd", "down"],
)
def test_a_release_stops_while_the_name_has_other_files(
    checkout: Path, listed: Mapping[str, str], status: int, built: bool, code: int, said: str
) -> None:
    """Files of others, or of this version with another content; an index that does not answer is no free name."""
    with HTTPServer(("127.0.0.1", 0), type("Given", (Index,), {"listed": listed, "status": status})) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}/simple"
        done = ask(checkout, index, *([WHEEL] if built else []))
        server.shutdown()
    assert done.returncode == code and said in done.stderr, done.stderr
    assert bool(done.stderr) == bool(code) and "Traceback" not in done.stderr


def test_a_release_without_network_has_to_be_asked_for(checkout: Path) -> None:
    """An index that cannot be reached stops it, but with OFFLINE=1, which says what was left out."""
    refused = ask(checkout, "http://127.0.0.1:1/simple")
    assert (refused.returncode, "OFFLINE=1" in refused.stderr) == (2, True)
    offline = ask(checkout, "http://127.0.0.1:1/simple", OFFLINE="1")
    assert (offline.returncode, "ask it before the upload" in offline.stdout) == (0, True)


def ask(folder: Path, index: str, *built: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OPSD_INDEX": index, "OFFLINE": "", "no_proxy": "127.0.0.1", **variables}
    command = [sys.executable, "deploy/published.py", "0.1.0", *built]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_release_asks_before_and_after_it_has_built() -> None:
    """Early, so that nobody waits for a build in vain, and with the files that it would upload."""
    before, _, after = (ROOT / "deploy/release").read_text().partition("twine check")
    assert 'deploy/published.py "$version" || exit 2' in before
    assert 'deploy/published.py "$version" dist/*.whl dist/*.tar.gz || exit 2' in after


def test_the_index_is_that_of_the_user(tmp_path: Path) -> None:
    """No host is written down: the one that uv uses is asked."""
    program = "import runpy; print(runpy.run_path('deploy/published.py')['default_index']())"
    environment = {**os.environ, "UV_DEFAULT_INDEX": "https://mirror.example/simple"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "https://mirror.example/simple", done.stderr


# What opsd needs has tested bounds, and what is installed on nodes is pinned with hashes (`make lock`).


PINNED = ROOT / "deploy" / "requirements"

PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

NAME: str = PYPROJECT["project"]["name"]

NEEDED: dict[str, list[str]] = {
    "": PYPROJECT["project"]["dependencies"],
    **PYPROJECT["project"]["optional-dependencies"],
}

GROUPS: dict[str, list[Any]] = PYPROJECT["dependency-groups"]

BUILD: list[str] = PYPROJECT["build-system"]["requires"]

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


# Which packages come first where PYTHONPATH names those of another Python.


OWN = str(Path(opsd.__file__).parents[1])

SITE = site.getsitepackages()[0]


@pytest.mark.parametrize(
    ("named", "path", "expected"),
    [
        ("/apps/python", ["/apps/python", "/lib", SITE], ["/lib", SITE, "/apps/python"]),
        (f"/apps/a/:{OWN}", ["/apps/a", OWN, "/lib", SITE], [OWN, "/lib", SITE, "/apps/a"]),
        (f"/apps/a:{SITE}", ["/apps/a", SITE, "/lib"], [SITE, "/lib", "/apps/a"]),
        ("", ["/work", "/lib"], ["/work", "/lib"]),
    ],
    ids=["a module", "pip install --target", "its own site-packages", "nothing"],
)
def test_what_pythonpath_names_comes_last(named: str, path: list[str], expected: list[str]) -> None:
    """But for what opsd itself is installed in, which comes before an older package of the Python that runs it."""
    prefer_own_packages(path, named)
    assert path == expected


@pytest.mark.parametrize(
    ("called", "argv", "answer"),
    [
        ("python -m opsd top", "-m top", True),
        ("python -X dev -W ignore -Pm opsd.trainer c.toml", "-m c.toml", True),
        ("python -X importtime -umopsd.trainer", "-m", True),
        ("python -u -m opsd.trainer c.toml", "/site/opsd/trainer/__main__.py c.toml", True),
        ("python -m opsdata -m opsd", "-m -m opsd", False),
        ("python opsd top", "opsd top", False),
        ("python -m pytest", "-m", False),
        ("python train.py", "train.py --with more than there was", False),
        ("", "", False),
    ],
)
def test_a_module_of_opsd_is_known_by_its_command_line(called: str, argv: str, answer: bool) -> None:
    """However the options of Python are written, and as a rank, which has the command line of its program."""
    assert is_module_of_opsd(called.split(), argv.split()) is answer


def test_an_older_python_says_so() -> None:
    """In a sentence, as a checkout has no installer that would."""
    program = "import sys; sys.version_info = (3, 10, 4); import opsd.commands.main"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    said = f"opsd: {sys.executable} is Python 3.10; opsd needs 3.11 or later\n"
    assert (done.returncode, done.stderr) == (exitcodes.USAGE, said)


@pytest.mark.parametrize("name", ["__init__.py", "__main__.py", "own_packages.py", "commands/__init__.py"])
def test_what_an_older_python_reads_until_then_it_understands(name: str) -> None:
    """By the grammar of 3.7."""
    ast.parse(Path(OWN, "opsd", name).read_text(), feature_version=(3, 7))


# opsd deploy: what a package brings along can be listed, shown and copied.


DEPLOY = Path(__file__).parents[2] / "deploy"


def test_every_file_is_listed_and_copied_with_its_mode(tmp_path: Path) -> None:
    """The copies are those files, and scripts remain executable."""
    listed = CliRunner().invoke(cli, ["deploy", "list"]).output.split()
    assert "slurm/train-spares.sbatch" in listed
    assert CliRunner().invoke(cli, ["deploy", "copy", str(tmp_path / "new")]).exit_code == exitcodes.OK
    assert sorted(str(p.relative_to(tmp_path / "new")) for p in (tmp_path / "new").rglob("*") if p.is_file()) == listed
    for name in listed:
        copied = tmp_path / "new" / name
        assert copied.read_bytes() == (DEPLOY / name).read_bytes()
        assert copied.stat().st_mode & 0o111 == (DEPLOY / name).stat().st_mode & 0o111


def test_a_file_is_shown_as_it_is() -> None:
    """So that it can be piped somewhere."""
    shown = CliRunner().invoke(cli, ["deploy", "show", "systemd/opsd.service"])
    assert shown.output == (DEPLOY / "systemd/opsd.service").read_text()


def test_an_edited_file_is_kept_unless_overwriting_is_asked_for(tmp_path: Path) -> None:
    """Nothing at all is copied then."""
    edited = tmp_path / "slurm/prolog.sh"
    edited.parent.mkdir()
    edited.write_text("mine")
    refused = CliRunner().invoke(cli, ["deploy", "copy", str(tmp_path), "slurm"])
    assert (refused.exit_code, edited.read_text()) == (2, "mine")
    assert "--overwrite" in refused.output
    assert [p.name for p in edited.parent.iterdir()] == ["prolog.sh"]
    assert CliRunner().invoke(cli, ["deploy", "copy", str(tmp_path), "slurm", "--overwrite"]).exit_code == 0
    assert edited.read_text() != "mine"


def test_copies_of_a_read_only_package_can_be_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their owner, and scripts remain executable."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "prolog.sh").touch()
    (package / "prolog.sh").chmod(0o555)
    monkeypatch.setattr("opsd.commands.deploy.FOLDER", package)
    assert CliRunner().invoke(cli, ["deploy", "copy", str(tmp_path / "new")]).exit_code == exitcodes.OK
    assert (tmp_path / "new/prolog.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    "arguments",
    [("show", "no/such"), ("show", "slurm"), ("show", "../pyproject.toml"), ("copy", "/proc/no", "install")],
)
def test_what_cannot_be_done_is_said_in_a_sentence(arguments: tuple[str, ...]) -> None:
    """A wrong name, a folder, something outside of it, and a target that cannot be written."""
    result = CliRunner().invoke(cli, ["deploy", *arguments])
    assert result.exit_code == exitcodes.USAGE
    assert result.output.count("Error: ") == 1
