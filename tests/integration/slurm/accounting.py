"""Slurm's accounting for a test cluster: MariaDB and slurmdbd on its controller, everything in the cluster's folder.

Both are processes of the controller's namespaces, so they end with the cluster, however that ends.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.integration.slurm.host import USUAL_DEADLINE_S, Host

PROGRAMS = ("mariadbd", "mariadb-install-db", "slurmdbd", "sacct", "sacctmgr")
SETTINGS: Mapping[str, str] = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageHost": "ctl",
    "AccountingStoreFlags": "job_comment",
}
_CONFIGURATION = """\
AuthType=auth/munge
DbdHost=ctl
SlurmUser=root
LogFile={folder}/log/slurmdbd.log
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
{settings}
"""
_SOCKET = "/run/mysqld/mysqld.sock"
_PLAIN = ("--no-defaults", "--user=root")
_SMALL = ("--skip-networking", "--innodb-buffer-pool-size=16M", "--innodb-flush-log-at-trx-commit=0")


def missing() -> str:
    """Why there can be no accounting here, as a sentence; "" if there can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)} (see tests/debian-packages.txt)" if absent else ""


class Accounting:
    """The database and slurmdbd on ``controller``; ``settings`` are lines of slurmdbd.conf."""

    def __init__(self, controller: Host, folder: Path, settings: Mapping[str, str]) -> None:
        self._controller, self._folder = controller, folder
        self._database = folder / "database"
        subprocess.run(
            ["mariadb-install-db", *_PLAIN, f"--datadir={self._database}", "--skip-test-db",
             "--auth-root-authentication-method=socket"],
            check=True, capture_output=True, timeout=USUAL_DEADLINE_S,
        )  # fmt: skip
        lines = "\n".join(f"{key}={value}" for key, value in settings.items())
        path = folder / "etc/slurmdbd.conf"
        path.write_text(_CONFIGURATION.format(folder=folder, settings=lines))
        path.chmod(0o600)

    def start(self) -> None:
        """Start both and have the cluster known to them, which slurmctld needs to start."""
        command = ("mariadbd", *_PLAIN, f"--datadir={self._database}", f"--socket={_SOCKET}", *_SMALL)
        log = self._folder / "log/mariadbd.log"
        self._controller.run("sh", "-c", f"mkdir /run/mysqld; exec setsid {' '.join(command)} >{log} 2>&1 &")
        self._until(f"test -S {_SOCKET}")
        self.start_daemon()
        self._controller.run("sacctmgr", "--immediate", "add", "cluster", "test")

    def start_daemon(self) -> None:
        """Start slurmdbd and wait until it answers."""
        self._controller.run("slurmdbd")
        self._until("sacctmgr --noheader show cluster")

    def stop_daemon(self) -> None:
        """Kill slurmdbd as a crash would."""
        self._controller.run("sh", "-c", "kill -KILL $(cat /run/slurmdbd.pid)")

    def _until(self, command: str) -> None:
        limit = time.monotonic() + USUAL_DEADLINE_S
        while self._controller.run("sh", "-c", command, check=False).returncode:
            if time.monotonic() > limit:
                raise TimeoutError(f"not within {USUAL_DEADLINE_S:g} s: {command}")
            time.sleep(0.1)
