"""Pages of docs/ whose commands a shell plays, in an environment into which the checkout is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.fakes.tree import ROOT
from tests.fakes.tutorial import Shell, play
from tests.integration.slurm.cluster import Cluster, missing

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

DOCS = ROOT / "docs"


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with what this one has, but for opsd, which is what the tutorials install."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "needed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for name, module in (("pip", "pip"), ("torchrun", "torch.distributed.run")):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m {module} "$@"\n')
        script.chmod(0o755)
    return folder


@pytest.fixture
def variables(environment: Path, tmp_path: Path) -> dict[str, str]:
    """What the shell of a tutorial has: a home of its own, runs of its own, and pip without an index."""
    return {
        "HOME": str(tmp_path),
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "OPSD_SHM": str(tmp_path / "shm"),
        "OPSD_STATE_DIR": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def test_of_a_torchrun_script(variables: dict[str, str]) -> None:
    """A script for torchrun moves under opsd launch, loses a rank, and learns to report."""
    with Shell(ROOT, variables) as shell:
        play(DOCS / "tutorial-torchrun.md", shell)


def test_of_the_trainer(variables: dict[str, str]) -> None:
    """From text to a folder for Hugging Face, with a killed rank that changes no bit."""
    with Shell(ROOT, variables) as shell:
        play(DOCS / "tutorial-trainer.md", shell)


def test_of_post_training(variables: dict[str, str]) -> None:
    """A pretrained model answers after SFT, APO and GRPO, and a template without an end is refused."""
    for package in ("trl", "math_verify"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    with Shell(ROOT, variables) as shell:
        play(DOCS / "tutorial-post-training.md", shell)


def test_of_ablations(variables: dict[str, str]) -> None:
    """The study of the guide: three questions, three seeds, one command."""
    with Shell(ROOT, variables) as shell:
        play(DOCS / "ablations.md", shell, timeout_s=900)


def test_of_a_cluster(variables: dict[str, str]) -> None:
    """Agents on the nodes of a real Slurm, a real Prometheus, and a job with a spare."""
    if reason := missing() or ", ".join(
        name for name in ("prometheus", "promtool", "curl") if shutil.which(name) is None
    ):
        pytest.skip(f"not here: {reason}")
    with Cluster() as cluster:
        ours = {
            **variables,
            "HOME": str(cluster.shared),
            "OPSD_STATE_DIR": "/run/opsd-state",
            "OPSD_SHM": "/dev/shm/opsd",
        }
        within = ("env", f"--chdir={ROOT}")
        with Shell(cluster.shared, ours, cluster.nodes["n1"].command(*within)) as shell:
            play(DOCS / "tutorial-cluster.md", shell)


def test_of_data(variables: dict[str, str]) -> None:
    """Raw files become a model that two nodes of a real Slurm train."""
    if reason := missing():
        pytest.skip(f"not here: {reason}")
    with Cluster(["n1", "n2"]) as cluster:
        ours = {
            **variables,
            "HOME": str(cluster.shared),
            "OPSD_STATE_DIR": "/run/opsd-state",
            "OPSD_SHM": "/dev/shm/opsd",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        with Shell(cluster.shared, ours, cluster.nodes["n1"].command("env", f"--chdir={ROOT}")) as shell:
            play(DOCS / "tutorial-data.md", shell)


def test_each_tutorial_is_played() -> None:
    """One that is added without a test would not be."""
    source = Path(__file__).read_text(encoding="utf-8")
    assert [page.name for page in DOCS.glob("tutorial*.md") if f'"{page.name}"' not in source] == []
