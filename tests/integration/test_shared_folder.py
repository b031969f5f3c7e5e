"""Claims on a real NFS, client and server, in a user-mode Linux: kernels of nodes and their caches as they are."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[1] / "fakes/nfs"
TOOLS = ("linux.uml", "modprobe", "exportfs", "rpc.mountd", "rpc.nfsd", "mount.nfs", "mkfs.ext4")
V3 = "vers=3,nolock,port=2049,mountport=20048,mountproto=tcp,mountvers=3"
OPTIONS = ("vers=4.2", "vers=4.0", V3, f"{V3},nocto,actimeo=60,lookupcache=all", "vers=4.2,nocto,actimeo=60")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (see tests/debian-packages.txt)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="its root is this machine's, and only root may mount there"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What was seen under each of the options."""
    folder = tmp_path_factory.mktemp("nfs")
    disk, init = folder / "disk", folder / "init"
    with open(disk, "wb") as file:
        file.truncate(300 << 20)
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)
    uml = Path(str(shutil.which("linux.uml"))).resolve()
    (modules,) = (uml.parents[1] / "lib/uml/modules").iterdir()
    environ = {
        "PATH": os.environ["PATH"], "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""), "HERE": HERE,
        "PYTHONPATH": HERE.parents[2], "PYTHONDONTWRITEBYTECODE": "1", "PYTHON": sys.executable,
        "UML_MODULES": modules, "OPTIONS": " ".join(OPTIONS),
    }  # fmt: skip
    exports = "".join(f"export {name}={shlex.quote(str(value))}\n" for name, value in environ.items())
    init.write_text(f"#!/bin/sh\n{exports}exec sh {HERE}/init.sh\n")
    init.chmod(0o755)
    command = [
        uml, "mem=700M", "quiet", f"ubd0={disk}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw",
        f"init={init}", "con=null", "con0=fd:0,fd:1",
    ]  # fmt: skip
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=450, check=False, cwd=folder,
        env={**os.environ, "HOME": str(folder), "TMPDIR": "/dev/shm"},
    )  # fmt: skip
    found = [json.loads(line.partition("SEEN ")[2]) for line in done.stdout.splitlines() if "SEEN {" in line]
    assert [one["options"] for one in found] == list(OPTIONS), done.stdout + done.stderr
    return {one["options"]: one for one in found}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_number_has_one_owner(seen: dict[str, dict[str, Any]], options: str) -> None:
    """Four processes on two mounts claim the same numbers, by links and by folders."""
    race = seen[options]["race"]
    every = [number for numbers in race["won"] for number in numbers]
    assert not any(race["codes"])
    assert len(every) == len(set(every)) > 0
    assert race["newest"] >= 40
    assert seen[options]["looks"]["primitive"] == "link"


@pytest.mark.parametrize("options", OPTIONS)
def test_a_look_sees_what_was_claimed_before_it(seen: dict[str, dict[str, Any]], options: str) -> None:
    """Through another mount, whatever that keeps for a minute; also where it had seen that there were no claims."""
    looks = seen[options]["looks"]
    assert (looks["before"], looks["first"], looks["missed"]) == (None, True, 0)
    if "actimeo" in options:
        assert looks["plain listing missed"] > 0  # else this shows nothing


@pytest.mark.parametrize("options", [options for options in OPTIONS if "nocto" not in options])
def test_the_lease_is_seen_and_a_pause_delays(seen: dict[str, dict[str, Any]], options: str) -> None:
    """On a mount as it comes: the lease is as old as its last beat, a claim is made once the server is back."""
    assert seen[options]["leases"]["old"] <= 1
    assert (seen[options]["pause"]["made"], seen[options]["pause"]["newest"]) == (True, 2)
    assert seen[options]["pause"]["seconds"] >= 4
