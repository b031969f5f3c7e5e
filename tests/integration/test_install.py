"""How a node gets opsd: deploy/install, packages of dpkg and rpm, an image."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from opsd import __version__
from tests.fakes.tree import ROOT

# deploy/install: a node gets opsd, keeps its settings when upgraded, and is rid of it again.


INSTALL = Path(__file__).parents[2] / "deploy" / "install"

ROLE = INSTALL.parent / "ansible/roles/opsd/tasks/main.yml"

UNIT, SETTINGS = "etc/systemd/system/opsd.service", "etc/opsd/opsd.toml"

LINK, MANUAL = "usr/local/bin/opsd", "usr/local/share/man/man1/opsd-launch.1"

MAINTAINER = "The maintainers <m@opsd.example>"


def wheel(folder: Path, version: str, name: str = "opsd", *metadata: str) -> Path:
    """A wheel called ``name`` that does nothing; it needs nothing unless ``metadata`` says so."""
    file = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", f"Maintainer-email: {MAINTAINER}"]
    contents = {
        f"{name.removesuffix('_cluster')}/__init__.py": f'__version__ = "{version}"\n',
        f"{info}/METADATA": "\n".join([*lines, *metadata, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in contents.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*contents, f"{info}/RECORD"]))
    return file


def pin(folder: Path, *wheels: Path, file: str = "agent.txt") -> Path:
    """A folder whose ``file`` pins ``wheels`` with their hashes."""
    folder.mkdir(exist_ok=True)
    pins = [(*path.name.split("-")[:2], hashlib.sha256(path.read_bytes()).hexdigest()) for path in wheels]
    (folder / file).write_text("".join(f"{name}=={version} --hash=sha256:{sha}\n" for name, version, sha in pins))
    return folder


@cache
def python() -> Path:
    """A Python that copies the environments it is asked for: installing pip in each takes most of an installation."""
    folder = Path(tempfile.mkdtemp(prefix="opsd-install-"))
    atexit.register(shutil.rmtree, folder)
    subprocess.run(["python3", "-m", "venv", folder / "made"], check=True, umask=0o022)
    copying = folder / "python3"
    copying.write_text(COPYING.format(made=folder / "made"))
    copying.chmod(0o755)
    return copying


COPYING = """#!/bin/sh -e
[ "$1 $2" = "-m venv" ] || exec python3 "$@"
mkdir -p "${{3%/*}}"
cp -r '{made}' "$3"
grep -rlI '{made}' "$3/bin" "$3/pyvenv.cfg" | xargs sed -i "s,{made},$3,g"
"""


def run(root: Path, *options: object, script: Path = INSTALL, **variables: str) -> subprocess.CompletedProcess[str]:
    """Installs nothing but the wheel, unless ``options`` name requirements, or ``script`` is a copy with its own."""
    environment = {**os.environ, "DESTDIR": str(root), "PIP_NO_INDEX": "1", "PYTHON": str(python()), **variables}
    own = script != INSTALL or "--requirements" in options
    nothing = [] if own else ["--requirements", str(pin(root.parent / "nothing"))]
    command = [str(script), *nothing, *map(str, options)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_node_with_the_distribution_under_its_old_name_is_upgraded(tmp_path: Path) -> None:
    """One distribution has the files then: removing another would take them along."""
    root = tmp_path / "root"
    assert run(root, "--wheel", wheel(tmp_path, "0.0.1")).returncode == 0
    done = run(root, "--wheel", wheel(tmp_path, "0.0.2", "opsd_cluster"))
    assert done.returncode == 0, done.stderr
    packages = next((root / "opt/opsd/lib").glob("python*/site-packages"))
    assert {path.name for path in packages.glob("opsd*")} == {"opsd", "opsd_cluster-0.0.2.dist-info"}
    assert "0.0.2" in (packages / "opsd/__init__.py").read_text()


@pytest.mark.slow
def test_install_again_upgrade_and_uninstall(tmp_path: Path) -> None:
    """Twice is once, an upgrade keeps the settings, and what is removed is gone but for settings and journal."""
    root, first = tmp_path / "root", wheel(tmp_path, "0.0.1")
    done = run(root, "--wheel", first, PYTHON="python3")
    assert done.returncode == 0, done.stderr
    assert (root / UNIT).read_text() == (INSTALL.parent / "systemd/opsd.service").read_text()
    assert (root / "usr/lib/sysusers.d/opsd.conf").exists()
    assert (root / "usr/lib/tmpfiles.d/opsd.conf").exists()
    assert (root / SETTINGS).stat().st_mode & 0o777 == 0o644
    assert str((root / LINK).readlink()) == "/opt/opsd/bin/opsd"
    assert (root / MANUAL).read_bytes() == (INSTALL.parent / "man/opsd-launch.1").read_bytes()
    units = [file.name for file in (INSTALL.parent / "systemd").iterdir() if file.suffix != ".conf"]
    assert "opsd-repair-driver@.service" in units
    assert all((root / UNIT).with_name(name).exists() for name in units)
    assert (root / "opt/opsd/bin/pip").read_text().startswith("#!/opt/opsd/bin/python"), "as it is found in the image"
    (root / SETTINGS).write_text("mine")

    again = run(root, "--wheel", first)
    assert again.stdout.strip() == "opsd is up to date"

    (root / UNIT).write_text("edited")
    upgraded = run(root, "--wheel", wheel(tmp_path, "0.0.2"))
    assert "opsd is installed" in upgraded.stdout
    version = [str(root / "opt/opsd/bin/python"), "-c", "import opsd; print(opsd.__version__)"]
    assert subprocess.run(version, capture_output=True, text=True, check=True, cwd=root).stdout.strip() == "0.0.2"
    assert (root / UNIT).read_text().startswith("# Installed by deploy/install")
    assert (root / SETTINGS).read_text() == "mine"

    assert run(root, "--uninstall").returncode == 0
    assert not (root / UNIT).exists()
    assert not (root / "opt/opsd").exists()
    assert not (root / MANUAL).exists()
    assert not (root / LINK).is_symlink()
    assert (root / SETTINGS).read_text() == "mine"
    assert run(root, "--uninstall", "--purge").returncode == 0
    assert not (root / "etc/opsd").exists()


@pytest.mark.slow
def test_what_is_installed_is_open_to_the_agent_s_user(tmp_path: Path) -> None:
    """Also where root's umask closes everything, as hardened images have it; and a program of that name stays."""
    root = tmp_path / "root"
    (root / LINK).parent.mkdir(parents=True)
    (root / LINK).write_text("another opsd")
    before = os.umask(0o077)
    try:
        assert run(root, "--wheel", wheel(tmp_path, "0.0.1")).returncode == 0
    finally:
        os.umask(before)
    closed = [path for part in ("opt", "etc") for path in (root / part).rglob("*") if path.stat().st_mode & 0o4 == 0]
    assert closed == []
    assert run(root, "--uninstall").returncode == 0
    assert (root / LINK).read_text() == "another opsd"


@pytest.mark.slow
def test_torch_is_installed_if_asked_for(tmp_path: Path) -> None:
    """It takes gigabytes, and not every node has GPUs to test or lacks a Python of the training."""
    root, index = tmp_path / "root", tmp_path / "index"
    index.mkdir()
    torch = wheel(index, "2.0.0", "torch")
    needs = ("Provides-Extra: train", "Requires-Dist: torch; extra == 'train'")
    opsd = wheel(tmp_path, "0.0.1", "opsd", *needs)
    packages = root / "opt/opsd/lib"
    pinned = pin(pin(tmp_path / "pinned"), torch, file="train.txt")
    assert run(root, "--wheel", opsd, "--requirements", pinned).returncode == 0
    assert not [*packages.rglob("torch")]
    done = run(root, "--wheel", opsd, "--requirements", pinned, "--train", PIP_FIND_LINKS=str(index))
    assert done.returncode == 0, done.stderr
    assert [*packages.rglob("torch")]


@pytest.mark.slow
def test_what_the_ansible_role_copies_is_all_that_the_installer_needs(tmp_path: Path) -> None:
    """With the pins of this release. Twice is once: a play that changes nothing must not restart the agent."""
    yaml = pytest.importorskip("yaml")
    (copied,) = (task["loop"] for task in yaml.safe_load(ROLE.read_text()) if "loop" in task)
    node = tmp_path / "node"
    node.mkdir()
    for name in (source.rpartition("/../")[2] for source in copied if source != "{{ opsd_wheel }}"):
        source = INSTALL.parent / name
        shutil.copytree(source, node / name) if source.is_dir() else shutil.copy(source, node)
    assert (node / "requirements/agent.txt").read_bytes() == (INSTALL.parent / "requirements/agent.txt").read_bytes()
    pin(node / "requirements")
    root, opsd = tmp_path / "root", wheel(tmp_path, "0.0.1")
    first = run(root, "--wheel", opsd, script=node / "install")
    assert (first.returncode, first.stderr) == (0, "")
    again = run(root, "--wheel", opsd, script=node / "install")
    assert (again.returncode, again.stdout.strip()) == (0, "opsd is up to date")


@pytest.mark.slow
def test_a_package_that_was_exchanged_is_not_installed(tmp_path: Path) -> None:
    """Of the same name and version, with another content than the one whose hash was pinned."""
    root, index = tmp_path / "root", tmp_path / "index"
    index.mkdir()
    opsd = wheel(tmp_path, "0.0.1", "opsd", "Requires-Dist: needed")
    pinned = pin(tmp_path / "pinned", wheel(index, "1.0", "needed"))
    wheel(index, "1.0", "needed", "Summary: with a back door")
    done = run(root, "--wheel", opsd, "--requirements", pinned, PIP_FIND_LINKS=str(index))
    assert (done.returncode, "DO NOT MATCH THE HASHES" in done.stderr) == (1, True)
    assert not [*(root / "opt/opsd").rglob("needed")] and not (root / UNIT).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pinned", "said"),
    [("needed==1.0", "Hashes are required"), ("", "opsd 0.0.1 requires needed, which is not installed.")],
)
def test_nothing_is_installed_that_is_not_pinned(tmp_path: Path, pinned: str, said: str) -> None:
    """Without a hash, or needed by a wheel that goes with other requirements; an index would have it."""
    index, folder = tmp_path / "index", pin(tmp_path / "pinned")
    index.mkdir()
    wheel(index, "1.0", "needed")
    (folder / "agent.txt").write_text(pinned)
    opsd = wheel(tmp_path, "0.0.1", "opsd", "Requires-Dist: needed")
    done = run(tmp_path / "root", "--wheel", opsd, "--requirements", folder, PIP_FIND_LINKS=str(index))
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    assert not [*tmp_path.glob("root/opt/opsd/lib/python*/site-packages/needed")]
    assert not (tmp_path / "root" / UNIT).exists()


@pytest.mark.slow
def test_no_code_of_a_package_is_run(tmp_path: Path) -> None:
    """A source distribution would run its own build as root, for which it need not even ask for another package."""
    index, folder = tmp_path / "index", pin(tmp_path / "pinned")
    (index / "needed-1.0").mkdir(parents=True)
    build = '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n'
    (index / "needed-1.0/pyproject.toml").write_text(build)
    (index / "needed-1.0/own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    source = Path(shutil.make_archive(str(index / "needed-1.0"), "gztar", index, "needed-1.0"))
    sha = hashlib.sha256(source.read_bytes()).hexdigest()
    (folder / "agent.txt").write_text(f"needed==1.0 --hash=sha256:{sha}\n")
    opsd = wheel(tmp_path, "0.0.1")
    done = run(tmp_path / "root", "--wheel", opsd, "--requirements", folder, PIP_FIND_LINKS=str(index))
    assert done.returncode == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--wheel"], 2, "--wheel needs a file"),
        (["--requirements"], 2, "--requirements needs a folder"),
        (["--wat"], 2, "unknown option --wat; see deploy/install --help"),
        (["--purge"], 2, "--purge goes with --uninstall"),
        (["--wheel", "none.whl"], 1, "none.whl: no such wheel"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, options: list[str], code: int, said: str) -> None:
    """And nothing is written."""
    done = run(tmp_path / "root", *options)
    assert (done.returncode, done.stderr.strip()) == (code, f"opsd: {said}")
    assert not (tmp_path / "root").exists()


@pytest.mark.slow
def test_a_wheel_that_is_none_is_said(tmp_path: Path) -> None:
    """Pip's own words, then ours."""
    broken = tmp_path / "opsd-0.0.1-py3-none-any.whl"
    broken.write_text("no zip")
    done = run(tmp_path / "root", "--wheel", broken)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"opsd: pip could not install {broken}"


@pytest.mark.slow
def test_the_help_is_what_the_file_says(tmp_path: Path) -> None:
    """Without installing anything."""
    done = run(tmp_path / "root", "--help")
    assert done.returncode == 0
    assert "deploy/install --uninstall --purge" in done.stdout
    assert "set -euo" not in done.stdout


@pytest.mark.slow
def test_a_copy_of_the_script_without_a_checkout_asks_for_a_wheel(tmp_path: Path) -> None:
    """As `opsd deploy copy` makes it; nothing is written."""
    copied = tmp_path / "copy" / "install"
    copied.parent.mkdir()
    shutil.copy(INSTALL, copied)
    done = subprocess.run(
        [copied], env={**os.environ, "DESTDIR": str(tmp_path / "root")}, capture_output=True, text=True
    )
    assert (done.returncode, "--wheel" in done.stderr) == (2, True)
    assert not (tmp_path / "root").exists()


# deploy/deb: a package that dpkg installs on a node, again with the settings kept, and removes.


BUILD = Path(__file__).parents[2] / "deploy" / "deb"

PYTHON = "/usr/bin/python3"

DPKG = Path("/var/lib/dpkg/status")


def build(script: Path, folder: Path, version: str, package: str) -> Path:
    """The file ``package`` (a pattern) that ``script`` makes of this checkout in ``folder``."""
    wanted = ("--wheel", str(wheel(folder, version)), "--requirements", str(pin(folder / "nothing")))
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PYTHON": PYTHON}
    command = [str(script), *wanted, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=150)
    if "ensurepip is not available" in done.stdout + done.stderr:
        pytest.skip(f"{PYTHON} makes no virtual environments: install python3-venv")
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob(package)
    return made


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Path]:
    """This machine's root as it is, with all changes to it in memory."""
    if os.geteuid() != 0:
        pytest.skip("a changed root needs root")
    memory, root = tmp_path / "memory", tmp_path / "root"
    memory.mkdir()
    root.mkdir()
    mount("-t", "tmpfs", "tmpfs", str(memory))
    try:
        for name in ("upper", "work"):
            (memory / name).mkdir()
        layers = f"lowerdir=/,upperdir={memory}/upper,workdir={memory}/work"
        if mount("-t", "overlay", "overlay", "-o", layers, str(root), check=False):
            pytest.skip("no overlay file system here")
        try:
            yield root
        finally:
            subprocess.run(["umount", str(root)], check=True)
    finally:
        subprocess.run(["umount", str(memory)], check=True)


def mount(*arguments: str, check: bool = True) -> int:
    return subprocess.run(["mount", *arguments], check=check, capture_output=True).returncode


def inside(root: Path, *command: str) -> str:
    done = subprocess.run(["chroot", str(root), *command], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("dpkg-deb") and DPKG.exists()), reason="this is not Debian")
def test_dpkg_installs_it_again_and_removes_it(machine: Path, tmp_path: Path) -> None:
    """The program runs from /opt/opsd, an edited setting stays, and purging leaves nothing."""
    say = ("/opt/opsd/bin/python", "-c", "import opsd; print(opsd.__version__)")
    settings = machine / "etc/opsd/opsd.toml"
    package = build(BUILD, tmp_path, "0.0.1", "opsd_0.0.1_*.deb")
    told = subprocess.run(["dpkg-deb", "--field", package, "Maintainer"], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == MAINTAINER
    shutil.copy(package, machine / "opsd.deb")
    install = ("dpkg", "--install", "--force-depends", "--force-confold", "--force-unsafe-io", "/opsd.deb")
    inside(machine, *install)
    assert inside(machine, *say).strip() == "0.0.1"
    assert settings.stat().st_mode & 0o777 == 0o644
    assert str((machine / "usr/bin/opsd").readlink()) == "/opt/opsd/bin/opsd"
    settings.write_text("mine")
    inside(machine, *install)
    assert settings.read_text() == "mine"
    for unit in ("opsd.service", "opsd-repair.path", "opsd-repair-driver@.service", "opsd-targets.timer"):
        assert (machine / "usr/lib/systemd/system" / unit).exists()
    assert (machine / "usr/share/man/man1/opsd-launch.1.gz").exists()
    pip = (machine / "opt/opsd/bin/pip").read_text().splitlines()[0]
    assert pip.startswith("#!/opt/opsd/bin/python")
    inside(machine, "dpkg", "--remove", "opsd")
    assert not (machine / "opt/opsd").exists() and settings.read_text() == "mine"
    inside(machine, "dpkg", "--purge", "opsd")
    assert not (machine / "etc/opsd").exists()
    assert not (machine / "usr/share/man/man1/opsd-launch.1.gz").exists()


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("dpkg-deb") and DPKG.exists()), reason="this is not Debian")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--wheel"], "--wheel needs a file"),
        (["--requirements"], "--requirements needs a folder"),
        (["--wat"], "unknown option --wat; see deploy/deb --help"),
        (["/nowhere"], "/nowhere: no such folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_of_deb(options: list[str], said: str) -> None:
    """With exit code 2."""
    done = subprocess.run([str(BUILD), *options], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (2, f"opsd: {said}")


# deploy/rpm: a package that rpm installs on a node, again with the settings kept, and removes.


__all__ = ["machine"]

RPM_BUILD = Path(__file__).parents[2] / "deploy" / "rpm"


def ask(package: Path, *options: str) -> list[str]:
    done = subprocess.run(["rpm", "-qp", *options, package], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("rpmbuild") is None, reason="rpmbuild is not installed")
def test_rpm_installs_it_again_and_removes_it(machine: Path, tmp_path: Path) -> None:
    """The package says what it has and needs; the program runs, an edited setting stays, removal leaves no program."""
    package = build(RPM_BUILD, tmp_path, "0.0.1", "opsd-0.0.1-1.*.rpm")
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


# deploy/container: an image is built on a bare Debian, and its agent answers as an ordinary user.


FILE = ROOT / "deploy/container/Containerfile"

NEEDED = ("buildah", "debootstrap")

DEBIAN = "http://deb.debian.org/debian"


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


@pytest.mark.long
@pytest.mark.timeout(1200)
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
