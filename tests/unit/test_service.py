"""The service as systemd, the shell and Slurm read it, and the processes that opsd starts of itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")
from collections.abc import Callable
from contextlib import suppress

import pytest
import yaml

from opsd import config
from opsd.collectors.repairs import CASE, FOLDER, ORDER
from opsd.repair import driver, parts
from opsd.repair.machine import RemedyError, run_command
from opsd.repair.retest import Preflight
from opsd.slurm.connect import Worker
from opsd.slurm.port import SlurmError

# The service as systemd, the shell and Slurm read it.


DEPLOY = Path(__file__).parents[2] / "deploy"

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))

SCRIPTS = [DEPLOY / "install", *sorted((DEPLOY / "slurm").glob("*.sh"))]

PAGE = DEPLOY.parent / "docs" / "security.md"

ACT = DEPLOY / "systemd" / "opsd-act.conf"

REPAIR = DEPLOY / "systemd" / "opsd-repair.service"

DRIVER, TEST = (DEPLOY / "systemd" / f"opsd-repair-{part}@.service" for part in ("driver", "test"))

EXPOSURE, ACTING_EXPOSURE = 2.5, 3.0

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze (Debian package systemd) is not installed"
)


def directives(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing_wrong(unit: Path, tmp_path: Path) -> None:
    """In a copy whose program exists on this machine."""
    for file in (unit, *unit.parent.glob("*.socket")):
        copy = tmp_path / file.name
        copy.write_text(re.sub("/opt/opsd/bin/[a-z]+", shutil.which("true") or "/bin/true", file.read_text()))
    name = tmp_path / unit.name.replace("@.", "@1.")
    if name != tmp_path / unit.name:  # what a template needs is checked in an instance, which needs the repair itself
        (tmp_path / REPAIR.name).write_text("[Service]\nExecStart=/bin/true\n")
    checked = subprocess.run(["systemd-analyze", "verify", str(name)], capture_output=True, text=True, check=False)
    assert [line for line in checked.stderr.splitlines() if unit.stem in line] == []
    assert checked.returncode == 0


def exposure(unit: Path) -> float:
    """By systemd's own scale, on which 10 is a service without any protection."""
    command = ["systemd-analyze", "security", "--offline=yes", str(unit)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    level = re.search(r"Overall exposure level for \S+: ([\d.]+)", said.stdout)
    assert level is not None
    return float(level[1])


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_service_is_exposed_no_more_than_it_must_be(unit: Path) -> None:
    """Those that observe, decide, or change the driver; and, more, what tests a node under load, while it does."""
    assert exposure(unit) <= (ACTING_EXPOSURE if unit == TEST else EXPOSURE)


@needs_systemd
def test_an_agent_that_acts_is_hardly_more_exposed(tmp_path: Path) -> None:
    """With the drop-in, as root."""
    unit = tmp_path / "opsd.service"
    shutil.copy(DEPLOY / "systemd" / unit.name, unit)
    (tmp_path / "opsd.service.d").mkdir()
    shutil.copy(ACT, tmp_path / "opsd.service.d")
    assert exposure(unit) <= ACTING_EXPOSURE


def test_every_capability_is_argued_for() -> None:
    """In the drop-in's comment and in the page on security; and none can change the user or trace by ptrace(2)."""
    page = PAGE.read_text()
    held = set(" ".join([*directives(DEPLOY / "systemd/opsd.service", "CapabilityBoundingSet"), *added()]).split())
    assert held == set(re.findall(r"^\| (CAP_\w+) \|", page, re.MULTILINE))
    assert all(re.search(rf"^#   {name} +\w", ACT.read_text(), re.MULTILINE) for name in " ".join(added()).split())
    assert not held & {"CAP_SETUID", "CAP_SETGID", "CAP_SYS_MODULE", "CAP_NET_ADMIN", "CAP_SYS_RAWIO"}


@pytest.mark.parametrize("unit", [REPAIR, DRIVER, TEST], ids=lambda unit: unit.name)
def test_every_capability_of_a_repair_is_argued_for(unit: Path) -> None:
    """In the unit and in the page on security."""
    held = set(" ".join(directives(unit, "CapabilityBoundingSet")).split())
    assert held == set(re.findall(r"^#   (CAP_\w+) +\w", unit.read_text(), re.MULTILINE))
    (row,) = re.findall(rf"^\| `{re.escape(unit.name)}` \|(.+)$", PAGE.read_text(), re.MULTILINE)
    assert held == set(re.findall(r"CAP_\w+", row))
    assert not held & {"CAP_SETUID", "CAP_SETGID", "CAP_SYS_BOOT", "CAP_NET_ADMIN", "CAP_SYS_RAWIO"}


def test_what_speaks_to_the_network_cannot_touch_the_driver() -> None:
    """The right to load modules and the network are never in one unit, nor can the former read what users write."""
    assert directives(DRIVER, "PrivateNetwork") == ["yes"]
    for unit in UNITS:
        held = set(" ".join(directives(unit, "CapabilityBoundingSet")).split())
        assert ("CAP_SYS_MODULE" in held) == (unit == DRIVER)
        assert unit != DRIVER or not {name for name in held if name.startswith("CAP_DAC_")} | held & {"CAP_SYS_PTRACE"}
    assert "/run/systemd/private" in directives(REPAIR, "InaccessiblePaths")[0]


@pytest.mark.parametrize("part", ["driver", "test"])
def test_a_part_of_a_repair_is_asked_where_it_listens(part: str) -> None:
    """By root alone, and with as much time as the repair waits for it."""
    (socket,) = (DEPLOY / "systemd").glob(f"opsd-repair-{part}.socket")
    (start,) = directives(REPAIR, "ExecStart")
    helpers = start.split("--helpers ")[1].split()[0]
    assert directives(socket, "ListenStream") == [f"{helpers}/{part}"]
    assert [directives(socket, name) for name in ("SocketMode", "DirectoryMode")] == [["0600"], ["0700"]]
    assert socket.name in directives(REPAIR, "Requires")[0].split()
    (unit,) = (one for one in (DRIVER, TEST) if one.name.startswith(socket.stem))
    limit_s = {"driver": parts.DRIVER_S, "test": parts.TEST_S}[part]
    (given,) = directives(unit, "RuntimeMaxSec")
    assert (float(given[:-1]) * 3600 if given.endswith("h") else float(given)) == limit_s
    assert f"opsd.repair.local {part} " in directives(unit, "ExecStart")[0]


def test_a_repair_is_taken_up_where_the_agent_orders_it() -> None:
    """The path unit waits for the files that the program writes, and nothing else starts it: one switch for all."""
    files = {f"/var/lib/opsd/{FOLDER}/{name}" for name in (ORDER, CASE)}
    assert set(directives(REPAIR.with_suffix(".path"), "PathExists")) == files
    assert set(directives(REPAIR, "ConditionPathExists")) == {f"|{file}" for file in files}
    assert directives(REPAIR.with_suffix(".path"), "WantedBy") and not directives(REPAIR, "WantedBy")


def added() -> list[str]:
    return directives(ACT, "CapabilityBoundingSet")


def test_a_reload_is_of_the_file_that_the_agent_reads() -> None:
    """The file is checked first, so that systemctl says what is wrong; a hang-up is what the agent takes."""
    unit = DEPLOY / "systemd" / "opsd.service"
    (start,), reload = directives(unit, "ExecStart"), directives(unit, "ExecReload")
    program, file = start.split()[0], start.split("--config ")[1]
    assert reload == [f"{program} config check {file}", "/bin/kill -HUP $MAINPID"]


def test_the_agent_is_watched_and_runs_as_its_own_user() -> None:
    """Notification and watchdog are what the agent sends, and the user is the one that sysusers.d makes."""
    unit = DEPLOY / "systemd" / "opsd.service"
    assert directives(unit, "Type") == ["notify"]
    assert directives(unit, "WatchdogSec") == ["30"]
    assert directives(unit, "User") == ["opsd"]
    assert re.search(r"^u opsd ", (DEPLOY / "systemd" / "opsd.sysusers.conf").read_text(), re.MULTILINE)
    folders = (DEPLOY / "systemd" / "opsd.tmpfiles.conf").read_text()
    assert "d /dev/shm/opsd 1777 root root -" in folders
    assert "d /etc/opsd 0755 root root -" in folders, "all users of a node read its settings"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_shell_understands_the_scripts(script: Path) -> None:
    """Before a node has to."""
    shell = "bash" if "bash" in script.read_text().splitlines()[0] else "sh"
    assert subprocess.run([shell, "-n", str(script)], capture_output=True, check=False).returncode == 0
    assert script.stat().st_mode & 0o111


@pytest.mark.parametrize("name", ["prolog.sh", "epilog.sh", "health_check.sh"])
def test_slurm_is_not_asked_where_that_can_hang(name: str) -> None:
    """Prolog, epilog and health check run while the controller waits for the node."""
    code = [line for line in (DEPLOY / "slurm" / name).read_text().splitlines() if not line.startswith("#")]
    assert not re.search(r"\b(scontrol|squeue|sinfo|sacct|srun|sbatch|scancel)\b", "\n".join(code))


def program(path: Path, *lines: str) -> None:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """What a ``logger`` in ``tmp_path`` was told."""
    program(tmp_path / "logger", f'echo "$*" >>{tmp_path}/log')
    return tmp_path / "log"


@pytest.mark.parametrize(
    ("enabled", "active", "done"), [(True, True, ""), (True, False, "restart opsd"), (False, False, "")]
)
def test_only_an_agent_that_should_run_is_started(
    tmp_path: Path, logged: Path, enabled: bool, active: bool, done: str
) -> None:
    """One that was disabled, or is not installed, stays as it is and fills no log."""
    answers = f"is-enabled) exit {int(not enabled)} ;; is-active) exit {int(not active)} ;;"
    program(tmp_path / "systemctl", f'case $1 in {answers} esac; echo "$*" >>{tmp_path}/asked')
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert subprocess.run([str(DEPLOY / "slurm" / "health_check.sh")], env=environment, check=False).returncode == 0
    asked = tmp_path / "asked"
    assert (asked.read_text().strip() if asked.exists() else "") == done
    assert logged.exists() == bool(done)


def test_a_node_without_opsd_still_takes_jobs(tmp_path: Path) -> None:
    """Prolog and epilog are on shared storage more often than opsd is."""
    for name in ("prolog.sh", "epilog.sh"):
        environment = {"OPSD": str(tmp_path / "none"), "PATH": "/usr/bin:/bin"}
        assert subprocess.run([str(DEPLOY / "slurm" / name)], env=environment, check=False).returncode == 0


@pytest.mark.parametrize("file", sorted((DEPLOY / "ansible").rglob("*.yml")), ids=lambda file: file.parent.name)
def test_the_playbook_is_yaml(file: Path) -> None:
    """And the files that it copies exist."""
    text = file.read_text()
    assert yaml.safe_load(text)
    for name in re.findall(r"\{\{ playbook_dir \}\}/\.\./([\w./-]+)", text):
        assert (DEPLOY / name).exists(), name


def test_nobody_can_exchange_what_the_playbook_runs_as_root() -> None:
    """In a folder that all users can write to, the first user who makes one of its name owns it."""
    tasks = yaml.safe_load((DEPLOY / "ansible/roles/opsd/tasks/main.yml").read_text())
    names = [task["name"] for task in tasks]
    run = next(task for task in tasks if "ansible.builtin.command" in task)
    program = Path(run["ansible.builtin.command"].split()[0])
    made = next(task for task in tasks if task.get("ansible.builtin.file", {}).get("path") == str(program.parent))
    copied = next(task for task in tasks if task.get("ansible.builtin.copy", {}).get("dest") == f"{program.parent}/")
    assert any(item.endswith("/requirements") for item in copied["loop"]), "or the installer finds no hashes"
    assert made["ansible.builtin.file"].items() >= {"state": "directory", "owner": "root", "mode": "0700"}.items()
    assert not {"tmp", "shm"} & {*program.parts}
    assert names.index(made["name"]) < names.index(copied["name"]) < names.index(run["name"])


def test_the_playbook_writes_the_settings_that_it_was_given(tmp_path: Path) -> None:
    """Those of its own and all others, such as certificate and passwords for an agent that listens to the network."""
    jinja2 = pytest.importorskip("jinja2")  # torch brings it along
    role = DEPLOY / "ansible/roles/opsd"
    example = "\n".join(
        line.removeprefix("#").removeprefix("   ")
        for line in (role / "defaults/main.yml").read_text().splitlines()
        if line.startswith("#   ")
    )
    given = yaml.safe_load(example)
    environment = jinja2.Environment(trim_blocks=True, autoescape=False)
    environment.filters |= {"combine": combine, "to_json": json.dumps}
    template = environment.from_string((role / "templates/opsd.toml.j2").read_text())
    file = tmp_path / "opsd.toml"
    file.write_text(template.render(opsd_listen="10.0.0.1:9477", opsd_mode="act", **given))
    settings = config.load(file, env={})
    assert (settings.agent.listen, settings.policy.mode) == ("10.0.0.1:9477", "act")
    assert settings.agent.web_config == Path("/etc/opsd/web.yml")
    assert settings.notify.webhook_file == Path("/etc/opsd/webhook")
    assert (settings.preflight.gpus, settings.preflight.python) == (8, "/opt/train/bin/python")
    assert settings.preflight.limits == {"gpu_burn": {"throughput": 6.5e14}}


def combine(left: dict[str, Any], right: dict[str, Any], *, recursive: bool) -> dict[str, Any]:
    """Ansible's filter."""
    assert recursive
    both = {
        key: combine(left[key], right[key], recursive=True)
        for key in left.keys() & right.keys()
        if isinstance(left[key], dict)
    }
    return {**left, **right, **both}


# Processes that opsd starts of itself, as root too, run this opsd, and nothing of the folder it is called from.


SPY = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()"


def _ask_slurm() -> None:
    worker = Worker()
    try:
        worker("nodes")
    finally:
        worker.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda: driver.read("/no/such/library", run_command),
        lambda: Preflight(["--no-such-option"], "quick")([]),
        _ask_slurm,
    ],
    ids=["state of the driver", "retest", "pyslurm"],
)
def test_a_package_of_the_same_name_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]
) -> None:
    """A user's folder is where an administrator types sudo."""
    package = tmp_path / "opsd"
    package.mkdir()
    (package / "__init__.py").write_text(SPY)
    monkeypatch.chdir(tmp_path)
    with suppress(RemedyError, SlurmError):
        call()
    assert not (package / "ran").exists()


# What deploy/slurm/idle-checks.sh submits, with commands that only write down how they were called.


SCRIPT = Path(__file__).parents[2] / "deploy/slurm/idle-checks.sh"

CALLED = '#!/bin/sh\necho "$(basename "$0") $*" >>{folder}/called\n'

OPSD = CALLED + 'case "$*" in *--pairs*) echo "n[3-4]";; *) echo n1;; esac\n'


@pytest.mark.parametrize(("pairs", "asked", "submitted"), [("1", 2, 2), ("0", 1, 1)])
def test_pairs_can_be_turned_off(tmp_path: Path, pairs: str, asked: int, submitted: int) -> None:
    """With PAIRS=0 nobody asks for pairs; nodes are tested as ever."""
    called = [line.split()[0] for line in begun(tmp_path, pairs, "(null)")]
    assert (called.count("opsd"), called.count("sbatch")) == (asked, submitted)


@pytest.mark.parametrize(
    ("gres", "asked"),
    [
        ("gpu:h100:8(S:0-1)\\ngpu:h100:8(S:0,1)", "--gres=gpu:8 "),
        ("gpu:h100:8(S:0-1)\\ngpu:a:2(S:0,2),gpu:b:3,shard:20", "--gres=gpu:5 "),
        ("gpu:8\\n(null)", ""),
        ("(null)\\n(null)", ""),
    ],
)
def test_a_pair_asks_for_the_gpus_that_both_nodes_have(tmp_path: Path, gres: str, asked: str) -> None:
    """With those of the batch host alone a step failed where the other node has fewer, again and again."""
    (pair,) = [line for line in begun(tmp_path, "1", gres) if "n[3-4]" in line]
    assert f"--wrap=exec srun {asked or ' '}{tmp_path}/opsd preflight network --note" in pair


def begun(folder: Path, pairs: str, gres: str) -> list[str]:
    """How the script calls its commands, where sinfo says that two nodes have ``gres``."""
    sinfo = f"#!/bin/sh\nprintf '{gres}\\n'\n"
    for name, text in (("opsd", OPSD), ("sbatch", CALLED), ("scancel", CALLED), ("sinfo", sinfo)):
        program = folder / name
        program.write_text(text.format(folder=folder) if name != "sinfo" else text)
        program.chmod(0o755)
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "OPSD": str(folder / "opsd"), "PAIRS": pairs}
    done = subprocess.run(["sh", SCRIPT], env=environ, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return (folder / "called").read_text().splitlines()
