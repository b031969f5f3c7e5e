"""deploy/container: an image is built on a bare Debian, and its agent answers as an ordinary user."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from opsd import __version__

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/container/Containerfile"
NEEDED = ("buildah", "debootstrap")
DEBIAN = "http://deb.debian.org/debian"

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


class Buildah:
    """Images below ``folder``, made and run in a chroot: neither namespaces nor overlays are needed."""

    def __init__(self, folder: Path) -> None:
        self._storage = ("--storage-driver=vfs", f"--root={folder / 'root'}", f"--runroot={folder / 'run'}")
        self._env = {
            **os.environ,
            "BUILDAH_ISOLATION": "chroot",
            "TMPDIR": str(folder),
            "REGISTRY_AUTH_FILE": "/dev/null",
        }

    def __call__(self, verb: str, *arguments: str | Path) -> str:
        command = ["buildah", *self._storage, verb, *arguments]
        done = subprocess.run(
            command, env=self._env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.strip()


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[Buildah]:
    """A store with the image ``base``: a bare Debian of the release of this machine, with its Python."""
    if absent := [program for program in NEEDED if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(absent)}")
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs root")
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    debian = tmp_path / "debian"
    packages = "--include=python3,python3-venv,ca-certificates"
    command = ["debootstrap", "--variant=minbase", packages, release.get("VERSION_CODENAME", ""), debian, DEBIAN]
    if subprocess.run(command, capture_output=True, check=False, timeout=600).returncode:
        pytest.skip("debootstrap could not make a Debian: is there no mirror?")
    buildah = Buildah(tmp_path)
    base = buildah("from", "scratch")
    buildah("copy", "--quiet", base, debian, "/")
    buildah("commit", "--quiet", base, "base")
    yield buildah
    buildah("rm", "--all")


def pip() -> list[str]:
    """How pip reaches packages on this machine."""
    paths = ("/etc/pip.conf", "/etc/ssl/certs", *os.environ.get("PIP_FIND_LINKS", "").split())
    options = [f"--volume={path}:{path}:ro" for path in paths if Path(path).exists()]
    names = [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]
    return [*options, *(f"--env={name}={os.environ[name]}" for name in names)]


def test_the_agent_of_the_image_answers_as_nobody_in_particular(buildah: Buildah) -> None:
    """It is built from the lock with its hashes, runs as its own user, and has metrics."""
    buildah("build", *pip(), "--build-arg=BASE=localhost/base", f"--file={FILE}", "--tag=opsd", ".")
    made = buildah("from", "opsd")
    assert buildah("inspect", "--format={{.OCIv1.Config.User}}", made) == "opsd"
    opsd = "/opt/opsd/bin/opsd"
    assert buildah("run", made, "--", opsd, "--version").split()[-1] == __version__
    script = (
        f"{opsd} agent --once --format openmetrics > /tmp/metrics; id -u;"
        " grep -c ^opsd_host /tmp/metrics; command -v gcc make git || echo none"
    )
    user, series, tools = buildah("run", made, "--", "sh", "-c", script).splitlines()[-3:]
    assert (user, tools) == ("9477", "none")
    assert int(series) > 10
