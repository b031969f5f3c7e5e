"""opsd is installed under a name that is its own: in every hint and page, and on the package index."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from opsd import DISTRIBUTION, pip_install

ROOT = Path(__file__).parents[2]
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
