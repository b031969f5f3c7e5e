"""A batch script that loads modules: launchers and ranks on all nodes have what it has loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from opsd.slurm.commands import CommandSlurm
from tests.integration.slurm.cluster import Cluster, runner_on, wait_until
from tests.integration.slurm.templates import USER

MODULES = Path("/usr/share/modules/init/bash")
pytestmark = [
    pytest.mark.xdist_group("slurm"),
    pytest.mark.slow,
    pytest.mark.skipif(not MODULES.exists(), reason="not installed: environment-modules"),
]
PROGRAM = """
import os, pathlib, site_code
pathlib.Path("rank-" + os.environ["RANK"]).write_text(os.environ["LOADEDMODULES"])
"""


def test_modules_of_the_batch_script(cluster: Cluster) -> None:
    """One of another Python, which has a click that opsd's Python cannot import, and code that the ranks need."""
    folder = cluster.shared / f"modules-{len(list(cluster.shared.iterdir()))}"
    packages = folder / "packages"
    packages.mkdir(parents=True)
    folder.chmod(0o777)
    (packages / "click.py").write_text("raise ImportError('click is that of another Python')\n")
    (packages / "site_code.py").touch()
    (folder / "modulefiles").mkdir()
    (folder / "modulefiles/site").write_text(f"#%Module1.0\nprepend-path PYTHONPATH {packages}\n")
    (folder / "prog.py").write_text(PROGRAM)
    script = (
        f"#!/bin/bash\nexport HOME={folder} PYTHONPATH={':'.join(sys.path)}\n"
        f". {MODULES}\nmodule use {folder}/modulefiles\nmodule load site\n"
        f"exec {sys.executable} -m opsd slurm run --opsd '{sys.executable} -m opsd' --nnodes 2 -- prog.py\n"
    )
    slurm = CommandSlurm(runner_on(cluster.controller, USER))
    job = slurm.submit(script, [f"--chdir={folder}", "--output=job.out", "--nodes=2"])
    wait_until(lambda: not slurm.jobs([job]), "the job has ended")
    ranks = {path.name: path.read_text() for path in folder.glob("rank-*")}
    assert ranks == {"rank-0": "site", "rank-1": "site"}, (folder / "job.out").read_text()
